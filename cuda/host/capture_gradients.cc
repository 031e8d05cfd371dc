#include "host/capture_gradients.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/program_kernels.h"
#include "common/status.h"
#include "common/workspace.h"
#include "sm80/capture_gradient_traits.h"

namespace jaxflash {

namespace {

// Calls use(Traits{}).
template <Math kMath, int kHeadDim, class Use>
void use_traits(int shared_bytes, const Use& use) {
  using Choice = sm80::CaptureGradientChoice<kMath, kHeadDim>;
  if (Choice::Large::kSharedBytes <= shared_bytes) {
    use(typename Choice::Large{});
  } else {
    use(typename Choice::Small{});
  }
}

template <Math kMath, class Use>
bool use_traits(int head_dim, int shared_bytes, const Use& use) {
  if (head_dim <= 64) {
    use_traits<kMath, 64>(shared_bytes, use);
  } else if (head_dim <= 128) {
    use_traits<kMath, 128>(shared_bytes, use);
  } else if (head_dim <= 256) {
    use_traits<kMath, 256>(shared_bytes, use);
  } else {
    return false;
  }
  return true;
}

template <class Use>
bool use_traits(Math math, int head_dim, int shared_bytes, const Use& use) {
  switch (math) {
    case Math::kFloat16:
      return use_traits<Math::kFloat16>(head_dim, shared_bytes, use);
    case Math::kBFloat16:
      return use_traits<Math::kBFloat16>(head_dim, shared_bytes, use);
    case Math::kTF32:
      return use_traits<Math::kTF32>(head_dim, shared_bytes, use);
    case Math::kFloat32:
      return use_traits<Math::kFloat32>(head_dim, shared_bytes, use);
  }
  return false;
}

}  // namespace

CaptureGradients::CaptureGradients(const ProgramDescription& description)
    : source_(description.gradient_source),
      loads_(description.gradient_loads,
             description.gradient_loads + description.num_gradient_loads),
      math_(description.math),
      mask_(description.mask),
      head_dim_(std::max(description.head_dim, description.value_dim)) {}

Status CaptureGradients::geometry(const GpuTraits& gpu, Geometry* result) const {
  const bool known = use_traits(math_, head_dim_, gpu.shared_bytes, [&](auto traits) {
    using Traits = decltype(traits);
    using Tile = typename Traits::Tile;
    const TypeName tile = type_name<Tile>();
    result->tile.assign(tile.begin, tile.length);
    result->name = "jaxflash::sm80::CaptureGradientTraits<static_cast<jaxflash::Math>(" +
                   std::to_string(static_cast<int>(Traits::kMath)) + "), " +
                   std::to_string(Traits::kHeadDim) + ", " + result->tile + ">";
    result->rows = Tile::kRows;
    result->keys = Tile::kKeys;
    result->threads = Traits::kThreads;
    result->shared_bytes = Traits::kSharedBytes;
    result->blocks_per_sm = Tile::kBlocksPerSM;
  });
  if (!known) return error_status("gradients of captures take head sizes up to 256");
  if (result->shared_bytes > gpu.shared_bytes) {
    return error_status("gradients of captures need %d bytes of shared memory, the GPU has %d",
                        result->shared_bytes, gpu.shared_bytes);
  }
  return {};
}

Status CaptureGradients::get(const GpuTraits& gpu, const Geometry& geometry, size_t load,
                             std::shared_ptr<RuntimeKernel>* kernel) const {
  KernelRequest request;
  request.label = "sm80 capture gradient " + std::to_string(head_dim_);
  request.tile = geometry.tile;
  request.architecture = "sm_" + std::to_string(gpu.arch);
  request.options.push_back("-DJAXFLASH_PORTABLE_ARCH=" + std::to_string(gpu.portable_arch));
  if (math_ == Math::kFloat32) request.options.push_back("-DJAXFLASH_PRECISE_MATH");
  request.source = "#include \"common/program.cuh\"\n#include \"common/range_mask.cuh\"\n" +
                   source_ + "\n#include \"sm80/capture_gradient_kernel.cuh\"\n";
  request.kernel = "jaxflash::sm80::capture_gradient_kernel<" + geometry.name + ", " +
                   mask_name(mask_) + ", jaxflash::Program, jaxflash::Program::Load" +
                   std::to_string(load) + ">";
  return RuntimeKernel::get(request, kernel);
}

Status CaptureGradients::compile(const GpuTraits& gpu) const {
  Geometry tile;
  if (Status status = geometry(gpu, &tile); !status.ok()) return status;
  for (size_t load = 0; load < loads_.size(); ++load) {
    std::shared_ptr<RuntimeKernel> kernel;
    if (Status status = get(gpu, tile, load, &kernel); !status.ok()) return status;
  }
  return {};
}

Status CaptureGradients::load_new(int device, const GpuTraits& gpu, const Loaded** result) const {
  auto loaded = std::make_unique<Loaded>();
  loaded->device = device;
  if (Status status = geometry(gpu, &loaded->geometry); !status.ok()) return status;
  if (Status status = cuda_status(
          cudaDeviceGetAttribute(&loaded->multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "asking for the GPU");
      !status.ok()) {
    return status;
  }
  for (size_t load = 0; load < loads_.size(); ++load) {
    std::shared_ptr<RuntimeKernel> kernel;
    Status status = get(gpu, loaded->geometry, load, &kernel);
    const void* handle = nullptr;
    if (status.ok()) status = kernel->load(device, loaded->geometry.shared_bytes, &handle);
    if (!status.ok()) return status;
    loaded->handles.push_back(handle);
  }
  *result = loaded.get();
  loaded_.push_back(std::move(loaded));
  return {};
}

Status CaptureGradients::launch(const Loaded& loaded, const BackwardParams& call,
                                const CaptureGradientArray* arrays, CUstream_st* stream) const {
  BackwardParams params = call;
  const Problem& problem = params.problem;
  BackwardWorkspace workspace = backward_workspace(problem);
  const Geometry& tile = loaded.geometry;
  bool written[kMaxCaptures] = {};
  for (size_t i = 0; i < loads_.size(); ++i) {
    const CaptureLoad& load = loads_[i];
    const CaptureGradientArray& array = arrays[load.capture];
    if (array.data == nullptr) return error_status("the gradient of a capture has no array");
    CaptureGradient plan =
        plan_capture_gradient(problem, params.captures, load, array, tile.rows, tile.keys,
                              int64_t{loaded.multiprocessors} * tile.blocks_per_sm,
                              written[load.capture], params.deterministic);
    written[load.capture] = true;
    const int64_t elements =
        capture_gradient_elements(problem, params.captures.of[load.capture], array, load.rank);
    const bool no_rows = workspace.bytes == 0 || problem.q_len == 0 || problem.kv_len == 0;
    if (no_rows && plan.adds) continue;
    if (plan.zeros || no_rows) {
      if (Status status =
              cuda_status(cudaMemsetAsync(array.data, 0, elements * (load.narrow ? 2 : 4), stream),
                          "clearing the gradient of a capture");
          !status.ok()) {
        return status;
      }
    }
    if (no_rows) continue;
    if (plan.ordered) {
      plan.turns = reinterpret_cast<uint32_t*>(workspace.dq_of(params.workspace, 0));
      if (Status status =
              cuda_status(cudaMemsetAsync(plan.turns, 0, capture_gradient_turns(plan) * 4, stream),
                          "clearing the turns of a gradient");
          !status.ok()) {
        return status;
      }
    }
    constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
    const int64_t blocks = plan.pieces() * plan.parts;
    for (int64_t first = 0; first < blocks; first += kMaxGrid) {
      void* arguments[] = {&params, &workspace, &plan, &first};
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(static_cast<unsigned>(std::min(blocks - first, kMaxGrid)));
      config.blockDim = dim3(tile.threads);
      config.dynamicSmemBytes = tile.shared_bytes;
      config.stream = stream;
      if (Status status = cuda_status(cudaLaunchKernelExC(&config, loaded.handles[i], arguments),
                                      "launching the kernel for the gradient of a capture");
          !status.ok()) {
        return status;
      }
    }
  }
  return {};
}

}  // namespace jaxflash
