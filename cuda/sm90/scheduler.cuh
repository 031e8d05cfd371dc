// Which tiles of query rows a block works on, and in which order. Every role of a block walks the
// same sequence on its own, so that no role waits for another to learn its next tile.
#pragma once

#include <cstdint>

namespace jaxflash::sm90 {

struct TileOrder {
  uint32_t q_tiles;  // tiles of one head
  uint32_t heads;    // query heads of all batch elements, head fastest; heads * q_tiles < 2^30
  // 0: all tiles cost about the same; the tiles of a head follow one another and share its keys in
  // the L2. Otherwise heads are taken in sections of this many, whose keys and values stay in the
  // L2, and the tiles of a section from the longest to the shortest.
  uint32_t section_heads;
  bool last_is_longest;
};

struct QueryTile {
  int head;   // flat over batch and query heads
  int index;  // along the sequence
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
    const uint32_t blocks = gridDim.x;
    if (order_.section_heads == 0) {
      const uint32_t position = round_ * blocks + blockIdx.x;
      done_ = position >= order_.heads * order_.q_tiles;
      tile_.head = position / order_.q_tiles;
      tile_.index = position % order_.q_tiles;
      return;
    }
    for (;;) {
      const uint32_t first_head = section_ * order_.section_heads;
      done_ = first_head >= order_.heads;
      if (done_) return;
      const uint32_t heads = min(order_.section_heads, order_.heads - first_head);
      const uint32_t tiles = heads * order_.q_tiles;
      if (round_ * blocks >= tiles) {
        round_ = 0;
        ++section_;
        continue;
      }
      // Odd rounds run backwards, so that a block with a long tile gets a short one next. The last
      // round of a section is not full: turning by its size from section to section lets every
      // block sit out in its turn.
      const uint32_t lane = (blockIdx.x + first_head * order_.q_tiles) % blocks;
      const uint32_t position = round_ * blocks + (round_ % 2 == 0 ? lane : blocks - 1 - lane);
      if (position < tiles) {
        const uint32_t rank = position / heads;
        tile_.head = first_head + position % heads;
        tile_.index = order_.last_is_longest ? order_.q_tiles - 1 - rank : rank;
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

}  // namespace jaxflash::sm90
