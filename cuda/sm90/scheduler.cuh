// Which tiles of query rows a block works on, in which order, and what its roles learn of them. One
// warp walks the order, ahead of the others: on the way of a consumer, between two tiles, the index
// of the next took longer than the epilogue.
#pragma once

#include "common/divisor.h"
#include "common/integers.h"
#include "common/mask.cuh"

namespace jaxflash::sm90 {

// The 64 rows of a consumer warpgroup: `positions` of each of `heads` query heads that share a kv
// head, so that short queries of grouped heads fill them. Row r is position r % positions of head
// r / positions; rows beyond the last head go unused.
struct UnitShape {
  int32_t log2_positions;
  int32_t heads;  // a divisor of the group

  __device__ __forceinline__ int positions() const { return 1 << log2_positions; }
  __device__ __forceinline__ int rows() const { return heads << log2_positions; }
  __device__ __forceinline__ int position(int row) const { return row & (positions() - 1); }
  __device__ __forceinline__ int head(int row) const { return row >> log2_positions; }
};

// A kv head's units go by position, those of one position by head; a tile takes as many units in a
// row as a block has consumer warpgroups. They see about the same keys, and share them.
struct TileOrder {
  uint32_t head_tiles;  // tiles of one kv head
  uint32_t heads;       // kv heads of all batch elements, head fastest; heads * head_tiles < 2^30
  uint32_t blocks;      // of the grid
  // 0: all tiles cost about the same; the tiles of a head follow one another and share its keys in
  // the L2. Otherwise heads are taken in sections of this many, whose keys and values stay in the
  // L2, and the tiles of a section from the longest to the shortest.
  uint32_t section_heads;
  bool last_is_longest;

  Divisor by_blocks;
  Divisor by_head_tiles;
  Divisor by_section_heads;
  Divisor by_last_heads;  // what is left for the last section, if it is not full
};

struct QueryTile {
  int head;   // flat over batch and kv heads
  int index;  // among those of the head
};

class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const TileOrder& order) : order_(order) { settle(); }

  __device__ __forceinline__ bool done() const { return done_; }
  __device__ __forceinline__ const QueryTile& tile() const { return tile_; }
  __device__ __forceinline__ void advance() {
    ++round_;
    settle();
  }

 private:
  // Finds the tile of the current round, moving on to later rounds and sections as needed.
  __device__ __forceinline__ void settle() {
    if (order_.section_heads == 0) {
      const uint32_t position = round_ * order_.blocks + blockIdx.x;
      done_ = position >= order_.heads * order_.head_tiles;
      tile_.head = order_.by_head_tiles.quotient(position);
      tile_.index = order_.by_head_tiles.remainder(position);
      return;
    }
    for (;;) {
      const uint32_t first_head = section_ * order_.section_heads;
      done_ = first_head >= order_.heads;
      if (done_) return;
      const bool last = order_.heads - first_head < order_.section_heads;
      const uint32_t heads = last ? order_.heads - first_head : order_.section_heads;
      const uint32_t tiles = heads * order_.head_tiles;
      if (round_ * order_.blocks >= tiles) {
        round_ = 0;
        ++section_;
        continue;
      }
      // Every other round runs backwards, so that a block with a long tile gets a short one next;
      // in odd sections it is the even rounds. The last round of a section is not full: turning by
      // its size from section to section lets every block sit out in its turn.
      const uint32_t lane = order_.by_blocks.remainder(blockIdx.x + first_head * order_.head_tiles);
      const bool forwards = (round_ + section_) % 2 == 0;
      const uint32_t position =
          round_ * order_.blocks + (forwards ? lane : order_.blocks - 1 - lane);
      if (position < tiles) {
        const Divisor& by_heads = last ? order_.by_last_heads : order_.by_section_heads;
        const uint32_t rank = by_heads.quotient(position);
        tile_.head = first_head + by_heads.remainder(position);
        tile_.index = order_.last_is_longest ? order_.head_tiles - 1 - rank : rank;
        return;
      }
      ++round_;
    }
  }

  const TileOrder& order_;
  uint32_t round_ = 0;
  uint32_t section_ = 0;
  bool done_;
  QueryTile tile_;
};

// A tile of query rows as the roles of its block see it. Intervals of tiles count key tiles.
template <class Mask, int kWarpGroups>
struct TilePlan {
  struct Unit {
    int position;    // of the first row along the sequence
    int head;        // query head of the first row
    Interval tiles;  // of which some row sees a key; if none, empty at the begin of the block's
    Interval full;   // of which every row sees every key: no element needs a test
    float* lse;      // of the first row
    uint16_t* out;   // of the first row, for direct stores
  };

  bool exists;  // false: the walk is over
  int kv_head;
  int batch;
  int inner;  // its coordinates along the batch axes
  int outer;
  Mask mask;
  Interval seen;   // keys that some row of the sequence sees
  Interval tiles;  // of which some row of the block sees a key
  Unit units[kWarpGroups];
};

// The tiles of kKeys keys that cover an interval of keys.
template <int kKeys>
__device__ __forceinline__ Interval covering_tiles(Interval keys) {
  if (keys.end <= keys.begin) return {0, 0};
  return {keys.begin / kKeys, (keys.end + kKeys - 1) / kKeys};
}

// The tiles of kKeys keys inside an interval of keys, which begins at 0 or later.
template <int kKeys>
__device__ __forceinline__ Interval inner_tiles(Interval keys) {
  return {(keys.begin + kKeys - 1) / kKeys, keys.end / kKeys};
}

}  // namespace jaxflash::sm90
