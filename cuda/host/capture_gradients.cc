#include "host/capture_gradients.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "common/launch.h"
#include "common/program_kernels.h"
#include "common/status.h"
#include "common/workspace.h"
#include "host/program_request.h"
#include "sm80/capture_gradient_traits.h"
#include "sm90/capture_gradient.h"

namespace jaxflash {

namespace {

// Calls use(size), a constant, for the smallest head size that kernels are written for and that is
// enough; false where none is.
template <class Use>
bool use_head_dim(int head_dim, const Use& use) {
  if (head_dim <= 64) {
    use(std::integral_constant<int, 64>{});
  } else if (head_dim <= 128) {
    use(std::integral_constant<int, 128>{});
  } else if (head_dim <= 256) {
    use(std::integral_constant<int, 256>{});
  } else {
    return false;
  }
  return true;
}

// Likewise.
template <class Use>
void use_math(Math math, const Use& use) {
  switch (math) {
    case Math::kFloat16:
      return use(std::integral_constant<Math, Math::kFloat16>{});
    case Math::kBFloat16:
      return use(std::integral_constant<Math, Math::kBFloat16>{});
    case Math::kTF32:
      return use(std::integral_constant<Math, Math::kTF32>{});
    case Math::kFloat32:
      return use(std::integral_constant<Math, Math::kFloat32>{});
  }
}

template <class Traits>
CaptureGradients::Geometry geometry_of(int blocks_per_sm) {
  using Tile = typename Traits::Tile;
  return {type_name<Traits>(), type_name<Tile>(),    Tile::kRows,  Tile::kKeys,
          Traits::kThreads,    Traits::kSharedBytes, blocks_per_sm};
}

using Geometries = std::vector<CaptureGradients::Geometry>;

template <Math kMath, int kHeadDim>
void add_hopper(sm90::GradientStaging staging, Geometries* result) {
  using sm90::GradientStaging;
  for_each_tile(sm90::CaptureGradientTiles{}, [&](int, auto tile) {
    using Tile = decltype(tile);
    const auto add = [&](auto constant) {
      using Traits = sm90::CaptureGradientTraits<kMath, kHeadDim, Tile, constant()>;
      if (staging == constant()) result->push_back(geometry_of<Traits>(1));
    };
    add(std::integral_constant<GradientStaging, GradientStaging::kSums>{});
    add(std::integral_constant<GradientStaging, GradientStaging::kTiles>{});
    add(std::integral_constant<GradientStaging, GradientStaging::kStartTiles>{});
  });
}

template <Math kMath, int kHeadDim>
void add_portable(int shared_bytes, Geometries* result) {
  using Choice = sm80::CaptureGradientChoice<kMath, kHeadDim>;
  using Large = typename Choice::Large;
  using Small = typename Choice::Small;
  result->push_back(Large::kSharedBytes <= shared_bytes
                        ? geometry_of<Large>(Large::Tile::kBlocksPerSm)
                        : geometry_of<Small>(Small::Tile::kBlocksPerSm));
}

}  // namespace

CaptureGradients::CaptureGradients(const ProgramDescription& description)
    : source_(description.gradient_source),
      loads_(description.gradient_loads,
             description.gradient_loads + description.num_gradient_loads),
      start_capture_(description.start_capture),
      problem_{},
      mask_(description.mask) {
  problem_.math = description.math;
  problem_.head_dim = description.head_dim;
  problem_.value_dim = description.value_dim;
  problem_.scale = description.scale;
}

CaptureGradients::Family CaptureGradients::family(const GpuTraits& gpu) const {
  const int head_dim = std::max(problem_.head_dim, problem_.value_dim);
  const bool takes = gpu.arch == 90 && head_dim <= 256 && sm90::takes_sizes(problem_);
  return takes ? Family::kHopper : Family::kPortable;
}

sm90::GradientStaging CaptureGradients::staging(const CaptureLoad& load) const {
  using sm90::GradientStaging;
  const bool owns_tiles = !load.scatter && load.query_axis >= 0 && load.key_axis >= 0;
  if (!owns_tiles) return GradientStaging::kSums;
  return load.capture == start_capture_ ? GradientStaging::kStartTiles : GradientStaging::kTiles;
}

// The tiles of a family for a load, the best first.
Status CaptureGradients::geometries(const GpuTraits& gpu, Family family, const CaptureLoad& load,
                                    std::vector<Geometry>* result) const {
  const int head_dim = std::max(problem_.head_dim, problem_.value_dim);
  const bool known = use_head_dim(head_dim, [&](auto size) {
    use_math(problem_.math, [&](auto math) {
      if (family == Family::kHopper) {
        add_hopper<math(), size()>(staging(load), result);
      } else {
        add_portable<math(), size()>(gpu.shared_bytes, result);
      }
    });
  });
  if (!known) return error_status("gradients of captures take head sizes up to 256");
  if (result->back().shared_bytes > gpu.shared_bytes) {
    return error_status("gradients of captures need %d bytes of shared memory, the GPU has %d",
                        result->back().shared_bytes, gpu.shared_bytes);
  }
  return {};
}

Status CaptureGradients::get(const GpuTraits& gpu, Family family, size_t load, Geometry* geometry,
                             std::shared_ptr<RuntimeKernel>* kernel) const {
  std::vector<Geometry> tiles;
  if (Status status = geometries(gpu, family, loads_[load], &tiles); !status.ok()) return status;
  const bool portable = family == Family::kPortable;
  const std::string name = portable ? "sm80" : "sm90";
  KernelRequest request = program_request(gpu, portable, problem_.math);
  request.label =
      name + " capture gradient " + std::to_string(std::max(problem_.head_dim, problem_.value_dim));
  request.source = program_source(source_, name + "/capture_gradient_kernel.cuh");
  const auto ask = [&](int tile, KernelRequest* of_tile) {
    of_tile->tile = tiles[tile].tile;
    of_tile->kernel = "jaxflash::" + name + "::capture_gradient_kernel<" + tiles[tile].name + ", " +
                      mask_name(mask_) + ", jaxflash::Program, jaxflash::Program::Load" +
                      std::to_string(load) + ">";
    return kHarmlessSpills;
  };
  int chosen = 0;
  Status status =
      choose_tile(std::move(request), static_cast<int>(tiles.size()), ask, &chosen, kernel);
  if (status.ok()) *geometry = std::move(tiles[chosen]);
  return status;
}

Status CaptureGradients::compile(const GpuTraits& gpu, const GradientsBeside& computed) const {
  for (size_t load = 0; load < loads_.size(); ++load) {
    if (computed.has(loads_[load])) continue;
    Geometry geometry;
    std::shared_ptr<RuntimeKernel> kernel;
    if (Status status = get(gpu, family(gpu), load, &geometry, &kernel); !status.ok()) {
      return status;
    }
  }
  return {};
}

Status CaptureGradients::add_device(int number, const GpuTraits& gpu, Device** result) const {
  auto device = std::make_unique<Device>();
  device->number = number;
  device->gpu = gpu;
  if (Status status = cuda_status(
          cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, number),
          "asking for the GPU");
      !status.ok()) {
    return status;
  }
  *result = device.get();
  devices_.push_back(std::move(device));
  return {};
}

