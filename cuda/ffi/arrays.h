// Shapes of a call's arrays, as XLA hands them over.

#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
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

// An error, which says what came and what is allowed: these parts, as streams write them.
template <class... Parts>
ffi::Error invalid(const Parts&... parts) {
  std::ostringstream text;
  text << "jaxflash: ";
  (text << ... << parts);
  return ffi::Error::InvalidArgument(text.str());
}

// Parts of such texts: "(2, 16)", "BF16 (2, 16)", "q (2, 16), k (2, 8)".
std::string text_of(ffi::Span<const int64_t> dims);
std::string text_of(ffi::AnyBuffer array);
struct Named {
  const char* name;
  ffi::Span<const int64_t> dims;
};
std::string text_of(std::initializer_list<Named> arrays);
// Of the array of that number, which may not be there.
std::string text_of(ffi::RemainingArgs arrays, size_t number);
std::string text_of(ffi::RemainingRets arrays, size_t number);

// Whether intervals are pairs for so many rows and keys as there may be, whatever the leading axes.
ffi::Error check_intervals(ffi::Span<const int64_t> keys_of_row,
                           ffi::Span<const int64_t> rows_of_key);

// An error where the workspace of what is named has fewer bytes than it needs.
ffi::Error check_workspace(const char* name, ffi::Buffer<ffi::U8> workspace, size_t needed);

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

  // Whether kernels take as many.
  ffi::Error check() const;

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
