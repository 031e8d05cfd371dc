// Shapes of a call's arrays, as XLA hands them over.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash {

namespace ffi = xla::ffi;

// (*B, length, heads, dim)
struct Shape {
  ffi::Span<const int64_t> dims;
  size_t batch_rank() const { return dims.size() - 3; }
  int64_t batch(size_t axis) const { return dims[axis]; }
  int64_t length() const { return dims[batch_rank()]; }
  int64_t heads() const { return dims[batch_rank() + 1]; }
  int64_t dim() const { return dims[batch_rank() + 2]; }
};

ffi::Error invalid(const std::string& what);
ffi::Error to_error(const Status& status);

// The arithmetic of a dtype; nothing if there are no kernels for it.
std::optional<Math> math_of(std::string_view dtype, bool highest_precision);
std::optional<Math> math_of(ffi::DataType dtype, bool highest_precision);

// Merges neighbouring batch axes over which every operand either steps densely or broadcasts, so
// that an ordinary call has one axis however many leading axes the arrays have.
class BatchAxes {
 public:
  // `full` holds the extents; each operand's extent is the full one or 1 (broadcast).
  BatchAxes(Shape full, const std::vector<Shape>& operands);

  bool fits() const { return groups_.size() <= kMaxBatchAxes; }

  void describe(Problem* problem) const;
  Tensor tensor(void* data, Shape shape) const;
  // Of a dense array with these leading axes; `stride` elements lie behind the batch axes.
  void strides(Shape shape, int64_t stride, int64_t (&batch_stride)[kMaxBatchAxes]) const;

 private:
  struct Group {
    int64_t extent;
    size_t last;  // one of its axes, to look up which operands broadcast
  };
  std::vector<Group> groups_;
};

// Whether each batch axis is that of `full` or 1.
bool batch_fits(Shape operand, Shape full);

// Whether an array has these trailing axes, after batch axes of full extent or, if it may
// broadcast, of 1.
bool is_array(Shape shape, Shape full, int64_t length, int64_t heads, int64_t dim,
              bool may_broadcast);

// Whether an array is (*B, T, N): a number for each row of `full`, (*B, T, N, h).
bool is_per_row(ffi::Span<const int64_t> dims, Shape full);

int64_t batch_count(Shape full);

// The leading axes of an array that has `own_rank` others, for arrays that must have the same ones.
class Lead {
 public:
  Lead(ffi::Span<const int64_t> dims, size_t own_rank);

  int64_t count() const;
  // Whether an array is (*B, *own).
  bool has_shape(ffi::Span<const int64_t> dims, std::vector<int64_t> own) const;

 private:
  std::vector<int64_t> axes_;
};

}  // namespace jaxflash
