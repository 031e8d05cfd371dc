// Backward of every GPU from Ampere on: the tile table and the launcher. Three kernels: delta, the
// main one, and the conversion of dq.
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

namespace jaxflash::sm80 {

// ---- Tiles --------------------------------------------------------------------------------------

// Columns: rows, keys, key warps, column warps, exchange, rows of a pass, stages, dq row warps,
// blocks per SM. Fast: for 227 KB of shared memory in an SM. Small: 99 KB for a block, as GPUs of
// compute capability 8.6, 8.9 and 12.0 have; void where Fast already fits. kGroup is the size of
// the elements, and 0 for kFloat32.
template <int kGroup, int kHeadDim>
struct BackwardTiles;

// 80 KB: two blocks per SM, so that one computes while the other waits at a barrier. 32 keys for a
// warp, because every warp reads all of q and dout.
template <>
struct BackwardTiles<2, 64> {
  using Fast = BackwardTile<64, 128, 4, 1, false, 16, 2, 2, 2>;
  using Small = void;
};

template <>
struct BackwardTiles<2, 128> {
  using Fast = BackwardTile<64, 128, 4, 2, true, 32, 2, 2, 1>;
  using Small = BackwardTile<32, 64, 4, 1, false, 32, 2, 2, 1>;
};

// dk and dv of 64 keys are half of the register file; the columns are divided between four warps.
template <>
struct BackwardTiles<2, 256> {
  using Fast = BackwardTile<64, 64, 2, 4, true, 16, 2, 1, 1>;
  using Small = BackwardTile<32, 32, 2, 2, true, 16, 1, 1, 1>;
};

template <>
struct BackwardTiles<4, 64> {
  using Fast = BackwardTile<32, 128, 4, 1, false, 32, 2, 1, 2>;  // 119 TFLOP/s; 64 keys 95
  using Small = BackwardTile<32, 64, 4, 1, false, 32, 2, 1, 2>;
};

template <>
struct BackwardTiles<4, 128> {
  using Fast = BackwardTile<32, 64, 4, 1, false, 16, 2, 1, 1>;
  using Small = BackwardTile<16, 64, 4, 1, false, 16, 1, 1, 1>;
};

// Scores are computed twice, by the warps that share keys: see the assertion on the exchange.
template <>
struct BackwardTiles<4, 256> {
  using Fast = BackwardTile<32, 32, 2, 2, false, 16, 1, 2, 1>;
  using Small = BackwardTile<16, 32, 2, 2, false, 16, 1, 1, 1>;
};

// Split operands need more registers.
template <>
struct BackwardTiles<0, 64> {
  using Fast = BackwardTile<32, 64, 4, 1, false, 32, 2, 1, 2>;
  using Small = void;
};

template <>
struct BackwardTiles<0, 128> : BackwardTiles<4, 128> {};

template <>
struct BackwardTiles<0, 256> : BackwardTiles<4, 256> {};

// ---- Launch -------------------------------------------------------------------------------------

namespace detail {

// The element types by the names that CUDA's headers give them.
template <Math kMath>
using StorageType =
    std::conditional_t<kMath == Math::kFloat16, __half,
                       std::conditional_t<kMath == Math::kBFloat16, __nv_bfloat16, float>>;

}  // namespace detail

// Runs one tile configuration; `backward` below chooses it.
template <Math kMath, int kHeadDim, class Tile>
Status backward_with(const BackwardParams& params, cudaStream_t stream) {
  using Traits = BackwardTraits<kMath, kHeadDim, Tile>;
  using Storage = detail::StorageType<kMath>;
  const Problem& problem = params.problem;
  const BackwardWorkspace workspace = backward_workspace(problem);

  int device = 0;
  Status status = cuda_status(cudaGetDevice(&device), "asking for the GPU");
  if (!status.ok()) return status;
  const auto kernel = backward_kernel<Traits, BandMask, ScaleScore>;
  status = cuda_status(allow_shared_memory<Traits>(reinterpret_cast<const void*>(kernel), device),
                       "reserving shared memory for the backward kernel");
  if (!status.ok()) return status;

  status = cuda_status(
      launch_blocks(delta_kernel<Storage>, Start::kAfter, delta_blocks(problem, workspace),
                    kDeltaThreads, 0, params, workspace, stream),
      "launching the delta kernel");
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
      launch_blocks(convert_dq_kernel<Storage, DqFragmentOrder>, Start::kAfter,
                    convert_dq_blocks(problem), kConvertThreads, 0, params, workspace, stream, 0u),
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
