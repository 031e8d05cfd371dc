// The boundary to XLA and Python: the only file that sees XLA or nanobind headers. Handlers turn
// buffers and attributes into the structs of attention.h and pass a Status on as an ffi::Error.

#include "xla/ffi/api/ffi.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace jaxflash {

// What both passes are told, as one dictionary attribute.
struct Attributes {
  float scale;
  int64_t left;   // kUnlimited and above: no limit
  int64_t right;  // likewise
  bool bottom_right;
  bool highest_precision;
  bool has_q_lengths;  // the optional operands follow in this order
  bool has_kv_lengths;
};

// What both passes are told of the score program, attributes of their own.
struct ProgramAttributes {
  std::string_view source;  // empty: a plain call, and the others are not looked at
  bool unit_slope;
  int64_t head_dim;
  int64_t value_dim;
  std::string_view dtype;
  ffi::Span<const int64_t> capture_ranks;  // axes of each captured array beside the batch axes
};

}  // namespace jaxflash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxflash::Attributes, ffi::StructMember<float>("scale"),
                                      ffi::StructMember<int64_t>("left"),
                                      ffi::StructMember<int64_t>("right"),
                                      ffi::StructMember<bool>("bottom_right"),
                                      ffi::StructMember<bool>("highest_precision"),
                                      ffi::StructMember<bool>("has_q_lengths"),
                                      ffi::StructMember<bool>("has_kv_lengths"));

namespace jaxflash {
namespace {

#ifdef JAXFLASH_WITH_KERNELS

int32_t clamp_side(int64_t side) {
  return static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(side, -kMaxLength), kUnlimited));
}

// ---- Shapes -------------------------------------------------------------------------------------

// (*B, length, heads, dim)
struct Shape {
  ffi::Span<const int64_t> dims;
  size_t batch_rank() const { return dims.size() - 3; }
  int64_t batch(size_t axis) const { return dims[axis]; }
  int64_t length() const { return dims[batch_rank()]; }
  int64_t heads() const { return dims[batch_rank() + 1]; }
  int64_t dim() const { return dims[batch_rank() + 2]; }
};

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

