#include "host/score_kernels.h"

#include <algorithm>

#include "common/program_kernels.h"
#include "common/status.h"
#include "host/program_request.h"

namespace jaxflash {

ScoreKernels::ScoreKernels(const ProgramDescription& description)
    : pass_(description.pass),
      source_(description.source),
      unit_slope_(description.unit_slope),
      mask_(description.mask),
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
std::string with_mask(std::string name, MaskKind mask, bool ordered) {
  const std::string band = mask_name(MaskKind::kBand);
  if (mask == MaskKind::kBand) return name;
  std::string other = mask_name(mask);
  if (ordered) other = "jaxflash::Ordered<" + other + ">";
  for (size_t at = name.find(band); at != std::string::npos; at = name.find(band, at + 1)) {
    name.replace(at, band.size(), other);
  }
  return name;
}

}  // namespace

Status ScoreKernels::compile(const CompiledVariant& variant, const GpuTraits& gpu,
                             Compiled* compiled) const {
  ProgramKernel tiles[kMaxProgramTiles] = {};
  const bool ranges = mask_ == MaskKind::kRanges || mask_ == MaskKind::kSegments;
  const int head_dim = std::max(problem_.head_dim, problem_.value_dim);
  const int count = variant.program_kernels({unit_slope_, ranges, one_sided_, paged_, shared_units_,
                                             head_dim, start_capture_, gpu.shared_bytes, sizes_},
                                            tiles);
  const Variant& name = variant.variant;
  KernelRequest request = program_request(gpu, variant.target.newer, variant.math);
  request.label = std::string(name.family) + " " + name.pass + " " + name.math + " " +
                  std::to_string(name.head_dim);
  if (name.value_dim != name.head_dim) request.label += "/" + std::to_string(name.value_dim);
  if (count == 0) {
    return error_status("no tile of %s fits into %d bytes of shared memory", request.label.c_str(),
                        gpu.shared_bytes);
  }
  *compiled = {};
  const auto ask = [&](int tile, KernelRequest* of_tile) {
    of_tile->tile = tiles[tile].tile_name;
    of_tile->kernel = with_mask(tiles[tile].name, mask_, deterministic_);
    of_tile->source = program_source(source_, tiles[tile].header);
    return tiles[tile].harmless_spills;
  };
  int chosen = 0;
  if (Status status = choose_tile(request, count, ask, &chosen, &compiled->kernel); !status.ok()) {
    return status;
  }
  const ProgramKernel& tile = compiled->tile = tiles[chosen];
  if (tile.merge_header == nullptr) return {};
  request.label += " merge";
  request.tile = tile.tile_name;
  request.kernel = with_mask(tile.merge_name, mask_, deterministic_);
  request.source = program_source(source_, tile.merge_header);
  return RuntimeKernel::get(request, &compiled->merge);
}

Status ScoreKernels::load_new(const CompiledVariant& variant, int device, const GpuTraits& gpu,
                              LoadedKernel* kernel) const {
  Compiled compiled;
  if (Status status = compile(variant, gpu, &compiled); !status.ok()) return status;
  kernel->tile = compiled.tile.tile;
  kernel->merge = nullptr;
  kernel->start_capture = start_capture_;
  Status status = compiled.kernel->load(device, compiled.tile.shared_bytes, &kernel->handle);
  if (status.ok() && compiled.merge != nullptr) {
    status = compiled.merge->load(device, 0, &kernel->merge);
  }
  if (status.ok()) loaded_.push_back({&variant, device, *kernel});
  return status;
}

}  // namespace jaxflash
