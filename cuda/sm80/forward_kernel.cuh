// Forward: a block computes the output of one tile of query rows of one head. Its keys and values
// stream through shared memory while an online softmax keeps the running sums; probabilities stay
// in registers, where they are the left operand of the second product.
#pragma once

#include "common/mask.cuh"
#include "common/softmax.cuh"
#include "common/tensor.cuh"
#include "common/thread.cuh"
#include "problem.h"
#include "sm80/query_work.cuh"
#include "sm80/scores.cuh"
#include "sm80/tile.cuh"
#include "sm80/tile_config.h"

namespace jaxflash::sm80 {

// Shared memory of a block; also the plan: Q (later the output), then stages of K, then of V.
template <Math kMath, int kHeadDim, class Tile>
struct ForwardSmem {
  using Element = typename MathTraits<kMath>::Element;
  using Rows = SmemTile<Element, Tile::kRows, kHeadDim>;
  using Keys = SmemTile<Element, Tile::kKeys, kHeadDim>;
  static constexpr int kBytes = Rows::kBytes + 2 * Tile::kStages * Keys::kBytes;

  uint32_t base;

  __device__ __forceinline__ Rows q() const { return {base}; }
  __device__ __forceinline__ Keys k(int stage) const {
    return {base + Rows::kBytes + stage * Keys::kBytes};
  }
  __device__ __forceinline__ Keys v(int stage) const {
    return {base + Rows::kBytes + (Tile::kStages + stage) * Keys::kBytes};
  }
};

// The rows of a key head's K or V, by whether they lie in pages (ForwardParams::pages).
template <bool kPaged, class Element>
__device__ __forceinline__ auto key_rows(const ForwardParams& params, const Tensor& tensor,
                                         int64_t batch, int kv_head) {
  const Problem& problem = params.problem;
  const auto* const data = static_cast<const Element*>(tensor.data);
  if constexpr (kPaged) {
    Pages pages = params.pages;
    pages.table += batch * (problem.kv_len >> pages.log2_size);
    const Element* const base = data + kv_head * tensor.head_stride;
    return PagedRows<Element>{base, tensor.seq_stride, pages, problem.kv_len};
  } else {
    const Element* const base =
        data + tensor_offset(tensor, problem, batch) + kv_head * tensor.head_stride;
    return DenseRows<Element>{base, tensor.seq_stride};
  }
}

template <Math kMath, int kHeadDim, class Tile, class AnyMask = BandMask,
          class Scores = ScaledScores, bool kPaged = false>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    forward_kernel(const __grid_constant__ ForwardParams params, uint64_t first_head) {
  using Mask = MaskBeside<AnyMask, Scores>;
  using Smem = ForwardSmem<kMath, kHeadDim, Tile>;
  using Element = typename Smem::Element;
  constexpr int kK = MathTraits<kMath>::kK;
  constexpr int kRowTiles = Tile::kRowTiles;
  constexpr int kKeyBlocks = Tile::kKeys / 8;
  constexpr int kWarpRows = 16 * kRowTiles;
  extern __shared__ __align__(128) char smem_bytes[];
  const Smem smem{smem_address(smem_bytes)};

  const Problem& problem = params.problem;
  const QueryWork work = QueryWork::of<Tile>(blockIdx.x, first_head, problem);
  const int kv_head = work.head / (problem.q_heads / problem.kv_heads);
  const auto part_of = [&](const Tensor& tensor, int64_t batch, int head) {
    return static_cast<Element*>(tensor.data) + tensor_offset(tensor, problem, batch) +
           head * tensor.head_stride;
  };

  const auto k_rows = key_rows<kPaged, Element>(params, params.k, work.batch, kv_head);
  const auto v_rows = key_rows<kPaged, Element>(params, params.v, work.batch, kv_head);

  // One answer for both, known before the loop.
  const bool aligned = rows_are_aligned(k_rows.base, params.k.seq_stride, problem.head_dim) &&
                       rows_are_aligned(v_rows.base, params.v.seq_stride, problem.value_dim);

  const Mask mask(problem, work.batch);
  Scores scores(problem);
  scores.begin_head(params.captures, problem, mask, work.batch, work.head);
  const bool rewrites = scores.factor() == 0.f;
  const float factor = rewrites ? 1.f : scores.factor();

