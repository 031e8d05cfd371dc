// Host side of the backward pass of every GPU from Ampere on: the choice of a tile, and the
// launches. Three kernels: delta, the main one, and the conversion of dq.
#pragma once

#include <cuda_runtime.h>

#include "attention.h"
#include "common/convert_dq.cuh"
#include "common/launch.h"
#include "common/program_kernels.h"
#include "common/status.h"
#include "common/workspace.h"
#include "delta.h"
#include "sm80/backward_kernel.cuh"

namespace jaxflash::sm80 {

namespace detail {

template <Math kMath, int kHeadDim>
using BackwardTilesOf = BackwardTiles<kTileGroup<kMath>, kHeadDim>;

using MainKernel = Kernel<BackwardParams, BackwardWorkspace, int64_t>;

// All three kernels; the main one's shared memory has been allowed.
template <Math kMath, int kHeadDim, class Tile>
Status launch_backward(MainKernel kernel, const BackwardParams& params, cudaStream_t stream) {
  using Traits = BackwardTraits<kMath, kHeadDim, Tile>;
  const Problem& problem = params.problem;
  const BackwardWorkspace workspace = backward_workspace(problem);

  Status status = launch_delta(params, workspace, stream);
  if (!status.ok()) return status;

  const int64_t key_tiles = (int64_t{problem.kv_len} + Tile::kKeys - 1) / Tile::kKeys;
  const int64_t blocks = key_tiles * problem.kv_heads * batch_size(problem);
  BackwardParams main_params = params;
  main_params.deterministic &= problem.q_len > 0;  // else nothing has cleared the ticket
  status = cuda_status(launch_blocks(kernel, Start::kAfter, blocks, Traits::kThreads,
                                     Traits::kSharedBytes, main_params, workspace, stream),
                       "launching the backward kernel");
  if (!status.ok()) return status;

  return cuda_status(
      launch_convert_dq<kMath, DqFragmentOrder>(Start::kAfter, params, workspace, 0, stream),
      "launching the conversion of dq");
}

template <Math kMath, int kHeadDim, class Tile>
Status backward_with(const BackwardParams& params, cudaStream_t stream) {
  using Traits = BackwardTraits<kMath, kHeadDim, Tile>;
  const MainKernel kernel = backward_kernel<Traits, BandMask, ScaledScores>;
  Status status = allow_shared_memory<Traits>(kernel.handle, Traits::kSharedBytes);
  return status.ok() ? launch_backward<kMath, kHeadDim, Tile>(kernel, params, stream) : status;
}

}  // namespace detail

// Head sizes up to kHeadDim.
template <Math kMath, int kHeadDim>
Status backward(const BackwardParams& params, cudaStream_t stream) {
  using Tiles = detail::BackwardTilesOf<kMath, kHeadDim>;
  using Large = typename Tiles::Large;
  using Small = typename Tiles::Small;
  int available = 0;
  if (Status status = shared_memory_per_block(&available); !status.ok()) return status;
  return available >= BackwardTraits<kMath, kHeadDim, Large>::kSharedBytes
             ? detail::backward_with<kMath, kHeadDim, Large>(params, stream)
             : detail::backward_with<kMath, kHeadDim, Small>(params, stream);
}

template <int kHeadDim>
inline constexpr GradientsBeside kGradientsBeside = {};

// The kernel for a score program: see Launcher.
template <Math kMath, int kHeadDim>
std::vector<ProgramKernel> backward_program_kernels(const ProgramTraits& program) {
  using Tiles = detail::BackwardTilesOf<kMath, kHeadDim>;
  ProgramKernelList list(program);
  for_each_tile(ProgramTiles<typename Tiles::Large, typename Tiles::Small>{},
                [&](int number, auto tile) {
                  using Tile = decltype(tile);
                  using Traits = BackwardTraits<kMath, kHeadDim, Tile>;
                  if (!list.empty()) return;  // the larger one fits
                  list.add<Tile>(number, "sm80/backward_kernel.cuh", Traits::kSharedBytes,
                                 "jaxflash::sm80::backward_kernel<" + type_name<Traits>() +
                                     ", jaxflash::BandMask, "
                                     "jaxflash::sm80::ProgramScores<jaxflash::Program, false>>");
                });
  return list.take();
}

template <Math kMath, int kHeadDim>
Status backward_program(const BackwardParams& params, const LoadedKernel& kernel,
                        cudaStream_t stream) {
  using Tiles = detail::BackwardTilesOf<kMath, kHeadDim>;
  return use_tile(ProgramTiles<typename Tiles::Large, typename Tiles::Small>{}, kernel.tile,
                  [&](auto tile) {
                    return detail::launch_backward<kMath, kHeadDim, decltype(tile)>(
                        detail::MainKernel(kernel.handle), params, stream);
                  });
}

}  // namespace jaxflash::sm80
