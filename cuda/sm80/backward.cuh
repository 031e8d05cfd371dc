// Host side of the backward pass of every GPU from Ampere on: the choice of a tile, and the
// launches. Three kernels: delta, the main one, and the conversion of dq.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "attention.h"
#include "common/convert_dq.cuh"
#include "common/delta.cuh"
#include "common/launch.h"
#include "common/status.h"
#include "common/workspace.h"
#include "sm80/backward_kernel.cuh"
#include "sm80/tile_config.h"

namespace jaxflash::sm80 {

// Runs one tile configuration; `backward` below chooses it.
template <Math kMath, int kHeadDim, class Tile>
Status backward_with(const BackwardParams& params, cudaStream_t stream) {
  using Traits = BackwardTraits<kMath, kHeadDim, Tile>;
  const Problem& problem = params.problem;
  const BackwardWorkspace workspace = backward_workspace(problem);

  int device = 0;
  Status status = cuda_status(cudaGetDevice(&device), "asking for the GPU");
  if (!status.ok()) return status;
  const auto kernel = backward_kernel<Traits, BandMask, ScaledScores>;
  status = cuda_status(allow_shared_memory<Traits>(reinterpret_cast<const void*>(kernel), device),
                       "reserving shared memory for the backward kernel");
  if (!status.ok()) return status;

  status =
      cuda_status(launch_delta<kMath>(params, workspace, stream), "launching the delta kernel");
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

// Head sizes up to kHeadDim.
template <Math kMath, int kHeadDim>
Status backward(const BackwardParams& params, cudaStream_t stream) {
  using Element = typename MathTraits<kMath>::Element;
  constexpr int kGroup = kMath == Math::kFloat32 ? 0 : sizeof(Element);
  using Tiles = BackwardTiles<kGroup, kHeadDim>;
  using Fast = typename Tiles::Fast;
  using Small = typename Tiles::Small;
  if constexpr (!std::is_void_v<Small>) {
    int device = 0, shared_bytes = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error =
          cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (Status status = cuda_status(error, "asking for the GPU"); !status.ok()) return status;
    if (shared_bytes < BackwardTraits<kMath, kHeadDim, Fast>::kSharedBytes) {
      return backward_with<kMath, kHeadDim, Small>(params, stream);
    }
  }
  return backward_with<kMath, kHeadDim, Fast>(params, stream);
}

}  // namespace jaxflash::sm80