// Merges neighbouring batch axes over which every operand either steps densely or broadcasts, so
// that an ordinary call has one axis however many leading axes the arrays have.
class BatchAxes {
 public:
  // `full` holds the extents; each operand's extent is the full one or 1 (broadcast).
  BatchAxes(Shape full, const std::vector<Shape>& operands) : rank_(full.batch_rank()) {
    for (size_t axis = 0; axis < rank_; ++axis) {
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

  bool fits() const { return groups_.size() <= kMaxBatchAxes; }

  void describe(Problem* problem) const {
    problem->num_batch_axes = static_cast<int32_t>(groups_.size());
    for (size_t i = 0; i < groups_.size(); ++i) problem->batch_extent[i] = groups_[i].extent;
  }

  Tensor tensor(void* data, Shape shape) const {
    Tensor tensor = {};
    tensor.data = data;
    tensor.head_stride = shape.dim();
    tensor.seq_stride = shape.heads() * shape.dim();
    strides(shape, shape.length() * tensor.seq_stride, tensor.batch_stride);
    return tensor;
  }

  // Of a dense array with these leading axes; `stride` elements lie behind the batch axes.
  void strides(Shape shape, int64_t stride, int64_t (&batch_stride)[kMaxBatchAxes]) const {
    for (size_t i = groups_.size(); i-- > 0;) {
      const bool broadcast = shape.batch(groups_[i].last) == 1;
      batch_stride[i] = broadcast ? 0 : stride;
      if (!broadcast) stride *= groups_[i].extent;
    }
  }

 private:
  struct Group {
    int64_t extent;
    size_t last;  // one of its axes, to look up which operands broadcast
  };
  size_t rank_;
  std::vector<Group> groups_;
};

bool batch_fits(Shape operand, Shape full) {
  for (size_t axis = 0; axis < full.batch_rank(); ++axis) {
    if (operand.batch(axis) != full.batch(axis) && operand.batch(axis) != 1) return false;
  }
  return true;
}

int64_t batch_count(Shape full) {
  int64_t count = 1;
  for (size_t axis = 0; axis < full.batch_rank(); ++axis) count *= full.batch(axis);
  return count;
}

// Checks q, k, v against the output, whose batch axes are of full extent, and fills the problem.
ffi::Error describe(const Attributes& attributes, ffi::AnyBuffer q, ffi::AnyBuffer k,
                    ffi::AnyBuffer v, Shape out, ffi::RemainingArgs optional, Problem* problem) {
  const Shape q_shape{q.dimensions()}, k_shape{k.dimensions()}, v_shape{v.dimensions()};
  const size_t rank = out.dims.size();
  if (rank < 3 || q_shape.dims.size() != rank || k_shape.dims.size() != rank ||
      v_shape.dims.size() != rank) {
    return invalid("q, k, v and out must have one rank, at least 3");
  }
  if (!batch_fits(q_shape, out) || !batch_fits(k_shape, out) || !batch_fits(v_shape, out)) {
    return invalid("each batch axis of q, k and v must be that of the result or 1");
  }
  if (q_shape.length() != out.length() || q_shape.heads() != out.heads() ||
      k_shape.length() != v_shape.length() || k_shape.heads() != v_shape.heads() ||
      q_shape.dim() != k_shape.dim() || v_shape.dim() != out.dim()) {
    return invalid("the shapes of q, k, v and the result do not fit together");
  }
  if (k_shape.heads() == 0 || q_shape.heads() % k_shape.heads() != 0) {
    return invalid("query heads must be a multiple of key heads");
  }
  if (q_shape.length() > kMaxLength || k_shape.length() > kMaxLength) {
    return invalid("sequences are limited to 2^30 positions");
  }
  const std::optional<Math> math = math_of(q.element_type(), attributes.highest_precision);
  if (!math || k.element_type() != q.element_type() || v.element_type() != q.element_type()) {
    return invalid("q, k and v must share one dtype of float16, bfloat16, float32");
  }
  problem->math = *math;
  problem->q_len = static_cast<int32_t>(q_shape.length());
  problem->kv_len = static_cast<int32_t>(k_shape.length());
  problem->q_heads = static_cast<int32_t>(q_shape.heads());
  problem->kv_heads = static_cast<int32_t>(k_shape.heads());
  problem->head_dim = static_cast<int32_t>(q_shape.dim());
  problem->value_dim = static_cast<int32_t>(v_shape.dim());
  problem->scale = attributes.scale;
  problem->band.left = clamp_side(attributes.left);
  problem->band.right = clamp_side(attributes.right);
  problem->band.bottom_right = attributes.bottom_right;

  size_t next = 0;
  const int64_t batch = batch_count(out);
  auto lengths = [&](bool given, const int32_t** data) {
    if (!given) return true;
    auto buffer = optional.get<ffi::Buffer<ffi::S32>>(next++);
    if (!buffer.has_value() || static_cast<int64_t>(buffer->element_count()) != batch) return false;
    *data = buffer->typed_data();
    return true;
  };
  if (!lengths(attributes.has_q_lengths, &problem->band.q_lengths) ||
      !lengths(attributes.has_kv_lengths, &problem->band.kv_lengths)) {
    return invalid("sequence lengths must be int32, one per sequence of the batch");
  }
  return ffi::Error::Success();
}

// ---- Score programs -----------------------------------------------------------------------------

// What lives as long as an executable, for each of its calls.
struct ProgramState {
  static ffi::TypeId id;

  ProgramState() = default;
  ProgramState(const ProgramState&) = delete;
  ~ProgramState() {
    if (kernels != nullptr) jaxflash_delete_program(kernels);
  }

  ScoreKernels* kernels = nullptr;  // nullptr: a plain call
};
ffi::TypeId ProgramState::id = {};

// While XLA compiles.
ffi::ErrorOr<std::unique_ptr<ProgramState>> instantiate(bool forward, const Attributes& attributes,
                                                        const ProgramAttributes& program) {
  auto state = std::make_unique<ProgramState>();
  if (program.source.empty()) return state;
  const std::optional<Math> math = math_of(program.dtype, attributes.highest_precision);
  if (!math) return ffi::Unexpected(invalid("unknown dtype of a score program"));
  if (program.capture_ranks.size() > kMaxCaptures) {
    return ffi::Unexpected(invalid("a score program may capture at most 8 arrays"));
  }
  for (const int64_t rank : program.capture_ranks) {
    if (rank < 0 || rank > kMaxCaptureRank) {
      return ffi::Unexpected(invalid("captured arrays have at most 6 axes"));
    }
  }
  const std::string source(program.source);
  ProgramDescription description = {};
  description.forward = forward;
  description.source = source.c_str();
  description.unit_slope = program.unit_slope;
  description.math = *math;
  description.head_dim = static_cast<int32_t>(program.head_dim);
  description.value_dim = static_cast<int32_t>(program.value_dim);
  description.scale = attributes.scale;
  const Status status = jaxflash_create_program(&description, &state->kernels);
  if (!status.ok()) return ffi::Unexpected(to_error(status));
  return state;
}

// Before the first execution on a device, and outside of any capture.
ffi::Error initialize(ProgramState* state) {
  if (state->kernels == nullptr) return ffi::Error::Success();
  return to_error(jaxflash_load_program(state->kernels));
}

// A program's operands, from the one of that index on: numbers of batch elements and heads, then
// the captured arrays, whose leading axes are the batch axes or 1.
class ProgramOperands {
 public:
  // Reads the shapes.
  ffi::Error take(const ProgramAttributes& program, Shape full, ffi::RemainingArgs optional,
                  size_t first) {
    if (program.source.empty()) return ffi::Error::Success();
    present_ = true;
    ranks_ = program.capture_ranks;
    const size_t batch_rank = full.batch_rank();
    auto numbers = optional.get<ffi::Buffer<ffi::S32>>(first);
    auto heads = optional.get<ffi::Buffer<ffi::S32>>(first + 1);
    if (!numbers.has_value() || numbers->dimensions().size() != batch_rank ||
        !batch_axes_fit(numbers->dimensions(), full)) {
      return invalid("the numbers of a program's batch elements must be int32, of the batch axes");
    }
    if (!heads.has_value() || heads->dimensions().size() != 1 ||
        heads->dimensions()[0] != full.heads()) {
      return invalid("the numbers of a program's heads must be int32, one for each query head");
    }
    batch_numbers_ = *numbers;
    head_numbers_ = *heads;
    if (ranks_.size() > kMaxCaptures || optional.size() != first + 2 + ranks_.size()) {
      return invalid("the number of captured arrays is not that of capture_ranks");
    }
    for (size_t i = 0; i < ranks_.size(); ++i) {
      auto buffer = optional.get<ffi::AnyBuffer>(first + 2 + i);
      if (!buffer.has_value()) return invalid("a captured array is not a buffer");
      const auto dims = buffer->dimensions();
      if (ranks_[i] < 0 || ranks_[i] > kMaxCaptureRank ||
          dims.size() != batch_rank + static_cast<size_t>(ranks_[i]) ||
          !batch_axes_fit(dims, full)) {
        return invalid("a captured array must have the batch axes (or 1s) and its own ones");
      }
      for (size_t axis = batch_rank; axis < dims.size(); ++axis) {
        if (dims[axis] < 1 || dims[axis] > INT32_MAX) {
          return invalid("axes of captured arrays have 1 to 2^31 - 1 elements");
        }
      }
      switch (buffer->element_type()) {
        case ffi::DataType::F32:
        case ffi::DataType::BF16:
        case ffi::DataType::F16:
        case ffi::DataType::S32:
        case ffi::DataType::U32:
        case ffi::DataType::PRED:
          break;
        default:
          return invalid("captured arrays are float32, bfloat16, float16, int32, uint32 or bool");
      }
      captures_.push_back(*buffer);
    }
    return ffi::Error::Success();
  }

  // For BatchAxes.
  void add_shapes(std::vector<Shape>* shapes) const {
    if (!present_) return;
    shapes->push_back({batch_numbers_->dimensions()});
    for (const ffi::AnyBuffer& capture : captures_) shapes->push_back({capture.dimensions()});
  }

  Captures describe(size_t batch_rank, const BatchAxes& axes) const {
    Captures result = {};
    if (!present_) return result;
    result.batch_numbers = batch_numbers_->typed_data();
    axes.strides({batch_numbers_->dimensions()}, 1, result.batch_numbers_stride);
    result.head_numbers = head_numbers_->typed_data();
    for (size_t i = 0; i < captures_.size(); ++i) {
      Capture& capture = result.of[i];
      const auto dims = captures_[i].dimensions();
      capture.data = captures_[i].untyped_data();
      int64_t size = 1;
      for (size_t axis = batch_rank; axis < dims.size(); ++axis) {
        capture.extent[axis - batch_rank] = static_cast<int32_t>(dims[axis]);
        size *= dims[axis];
      }
      axes.strides({dims}, size, capture.batch_stride);
    }
    return result;
  }

 private:
  static bool batch_axes_fit(ffi::Span<const int64_t> dims, Shape full) {
    for (size_t axis = 0; axis < full.batch_rank(); ++axis) {
      if (dims[axis] != full.batch(axis) && dims[axis] != 1) return false;
    }
    return true;
  }

  bool present_ = false;
  ffi::Span<const int64_t> ranks_;
  std::optional<ffi::Buffer<ffi::S32>> batch_numbers_, head_numbers_;
  std::vector<ffi::AnyBuffer> captures_;
};

// ---- Handlers -----------------------------------------------------------------------------------

ffi::ErrorOr<std::unique_ptr<ProgramState>> instantiate_forward(
    Attributes attributes, std::string_view source, bool unit_slope, int64_t head_dim,
    int64_t value_dim, std::string_view dtype, ffi::Span<const int64_t> capture_ranks) {
  return instantiate(true, attributes,
                     {source, unit_slope, head_dim, value_dim, dtype, capture_ranks});
}

ffi::ErrorOr<std::unique_ptr<ProgramState>> instantiate_backward(
    Attributes attributes, std::string_view source, bool unit_slope, int64_t head_dim,
    int64_t value_dim, std::string_view dtype, ffi::Span<const int64_t> capture_ranks,
    bool /*has_dlse*/, bool /*deterministic*/) {
  return instantiate(false, attributes,
                     {source, unit_slope, head_dim, value_dim, dtype, capture_ranks});
}

ffi::Error forward(CUstream_st* stream, ProgramState* state, Attributes attributes,
                   std::string_view source, bool unit_slope, int64_t head_dim, int64_t value_dim,
                   std::string_view dtype, ffi::Span<const int64_t> capture_ranks, ffi::AnyBuffer q,
                   ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::RemainingArgs optional,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::F32>> lse,
                   ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const Shape full{out->dimensions()};
  ForwardParams params = {};
  if (ffi::Error error = describe(attributes, q, k, v, full, optional, &params.problem);
      error.failure()) {
    return error;
  }
  const Shape q_shape{q.dimensions()}, k_shape{k.dimensions()}, v_shape{v.dimensions()};
  ProgramOperands program;
  if (ffi::Error error =
          program.take({source, unit_slope, head_dim, value_dim, dtype, capture_ranks}, full,
                       optional, attributes.has_q_lengths + attributes.has_kv_lengths);
      error.failure()) {
    return error;
  }
  std::vector<Shape> shapes = {q_shape, k_shape, v_shape};
  program.add_shapes(&shapes);
  const BatchAxes axes(full, shapes);
  if (!axes.fits()) return invalid("too many batch axes that broadcast differently");
  axes.describe(&params.problem);
  params.program = state->kernels;
  params.captures = program.describe(full.batch_rank(), axes);
  params.q = axes.tensor(q.untyped_data(), q_shape);
  params.k = axes.tensor(k.untyped_data(), k_shape);
  params.v = axes.tensor(v.untyped_data(), v_shape);
  params.out = axes.tensor(out->untyped_data(), full);
  params.lse = lse->typed_data();
  params.workspace = workspace->untyped_data();
  if (workspace->size_bytes() < jaxflash_forward_workspace_bytes(&params.problem)) {
    return invalid("the forward workspace is too small");
  }
  return to_error(jaxflash_forward(&params, stream));
}

ffi::Error backward(CUstream_st* stream, ProgramState* state, Attributes attributes,
                    std::string_view source, bool unit_slope, int64_t head_dim, int64_t value_dim,
                    std::string_view dtype, ffi::Span<const int64_t> capture_ranks, bool has_dlse,
                    bool deterministic, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::AnyBuffer out, ffi::AnyBuffer dout, ffi::Buffer<ffi::F32> lse,
                    ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> dq,
                    ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
                    ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  // Values of the value's head size, but full batch extents, which the query gradient has.
  const Shape out_shape{out.dimensions()}, dout_shape{dout.dimensions()};
  const Shape dq_shape{dq->dimensions()}, dk_shape{dk->dimensions()}, dv_shape{dv->dimensions()};
  BackwardParams params = {};
  const Shape q_shape{q.dimensions()}, k_shape{k.dimensions()}, v_shape{v.dimensions()};
  std::vector<int64_t> full_dims(dq_shape.dims.begin(), dq_shape.dims.end());
  if (full_dims.empty() || v_shape.dims.size() == 0) return invalid("arrays must have rank >= 3");
  full_dims.back() = v_shape.dims[v_shape.dims.size() - 1];
  const Shape full{ffi::Span<const int64_t>(full_dims.data(), full_dims.size())};
  if (ffi::Error error = describe(attributes, q, k, v, full, optional, &params.problem);
      error.failure()) {
    return error;
  }
  const size_t lengths = attributes.has_q_lengths + attributes.has_kv_lengths;
  ProgramOperands program;
  if (ffi::Error error =
          program.take({source, unit_slope, head_dim, value_dim, dtype, capture_ranks}, full,
                       optional, lengths + has_dlse);
      error.failure()) {
    return error;
  }
  std::vector<Shape> shapes = {q_shape, k_shape, v_shape, out_shape, dout_shape};
  program.add_shapes(&shapes);
  const BatchAxes axes(full, shapes);
  if (!axes.fits()) return invalid("too many batch axes that broadcast differently");
  axes.describe(&params.problem);
  params.program = state->kernels;
  params.captures = program.describe(full.batch_rank(), axes);
  params.q = axes.tensor(q.untyped_data(), q_shape);
  params.k = axes.tensor(k.untyped_data(), k_shape);
  params.v = axes.tensor(v.untyped_data(), v_shape);
  params.out = axes.tensor(out.untyped_data(), out_shape);
  params.dout = axes.tensor(dout.untyped_data(), dout_shape);
  params.lse = lse.typed_data();
  if (has_dlse) {
    auto dlse = optional.get<ffi::Buffer<ffi::F32>>(lengths);
    if (!dlse.has_value() || dlse->element_count() != lse.element_count()) {
      return invalid("dlse must be float32 of the shape of lse");
    }
    params.dlse = dlse->typed_data();
  }
  params.dq = axes.tensor(dq->untyped_data(), dq_shape);
  params.dk = axes.tensor(dk->untyped_data(), dk_shape);
  params.dv = axes.tensor(dv->untyped_data(), dv_shape);
  params.workspace = workspace->untyped_data();
  params.deterministic = deterministic;
  if (workspace->size_bytes() < jaxflash_backward_workspace_bytes(&params.problem)) {
    return invalid("the backward workspace is too small");
  }
  return to_error(jaxflash_backward(&params, stream));
}

// Family, query/key and value head size.
using VariantKey = std::tuple<std::string, int32_t, int32_t>;

// The variant that dispatch picks for dense, aligned arrays.
std::optional<VariantKey> variant_for(bool forward, const std::string& dtype,
                                      bool highest_precision, const std::vector<int64_t>& q,
                                      const std::vector<int64_t>& k,
                                      const std::vector<int64_t>& v) {
  const auto shape = [](const std::vector<int64_t>& dims) {
    return Shape{ffi::Span<const int64_t>(dims.data(), dims.size())};
  };
  const Shape q_shape = shape(q), k_shape = shape(k), v_shape = shape(v);
  if (q.size() < 3 || k.size() != q.size() || v.size() != q.size()) return std::nullopt;
  std::vector<int64_t> out = q;
  out.back() = v.back();
  const Shape out_shape = shape(out);
  const BatchAxes axes(out_shape, {q_shape, k_shape, v_shape});

  Problem problem = {};
  const std::optional<Math> math = math_of(dtype, highest_precision);
  if (!math) return std::nullopt;
  problem.math = *math;
  problem.q_len = static_cast<int32_t>(q_shape.length());
  problem.kv_len = static_cast<int32_t>(k_shape.length());
  problem.q_heads = static_cast<int32_t>(q_shape.heads());
  problem.kv_heads = static_cast<int32_t>(k_shape.heads());
  problem.head_dim = static_cast<int32_t>(q_shape.dim());
  problem.value_dim = static_cast<int32_t>(v_shape.dim());
  problem.scale = 1.f;
  problem.band.left = problem.band.right = kUnlimited;
  axes.describe(&problem);

  const Tensor q_tensor = axes.tensor(nullptr, q_shape), k_tensor = axes.tensor(nullptr, k_shape);
  const Tensor v_tensor = axes.tensor(nullptr, v_shape);
  const Tensor out_tensor = axes.tensor(nullptr, out_shape);
  const Variant* variant = nullptr;
  if (forward) {
    ForwardParams params = {};
    params.problem = problem;
    params.q = q_tensor, params.k = k_tensor, params.v = v_tensor, params.out = out_tensor;
    variant = jaxflash_forward_variant(&params);
  } else {
    BackwardParams params = {};
    params.problem = problem;
    params.q = params.dq = q_tensor;
    params.k = params.dk = k_tensor;
    params.v = params.dv = v_tensor;
    params.out = params.dout = out_tensor;
    variant = jaxflash_backward_variant(&params);
  }
  if (variant == nullptr) return std::nullopt;
  return std::make_tuple(std::string(variant->family), variant->head_dim, variant->value_dim);
}

#endif  // JAXFLASH_WITH_KERNELS

// Stands in for the kernels on platforms that have none, so that asking for them there is an error
// with a text rather than an unknown custom call.
ffi::Error wrong_platform(ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "jaxflash: implementation='cuda' needs an NVIDIA GPU and JAX's CUDA platform; "
                    "this computation runs on another one. Use implementation='xla' or None");
}

}  // namespace
}  // namespace jaxflash

