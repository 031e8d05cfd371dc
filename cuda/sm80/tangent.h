// Host side of the portable tangent pass, whose kernels are compiled at run time: the choice of a
// tile, and the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "attention.h"
#include "common/launch.h"
#include "common/program_kernels.h"
#include "common/status.h"
#include "common/workspace.h"
#include "sm80/tangent_traits.h"

namespace jaxflash::sm80 {

template <Math kMath, int kHeadDim>
Status tangent(const TangentParams&, cudaStream_t) {
  return error_status("tangents are computed by the kernels of a score program");
}

namespace detail {

template <Math kMath, int kHeadDim>
using TangentTraitsList = ProgramTiles<typename TangentChoice<kMath, kHeadDim>::Large,
                                       typename TangentChoice<kMath, kHeadDim>::Small>;

}  // namespace detail

// The kernel for a score program: see Launcher.
template <Math kMath, int kHeadDim>
std::vector<ProgramKernel> tangent_program_kernels(const ProgramTraits& program) {
  ProgramKernelList list(program);
  for_each_tile(detail::TangentTraitsList<kMath, kHeadDim>{}, [&](int number, auto traits) {
    using Traits = decltype(traits);
    if (!list.empty()) return;  // the larger one fits
    list.add<typename Traits::Tile>(
        number, "sm80/tangent_kernel.cuh", Traits::kSharedBytes,
        "jaxflash::sm80::tangent_kernel<jaxflash::sm80::TangentTraits<" + math_name(kMath) + ", " +
            std::to_string(kHeadDim) + ", " + type_name<typename Traits::Tile>() +
            ">, jaxflash::BandMask, jaxflash::sm80::ProgramScores<jaxflash::Program, true>>");
  });
  return list.take();
}

template <Math kMath, int kHeadDim>
Status tangent_program(const TangentParams& params, const LoadedKernel& kernel,
                       cudaStream_t stream) {
  const auto run = [&](auto traits) -> Status {
    using Traits = decltype(traits);
    using Tile = typename Traits::Tile;
    const Problem& problem = params.problem;
    const int64_t heads = batch_size(problem) * problem.q_heads;
    const int64_t tiles = (int64_t{problem.q_len} + Tile::kRows - 1) / Tile::kRows;
    return cuda_status(launch_heads(Kernel<TangentParams, uint64_t>(kernel.handle), heads, tiles,
                                    Tile::kThreads, Traits::kSharedBytes, params, stream),
                       "launching the tangent kernel");
  };
  return use_tile(detail::TangentTraitsList<kMath, kHeadDim>{}, kernel.tile, run);
}

}  // namespace jaxflash::sm80
