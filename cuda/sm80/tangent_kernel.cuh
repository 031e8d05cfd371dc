// Tangent: a block computes that of one tile of query rows of one head. Probabilities are final at
// first sight, because lse is given:
//
//   tS = slope scale (tQ K^T + Q tK^T)      slope: d logit / d score; captures that move add theirs
//   t_lse = sum of P tS over a row
//   tO = (P tS) V + P tV - t_lse O
//
// Where tS hardly changes along a row, nearly all of tO cancels, and what P tS loses when it is
// rounded would remain. So a row takes from its tS a reference, the mean over the first tile of
// keys that it sees, if that has most of its probability: (P (tS - reference)) V + reference O is
// the same sum. Another tile's mean may be far from all that counts.
#pragma once

#include "common/approx.cuh"
#include "common/mask.cuh"
#include "common/tangent_reference.h"
#include "common/tensor.cuh"
#include "common/thread.cuh"
#include "problem.h"
#include "sm80/query_work.cuh"
#include "sm80/scores.cuh"
#include "sm80/tangent_traits.h"
#include "sm80/tile.cuh"

namespace jaxflash::sm80 {

template <class Traits, class AnyMask, class Scores>
__global__ void __launch_bounds__(Traits::Tile::kThreads, Traits::Tile::kBlocksPerSm)
    tangent_kernel(const __grid_constant__ TangentParams params, uint64_t first_head) {
  using Mask = MaskBeside<AnyMask, Scores>;
  using Tile = typename Traits::Tile;
  constexpr Math kMath = Traits::kMath;
  constexpr int kHeadDim = Traits::kHeadDim;
  using Element = typename MathTraits<kMath>::Element;
  using Rows = SmemTile<Element, Tile::kRows, kHeadDim>;
  using Keys = SmemTile<Element, Tile::kKeys, kHeadDim>;
  static_assert(Rows::kBytes == Traits::kQueryBytes && Keys::kBytes == Traits::kKeyBytes);
  constexpr int kK = MathTraits<kMath>::kK;
  constexpr int kRowTiles = Tile::kRowTiles;
  constexpr int kKeyBlocks = Tile::kKeys / 8;
  constexpr int kWarpRows = 16 * kRowTiles;
  extern __shared__ __align__(128) char smem_bytes[];
  const uint32_t base = smem_address(smem_bytes);
  const Rows q_tile{base}, tq_tile{base + Traits::kQueryBytes};
  constexpr int kKey = 0, kKeyTangent = 1, kValue = 2, kValueTangent = 3;
  const auto key_tile = [&](int stage, int operand) {
    return Keys{base + 2 * Traits::kQueryBytes + stage * Traits::kStageBytes +
                operand * Traits::kKeyBytes};
  };

  const Problem& problem = params.problem;
  const QueryWork work = QueryWork::of<Tile>(blockIdx.x, first_head, problem);
  const int kv_head = work.head / (problem.q_heads / problem.kv_heads);
  const auto part_of = [&](const Tensor& tensor, int head) {
    return static_cast<Element*>(tensor.data) + tensor_offset(tensor, problem, work.batch) +
           head * tensor.head_stride;
  };

  const Mask mask(problem, work.batch);
  Scores scores(problem);
  scores.begin_head(params.captures, problem, mask, work.batch, work.head);

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

  const Element* const k_gmem = part_of(params.k, kv_head);
  const Element* const tk_gmem = part_of(params.tk, kv_head);
  const Element* const v_gmem = part_of(params.v, kv_head);
  const Element* const tv_gmem = part_of(params.tv, kv_head);
  // One answer for all, known before the loop.
  const bool aligned = rows_are_aligned(k_gmem, params.k.seq_stride, problem.head_dim) &&
                       rows_are_aligned(tk_gmem, params.tk.seq_stride, problem.head_dim) &&
                       rows_are_aligned(v_gmem, params.v.seq_stride, problem.value_dim) &&
                       rows_are_aligned(tv_gmem, params.tv.seq_stride, problem.value_dim);
  // Keys at keys.end and beyond are zero: a probability of 0 does not silence a NaN.
  const auto load_keys = [&](int stage, int first_key) {
    const auto load = [&](int operand, const Element* gmem, const Tensor& tensor, int dim) {
      load_tile_async<Tile::kThreads>(key_tile(stage, operand), gmem, tensor.seq_stride, first_key,
                                      keys.end, dim, threadIdx.x, aligned);
    };
    load(kKey, k_gmem, params.k, problem.head_dim);
    load(kKeyTangent, tk_gmem, params.tk, problem.head_dim);
    load(kValue, v_gmem, params.v, problem.value_dim);
    load(kValueTangent, tv_gmem, params.tv, problem.value_dim);
  };
  if (keys.begin < keys.end) {
    const auto load = [&](const Rows& tile, const Tensor& tensor) {
      load_tile_async<Tile::kThreads>(tile, part_of(tensor, work.head), tensor.seq_stride,
                                      work.first_row, mask.q_len(), problem.head_dim, threadIdx.x);
    };
    load(q_tile, params.q);
    load(tq_tile, params.tq);
    load_keys(0, keys.begin);
    cp_async_commit_group();
  }

  const int warp_row = threadIdx.x / 32 * kWarpRows;
  const auto q_smem = q_tile.from_row(warp_row), tq_smem = tq_tile.from_row(warp_row);
  const Interval warp_rows = cut_rows(work.first_row + warp_row, kWarpRows);
  const int first_row = work.first_row + warp_row + static_cast<int>(lane_index() / 4);

  float o[kRowTiles][kHeadDim / 8][4] = {};
  float lse_log2[kRowTiles][2];  // infinity for a row that sees no key: its probabilities are 0
  float reference[kRowTiles][2] = {};
  bool settled[kRowTiles][2];
  float moment[kRowTiles][2] = {};  // sum of P (tS - reference), this thread's part
  float total[kRowTiles][2] = {};   // of P; with a sink
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 16 * m + 8 * r;
      const float lse =
          row < mask.q_len()
              ? params.lse[(work.batch * problem.q_len + row) * problem.q_heads + work.head]
              : -INFINITY;
      settled[m][r] = lse == -INFINITY;
      lse_log2[m][r] = settled[m][r] ? INFINITY : lse_in_log2(lse);
    }
  }

  int stage = 0;
