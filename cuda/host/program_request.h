// What all kernels of score programs are compiled with, and the choice among their tiles.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "host/gpu_traits.h"
#include "host/runtime_kernel.h"
#include "problem.h"

namespace jaxflash {

// Without a label, a kernel and its source. `portable`: of the family for every GPU.
inline KernelRequest program_request(const GpuTraits& gpu, bool portable, Math math) {
  KernelRequest request;
  request.architecture = "sm_" + std::to_string(gpu.arch) + (portable ? "" : "a");
  if (portable) {
    request.options.push_back("-DJAXFLASH_PORTABLE_ARCH=" + std::to_string(gpu.portable_arch));
  }
  if (math == Math::kFloat32) request.options.push_back("-DJAXFLASH_PRECISE_MATH");
  return request;
}

// A program, and the header of a kernel that takes it.
inline std::string program_source(const std::string& program, const std::string& header) {
  return "#include \"common/program.cuh\"\n#include \"common/range_mask.cuh\"\n" + program +
         "\n#include \"" + header + "\"\n";
}

// The first of `count` tiles whose kernel hardly spills and does not serialise its warpgroup
// instructions; where there is none, the one that does so least. A tile that does not compile is
// passed over, as beside a large program it may not fit. `ask(tile, &request)` fills in what
// depends on the tile, and returns how many bytes of spills do not matter.
template <class Ask>
Status choose_tile(KernelRequest request, int count, const Ask& ask, int* chosen,
                   std::shared_ptr<RuntimeKernel>* kernel) {
  *kernel = nullptr;
  Status first_failure = {};
  for (int tile = 0; tile < count; ++tile) {
    const int harmless_spills = ask(tile, &request);
    std::shared_ptr<RuntimeKernel> compiled;
    Status status = RuntimeKernel::get(request, &compiled);
    if (!status.ok()) {
      if (first_failure.ok()) first_failure = status;
      continue;
    }
    const bool harmless = compiled->costs().harmless(harmless_spills);
    if (*kernel == nullptr || harmless || compiled->costs().better_than((*kernel)->costs())) {
      *kernel = std::move(compiled);
      *chosen = tile;
    }
    if (harmless) break;
  }
  return *kernel == nullptr ? first_failure : Status{};
}

}  // namespace jaxflash
