#include "host/score_kernels.h"

#include <algorithm>
#include <future>

#include "common/program_kernels.h"
#include "common/status.h"
#include "host/program_request.h"

namespace jaxflash {

ScoreKernels::ScoreKernels(const ProgramDescription& description)
    : pass_(description.pass),
      source_(description.source),
      unit_slope_(description.unit_slope),
      bounded_(description.bounded),
      mask_(description.mask),
      walks_(description.walks),
      one_sided_(description.one_sided),
      deterministic_(description.deterministic),
      paged_(description.paged),
      shared_units_(description.shared_units),
      sizes_(description.sizes),
      start_capture_(description.start_capture),
      problem_{} {
  problem_.math = description.math;
  problem_.head_dim = description.head_dim;
  problem_.value_dim = description.value_dim;
  problem_.scale = description.scale;
  if (description.num_gradient_loads > 0) {
    capture_gradients_ = std::make_unique<CaptureGradients>(description);
  }
}

namespace {

// The name of a kernel with another mask than that of plain calls.
std::string with_mask(std::string name, MaskKind mask, bool walks, bool ordered) {
  const std::string band = mask_name(MaskKind::kBand);
  if (mask == MaskKind::kBand) return name;
  std::string other = mask_name(mask);
  if (walks) other = "jaxflash::Walked<" + other + ">";
  if (ordered) other = "jaxflash::Ordered<" + other + ">";
  for (size_t at = name.find(band); at != std::string::npos; at = name.find(band, at + 1)) {
    name.replace(at, band.size(), other);
  }
  return name;
}

}  // namespace

bool ScoreKernels::has_walk(const CompiledVariant& variant) const {
  return walks_ && variant.walks && is_of_program(mask_) && !paged_ && shared_units_ == 0;
}

Status ScoreKernels::compile(const CompiledVariant& variant, const GpuTraits& gpu, bool walks,
                             Compiled* compiled) const {
  const bool ranges = mask_ == MaskKind::kRanges || mask_ == MaskKind::kSegments;
  const int head_dim = std::max(problem_.head_dim, problem_.value_dim);
  const std::vector<ProgramKernel> tiles =
      variant.program_kernels({unit_slope_, bounded_, ranges, walks, one_sided_, paged_,
                               shared_units_, head_dim, start_capture_, gpu.shared_bytes, sizes_});
  const Variant& name = variant.variant;
  KernelRequest request = program_request(gpu, variant.target.newer, variant.math);
  request.label = std::string(name.family) + " " + name.pass + " " + name.math + " " +
                  std::to_string(name.head_dim);
  if (name.value_dim != name.head_dim) request.label += "/" + std::to_string(name.value_dim);
  if (walks) request.label += " walk";
  if (tiles.empty()) {
    return error_status("no tile of %s fits into %d bytes of shared memory", request.label.c_str(),
                        gpu.shared_bytes);
  }
  *compiled = {};
  const auto ask = [&](int tile, KernelRequest* of_tile) {
    of_tile->tile = tiles[tile].tile_name;
    of_tile->kernel = with_mask(tiles[tile].name, mask_, walks, deterministic_);
    of_tile->source = program_source(source_, tiles[tile].header);
    return tiles[tile].harmless_spills;
  };
  int chosen = 0;
  const auto count = static_cast<int>(tiles.size());
  if (Status status = choose_tile(request, count, ask, &chosen, &compiled->kernel); !status.ok()) {
    return status;
  }
  const ProgramKernel& tile = compiled->tile = tiles[chosen];
  if (tile.merge_header == nullptr) return {};
  request.label += " merge";
  request.tile = tile.tile_name;
  request.kernel = with_mask(tile.merge_name, mask_, walks, deterministic_);
  request.source = program_source(source_, tile.merge_header);
  return RuntimeKernel::get(request, &compiled->merge);
}

Status ScoreKernels::compile_all(const CompiledVariant& variant, const GpuTraits& gpu,
                                 Compiled* compiled, Compiled* walk) const {
  *walk = {};
  if (!has_walk(variant)) return compile(variant, gpu, false, compiled);
  // Side by side, or the first call of a program would wait for twice as long.
  std::future<Status> walking = std::async(std::launch::async | std::launch::deferred,
                                           [&] { return compile(variant, gpu, true, walk); });
  const Status status = compile(variant, gpu, false, compiled);
  const Status of_walk = walking.get();
  return status.ok() ? of_walk : status;
}

Status ScoreKernels::load_new(const CompiledVariant& variant, int device, const GpuTraits& gpu,
                              LoadedKernel* kernel) const {
  Compiled compiled, walk;
  if (Status status = compile_all(variant, gpu, &compiled, &walk); !status.ok()) return status;
  *kernel = {};
  kernel->tile = compiled.tile.tile;
  kernel->start_capture = start_capture_;
  Status status = compiled.kernel->load(device, compiled.tile.shared_bytes, &kernel->handle);
  if (status.ok() && compiled.merge != nullptr) {
    status = compiled.merge->load(device, 0, &kernel->merge);
  }
  if (status.ok() && walk.kernel != nullptr) {
    kernel->walk.tile = walk.tile.tile;
    status = walk.kernel->load(device, walk.tile.shared_bytes, &kernel->walk.handle);
  }
  if (status.ok()) loaded_.push_back({&variant, device, *kernel});
  return status;
}

}  // namespace jaxflash
