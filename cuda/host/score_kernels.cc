#include "host/score_kernels.h"

#include <tuple>

#include "common/status.h"

namespace jaxflash {

ScoreKernels::ScoreKernels(const ProgramDescription& description)
    : forward_(description.forward),
      source_(description.source),
      unit_slope_(description.unit_slope),
      problem_{} {
  problem_.math = description.math;
  problem_.head_dim = description.head_dim;
  problem_.value_dim = description.value_dim;
  problem_.scale = description.scale;
}

Status ScoreKernels::compile(const CompiledVariant& variant, const GpuTraits& gpu,
                             std::shared_ptr<RuntimeKernel>* kernel, ProgramKernel* tile) const {
  ProgramKernel tiles[kMaxProgramTiles];
  const int count = variant.program_kernels({unit_slope_, gpu.shared_bytes}, tiles);
  const Variant& name = variant.variant;
  KernelRequest request;
  request.label = std::string(name.family) + " " + name.pass + " " + name.math + " " +
                  std::to_string(name.head_dim);
  if (name.value_dim != name.head_dim) request.label += "/" + std::to_string(name.value_dim);
  if (count == 0) {
    return error_status("no tile of %s fits into %d bytes of shared memory", request.label.c_str(),
                        gpu.shared_bytes);
  }
  request.architecture = "sm_" + std::to_string(gpu.arch);
  if (variant.target.newer) {
    request.options.push_back("-DJAXFLASH_PORTABLE_ARCH=" + std::to_string(gpu.portable_arch));
  } else {
    request.architecture += "a";
  }

  if (variant.math == Math::kFloat32) request.options.push_back("-DJAXFLASH_PRECISE_MATH");

  const auto badness = [](const KernelCosts& costs) {
    return std::make_tuple(costs.serialised, costs.spilled);
  };
  // The next tile costs more than this, measured at head size 64.
  constexpr int kHarmlessSpills = 64;
  *kernel = nullptr;
  for (int i = 0; i < count; ++i) {
    request.tile = tiles[i].tile_name;
    request.kernel = tiles[i].name;
    request.source =
        "#include \"common/program.cuh\"\n" + source_ + "\n#include \"" + tiles[i].header + "\"\n";
    std::shared_ptr<RuntimeKernel> compiled;
    if (Status status = RuntimeKernel::get(request, &compiled); !status.ok()) return status;
    if (*kernel == nullptr || badness(compiled->costs()) < badness((*kernel)->costs())) {
      *kernel = std::move(compiled);
      *tile = tiles[i];
    }
    const KernelCosts& best = (*kernel)->costs();
    if (!best.serialised && best.spilled <= kHarmlessSpills) break;
  }
  return {};
}

Status ScoreKernels::load_new(const CompiledVariant& variant, int device, const GpuTraits& gpu,
                              LoadedKernel* kernel) const {
  std::shared_ptr<RuntimeKernel> compiled;
  ProgramKernel tile;
  if (Status status = compile(variant, gpu, &compiled, &tile); !status.ok()) return status;
  kernel->tile = tile.tile;
  Status status = compiled->load(device, tile.shared_bytes, &kernel->handle);
  if (status.ok()) loaded_.push_back({&variant, device, *kernel});
  return status;
}

}  // namespace jaxflash