XLA_FFI_DEFINE_HANDLER(kWrongPlatform, jaxflash::wrong_platform,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets());

#ifdef JAXFLASH_WITH_KERNELS

XLA_FFI_DEFINE_HANDLER(kInstantiateForward, jaxflash::instantiate_forward,
                       ffi::Ffi::BindInstantiate()
                           .Attr<jaxflash::Attributes>("problem")
                           .Attr<std::string_view>("program")
                           .Attr<bool>("unit_slope")
                           .Attr<int64_t>("head_dim")
                           .Attr<int64_t>("value_dim")
                           .Attr<std::string_view>("dtype")
                           .Attr<ffi::Span<const int64_t>>("capture_ranks"));

XLA_FFI_DEFINE_HANDLER(kInstantiateBackward, jaxflash::instantiate_backward,
                       ffi::Ffi::BindInstantiate()
                           .Attr<jaxflash::Attributes>("problem")
                           .Attr<std::string_view>("program")
                           .Attr<bool>("unit_slope")
                           .Attr<int64_t>("head_dim")
                           .Attr<int64_t>("value_dim")
                           .Attr<std::string_view>("dtype")
                           .Attr<ffi::Span<const int64_t>>("capture_ranks")
                           .Attr<bool>("has_dlse")
                           .Attr<bool>("deterministic"));

