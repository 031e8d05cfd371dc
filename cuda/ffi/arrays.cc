#include "ffi/arrays.h"

#include <algorithm>

namespace jaxflash {

ffi::Error invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jaxflash: " + what);
}

ffi::Error to_error(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    std::string("jaxflash: ") + status.message);
}

std::optional<Math> math_of(std::string_view dtype, bool highest_precision) {
  if (dtype == "float16") return Math::kFloat16;
  if (dtype == "bfloat16") return Math::kBFloat16;
  if (dtype == "float32") return highest_precision ? Math::kFloat32 : Math::kTF32;
  return std::nullopt;
}

std::optional<Math> math_of(ffi::DataType dtype, bool highest_precision) {
  switch (dtype) {
    case ffi::DataType::F16:
      return Math::kFloat16;
    case ffi::DataType::BF16:
      return Math::kBFloat16;
    case ffi::DataType::F32:
      return highest_precision ? Math::kFloat32 : Math::kTF32;
    default:
      return std::nullopt;
  }
}

BatchAxes::BatchAxes(Shape full, const std::vector<Shape>& operands) {
  for (size_t axis = 0; axis < full.batch_rank(); ++axis) {
    if (full.batch(axis) == 1) continue;
    bool merges = !groups_.empty();
    for (const Shape& operand : operands) {
      merges = merges && (operand.batch(axis) == 1) == (operand.batch(groups_.back().last) == 1);
    }
    if (merges) {
      groups_.back().extent *= full.batch(axis);
      groups_.back().last = axis;
    } else {
      groups_.push_back({full.batch(axis), axis});
    }
  }
}

void BatchAxes::describe(Problem* problem) const {
  problem->num_batch_axes = static_cast<int32_t>(groups_.size());
  for (size_t i = 0; i < groups_.size(); ++i) problem->batch_extent[i] = groups_[i].extent;
}

Tensor BatchAxes::tensor(void* data, Shape shape) const {
  Tensor tensor = {};
  tensor.data = data;
  tensor.head_stride = shape.dim();
  tensor.seq_stride = shape.heads() * shape.dim();
  strides(shape, shape.length() * tensor.seq_stride, tensor.batch_stride);
  return tensor;
}

void BatchAxes::strides(Shape shape, int64_t stride, int64_t (&batch_stride)[kMaxBatchAxes]) const {
  for (size_t i = groups_.size(); i-- > 0;) {
    const bool broadcast = shape.batch(groups_[i].last) == 1;
    batch_stride[i] = broadcast ? 0 : stride;
    if (!broadcast) stride *= groups_[i].extent;
  }
}

bool batch_fits(Shape operand, Shape full) {
  for (size_t axis = 0; axis < full.batch_rank(); ++axis) {
    if (operand.batch(axis) != full.batch(axis) && operand.batch(axis) != 1) return false;
  }
  return true;
}

bool is_array(Shape shape, Shape full, int64_t length, int64_t heads, int64_t dim,
              bool may_broadcast) {
  if (shape.dims.size() != full.dims.size() || !batch_fits(shape, full)) return false;
  for (size_t axis = 0; axis < full.batch_rank(); ++axis) {
    if (!may_broadcast && shape.batch(axis) != full.batch(axis)) return false;
  }
  return shape.length() == length && shape.heads() == heads && shape.dim() == dim;
}

bool is_per_row(ffi::Span<const int64_t> dims, Shape full) {
  return dims.size() + 1 == full.dims.size() &&
         std::equal(dims.begin(), dims.end(), full.dims.begin());
}

Lead::Lead(ffi::Span<const int64_t> dims, size_t own_rank)
    : axes_(dims.begin(), dims.end() - own_rank) {}

int64_t Lead::count() const {
  int64_t count = 1;
  for (const int64_t n : axes_) count *= n;
  return count;
}

bool Lead::has_shape(ffi::Span<const int64_t> dims, std::vector<int64_t> own) const {
  own.insert(own.begin(), axes_.begin(), axes_.end());
  return std::equal(dims.begin(), dims.end(), own.begin(), own.end());
}

int64_t batch_count(Shape full) {
  int64_t count = 1;
  for (size_t axis = 0; axis < full.batch_rank(); ++axis) count *= full.batch(axis);
  return count;
}

}  // namespace jaxflash
