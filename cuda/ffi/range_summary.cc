// The custom call that summarises the intervals of a call's masks.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/arrays.h"
#include "ffi/handlers.h"

namespace jaxflash {
namespace {

// The optional operands in their order; each must be (*B, *own).
class Operands {
 public:
  Operands(ffi::RemainingArgs arguments, ffi::Span<const int64_t> like)
      : arguments_(arguments), lead_(like.begin(), like.end() - 2) {}

  bool are_as_many_as(size_t count) const { return arguments_.size() == count; }
  bool has_shape(ffi::Span<const int64_t> dims, std::vector<int64_t> own) const {
    own.insert(own.begin(), lead_.begin(), lead_.end());
    return std::equal(dims.begin(), dims.end(), own.begin(), own.end());
  }
  // Null if it is of another type or shape.
  template <ffi::DataType kType>
  auto next(std::vector<int64_t> own) {
    auto buffer = arguments_.get<ffi::Buffer<kType>>(next_++);
    return buffer && has_shape(buffer->dimensions(), std::move(own)) ? buffer->typed_data()
                                                                     : nullptr;
  }
  int64_t count() const {
    int64_t count = 1;
    for (const int64_t n : lead_) count *= n;
    return count;
  }

 private:
  ffi::RemainingArgs arguments_;
  std::vector<int64_t> lead_;
  size_t next_ = 0;
};

ffi::Error range_summary(CUstream_st* stream, bool has_solid, bool has_inside,
                         ffi::Buffer<ffi::S32> keys_of_row, ffi::Buffer<ffi::S32> rows_of_key,
                         ffi::RemainingArgs optional, ffi::Result<ffi::Buffer<ffi::S32>> row_blocks,
                         ffi::Result<ffi::Buffer<ffi::S32>> key_blocks,
                         ffi::Result<ffi::Buffer<ffi::S32>> hulls,
                         ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const auto row_dims = keys_of_row.dimensions(), key_dims = rows_of_key.dimensions();
  if (row_dims.size() < 2 || key_dims.size() < 2) return invalid("intervals are pairs");
  const int64_t rows = row_dims[row_dims.size() - 2], keys = key_dims[key_dims.size() - 2];
  if (std::max(rows, keys) > kMaxLength) return invalid("there are at most 2^30 rows and keys");
  const int64_t of_rows = blocks_of(static_cast<int32_t>(rows));
  const int64_t of_keys = blocks_of(static_cast<int32_t>(keys));
  Operands operands(optional, row_dims);
  if (!operands.are_as_many_as(2 * has_solid + 2 * has_inside) ||
      !operands.has_shape(row_dims, {rows, 2}) || !operands.has_shape(key_dims, {keys, 2}) ||
      !operands.has_shape(row_blocks->dimensions(), {of_rows, 6}) ||
      !operands.has_shape(key_blocks->dimensions(), {of_keys, 6}) ||
      !operands.has_shape(hulls->dimensions(), {6})) {
    return invalid("intervals and their summaries have the same leading axes");
  }
  RangeSummaryParams params = {};
  params.count = operands.count();
  params.rows = static_cast<int32_t>(rows);
  params.keys = static_cast<int32_t>(keys);
  params.keys_of_row = keys_of_row.typed_data();
  params.rows_of_key = rows_of_key.typed_data();
  bool given = true;
  if (has_solid) {
    params.keys_solid = reinterpret_cast<const uint8_t*>(operands.next<ffi::PRED>({rows}));
    params.rows_solid = reinterpret_cast<const uint8_t*>(operands.next<ffi::PRED>({keys}));
    given = params.keys_solid != nullptr && params.rows_solid != nullptr;
  }
  if (has_inside) {
    params.keys_inside = operands.next<ffi::S32>({of_rows, 4});
    params.rows_inside = operands.next<ffi::S32>({of_keys, 4});
    given = given && params.keys_inside != nullptr && params.rows_inside != nullptr;
  }
  if (!given && params.count > 0 && rows > 0 && keys > 0) {
    return invalid("what is told of intervals has their leading axes");
  }
  params.row_blocks = row_blocks->typed_data();
  params.key_blocks = key_blocks->typed_data();
  params.hulls = hulls->typed_data();
  params.hidden = reinterpret_cast<uint64_t*>(workspace->untyped_data());
  if (workspace->size_bytes() < params.count * (of_rows + of_keys) * sizeof(uint64_t)) {
    return invalid("the workspace of a summary is too small");
  }
  return to_error(jaxflash_range_summary(&params, stream));
}

XLA_FFI_DEFINE_HANDLER(kRangeSummary, range_summary,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Attr<bool>("has_solid")
                           .Attr<bool>("has_inside")
                           .Arg<ffi::Buffer<ffi::S32>>()  // see RangeSummaryParams
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::U8>>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* range_summary_handler() { return kRangeSummary; }

}  // namespace jaxflash
