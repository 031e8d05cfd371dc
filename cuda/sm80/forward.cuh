// Host side of the forward pass of every GPU from Ampere on: the choice of a tile, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "attention.h"
#include "common/status.h"
#include "common/workspace.h"
#include "sm80/forward_kernel.cuh"
#include "sm80/tile_config.h"

namespace jaxflash::sm80 {

template <Math kMath, int kHeadDim, class Tile>
Status launch_forward(const ForwardParams& params, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const int64_t heads = batch_size(problem) * problem.q_heads;
  const int64_t tiles = (int64_t{problem.q_len} + Tile::kRows - 1) / Tile::kRows;
  if (heads * tiles == 0) return {};

  constexpr int kBytes = ForwardSmem<kMath, kHeadDim, Tile>::kBytes;
  const auto kernel = forward_kernel<kMath, kHeadDim, Tile>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  const int64_t heads_per_launch = ((int64_t{1} << 31) - 1) / tiles;  // the largest grid
  for (int64_t first = 0; first < heads && error == cudaSuccess; first += heads_per_launch) {
    const int64_t blocks = std::min(heads - first, heads_per_launch) * tiles;
    kernel<<<static_cast<unsigned>(blocks), Tile::kThreads, kBytes, stream>>>(params, first);
    error = cudaGetLastError();
  }
  return cuda_status(error, "launching the attention forward kernel");
}

template <Math kMath, int kHeadDim>
Status forward(const ForwardParams& params, cudaStream_t stream) {
  constexpr int kGroup = kMath == Math::kFloat32 ? 0 : sizeof(typename MathTraits<kMath>::Element);
  using Large = typename ForwardTiles<kGroup, kHeadDim>::Large;
  using Small = typename ForwardTiles<kGroup, kHeadDim>::Small;
  int device = 0, available = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) return cuda_status(error, "asking for the GPU's shared memory");
  return available >= ForwardSmem<kMath, kHeadDim, Large>::kBytes
             ? launch_forward<kMath, kHeadDim, Large>(params, stream)
             : launch_forward<kMath, kHeadDim, Small>(params, stream);
}

}  // namespace jaxflash::sm80
