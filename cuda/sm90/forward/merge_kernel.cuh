// Puts the parts of query tiles together that blocks of the forward kernel have left in the
// workspace: out = sum of e^(lse_j - lse) out_j over the parts j, in the order of their keys.
//
// A tile is in parts where the end of a run lies inside it. Thread blocks are made for each such
// end and each member of the team that had the run, `kMergeRows` rows each: the first end inside a
// tile merges it, the others have nothing to do.
#pragma once

#include "common/dependency.cuh"
#include "common/logarithms.h"
#include "sm90/forward_traits.cuh"
#include "sm90/scores.cuh"

namespace jaxflash::sm90 {

inline constexpr int kMergeThreads = 128;
inline constexpr int kMergeRows = 8;  // a warp takes two
// A long sequence of 8 kv heads has 16 or 17 on 132 multiprocessors.
inline constexpr int kPartsAtOnce = 16;

__host__ __device__ inline int merges_of_tile(int rows) {
  return (rows + kMergeRows - 1) / kMergeRows;
}

template <class Traits, class Scores>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ ForwardArgs args) {
  using Slices = typename Traits::Slices;
  using Shares = KeyShares<Slices>;
  __shared__ float weights[kMergeThreads / 32][kMaxSharingBlocks];

  // Where runs end is known without the parts, and is found while the forward kernel runs.
  const Slices slices(args);
  const Shares shares(slices, args.order.blocks);
  const int merges = merges_of_tile(args.sharing.rows);
  const int team = slices.team();
  const int block = blockIdx.x / merges;  // whose run ends
  const int ending = block / team;
  typename Shares::Place tile = {};
  int parts = 0;
  int first_slot = 0;
  if (ending + 1 < shares.runs()) {
    tile = shares.place(shares.begin(ending + 1), block % team);
    const int64_t first = shares.begin(ending) - tile.tile_begin;
    const bool has_parts = shares.begin(ending + 1) - tile.tile_begin > Shares::kTileCost;
    const bool is_first = first <= Shares::kTileCost;  // else an earlier run has a part too
    if (has_parts && is_first) {
      first_slot = ShareWalk<Slices>::slot_of(block, first);
      const int64_t tile_end = tile.tile_begin + tile.length();
      parts = 2;
      while (ending + parts < shares.runs() && shares.begin(ending + parts) < tile_end) ++parts;
    }
  }
  // Every thread block, so that this kernel is not done before the one that it waits for.
  wait_for_previous_kernel();
  if (parts == 0) return;

  const auto slot = [&](int part) {
    return static_cast<int64_t>(part == 0 ? first_slot
                                          : ShareWalk<Slices>::slot_of(block + part * team, 1));
  };

  const Problem& problem = args.problem;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int batch = slices.batch(tile.slice);
  const int inner = args.by_inner_batch.remainder(batch);
  const int outer = args.by_inner_batch.quotient(batch);
  const int first_unit = slices.index(tile.slice) * Traits::kWarpGroups;
  for (int i = warp; i < kMergeRows; i += kMergeThreads / 32) {
    const int tile_row = blockIdx.x % merges * kMergeRows + i;
    if (tile_row >= args.sharing.rows) return;
    const int unit = first_unit + tile_row / args.unit.rows();
    const int row = tile_row % args.unit.rows();
    const int position =
        (args.by_units.quotient(unit) << args.unit.log2_positions) + args.unit.position(row);
    const int head = tile.kv_head * args.group + args.by_units.remainder(unit) * args.unit.heads +
                     args.unit.head(row);
    if (tile_row >= Traits::kWarpGroups * args.unit.rows() || position >= problem.q_len) continue;

    const auto load = [&](int column, int first_part, float4(&values)[kPartsAtOnce]) {
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        if (column >= problem.value_dim || first_part + i >= parts) continue;
        const int64_t part_row = slot(first_part + i) * args.sharing.rows + tile_row;
        values[i] = *reinterpret_cast<const float4*>(args.sharing.out +
                                                     part_row * problem.value_dim + column);
      }
    };
    // Under way with the lse: one latency of the memory instead of two.
    float4 values[kPartsAtOnce] = {};
    load(lane * 4, 0, values);

    float top = -INFINITY;
    for (int part = lane; part < parts; part += 32) {
      const float lse = args.sharing.lse[slot(part) * args.sharing.rows + tile_row];
      weights[warp][part] = lse;
      top = fmaxf(top, lse);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    }
    if (top == -INFINITY) top = 0.f;  // no part sees a key: every weight becomes 0
    float sum = 0.f;
    for (int part = lane; part < parts; part += 32) {
      weights[warp][part] = exp2_approx((weights[warp][part] - top) * kLog2E);
      sum += weights[warp][part];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    __syncwarp();
    if constexpr (Scores::kHasSink) {
      if (sum != 0.f) {
        const float above = Scores::sink_of(args, batch, head) - top * kLog2E;
        // The sink becomes the reference where it is above: nothing then overflows.
        const float smaller = exp2_approx(-fabsf(above));
        const float rescale = above > 0.f ? smaller : 1.f;
        sum = sum * rescale + (above > 0.f ? 1.f : smaller);
        if (above > 0.f) {
          for (int part = lane; part < parts; part += 32) weights[warp][part] *= smaller;
          top += above * kLn2;
          __syncwarp();
        }
      }
    }
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    uint16_t* const out = args.out_data + outer * args.out_batch_stride[1] +
                          inner * args.out_batch_stride[0] + head * args.out_head_stride +
                          position * args.out_seq_stride;
    for (int column = lane * 4; column < problem.value_dim; column += 128) {
      float4 merged = {};
      for (int first_part = 0; first_part < parts; first_part += kPartsAtOnce) {
        if (first_part > 0 || column >= 128) load(column, first_part, values);
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
          if (first_part + i >= parts) continue;
          const float weight = weights[warp][first_part + i];
          merged.x += weight * values[i].x;
          merged.y += weight * values[i].y;
          merged.z += weight * values[i].z;
          merged.w += weight * values[i].w;
        }
      }
      *reinterpret_cast<uint2*>(out + column) =
          make_uint2(pack<Traits::kMath>(merged.x * inverse, merged.y * inverse),
                     pack<Traits::kMath>(merged.z * inverse, merged.w * inverse));
    }
    if (lane == 0) {
      args.lse[(int64_t{batch} * problem.q_len + position) * problem.q_heads + head] =
          sum == 0.f ? -INFINITY : top + log2_approx(sum) * kLn2;
    }
    __syncwarp();  // the weights have been read
  }
}

}  // namespace jaxflash::sm90