#pragma unroll 1
  for (int first_key = keys.begin; first_key < keys.end; first_key = next_of(first_key)) {
    const Interval tile_keys = {first_key, first_key + Tile::kKeys};
    const int next_key = next_of(first_key);
    const Interval warp_keys = mask.keys(warp_rows);
    const bool sees = first_key < warp_keys.end && tile_keys.end > warp_keys.begin;
    const auto v_smem = key_tile(stage, kValue), tv_smem = key_tile(stage, kValueTangent);

    cp_async_wait_group<0>();
    __syncthreads();  // the tile has arrived for all warps, and all have left the one before
    if (Tile::kStages == 2 && next_key < keys.end) load_keys(1 - stage, next_key);
    cp_async_commit_group();

    if (sees) {
      const bool full = mask.full(warp_rows, tile_keys);
      Shown<Scores::kHasWords, kRowTiles, Tile::kKeys> shown;
      if constexpr (Scores::kHasWords) {
        if (!full) scores.load(shown, first_row, first_key);
      }
      float s[kRowTiles][kKeyBlocks][4] = {};
      float t[kRowTiles][kKeyBlocks][4] = {};
      const auto multiply = [&](float (&sum)[kRowTiles][kKeyBlocks][4], const Rows& rows,
                                int operand) {
        const auto columns = key_tile(stage, operand);
        gemm<kMath, kHeadDim / kK>(
            sum, [&](int m, int k) { return load_a<kMath>(rows, 16 * m, k * kK); },
            [&](int n, int k) { return load_b<kMath>(columns, 16 * n, k * kK); });
      };
      multiply(s, q_smem, kKey);
      multiply(t, q_smem, kKeyTangent);
      multiply(t, tq_smem, kKey);
      if constexpr (kTileMultiple > 1) {
        if (first_key < seen_keys.begin) {
          clear_rows<32>(v_smem, seen_keys.begin - first_key, lane_index());
          clear_rows<32>(tv_smem, seen_keys.begin - first_key, lane_index());
          __syncwarp();
        }
      }
      if (hidden.meet(tile_keys)) {
        clear_hidden_rows<32>(v_smem, hidden, tile_keys, lane_index());
        clear_hidden_rows<32>(tv_smem, hidden, tile_keys, lane_index());
        __syncwarp();
      }

      // Probabilities in place of products, and tangents of logits in place of theirs.
      const int s_key = first_key + static_cast<int>(lane_index() % 4) * 2;
      scores.begin_tile(first_row, s_key);
      if constexpr (Scores::kHasWords) scores.make_bits(shown, mask, first_row, s_key);
      bool waiting = false;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) waiting |= !settled[m][r];
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = 16 * m + i / 2 * 8, key = 8 * n + i % 2;
            float slope = problem.scale;
            float logit;
            if constexpr (Scores::kUnitSlope) {
              logit = scores.logit(s[m][n][i], row, key);
            } else {
              logit = scores.logit_and_slope(s[m][n][i], row, key, &slope);
              slope *= problem.scale;
            }
            const float tangent = scores.tangent(t[m][n][i] * slope, s[m][n][i], row, key);
            bool visible = full;
            if (!full) {
              visible = is_inside(shown, mask, first_row, s_key, row, key) & scores.shows(row, key);
            }
            s[m][n][i] = visible ? exp2_approx(logit - lse_log2[m][i / 2]) : 0.f;
            t[m][n][i] = visible ? tangent : 0.f;
          }
        }
      }
      if (__any_sync(~0u, waiting)) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float weight = 0.f, sum = 0.f;