  // Rows past the sequence's end are computed like any other and dropped at the end: cutting them
  // off here keeps their tile off the path of element tests.
  const auto cut_rows = [&](int first_row, int count) {
    return Interval{first_row, min(first_row + count, mask.q_len())};
  };
  const Interval gap = mask.gap_of_keys(cut_rows(work.first_row, Tile::kRows));
  const Interval seen_keys = outside(mask.keys(cut_rows(work.first_row, Tile::kRows)), gap);
  Interval keys = seen_keys;
  constexpr int kTileMultiple = Scores::template kTileMultiple<Tile::kKeys>;
  keys.begin = keys.begin / kTileMultiple * kTileMultiple;
  const auto hidden = mask.hidden_keys(mask.hides_keys(seen_keys));

  const int gap_begin = begin_of(gap);
  const auto next_of = [&](int first_key) {
    return next_tile<Tile::kKeys, kTileMultiple, Mask::kHasGaps>(first_key, gap_begin, [&] {
      return mask.gap_of_keys(cut_rows(forget(work.first_row), Tile::kRows));
    });
  };

  // Keys at keys.end and beyond are zero: a probability of 0 does not silence a NaN.
  const auto load_k = [&](int stage, int first_key) {
    load_rows_async<Tile::kThreads>(smem.k(stage), k_rows, first_key, keys.end, problem.head_dim,
                                    tid_x(), aligned);
  };
  const auto load_v = [&](int stage, int first_key) {
    load_rows_async<Tile::kThreads>(smem.v(stage), v_rows, first_key, keys.end, problem.value_dim,
                                    tid_x(), aligned);
  };

  if (keys.begin < keys.end) {
    load_tile_async<Tile::kThreads>(smem.q(), part_of(params.q, work.batch, work.head),
                                    params.q.seq_stride, work.first_row, mask.q_len(),
                                    problem.head_dim, tid_x());
    load_k(0, keys.begin);
    if constexpr (Tile::kStages == 2) load_v(0, keys.begin);
    cp_async_commit_group();
  }

  const auto q_smem = smem.q().from_row(threadIdx.x / 32 * kWarpRows);  // the warp's own rows
  float o[kRowTiles][kHeadDim / 8][4] = {};
  OnlineSoftmax<kRowTiles, kMath> softmax;

  int stage = 0;
#pragma unroll 1
  for (int first_key = keys.begin; first_key < keys.end; first_key = next_of(first_key)) {
    const int next_stage = Tile::kStages == 1 ? 0 : 1 - stage;
    const Interval tile_keys = {first_key, first_key + Tile::kKeys};
    const int next_key = next_of(first_key);
    const Interval warp_rows =
        cut_rows(work.first_row + static_cast<int>(tid_x() / 32) * kWarpRows, kWarpRows);
    // A warp whose rows see nothing of this tile only keeps the barriers company.
    const Interval warp_keys = mask.keys(warp_rows);
    const bool sees = first_key < warp_keys.end && tile_keys.end > warp_keys.begin;
    const auto k_smem = smem.k(stage), v_smem = smem.v(stage);

    cp_async_wait_group<0>();
    // K (with two stages V too) of this tile has arrived for all warps, and all have left the
    // previous tile: its buffers are free.
    __syncthreads();
    if constexpr (Tile::kStages == 1) {
      load_v(stage, first_key);
    } else if (next_key < keys.end) {
      load_k(next_stage, next_key);
      load_v(next_stage, next_key);
    }
    cp_async_commit_group();

    // The thread's first element, and all of them by their distance from it.
    const int s_lane = static_cast<int>(laneid());
    const int s_row = warp_rows.begin + s_lane / 4;
    const int s_key = first_key + s_lane % 4 * 2;
    Shown<Scores::kHasWords, kRowTiles, Tile::kKeys> shown;
    if constexpr (Scores::kHasWords) {
      if (sees && !mask.full(warp_rows, tile_keys)) scores.load(shown, s_row, first_key);
    }

    float s[kRowTiles][kKeyBlocks][4] = {};
    if (sees) {
      gemm<kMath, kHeadDim / kK>(
          s, [&](int m, int k) { return load_a<kMath>(q_smem, 16 * m, k * kK); },
          [&](int n, int k) { return load_b<kMath>(k_smem, 16 * n, k * kK); });
    }

    if constexpr (Tile::kStages == 1) {
      cp_async_wait_group<0>();
      __syncthreads();  // V has arrived for all warps, and all have left K
      if (next_key < keys.end) load_k(next_stage, next_key);
      cp_async_commit_group();
    }
    stage = next_stage;
    if (!sees) continue;
    if constexpr (kTileMultiple > 1) {
      // Nobody sees the keys before: a probability of 0 does not silence a NaN. Every warp clears
      // them, so that none has to wait for another.
      if (first_key < seen_keys.begin) {
        clear_rows<32>(v_smem, seen_keys.begin - first_key, lane_index());
        __syncwarp();
      }
    }

    // Likewise of those that no row sees.
    if (hidden.meet(tile_keys)) {
      clear_hidden_rows<32>(v_smem, hidden, tile_keys, lane_index());
      __syncwarp();
    }

    const auto for_each_score = [&](auto change) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) change(s[m][n][i], 16 * m + i / 2 * 8, 8 * n + i % 2);
        }
      }
    };
    if (rewrites) {
      scores.begin_tile(s_row, s_key);
      for_each_score([&](float& x, int row, int key) { x = scores.logit(x, row, key); });
    }
    if (!mask.full(warp_rows, tile_keys)) {
      if constexpr (Scores::kHasWords) scores.make_bits(shown, mask, s_row, s_key);
      for_each_score([&](float& x, int row, int key) {
        // A branch: what the program loads for all elements at once would spill.
        if (!is_inside(shown, mask, s_row, s_key, row, key) || !scores.shows(row, key)) {
          x = -INFINITY;
        }
      });
    }

    softmax.advance(s, o, factor);

    // The exponentials of a few keys at a time, right before the product that takes them, so that
    // both units work at once. kFloat32 wants a long chain instead, see gemm().
    constexpr int kPart = kMath == Math::kFloat32 ? Tile::kKeys : 16;