XLA_FFI_DEFINE_HANDLER(kInitialize, jaxflash::initialize,
                       ffi::Ffi::BindInitialize().Ctx<ffi::State<jaxflash::ProgramState>>());

XLA_FFI_DEFINE_HANDLER(kForward, jaxflash::forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Ctx<ffi::State<jaxflash::ProgramState>>()
                           .Attr<jaxflash::Attributes>("problem")
                           .Attr<std::string_view>("program")
                           .Attr<bool>("unit_slope")
                           .Attr<int64_t>("head_dim")
                           .Attr<int64_t>("value_dim")
                           .Attr<std::string_view>("dtype")
                           .Attr<ffi::Span<const int64_t>>("capture_ranks")
                           .Arg<ffi::AnyBuffer>()  // q (*B, T, N, H), each batch axis full or 1
                           .Arg<ffi::AnyBuffer>()  // k (*B, S, K, H), likewise
                           .Arg<ffi::AnyBuffer>()  // v (*B, S, K, h), likewise
                           .RemainingArgs()        // q_lengths (*B), kv_lengths (*B), where given;
                                                   // of a program: numbers of batch elements (*B)
                                                   // and heads (N), captures (*B, ...)
                           .Ret<ffi::AnyBuffer>()  // out (*B, T, N, h)
                           .Ret<ffi::Buffer<ffi::F32>>()  // lse (*B, T, N)
                           .Ret<ffi::Buffer<ffi::U8>>(),  // workspace
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kBackward, jaxflash::backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Ctx<ffi::State<jaxflash::ProgramState>>()
                           .Attr<jaxflash::Attributes>("problem")
                           .Attr<std::string_view>("program")
                           .Attr<bool>("unit_slope")
                           .Attr<int64_t>("head_dim")
                           .Attr<int64_t>("value_dim")
                           .Attr<std::string_view>("dtype")
                           .Attr<ffi::Span<const int64_t>>("capture_ranks")
                           .Attr<bool>("has_dlse")
                           .Attr<bool>("deterministic")
                           .Arg<ffi::AnyBuffer>()         // q (*B, T, N, H), batch axes full or 1
                           .Arg<ffi::AnyBuffer>()         // k (*B, S, K, H), likewise
                           .Arg<ffi::AnyBuffer>()         // v (*B, S, K, h), likewise
                           .Arg<ffi::AnyBuffer>()         // out (*B, T, N, h), likewise
                           .Arg<ffi::AnyBuffer>()         // dout (*B, T, N, h), likewise
                           .Arg<ffi::Buffer<ffi::F32>>()  // lse (*B, T, N)
                           .RemainingArgs()               // lengths as above, dlse (*B, T, N),
                                                          // a program's as above
                           .Ret<ffi::AnyBuffer>()         // dq (*B, T, N, H)
                           .Ret<ffi::AnyBuffer>()         // dk (*B, S, K, H)
                           .Ret<ffi::AnyBuffer>()         // dv (*B, S, K, h)
                           .Ret<ffi::Buffer<ffi::U8>>(),  // workspace
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JAXFLASH_WITH_KERNELS

// ---- The Python module --------------------------------------------------------------------------

namespace {

template <class Handler>
nb::capsule capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>,
                "an FFI handler takes an XLA_FFI_CallFrame*");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

#ifdef JAXFLASH_WITH_KERNELS

// As `jaxflash._config.CompiledKernel`.
using ReportRow =
    std::tuple<std::string, std::string, std::string, int32_t, int32_t, bool, double, bool>;

ReportRow row_of(const jaxflash::KernelReport& report) {
  return {report.label,   report.tile,       report.architecture, report.registers,
          report.spilled, report.serialised, report.seconds,      report.from_disk};
}

#endif  // JAXFLASH_WITH_KERNELS

}  // namespace

