// Host side of the forward pass of every GPU from Ampere on: the choice of a tile, and the launch.
#pragma once

#include <cuda_runtime.h>

#include "attention.h"
#include "common/launch.h"
#include "common/program_kernels.h"
#include "common/status.h"
#include "common/workspace.h"
#include "sm80/forward_kernel.cuh"

namespace jaxflash::sm80 {

namespace detail {

template <Math kMath, int kHeadDim>
using ForwardTilesOf = ForwardTiles<kTileGroup<kMath>, kHeadDim>;

// The kernel's shared memory has been allowed.
template <Math kMath, int kHeadDim, class Tile>
Status launch_forward(Kernel<ForwardParams, uint64_t> kernel, const ForwardParams& params,
                      cudaStream_t stream) {
  const Problem& problem = params.problem;
  const int64_t heads = batch_size(problem) * problem.q_heads;
  const int64_t tiles = (int64_t{problem.q_len} + Tile::kRows - 1) / Tile::kRows;
  return cuda_status(launch_heads(kernel, heads, tiles, Tile::kThreads,
                                  ForwardSmem<kMath, kHeadDim, Tile>::kBytes, params, stream),
                     "launching the forward kernel");
}

template <Math kMath, int kHeadDim, class Tile>
Status forward_with(const ForwardParams& params, cudaStream_t stream) {
  const Kernel<ForwardParams, uint64_t> kernel = forward_kernel<kMath, kHeadDim, Tile>;
  using Smem = ForwardSmem<kMath, kHeadDim, Tile>;
  Status status = allow_shared_memory<Smem>(kernel.handle, Smem::kBytes);
  return status.ok() ? launch_forward<kMath, kHeadDim, Tile>(kernel, params, stream) : status;
}

}  // namespace detail

template <Math kMath, int kHeadDim>
Status forward(const ForwardParams& params, cudaStream_t stream) {
  using Tiles = detail::ForwardTilesOf<kMath, kHeadDim>;
  using Large = typename Tiles::Large;
  using Small = typename Tiles::Small;
  int available = 0;
  if (Status status = shared_memory_per_block(&available); !status.ok()) return status;
  return available >= ForwardSmem<kMath, kHeadDim, Large>::kBytes
             ? detail::forward_with<kMath, kHeadDim, Large>(params, stream)
             : detail::forward_with<kMath, kHeadDim, Small>(params, stream);
}

// The kernel for a score program: see Launcher.
template <Math kMath, int kHeadDim>
std::vector<ProgramKernel> forward_program_kernels(const ProgramTraits& program) {
  using Tiles = detail::ForwardTilesOf<kMath, kHeadDim>;
  ProgramKernelList list(program);
  for_each_tile(
      ProgramTiles<typename Tiles::Large, typename Tiles::Small>{}, [&](int number, auto tile) {
        using Tile = decltype(tile);
        if (!list.empty()) return;  // the larger one fits
        list.add<Tile>(
            number, "sm80/forward_kernel.cuh", ForwardSmem<kMath, kHeadDim, Tile>::kBytes,
            "jaxflash::sm80::forward_kernel<" + math_name(kMath) + ", " + std::to_string(kHeadDim) +
                ", " + type_name<Tile>() +
                ", jaxflash::BandMask, jaxflash::sm80::ProgramScores<jaxflash::Program, true>, " +
                (program.paged ? "true" : "false") + ">");
      });
  return list.take();
}

template <Math kMath, int kHeadDim>
Status forward_program(const ForwardParams& params, const LoadedKernel& kernel,
                       cudaStream_t stream) {
  using Tiles = detail::ForwardTilesOf<kMath, kHeadDim>;
  return use_tile(ProgramTiles<typename Tiles::Large, typename Tiles::Small>{}, kernel.tile,
                  [&](auto tile) {
                    return detail::launch_forward<kMath, kHeadDim, decltype(tile)>(
                        Kernel<ForwardParams, uint64_t>(kernel.handle), params, stream);
                  });
}

}  // namespace jaxflash::sm80
