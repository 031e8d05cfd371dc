// The custom call that reads a dense mask.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/arrays.h"
#include "ffi/handlers.h"

namespace jaxflash {
namespace {

ffi::Error dense_mask(CUstream_st* stream, bool packs_keys, ffi::Buffer<ffi::PRED> mask,
                      ffi::Result<ffi::Buffer<ffi::U32>> words,
                      ffi::Result<ffi::Buffer<ffi::S32>> keys_of_row,
                      ffi::Result<ffi::Buffer<ffi::S32>> rows_of_key,
                      ffi::Result<ffi::Buffer<ffi::S32>> keys_inside,
                      ffi::Result<ffi::Buffer<ffi::S32>> rows_inside,
                      ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const auto dims = mask.dimensions();
  if (dims.size() < 2) return invalid("a mask has axes of rows and keys");
  const int64_t rows = dims[dims.size() - 2], keys = dims[dims.size() - 1];
  if (std::max(rows, keys) > kMaxLength) return invalid("a mask has at most 2^30 rows and keys");
  const int64_t row_blocks = blocks_of(static_cast<int32_t>(rows));
  const int64_t key_blocks = blocks_of(static_cast<int32_t>(keys));
  const std::vector<int64_t> packed =
      packs_keys ? std::vector{rows, (keys + 31) / 32} : std::vector{(rows + 31) / 32, keys};
  const Lead lead(dims, 2);
  if (!lead.has_shape(words->dimensions(), packed) ||
      !lead.has_shape(keys_of_row->dimensions(), {rows, 2}) ||
      !lead.has_shape(rows_of_key->dimensions(), {keys, 2}) ||
      !lead.has_shape(keys_inside->dimensions(), {row_blocks, 4}) ||
      !lead.has_shape(rows_inside->dimensions(), {key_blocks, 4})) {
    return invalid("what is made of a mask has its leading axes");
  }
  DenseMaskParams params = {};
  params.mask = static_cast<const uint8_t*>(mask.untyped_data());
  params.count = lead.count();
  params.rows = static_cast<int32_t>(rows);
  params.keys = static_cast<int32_t>(keys);
  params.packs_keys = packs_keys;
  params.words = words->typed_data();
  params.keys_of_row = keys_of_row->typed_data();
  params.rows_of_key = rows_of_key->typed_data();
  params.keys_inside = keys_inside->typed_data();
  params.rows_inside = rows_inside->typed_data();
  params.blocks = static_cast<MaskBlock*>(workspace->untyped_data());
  if (workspace->size_bytes() < params.count * row_blocks * key_blocks * sizeof(MaskBlock)) {
    return invalid("the workspace of a mask is too small");
  }
  return to_error(jaxflash_dense_mask(&params, stream));
}

XLA_FFI_DEFINE_HANDLER(kDenseMask, dense_mask,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Attr<bool>("packs_keys")
                           .Arg<ffi::Buffer<ffi::PRED>>()  // mask (*B, rows, keys)
                           .Ret<ffi::Buffer<ffi::U32>>()   // the others: see DenseMaskParams
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::U8>>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* dense_mask_handler() { return kDenseMask; }

}  // namespace jaxflash
