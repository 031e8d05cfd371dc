// What a block of the forward and of the tangent kernel works on, and which tiles of keys it
// visits.
#pragma once

#include "common/mask.cuh"
#include "problem.h"

namespace jaxflash::sm80 {

// Which tile of which head a block computes. Blocks of one head are neighbours, so that the L2
// holds the K and V of few heads; under a causal mask later rows see more keys, and starting with
// those keeps the last blocks short.
struct QueryWork {
  int64_t batch;
  int head;
  int first_row;

  template <class Tile>
  __device__ __forceinline__ static QueryWork of(uint32_t block, uint64_t first_head,
                                                 const Problem& problem) {
    const uint32_t tiles = (problem.q_len + Tile::kRows - 1u) / Tile::kRows;
    const uint32_t block_head = block / tiles;
    const uint32_t tile = tiles - 1 - (block - block_head * tiles);
    const uint64_t head_index = first_head + block_head;
    const uint64_t batch = head_index / problem.q_heads;
    return {static_cast<int64_t>(batch), static_cast<int>(head_index - batch * problem.q_heads),
            static_cast<int>(tile * Tile::kRows)};
  }
};

// Where a gap begins; beyond all keys if there is none.
__device__ __forceinline__ int begin_of(Interval gap) {
  return gap.begin < gap.end ? gap.begin : kMaxLength;
}

// Where the tile of kKeys keys begins that is visited after that of `first_key`. Tiles begin at
// multiples of kMultiple. A gap() is asked for again where it begins: registers are short.
template <int kKeys, int kMultiple, bool kHasGaps, class Gap>
__device__ __forceinline__ int next_tile(int first_key, int gap_begin, const Gap& gap) {
  int next = first_key + kKeys;
  if constexpr (kHasGaps) {
    if (first_key < gap_begin && next >= gap_begin) next = beyond(gap(), next, kMultiple);
  }
  return next;
}

}  // namespace jaxflash::sm80
