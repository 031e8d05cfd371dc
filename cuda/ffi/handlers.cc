#include "ffi/handlers.h"

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/call.h"

namespace jaxflash {
namespace {

#ifdef JAXFLASH_WITH_KERNELS

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
ffi::ErrorOr<std::unique_ptr<ProgramState>> instantiate(Pass pass, const PassAttributes& attributes,
                                                        const KernelOptions& options,
                                                        const std::vector<CaptureLoad>& loads = {},
                                                        std::string_view gradient_program = {}) {
  auto state = std::make_unique<ProgramState>();
  if (attributes.program.empty()) return state;
  ProgramDescription description = {};
  if (ffi::Error error = describe_program(pass, attributes, options, &description);
      error.failure()) {
    return ffi::Unexpected(error);
  }
  const std::string source(attributes.program), gradient_source(gradient_program);
  description.source = source.c_str();
  if (!loads.empty()) {
    description.gradient_source = gradient_source.c_str();
    description.gradient_loads = loads.data();
    description.num_gradient_loads = static_cast<int32_t>(loads.size());
  }
  const Status status = jaxflash_create_program(&description, &state->kernels);
  if (!status.ok()) return ffi::Unexpected(to_error(status));
  return state;
}

// Before the first execution on a device, and outside of any capture.
ffi::Error initialize(ProgramState* state) {
  if (state->kernels == nullptr) return ffi::Error::Success();
  return to_error(jaxflash_load_program(state->kernels));
}

KernelOptions options_of(const ForwardAttributes& attributes, bool paged) {
  KernelOptions options;
  options.paged = paged;
  options.shared_units = attributes.shared_units;
  options.sizes = attributes.sizes;
  options.start_capture = attributes.start_capture;
  return options;
}

ffi::ErrorOr<std::unique_ptr<ProgramState>> instantiate_forward(ForwardAttributes attributes) {
  return instantiate(Pass::kForward, attributes, options_of(attributes, false));
}

ffi::ErrorOr<std::unique_ptr<ProgramState>> instantiate_paged(ForwardAttributes attributes) {
  if (attributes.program.empty()) {
    return ffi::Unexpected(invalid("calls with pages have a score program, got a plain call"));
  }
  if (attributes.problem.mask != static_cast<int64_t>(MaskKind::kBand)) {
    return ffi::Unexpected(
        invalid("calls with pages have no ranges, got a mask of kind ", attributes.problem.mask));
  }
  return instantiate(Pass::kForward, attributes, options_of(attributes, true));
}

ffi::ErrorOr<std::unique_ptr<ProgramState>> instantiate_backward(BackwardAttributes attributes) {
  const ffi::ErrorOr<std::vector<CaptureLoad>> loads = loads_of(attributes);
  if (!loads) return ffi::Unexpected(loads.error());
  KernelOptions options;
  options.deterministic = attributes.deterministic;
  options.start_capture = attributes.start_capture;
  return instantiate(Pass::kBackward, attributes, options, *loads, attributes.gradient_program);
}

ffi::ErrorOr<std::unique_ptr<ProgramState>> instantiate_tangent(PassAttributes attributes) {
  return instantiate(Pass::kTangent, attributes, {});
}

// The rest of a call whose operands have been checked: its batch axes, merged across the operands
// of these shapes and the program's.
template <class Params>
ffi::ErrorOr<BatchAxes> merge_batch_axes(const ProgramState& state, const ProgramOperands& program,
                                         Shape full, std::vector<Shape> shapes, Params* params) {
  program.add_shapes(&shapes);
  const BatchAxes axes(full, shapes);
  if (ffi::Error error = axes.check(); error.failure()) return ffi::Unexpected(error);
  axes.describe(&params->problem);
  params->program = state.kernels;
  params->captures = program.describe(full.batch_rank(), axes);
  return axes;
}

// How many arrays of lengths come first among the optional operands.
size_t lengths_of(const PassAttributes& attributes) {
  return attributes.problem.has_q_lengths + attributes.problem.has_kv_lengths;
}

size_t workspace_bytes(const ForwardParams& params, int64_t shared_units) {
  return params.program == nullptr ? jaxflash_forward_workspace_bytes(&params.problem)
                                   : jaxflash_program_workspace_bytes(
                                         &params.problem, static_cast<int32_t>(shared_units));
}

// The results of rows, beside the shape of the values.
ffi::Error check_rows(ffi::AnyBuffer q, ffi::AnyBuffer out, ffi::Buffer<ffi::F32> lse) {
  if (out.element_type() == q.element_type() && is_per_row(lse.dimensions(), {out.dimensions()})) {
    return ffi::Error::Success();
  }
  return invalid(
      "out must have the dtype of q, and lse the shape of out without its last axis, got ",
      text_of(q), ", ", text_of(out), ", ", text_of(lse.dimensions()));
}

// Whether all have the dtype of q.
ffi::Error check_dtypes(ffi::AnyBuffer q, std::initializer_list<ffi::AnyBuffer> others) {
  for (const ffi::AnyBuffer& x : others) {
    if (x.element_type() != q.element_type()) {
      return invalid("all arrays must have one dtype, got ", text_of(q), " and ", text_of(x));
    }
  }
  return ffi::Error::Success();
}

ffi::Error forward(CUstream_st* stream, ProgramState* state, ForwardAttributes attributes,
                   ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::Buffer<ffi::F32>> lse,
                   ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const Shape full{out->dimensions()};
  ForwardParams params = {};
  if (ffi::Error error = describe(attributes.problem, q, k, v, full, optional, &params.problem);
      error.failure()) {
    return error;
  }
  if (ffi::Error error = check_rows(q, *out, *lse); error.failure()) return error;
  const Shape q_shape{q.dimensions()}, k_shape{k.dimensions()}, v_shape{v.dimensions()};
  ProgramOperands program;
  const RangeArrays ranges(attributes.problem);
  if (ffi::Error error =
          program.take(attributes, ranges, full, optional, lengths_of(attributes), &params.problem);
      error.failure()) {
    return error;
  }
  const auto axes = merge_batch_axes(*state, program, full, {q_shape, k_shape, v_shape}, &params);
  if (!axes) return axes.error();
  params.q = axes->tensor(q.untyped_data(), q_shape);
  params.k = axes->tensor(k.untyped_data(), k_shape);
  params.v = axes->tensor(v.untyped_data(), v_shape);
  params.out = axes->tensor(out->untyped_data(), full);
  params.lse = lse->typed_data();
  params.workspace = workspace->untyped_data();
  if (ffi::Error error = check_workspace("the forward pass", *workspace,
                                         workspace_bytes(params, attributes.shared_units));
      error.failure()) {
    return error;
  }
  return to_error(jaxflash_forward(&params, stream));
}

ffi::Error paged(CUstream_st* stream, ProgramState* state, ForwardAttributes attributes,
                 ffi::AnyBuffer q, ffi::AnyBuffer key_pages, ffi::AnyBuffer value_pages,
                 ffi::Buffer<ffi::S32> table, ffi::RemainingArgs optional,
                 ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::F32>> lse,
                 ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const Shape full{out->dimensions()};
  ForwardParams params = {};
  if (ffi::Error error = describe_paged(attributes.problem, q, key_pages, value_pages, table, full,
                                        optional, &params.problem, &params.pages);
      error.failure()) {
    return error;
  }
  if (ffi::Error error = check_rows(q, *out, *lse); error.failure()) return error;
  const Shape q_shape{q.dimensions()};
  ProgramOperands program;
  if (ffi::Error error = program.take(attributes, RangeArrays{}, full, optional,
                                      lengths_of(attributes), &params.problem);
      error.failure()) {
    return error;
  }
  const auto axes = merge_batch_axes(*state, program, full, {q_shape}, &params);
  if (!axes) return axes.error();
  params.q = axes->tensor(q.untyped_data(), q_shape);
  params.k = pool_tensor(key_pages);
  params.v = pool_tensor(value_pages);
  params.out = axes->tensor(out->untyped_data(), full);
  params.lse = lse->typed_data();
  params.workspace = workspace->untyped_data();
  if (ffi::Error error = check_workspace("a call with pages", *workspace,
                                         workspace_bytes(params, attributes.shared_units));
      error.failure()) {
    return error;
  }
  return to_error(jaxflash_forward(&params, stream));
}

ffi::Error backward(CUstream_st* stream, ProgramState* state, BackwardAttributes attributes,
                    ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer out,
                    ffi::AnyBuffer dout, ffi::Buffer<ffi::F32> lse, ffi::RemainingArgs optional,
                    ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                    ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                    ffi::RemainingRets more) {
  // Values of the value's head size, but full batch extents, which the query gradient has.
  const Shape out_shape{out.dimensions()}, dout_shape{dout.dimensions()};
  const Shape dq_shape{dq->dimensions()}, dk_shape{dk->dimensions()}, dv_shape{dv->dimensions()};
  BackwardParams params = {};
  const Shape q_shape{q.dimensions()}, k_shape{k.dimensions()}, v_shape{v.dimensions()};
  std::vector<int64_t> full_dims(dq_shape.dims.begin(), dq_shape.dims.end());
  if (full_dims.empty() || v_shape.dims.size() == 0) {
    return invalid("arrays must have rank >= 3, got ",
                   text_of({{"dq", dq_shape.dims}, {"v", v_shape.dims}}));
  }
  full_dims.back() = v_shape.dims[v_shape.dims.size() - 1];
  const Shape full{ffi::Span<const int64_t>(full_dims.data(), full_dims.size())};
  if (ffi::Error error = describe(attributes.problem, q, k, v, full, optional, &params.problem);
      error.failure()) {
    return error;
  }
  const int64_t value_size = full.dim();
  if (ffi::Error error = check_dtypes(q, {out, dout, *dq, *dk, *dv}); error.failure()) return error;
  if (!is_array(out_shape, full, full.length(), full.heads(), value_size, true) ||
      !is_array(dout_shape, full, full.length(), full.heads(), value_size, true)) {
    return invalid("out and dout must have the shape of dq with the head size of v, got ",
                   text_of({{"out", out_shape.dims},
                            {"dout", dout_shape.dims},
                            {"dq", dq_shape.dims},
                            {"v", v_shape.dims}}));
  }
  if (!is_array(dq_shape, full, full.length(), full.heads(), q_shape.dim(), false) ||
      !is_array(dk_shape, full, k_shape.length(), k_shape.heads(), k_shape.dim(), false) ||
      !is_array(dv_shape, full, v_shape.length(), v_shape.heads(), value_size, false)) {
    return invalid("dq, dk and dv must have the shapes of q, k and v and the full batch, got ",
                   text_of({{"dq", dq_shape.dims}, {"dk", dk_shape.dims}, {"dv", dv_shape.dims}}),
                   " for ",
                   text_of({{"q", q_shape.dims}, {"k", k_shape.dims}, {"v", v_shape.dims}}));
  }
  if (!is_per_row(lse.dimensions(), full)) {
    return invalid("lse must have the shape of dq without its last axis, got ",
                   text_of({{"lse", lse.dimensions()}, {"dq", dq_shape.dims}}));
  }
  const size_t lengths = lengths_of(attributes);
  ProgramOperands program;
  const RangeArrays ranges(attributes.problem);
  if (ffi::Error error = program.take(attributes, ranges, full, optional,
                                      lengths + attributes.has_dlse, &params.problem);
      error.failure()) {
    return error;
  }
  CaptureGradientResults gradients;
  if (ffi::Error error = gradients.take(attributes, program, params.problem, full, more);
      error.failure()) {
    return error;
  }
  std::vector<Shape> shapes = {q_shape, k_shape, v_shape, out_shape, dout_shape};
  gradients.add_shapes(&shapes);
  const auto axes = merge_batch_axes(*state, program, full, std::move(shapes), &params);
  if (!axes) return axes.error();
  params.q = axes->tensor(q.untyped_data(), q_shape);
  params.k = axes->tensor(k.untyped_data(), k_shape);
  params.v = axes->tensor(v.untyped_data(), v_shape);
  params.out = axes->tensor(out.untyped_data(), out_shape);
  params.dout = axes->tensor(dout.untyped_data(), dout_shape);
  params.lse = lse.typed_data();
  if (attributes.has_dlse) {
    auto dlse = optional.get<ffi::Buffer<ffi::F32>>(lengths);
    if (!dlse.has_value() || !is_per_row(dlse->dimensions(), full)) {
      return invalid("dlse must be F32 of the shape of lse, ", text_of(lse.dimensions()), ", got ",
                     text_of(optional, lengths));
    }
    params.dlse = dlse->typed_data();
  }
  params.dq = axes->tensor(dq->untyped_data(), dq_shape);
  params.dk = axes->tensor(dk->untyped_data(), dk_shape);
  params.dv = axes->tensor(dv->untyped_data(), dv_shape);
  params.workspace = workspace->untyped_data();
  params.deterministic = attributes.deterministic;
  CaptureGradientArray arrays[kMaxCaptures] = {};
  gradients.describe(full.batch_rank(), *axes, arrays);
  gradients.describe(arrays, &params);
  gradients.describe(full, *axes, &params.stored);
  const size_t bytes = jaxflash_backward_workspace_bytes(&params.problem) +
                       jaxflash_batch_sum_workspace_bytes(&params.problem, params.stored.batch_sum);
  if (ffi::Error error = check_workspace("the backward pass", *workspace, bytes); error.failure()) {
    return error;
  }
  Status status = jaxflash_backward(&params, stream);
  if (status.ok() && gradients.wanted()) {
    status = jaxflash_capture_gradients(&params, arrays, stream);
  }
  return to_error(status);
}

ffi::Error tangent(CUstream_st* stream, ProgramState* state, PassAttributes attributes,
                   ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer tq,
                   ffi::AnyBuffer tk, ffi::AnyBuffer tv, ffi::AnyBuffer out,
                   ffi::Buffer<ffi::F32> lse, ffi::RemainingArgs optional,
                   ffi::Result<ffi::AnyBuffer> tout, ffi::Result<ffi::Buffer<ffi::F32>> tlse) {
  const Shape full{tout->dimensions()};
  TangentParams params = {};
  if (ffi::Error error = describe(attributes.problem, q, k, v, full, optional, &params.problem);
      error.failure()) {
    return error;
  }
  const Shape q_shape{q.dimensions()}, k_shape{k.dimensions()}, v_shape{v.dimensions()};
  const Shape tq_shape{tq.dimensions()}, tk_shape{tk.dimensions()}, tv_shape{tv.dimensions()};
  const Shape out_shape{out.dimensions()};
  if (ffi::Error error = check_dtypes(q, {tq, tk, tv, out, *tout}); error.failure()) return error;
  if (!is_array(tq_shape, full, q_shape.length(), q_shape.heads(), q_shape.dim(), true) ||
      !is_array(tk_shape, full, k_shape.length(), k_shape.heads(), k_shape.dim(), true) ||
      !is_array(tv_shape, full, v_shape.length(), v_shape.heads(), v_shape.dim(), true)) {
    return invalid("tangents must have the shapes of q, k and v, got ",
                   text_of({{"tq", tq_shape.dims}, {"tk", tk_shape.dims}, {"tv", tv_shape.dims}}),
                   " for ",
                   text_of({{"q", q_shape.dims}, {"k", k_shape.dims}, {"v", v_shape.dims}}));
  }
  if (!is_array(out_shape, full, full.length(), full.heads(), full.dim(), true)) {
    return invalid("out must have the shape of its tangent, got ",
                   text_of({{"out", out_shape.dims}, {"tout", full.dims}}));
  }
  if (!is_per_row(lse.dimensions(), full) || !is_per_row(tlse->dimensions(), full)) {
    return invalid(
        "lse and its tangent must have the shape of out without its last axis, got ",
        text_of({{"lse", lse.dimensions()}, {"tlse", tlse->dimensions()}, {"out", full.dims}}));
  }
  ProgramOperands program;
  const RangeArrays ranges(attributes.problem);
  if (ffi::Error error =
          program.take(attributes, ranges, full, optional, lengths_of(attributes), &params.problem);
      error.failure()) {
    return error;
  }
  const auto axes = merge_batch_axes(
      *state, program, full, {q_shape, k_shape, v_shape, tq_shape, tk_shape, tv_shape, out_shape},
      &params);
  if (!axes) return axes.error();
  if (params.program == nullptr) return invalid("tangents need a score program, got a plain call");
  params.q = axes->tensor(q.untyped_data(), q_shape);
  params.k = axes->tensor(k.untyped_data(), k_shape);
  params.v = axes->tensor(v.untyped_data(), v_shape);
  params.tq = axes->tensor(tq.untyped_data(), tq_shape);
  params.tk = axes->tensor(tk.untyped_data(), tk_shape);
  params.tv = axes->tensor(tv.untyped_data(), tv_shape);
  params.out = axes->tensor(out.untyped_data(), out_shape);
  params.lse = lse.typed_data();
  params.tout = axes->tensor(tout->untyped_data(), full);
  params.tlse = tlse->typed_data();
  return to_error(jaxflash_tangent(&params, stream));
}

// What the handlers of passes bind first.
template <class Attributes>
auto of_instantiation() {
  return ffi::Ffi::BindInstantiate().Attrs<Attributes>();
}
template <class Attributes>
auto of_execution() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<CUstream_st*>>()
      .Ctx<ffi::State<ProgramState>>()
      .Attrs<Attributes>();
}

XLA_FFI_DEFINE_HANDLER(kInstantiateForward, instantiate_forward,
                       of_instantiation<ForwardAttributes>());

XLA_FFI_DEFINE_HANDLER(kInstantiatePaged, instantiate_paged, of_instantiation<ForwardAttributes>());

XLA_FFI_DEFINE_HANDLER(kInstantiateBackward, instantiate_backward,
                       of_instantiation<BackwardAttributes>());

XLA_FFI_DEFINE_HANDLER(kInstantiateTangent, instantiate_tangent,
                       of_instantiation<PassAttributes>());

XLA_FFI_DEFINE_HANDLER(kInitialize, initialize,
                       ffi::Ffi::BindInitialize().Ctx<ffi::State<ProgramState>>());

XLA_FFI_DEFINE_HANDLER(kForward, forward,
                       of_execution<ForwardAttributes>()
                           .Arg<ffi::AnyBuffer>()  // q (*B, T, N, H), each batch axis full or 1
                           .Arg<ffi::AnyBuffer>()  // k (*B, S, K, H), likewise
                           .Arg<ffi::AnyBuffer>()  // v (*B, S, K, h), likewise
                           .RemainingArgs()        // q_lengths (*B), kv_lengths (*B), where given;
                                                   // of a program: numbers of batch elements (*B)
                                                   // and heads (N), captures (*B, ...); of a mask
                                                   // of ranges: their arrays, see take_ranges
                           .Ret<ffi::AnyBuffer>()  // out (*B, T, N, h)
                           .Ret<ffi::Buffer<ffi::F32>>()  // lse (*B, T, N)
                           .Ret<ffi::Buffer<ffi::U8>>(),  // workspace
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kPaged, paged,
                       of_execution<ForwardAttributes>()
                           .Arg<ffi::AnyBuffer>()         // q (*B, T, N, H)
                           .Arg<ffi::AnyBuffer>()         // k pages (P, size, K, H)
                           .Arg<ffi::AnyBuffer>()         // v pages (P, size, K, h)
                           .Arg<ffi::Buffer<ffi::S32>>()  // table (*B, S / size)
                           .RemainingArgs()               // kv_lengths (*B); a program's as above
                           .Ret<ffi::AnyBuffer>()         // out (*B, T, N, h)
                           .Ret<ffi::Buffer<ffi::F32>>()  // lse (*B, T, N)
                           .Ret<ffi::Buffer<ffi::U8>>(),  // workspace
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kBackward, backward,
                       of_execution<BackwardAttributes>()
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
                           .Ret<ffi::Buffer<ffi::U8>>()   // workspace
                           .RemainingRets(),              // gradients of captures
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kTangent, tangent,
                       of_execution<PassAttributes>()
                           .Arg<ffi::AnyBuffer>()  // q (*B, T, N, H), each batch axis full or 1
                           .Arg<ffi::AnyBuffer>()  // k (*B, S, K, H), likewise
                           .Arg<ffi::AnyBuffer>()  // v (*B, S, K, h), likewise
                           .Arg<ffi::AnyBuffer>()  // tangents of q,
                           .Arg<ffi::AnyBuffer>()  // k,
                           .Arg<ffi::AnyBuffer>()  // and v, likewise
                           .Arg<ffi::AnyBuffer>()  // out (*B, T, N, h), likewise
                           .Arg<ffi::Buffer<ffi::F32>>()   // lse (*B, T, N)
                           .RemainingArgs()                // as of the forward pass
                           .Ret<ffi::AnyBuffer>()          // tangents of out (*B, T, N, h)
                           .Ret<ffi::Buffer<ffi::F32>>(),  // and lse (*B, T, N)
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JAXFLASH_WITH_KERNELS

ffi::Error wrong_platform(ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "jaxflash: implementation='cuda' needs an NVIDIA GPU and JAX's CUDA platform; "
                    "this computation runs on another one. Use implementation='xla' or None");
}

XLA_FFI_DEFINE_HANDLER(kWrongPlatform, wrong_platform,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets());

}  // namespace

#ifdef JAXFLASH_WITH_KERNELS

Handlers forward_handlers() { return {kInstantiateForward, kInitialize, kForward}; }

Handlers paged_handlers() { return {kInstantiatePaged, kInitialize, kPaged}; }

Handlers backward_handlers() { return {kInstantiateBackward, kInitialize, kBackward}; }

Handlers tangent_handlers() { return {kInstantiateTangent, kInitialize, kTangent}; }

StateType program_state_type() {
  static ffi::TypeInfo info = ffi::MakeTypeInfo<ProgramState>();
  return {&ProgramState::id, &info};
}

#endif  // JAXFLASH_WITH_KERNELS

XLA_FFI_Handler* wrong_platform_handler() { return kWrongPlatform; }

}  // namespace jaxflash
