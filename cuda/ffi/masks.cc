// The custom calls that read masks: dense ones, and what blocks of others show.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/arrays.h"
#include "ffi/handlers.h"

namespace jaxflash {
namespace {

using IntervalArray = ffi::Result<ffi::Buffer<ffi::S32>>;

// Whether a mask of so many rows or keys is one of a call: it may have one for all.
bool fits(int64_t size, int64_t length) { return size == length || size == 1; }

// What both make of masks (*B, rows, keys): intervals of a call's rows and keys.
ffi::Error set_intervals(const Lead& lead, int64_t rows, int64_t keys, IntervalArray keys_of_row,
                         IntervalArray rows_of_key, IntervalArray keys_inside,
                         IntervalArray rows_inside, MaskIntervals* intervals) {
  const auto row_dims = keys_of_row->dimensions(), key_dims = rows_of_key->dimensions();
  if (row_dims.size() < 2 || key_dims.size() < 2) return invalid("intervals are pairs");
  const int64_t q_len = row_dims[row_dims.size() - 2], kv_len = key_dims[key_dims.size() - 2];
  if (std::max(q_len, kv_len) > kMaxLength) {
    return invalid("a mask has at most 2^30 rows and keys");
  }
  if (!fits(rows, q_len) || !fits(keys, kv_len)) {
    return invalid("a mask has the rows and keys of the call, or one for all");
  }
  const int64_t row_blocks = blocks_of(static_cast<int32_t>(q_len));
  const int64_t key_blocks = blocks_of(static_cast<int32_t>(kv_len));
  if (!lead.has_shape(row_dims, {q_len, 2}) || !lead.has_shape(key_dims, {kv_len, 2}) ||
      !lead.has_shape(keys_inside->dimensions(), {row_blocks, 4}) ||
      !lead.has_shape(rows_inside->dimensions(), {key_blocks, 4})) {
    return invalid("the intervals of a mask have its leading axes");
  }
  intervals->count = lead.count();
  intervals->rows = static_cast<int32_t>(rows);
  intervals->keys = static_cast<int32_t>(keys);
  intervals->q_len = static_cast<int32_t>(q_len);
  intervals->kv_len = static_cast<int32_t>(kv_len);
  intervals->keys_of_row = keys_of_row->typed_data();
  intervals->rows_of_key = rows_of_key->typed_data();
  intervals->keys_inside = keys_inside->typed_data();
  intervals->rows_inside = rows_inside->typed_data();
  return ffi::Error::Success();
}

ffi::Error dense_mask(CUstream_st* stream, bool packs_keys, ffi::Buffer<ffi::PRED> mask,
                      ffi::Result<ffi::Buffer<ffi::U32>> words, IntervalArray keys_of_row,
                      IntervalArray rows_of_key, IntervalArray keys_inside,
                      IntervalArray rows_inside, ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const auto dims = mask.dimensions();
  if (dims.size() < 2) return invalid("a mask has axes of rows and keys");
  const int64_t rows = dims[dims.size() - 2], keys = dims[dims.size() - 1];
  const Lead lead(dims, 2);
  DenseMaskParams params = {};
  if (auto error = set_intervals(lead, rows, keys, keys_of_row, rows_of_key, keys_inside,
                                 rows_inside, &params);
      error.failure()) {
    return error;
  }
  const std::vector<int64_t> packed = packs_keys ? std::vector<int64_t>{(keys + 127) / 128, rows, 4}
                                                 : std::vector<int64_t>{(rows + 31) / 32, keys};
  if (!lead.has_shape(words->dimensions(), packed)) {
    return invalid("the words of a mask have its leading axes");
  }
  params.mask = reinterpret_cast<const uint8_t*>(mask.typed_data());
  params.packs_keys = packs_keys;
  params.words = words->typed_data();
  params.blocks = reinterpret_cast<MaskBlock*>(workspace->untyped_data());
  const int64_t blocks = int64_t{blocks_of(params.rows)} * blocks_of(params.keys);
  if (workspace->size_bytes() < params.count * blocks * sizeof(MaskBlock)) {
    return invalid("the workspace of a mask is too small");
  }
  return to_error(jaxflash_dense_mask(&params, stream));
}

ffi::Error mask_blocks(CUstream_st* stream, ffi::Buffer<ffi::PRED> whole,
                       ffi::Buffer<ffi::PRED> empty, ffi::Buffer<ffi::PRED> row_sees,
                       ffi::Buffer<ffi::PRED> key_is_seen, IntervalArray keys_of_row,
                       IntervalArray rows_of_key, IntervalArray keys_inside,
                       IntervalArray rows_inside) {
  const auto row_dims = row_sees.dimensions(), key_dims = key_is_seen.dimensions();
  if (row_dims.size() < 1 || key_dims.size() < 1) return invalid("a mask has rows and keys");
  const int64_t rows = row_dims.back(), keys = key_dims.back();
  const Lead lead(row_dims, 1);
  MaskBlocksParams params = {};
  if (auto error = set_intervals(lead, rows, keys, keys_of_row, rows_of_key, keys_inside,
                                 rows_inside, &params);
      error.failure()) {
    return error;
  }
  const std::vector<int64_t> blocks = {blocks_of(params.rows), blocks_of(params.keys)};
  if (!lead.has_shape(key_dims, {keys}) || !lead.has_shape(whole.dimensions(), blocks) ||
      !lead.has_shape(empty.dimensions(), blocks)) {
    return invalid("blocks, rows and keys of a mask have the same leading axes");
  }
  const auto bytes = [](const ffi::Buffer<ffi::PRED>& bools) {
    return reinterpret_cast<const uint8_t*>(bools.typed_data());
  };
  params.whole = bytes(whole);
  params.empty = bytes(empty);
  params.row_sees = bytes(row_sees);
  params.key_is_seen = bytes(key_is_seen);
  return to_error(jaxflash_mask_blocks(&params, stream));
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

XLA_FFI_DEFINE_HANDLER(kMaskBlocks, mask_blocks,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Arg<ffi::Buffer<ffi::PRED>>()  // see MaskBlocksParams
                           .Arg<ffi::Buffer<ffi::PRED>>()
                           .Arg<ffi::Buffer<ffi::PRED>>()
                           .Arg<ffi::Buffer<ffi::PRED>>()
                           .Ret<ffi::Buffer<ffi::S32>>()  // see MaskIntervals
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* dense_mask_handler() { return kDenseMask; }
XLA_FFI_Handler* mask_blocks_handler() { return kMaskBlocks; }

}  // namespace jaxflash
