// Gradients of captures on the portable kernels' tiles: see common/capture_gradient_sums.cuh.
#pragma once

#include "common/capture_gradient_sums.cuh"
#include "common/mask.cuh"
#include "common/program.cuh"
#include "common/tensor.cuh"
#include "common/thread.cuh"
#include "common/workspace.h"
#include "problem.h"
#include "sm80/capture_gradient_traits.h"
#include "sm80/ptx.cuh"
#include "sm80/tile.cuh"

namespace jaxflash::sm80 {

template <class Traits, class AnyMask, class Program, class Load>
__global__ void __launch_bounds__(Traits::kThreads, Traits::Tile::kBlocksPerSm)
    capture_gradient_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ BackwardWorkspace workspace,
                            const __grid_constant__ CaptureGradient plan, int64_t first_block) {
  using Mask = MaskBeside<AnyMask, Program>;
  using Tile = typename Traits::Tile;
  using Fragments = typename Traits::Fragments;
  using Sums = CaptureSums<Fragments, Mask, Program, Load, WholeBlock>;
  using Element = typename MathTraits<Traits::kMath>::Element;
  using RowTile = SmemTile<Element, Tile::kRows, Traits::kHeadDim>;  // q, dout
  using KeyTile = SmemTile<Element, Tile::kKeys, Traits::kHeadDim>;  // k, v
  static_assert(RowTile::kBytes == Traits::kRowBytes && KeyTile::kBytes == Traits::kKeyBytes, "");
  constexpr Math kMath = Traits::kMath;
  constexpr int kK = MathTraits<kMath>::kK;
  constexpr int kThreads = Traits::kThreads;
  constexpr int kRowTiles = Fragments::kRowTiles, kColBlocks = Fragments::kColBlocks;

  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t smem_base = smem_address(smem);
  const Problem& problem = params.problem;
  const Captures& captures = params.captures;

  int64_t block = first_block + blockIdx.x;
  if (plan.turns != nullptr) {
    // Turns are waited for: a block must only wait for blocks that have already started.
    auto* ticket = reinterpret_cast<unsigned long long*>(smem);
    if (threadIdx.x == 0) *ticket = atomicAdd(reinterpret_cast<unsigned long long*>(plan.turns), 1);
    __syncthreads();
    block = static_cast<int64_t>(*ticket);
    __syncthreads();  // the word is part of q's tile
  }
  using Walk = typename Sums::Walk;
  static_assert(sizeof(Walk) <= Traits::kSharedBytes - Traits::kWalk &&
                    3 * sizeof(GradientItem) <= Traits::kWalk - Traits::kItems,
                "fits");
  Walk& walk = *reinterpret_cast<Walk*>(smem + Traits::kWalk);
  GradientItem* const items = reinterpret_cast<GradientItem*>(smem + Traits::kItems);
  if (threadIdx.x == 0) walk.begin(problem, plan, block);
  __syncwarp();
  if (threadIdx.x < 32) walk.advance(problem, captures, plan, items[0]);
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int warp_row = Sums::warp_row(warp), warp_key = Sums::warp_key(warp);

  // ---- Loads ------------------------------------------------------------------------------------

  const RowTile q{smem_base + Traits::kQ}, dout{smem_base + Traits::kDout};
  const KeyTile k{smem_base + Traits::kKey}, v{smem_base + Traits::kValue};
  const auto load = [&](const auto& tile, const Tensor& tensor, int64_t batch, int head, int first,
                        int end, int dim) {
    load_tile_async<kThreads>(tile,
                              static_cast<const Element*>(tensor.data) +
                                  tensor_offset(tensor, problem, batch) + head * tensor.head_stride,
                              tensor.seq_stride, first, end, dim, threadIdx.x);
  };
  const int group = problem.q_heads / problem.kv_heads;
  // Beyond the sequence's own lengths arrays may hold anything: zeros are taken instead.
  const auto load_pair = [&](const RowTile& rows, const Tensor& row_tensor, const KeyTile& keys,
                             const Tensor& key_tensor, const GradientItem& item, int dim) {
    const Mask mask(problem, item.batch);
    load(rows, row_tensor, item.batch, item.head, item.first_row, mask.q_len(), dim);
    load(keys, key_tensor, item.batch, item.head / group, item.first_key, mask.kv_len(), dim);
  };

  // ---- Main loop --------------------------------------------------------------------------------

  Sums sums(problem, plan, reinterpret_cast<float*>(smem + Traits::kStaging));

  // Row and column number of the thread's first element. Through another instruction each time, so
  // that the compiler does not keep them.
  const auto first_element = [&](const GradientItem& item) {
    const auto lane = static_cast<int>(laneid());
    return FirstElement{item.first_row + warp_row + lane / 4,
                        item.first_key + warp_key + lane % 4 * 2};
  };
  const auto program_head = [&](const GradientItem& item) {
    return Program::head(captures, problem, item.batch, batch_number(captures, problem, item.batch),
                         head_number(captures, item.head));
  };
  // From a row's number to its position among the keys.
  const auto diagonal_of = [&](const GradientItem& item) {
    return jaxflash::diagonal_of(problem, Mask(problem, item.batch));
  };

  if (items[0].exists) {
    load_pair(q, params.q, k, params.k, items[0], problem.head_dim);
    cp_async_commit_group();
    load_pair(dout, params.dout, v, params.v, items[0], problem.value_dim);
    cp_async_commit_group();
  }
#pragma unroll 1
  for (int turn = 0; items[turn].exists;) {
    const GradientItem& item = items[turn];
    turn = turn == 2 ? 0 : turn + 1;
    GradientItem& next_item = items[turn];
    // Three of them: another warp may still work on the one before.
    if (warp == 0) walk.advance(problem, captures, plan, next_item);
    cp_async_wait_group<1>();
    __syncthreads();  // q and k are there
    float s[kRowTiles][kColBlocks][4] = {};
    gemm<kMath, Traits::kHeadDim / kK>(
        s, [&](int m, int step) { return load_a<kMath>(q, warp_row + 16 * m, step * kK); },
        [&](int n, int step) { return load_b<kMath>(k, warp_key + 16 * n, step * kK); });
    __syncthreads();  // everybody is done with them
    if (next_item.exists) load_pair(q, params.q, k, params.k, next_item, problem.head_dim);
    cp_async_commit_group();

    {
      // Computed here, and anew after the next products: these need the registers.
      const auto [first_row, first_key] = first_element(item);
      const int64_t head_index = item.batch * problem.q_heads + item.head;
      const float* const lse = workspace.lse_of(params.workspace, head_index) + first_row;
      const auto first_distance = static_cast<float>(first_row + diagonal_of(item) - first_key);
      const auto head = program_head(item);

#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        // Always so. The compiler's schedule ends at the branch: it would keep what the program
        // loads until after the next products, which need the registers.
        if (!item.exists) continue;
#pragma unroll
        for (int n = 0; n < kColBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = 16 * m + i / 2 * 8, key = 8 * n + i % 2;
            const int query_number = first_row + row, key_number = first_key + key;
            const auto on_row = Program::row(head, query_number);
            const auto on_column = Program::column(head, key_number);
            const float distance = first_distance + (row - key);
            const float logit = Program::logit(head, on_row, on_column, query_number, key_number,
                                               distance, s[m][n][i]);
            const float partial = Load::partial(head, on_row, on_column, query_number, key_number,
                                                distance, s[m][n][i]);
            s[m][n][i] = exp2_approx(logit - __ldg(lse + row)) * partial;
          }
        }
      }
    }

    cp_async_wait_group<1>();
    __syncthreads();  // dout and v are there
    float dp[kRowTiles][kColBlocks][4] = {};
    gemm<kMath, Traits::kHeadDim / kK>(
        dp, [&](int m, int step) { return load_a<kMath>(dout, warp_row + 16 * m, step * kK); },
        [&](int n, int step) { return load_b<kMath>(v, warp_key + 16 * n, step * kK); });
    __syncthreads();
    if (next_item.exists) load_pair(dout, params.dout, v, params.v, next_item, problem.value_dim);
    cp_async_commit_group();

    // Not a structured binding, which lambdas of C++17 cannot capture.
    const FirstElement first = first_element(item);
    const int first_row = first.row, first_key = first.key;
    const int64_t head_index = item.batch * problem.q_heads + item.head;
    const float* const delta = workspace.delta_of(params.workspace, head_index) + first_row;
    Dropout dropout;
    float per_share = 1.f;  // probabilities that are kept make up for the dropped ones
    if constexpr (Program::kDrops) {
      dropout = Program::dropout(captures, problem, item.batch,
                                 batch_number(captures, problem, item.batch),
                                 head_number(captures, item.head));
      per_share = 1.f / dropout.share();
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      Kept<Program::kDrops, true, 8 * kColBlocks> kept;
      dropout.draw(kept, first_row + 16 * m, first_key);
#pragma unroll
      for (int n = 0; n < kColBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float kept_dp = kept.of(4 * n + i, dp[m][n][i]) * per_share;
          s[m][n][i] *= kept_dp - __ldg(delta + 16 * m + i / 2 * 8);
        }
      }
    }
    sums.add(
        item, [&] { return program_head(item); }, first, warp,
        [&](int m, int n, int i) -> float& { return s[m][n][i]; });
  }
  sums.store(walk.piece, warp);
}

}  // namespace jaxflash::sm80