Status CaptureGradients::load(Device& device, Family family,
                              const GradientsBeside& computed) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<LoadedLoad>& loads = device.loads[static_cast<int>(family)];
  loads.resize(loads_.size());
  for (size_t load = 0; load < loads_.size(); ++load) {
    LoadedLoad& loaded = loads[load];
    if (loaded.handle != nullptr || computed.has(loads_[load])) continue;
    std::shared_ptr<RuntimeKernel> kernel;
    const void* handle = nullptr;
    Status status = get(device.gpu, family, load, &loaded.geometry, &kernel);
    if (status.ok()) status = kernel->load(device.number, loaded.geometry.shared_bytes, &handle);
    if (!status.ok()) return status;
    loaded.handle = handle;
  }
  return {};
}

namespace {

// A kernel on the GPU, and a call of it.
struct Launch {
  const CaptureLoad& description;
  const CaptureGradients::LoadedLoad& load;
  const BackwardParams& params;
  const CaptureGradient& plan;
  int start_capture;  // that TMA loads, or -1
  CUstream_st* stream;

  int64_t parts() const { return plan.pieces() * plan.parts; }

  template <class... Parameters>
  Status blocks(int64_t count, const Parameters&... arguments) const {
    const CaptureGradients::Geometry& tile = load.geometry;
    return cuda_status(jaxflash::launch(Kernel<Parameters...>(load.handle), Start::kAfter,
                                        {static_cast<unsigned>(count)}, tile.threads,
                                        tile.shared_bytes, stream, arguments...),
                       "launching the kernel for the gradient of a capture");
  }

