#include "ffi/arrays.h"

#include <algorithm>

namespace jaxflash {

std::string text_of(ffi::Span<const int64_t> dims) {
  std::ostringstream text;
  text << "(";
  for (size_t axis = 0; axis < dims.size(); ++axis) text << (axis == 0 ? "" : ", ") << dims[axis];
  text << ")";
  return text.str();
}

std::string text_of(ffi::AnyBuffer array) {
  std::ostringstream text;
  text << array.element_type() << " " << text_of(array.dimensions());
  return text.str();
}

std::string text_of(std::initializer_list<Named> arrays) {
  std::string text;
  for (const Named& array : arrays) {
    text += (text.empty() ? "" : ", ") + std::string(array.name) + " " + text_of(array.dims);
  }
  return text;
}

std::string text_of(ffi::RemainingArgs arrays, size_t number) {
  const auto array = arrays.get<ffi::AnyBuffer>(number);
  return array.has_value() ? text_of(*array) : "none";
}

std::string text_of(ffi::RemainingRets arrays, size_t number) {
  auto array = arrays.get<ffi::AnyBuffer>(number);
  return array.has_value() ? text_of(**array) : "none";
}

ffi::Error check_intervals(ffi::Span<const int64_t> keys_of_row,
                           ffi::Span<const int64_t> rows_of_key) {
  for (const auto dims : {keys_of_row, rows_of_key}) {
    if (dims.size() < 2 || dims.back() != 2 || dims[dims.size() - 2] > kMaxLength) {
      return invalid("intervals are pairs of at most ", kMaxLength, " rows and keys, got ",
                     text_of({{"keys of rows", keys_of_row}, {"rows of keys", rows_of_key}}));
    }
  }
  return ffi::Error::Success();
}

ffi::Error check_workspace(const char* name, ffi::Buffer<ffi::U8> workspace, size_t needed) {
  if (workspace.size_bytes() >= needed) return ffi::Error::Success();
  return invalid("the workspace of ", name, " needs ", needed, " bytes, got ",
                 workspace.size_bytes());
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

ffi::Error BatchAxes::check() const {
  if (groups_.size() <= kMaxBatchAxes) return ffi::Error::Success();
  return invalid("there are at most ", kMaxBatchAxes,
                 " batch axes that broadcast differently, got ", groups_.size());
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