#pragma unroll
    for (int part = 0; part < Tile::kKeys; part += kPart) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = part / 8; n < (part + kPart) / 8; ++n) {
          softmax.exponentials(s[m][n], m, factor);
        }
        Kept<Scores::kDrops, true, kPart> kept;
        scores.draw(kept, 16 * m, part);
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& p = s[m][part / 8 + n][i];
            p = kept.of(4 * n + i, p);
          }
        }
      }
      gemm<kMath, kPart / kK>(
          o, [&](int m, int k) { return a_from_accumulators<kMath>(&s[m][(part + k * kK) / 8]); },
          [&](int n, int k) { return load_b_transposed<kMath>(v_smem, 16 * n, part + k * kK); });
    }
  }

  // A warp stages its output in the rows of Q that it alone has read.
  const QueryWork done = QueryWork::of<Tile>(ctaid_x(), first_head, problem);
  const int done_row = done.first_row + static_cast<int>(tid_x() / 32) * kWarpRows;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    float inverse[2];
    bool empty[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = done_row + static_cast<int>(lane_index() / 4) + 16 * m + 8 * r;
      float sum = softmax.row_sum(m, r);
      empty[r] = sum == 0.f || row >= mask.q_len();
      if constexpr (Scores::kHasSink) {
        inverse[r] = softmax.add_sink(scores.sink(), sum, m, r);
      } else {
        inverse[r] = 1.f / sum;
      }
      if constexpr (Scores::kDrops) inverse[r] /= scores.share();
      if (lane_index() % 4 == 0 && row < problem.q_len) {
        params.lse[(done.batch * problem.q_len + row) * problem.q_heads + done.head] =
            empty[r] ? -INFINITY : softmax.lse(sum, m, r);
      }
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      // Selected, not multiplied: a value of NaN must not reach a row that sees no key.
#pragma unroll
      for (int i = 0; i < 4; ++i) o[m][n][i] = empty[i / 2] ? 0.f : o[m][n][i] * inverse[i / 2];
      store_accumulator(q_smem, 16 * m, 8 * n, o[m][n]);
    }
  }
  __syncwarp();
  store_tile<32, kWarpRows>(q_smem, part_of(params.out, done.batch, done.head),
                            params.out.seq_stride, done_row, problem.q_len, problem.value_dim,
                            lane_index());
}

}  // namespace jaxflash::sm80