  // A block for each part.
  Status portable(const BackwardWorkspace& workspace) const {
    for (int64_t first = 0; first < parts(); first += kMaxGrid) {
      const int64_t count = std::min(parts() - first, kMaxGrid);
      Status status = blocks(count, params, workspace, plan, first);
      if (!status.ok()) return status;
    }
    return {};
  }

  // Blocks that stay and take one part after another.
  Status hopper(const sm90::CaptureGradientMaps& maps, int multiprocessors) const {
    if (parts() == 0) return {};
    sm90::CaptureGradientArgs args{};
    Status status =
        sm90::capture_gradient_args(params, maps, load.geometry.rows, load.geometry.keys, args);
    if (!status.ok()) return status;
    args.plan = plan;
    args.parts = parts();
    status = sm90::add_gradient_maps(params, description, start_capture, load.geometry.rows, args);
    if (!status.ok()) return status;
    return blocks(std::min<int64_t>(parts(), multiprocessors), args);
  }
};

}  // namespace

Status CaptureGradients::launch(Device& device, const BackwardParams& params,
                                const CaptureGradientArray* arrays, const GradientsBeside& computed,
                                CUstream_st* stream) const {
  const Problem& problem = params.problem;
  const BackwardWorkspace workspace = backward_workspace(problem);
  const bool no_rows = workspace.bytes == 0 || problem.q_len == 0 || problem.kv_len == 0;
  Family family = this->family(device.gpu);
  sm90::CaptureGradientMaps maps;
  if (family == Family::kHopper && !no_rows && !sm90::map_capture_gradient(params, maps)) {
    family = Family::kPortable;
  }
  if (Status status = load(device, family, computed); !status.ok()) return status;
  const std::vector<LoadedLoad>& loads = device.loads[static_cast<int>(family)];
  const auto clear = [stream](void* data, int64_t bytes, const char* doing) {
    return cuda_status(cudaMemsetAsync(data, 0, bytes, stream), doing);
  };

  int last_capture = -1;
  int key_sum = 0;
  for (size_t i = 0; i < loads_.size(); ++i) {
    const CaptureLoad& load = loads_[i];
    if (computed.has(load)) continue;
    const CaptureGradientArray array = load.is_key_sum()
                                           ? key_sum_array(problem, params.key_sums[key_sum++])
                                           : arrays[load.capture];
    const Geometry& tile = loads[i].geometry;
    const bool adds = load.capture == last_capture && !load.is_key_sum();
    last_capture = load.capture;
    CaptureGradient plan = plan_capture_gradient(
        problem, params.captures, load, array, tile.rows, tile.keys,
        int64_t{device.multiprocessors} * tile.blocks_per_sm, adds, params.deterministic);
    const int64_t elements = capture_gradient_elements(problem, plan, load.rank);
    if (elements == 0 || (no_rows && plan.adds)) continue;
    if (array.data == nullptr) return error_status("the gradient of a capture has no array");
    Status status = {};
    if (plan.zeros || no_rows) {
      status =
          clear(array.data, elements * (load.narrow ? 2 : 4), "clearing the gradient of a capture");
    }
    if (no_rows) {
      if (!status.ok()) return status;
      continue;
    }
    if (status.ok() && plan.ordered) {
      plan.turns = reinterpret_cast<uint32_t*>(workspace.dq_of(params.workspace, 0));
      status =
          clear(plan.turns, capture_gradient_turns(plan) * 4, "clearing the turns of a gradient");
    }
    const bool starts = staging(load) == sm90::GradientStaging::kStartTiles;
    const Launch launch{load, loads[i], params, plan, starts ? start_capture_ : -1, stream};
    if (status.ok()) {
      status = family == Family::kHopper ? launch.hopper(maps, device.multiprocessors)
                                         : launch.portable(workspace);
    }
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace jaxflash