NB_MODULE(_extension, m) {
  m.doc() = "FFI handlers of the jaxflash kernels, and what the kernel library was built with.";
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def(
      "wrong_platform_handler", [] { return capsule(kWrongPlatform); },
      "Handler that reports a platform without kernels.");

#ifdef JAXFLASH_WITH_KERNELS
  m.attr("kernels") = true;
  m.def(
      "cuda_handlers",
      [] {
        nb::dict forward, backward, handlers;
        forward["instantiate"] = capsule(kInstantiateForward);
        forward["initialize"] = capsule(kInitialize);
        forward["execute"] = capsule(kForward);
        backward["instantiate"] = capsule(kInstantiateBackward);
        backward["initialize"] = capsule(kInitialize);
        backward["execute"] = capsule(kBackward);
        handlers["forward"] = forward;
        handlers["backward"] = backward;
        return handlers;
      },
      "Handlers for the CUDA platform, by pass and stage.");
  m.def(
      "program_state_type",
      [] {
        static ffi::TypeInfo info = ffi::MakeTypeInfo<jaxflash::ProgramState>();
        return nb::make_tuple(nb::capsule(static_cast<void*>(&jaxflash::ProgramState::id)),
                              nb::capsule(static_cast<void*>(&info)));
      },
      "(type id, type info) of the state that a call keeps, for jax.ffi.register_ffi_type.");
  m.def(
      "set_compiler",
      [](const std::vector<std::pair<std::string, std::optional<std::string>>>& locations,
         const std::string& headers) {
        std::vector<jaxflash::CompilerLocation> list;
        for (const auto& [library, builtins] : locations) {
          list.push_back({library.c_str(), builtins ? builtins->c_str() : nullptr});
        }
        jaxflash_set_compiler(list.data(), static_cast<int32_t>(list.size()), headers.c_str());
      },
      nb::arg("locations"), nb::arg("headers"),
      "Where to look for NVRTC, best first: (library, its builtins or None); and the folder of the "
      "kernels' headers.");
  m.def(
      "compiler",
      []() -> std::pair<std::optional<std::pair<int32_t, int32_t>>, std::string> {
        int32_t major = 0, minor = 0;
        const char* library = nullptr;
        const nb::gil_scoped_release unlocked;
        const jaxflash::Status status = jaxflash_compiler(&major, &minor, &library);
        if (!status.ok()) return {std::nullopt, status.message};
        return {std::make_pair(major, minor), library};
      },
      "(version, path) of NVRTC, loaded if need be; (None, what is wrong) without one.");
  m.def(
      "compile_program",
      [](bool forward, const std::string& source, bool unit_slope, const std::string& dtype,
         bool highest_precision, int32_t head_dim, int32_t value_dim, float scale, int32_t arch,
         int32_t shared_memory) {
        const auto math = jaxflash::math_of(dtype, highest_precision);
        if (!math) throw nb::value_error("dtype must be float16, bfloat16 or float32");
        const jaxflash::ProgramDescription description = {
            forward, source.c_str(), unit_slope, *math, head_dim, value_dim, scale};
        jaxflash::KernelReport report;
        jaxflash::Status status;
        {
          const nb::gil_scoped_release unlocked;
          status = jaxflash_compile_program(&description, arch, shared_memory, &report);
        }
        if (!status.ok()) throw std::runtime_error(status.message);
        return row_of(report);
      },
      nb::kw_only(), nb::arg("forward"), nb::arg("source"), nb::arg("unit_slope"), nb::arg("dtype"),
      nb::arg("highest_precision"), nb::arg("head_dim"), nb::arg("value_dim"), nb::arg("scale"),
      nb::arg("arch"), nb::arg("shared_memory"),
      "Compiles a score program as for a GPU of compute capability `arch` / 10 whose blocks may "
      "have that many bytes of shared memory; needs no GPU. Returns a row of kernel_reports().");
  m.def(
      "compile_kernel",
      [](const std::string& source, const std::string& kernel, const std::string& architecture) {
        jaxflash::KernelReport report;
        jaxflash::Status status;
        {
          const nb::gil_scoped_release unlocked;
          status = jaxflash_compile_kernel(source.c_str(), kernel.c_str(), architecture.c_str(),
                                           &report);
        }
        if (!status.ok()) throw std::runtime_error(status.message);
        return row_of(report);
      },
      nb::arg("source"), nb::arg("kernel"), nb::arg("architecture"),
      "Compiles a kernel of a source that may include the kernels' headers.");
  m.def(
      "kernel_reports",
      [] {
        std::vector<jaxflash::KernelReport> reports(256);
        int32_t count = jaxflash_kernel_reports(reports.data(), 256);
        while (count > static_cast<int32_t>(reports.size())) {
          reports.resize(count);
          count = jaxflash_kernel_reports(reports.data(), count);
        }
        reports.resize(count);
        std::vector<ReportRow> rows;
        for (const jaxflash::KernelReport& report : reports) rows.push_back(row_of(report));
        return rows;
      },
      "What this process has compiled: (kernel, tile, architecture, registers, "
      "bytes spilled, serialised, seconds, from disk).");
  m.def(
      "cache_folder",
      [] {
        std::string path(4096, '\0');
        path.resize(std::min<size_t>(path.size() - 1, jaxflash_cache_folder(path.data(), 4096)));
        return path;
      },
      "Folder of the cache on disk; empty if there is none.");
  m.def(
      "forward_workspace_bytes",
      [](const std::string& dtype, int64_t batch, int64_t q_len, int64_t kv_len, int64_t q_heads,
         int64_t kv_heads, int64_t head_dim, int64_t value_dim, int64_t left, int64_t right) {
        jaxflash::Problem problem = {};
        problem.math = jaxflash::math_of(dtype, false).value_or(jaxflash::Math::kTF32);
        problem.num_batch_axes = 1;
        problem.batch_extent[0] = batch;
        problem.q_len = static_cast<int32_t>(q_len);
        problem.kv_len = static_cast<int32_t>(kv_len);
        problem.q_heads = static_cast<int32_t>(q_heads);
        problem.kv_heads = static_cast<int32_t>(kv_heads);
        problem.head_dim = static_cast<int32_t>(head_dim);
        problem.value_dim = static_cast<int32_t>(value_dim);
        problem.band.left = jaxflash::clamp_side(left);
        problem.band.right = jaxflash::clamp_side(right);
        return jaxflash_forward_workspace_bytes(&problem);
      },
      nb::kw_only(), nb::arg("dtype"), nb::arg("batch"), nb::arg("q_len"), nb::arg("kv_len"),
      nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_dim"),
      nb::arg("left"), nb::arg("right"),
      "Bytes of workspace that the forward pass of one problem needs; no more for more sequences.");
  m.def(
      "backward_workspace_bytes",
      [](int64_t batch, int64_t q_len, int64_t kv_len, int64_t q_heads, int64_t kv_heads,
         int64_t head_dim, int64_t value_dim) {
        jaxflash::Problem problem = {};
        problem.num_batch_axes = 1;
        problem.batch_extent[0] = batch;
        problem.q_len = static_cast<int32_t>(q_len);
        problem.kv_len = static_cast<int32_t>(kv_len);
        problem.q_heads = static_cast<int32_t>(q_heads);
        problem.kv_heads = static_cast<int32_t>(kv_heads);
        problem.head_dim = static_cast<int32_t>(head_dim);
        problem.value_dim = static_cast<int32_t>(value_dim);
        return jaxflash_backward_workspace_bytes(&problem);
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("q_len"), nb::arg("kv_len"), nb::arg("q_heads"),
      nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_dim"),
      "Bytes of workspace that the backward pass of one problem needs.");
  m.def("build_info", [] { return std::string(jaxflash_build_info()); });
  m.def("variants", [] {
    const jaxflash::Variant* variants = nullptr;
    const int32_t count = jaxflash_variants(&variants);
    std::vector<std::tuple<std::string, std::string, std::string, int32_t, int32_t>> rows;
    for (int32_t i = 0; i < count; ++i) {
      rows.emplace_back(variants[i].family, variants[i].pass, variants[i].math,
                        variants[i].head_dim, variants[i].value_dim);
    }
    return rows;
  });
  m.def(
      "variant",
      [](const std::string& pass, const std::string& dtype, bool highest_precision,
         const std::vector<int64_t>& q, const std::vector<int64_t>& k,
         const std::vector<int64_t>& v) -> std::optional<jaxflash::VariantKey> {
        return jaxflash::variant_for(pass == "forward", dtype, highest_precision, q, k, v);
      },
      nb::kw_only(), nb::arg("pass_name"), nb::arg("dtype"), nb::arg("highest_precision"),
      nb::arg("q"), nb::arg("k"), nb::arg("v"),
      "(family, head size, value head size) of the variant that the current GPU runs for "
      "q (*B, T, N, H), k (*B, S, K, H), v (*B, S, K, h), densely stored; None if it runs none.");
  m.def("devices", [] {
    jaxflash::Device devices[64];
    const int32_t count = jaxflash_devices(devices, 64);
    std::vector<std::tuple<std::string, int32_t, int32_t, int32_t>> rows;
    for (int32_t i = 0; i < count; ++i) {
      rows.emplace_back(devices[i].name, devices[i].major, devices[i].minor,
                        devices[i].shared_memory_per_block);
    }
    return rows;
  });
#else
  m.attr("kernels") = false;
#endif
}