#pragma unroll
            for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
              for (int i = 2 * r; i < 2 * r + 2; ++i) {
                weight += s[m][n][i];
                sum = fmaf(s[m][n][i], t[m][n][i], sum);
              }
            }
            weight = sum_of_row(weight);
            const float mean = sum_of_row(sum) / weight;
            if (settled[m][r] || weight == 0.f) continue;
            settled[m][r] = true;
            if (weight >= kReferenceWeight && fabsf(mean) < INFINITY) reference[m][r] = mean;
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float p = s[m][n][i];
            // Selected: what is hidden may have any tangent.
            t[m][n][i] = p == 0.f ? 0.f : p * (t[m][n][i] - reference[m][i / 2]);
            moment[m][i / 2] += t[m][n][i];
            if constexpr (Scores::kHasSink) total[m][i / 2] += p;
          }
        }
        if constexpr (Scores::kDrops) {
#pragma unroll
          for (int part = 0; part < Tile::kKeys; part += 16) {
            Kept<true, true, 16> kept;
            scores.draw(kept, 16 * m, part);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                float& p = s[m][part / 8 + n][i];
                float& weight = t[m][part / 8 + n][i];
                p = kept.of(4 * n + i, p);
                weight = kept.of(4 * n + i, weight);
              }
            }
          }
        }
      }
      const auto add = [&](const float (&weights)[kRowTiles][kKeyBlocks][4], const Keys& values) {
        gemm<kMath, Tile::kKeys / kK>(
            o, [&](int m, int k) { return a_from_accumulators<kMath>(&weights[m][k * kK / 8]); },
            [&](int n, int k) { return load_b_transposed<kMath>(values, 16 * n, k * kK); });
      };
      add(t, v_smem);
      add(s, tv_smem);
    }
    if constexpr (Tile::kStages == 1) {
      __syncthreads();  // all warps have left the tile
      if (next_key < keys.end) load_keys(0, next_key);
      cp_async_commit_group();
    } else {
      stage = 1 - stage;
    }
  }

  // A warp stages its rows where its rows of Q were, which it alone has read.
  __syncwarp();
  const Element* const out = part_of(params.out, work.head);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    float coefficient[2];  // of O
    float inverse[2];
    const Element* out_row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 16 * m + 8 * r;
      const bool empty = lse_log2[m][r] == INFINITY;
      const float sum = sum_of_row(moment[m][r]);
      const float all = Scores::kHasSink ? sum_of_row(total[m][r]) : 1.f;
      coefficient[r] = fmaf(reference[m][r], 1.f - all, -sum);
      inverse[r] = 1.f;
      if constexpr (Scores::kDrops) inverse[r] /= scores.share();
      out_row[r] = empty ? nullptr : out + row * params.out.seq_stride;
      if (lane_index() % 4 == 0 && row < problem.q_len) {
        params.tlse[(work.batch * problem.q_len + row) * problem.q_heads + work.head] =
            empty ? 0.f : fmaf(reference[m][r], all, sum);
      }
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2;
        const int column = 8 * n + static_cast<int>(lane_index() % 4) * 2 + i % 2;
        const bool exists = out_row[r] != nullptr && column < problem.value_dim;
        const float value = exists ? to_float(out_row[r][column]) : 0.f;
        o[m][n][i] = exists ? fmaf(coefficient[r], value, o[m][n][i] * inverse[r]) : 0.f;
      }
      store_accumulator(q_smem, 16 * m, 8 * n, o[m][n]);
    }
  }
  __syncwarp();
  store_tile<32, kWarpRows>(q_smem, part_of(params.tout, work.head), params.tout.seq_stride,
                            work.first_row + warp_row, problem.q_len, problem.value_dim,
                            lane_index());
}

}  // namespace jaxflash::sm80
