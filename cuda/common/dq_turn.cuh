// Whose turn it is to add to dq, where gradients are to be bitwise the same from run to run.
#pragma once

#include "common/integers.h"

namespace jaxflash {

// When a key tile may add to a tile of rows. The tiles of a head are numbered in the order in which
// they add, and a counter holds the number of the last that has, plus 1; it is 0 at first. A tile
// of which the rows see nothing has no turn: its block may work on the rows nevertheless, because
// what it works on is an interval, but all that it adds is 0, and it leaves the counter alone.
struct DqTurn {
  bool exists;
  uint32_t after;  // what the counter has to be
};

__device__ __forceinline__ DqTurn turn_after(int tile) {
  return {true, static_cast<uint32_t>(tile + 1)};
}

// Where neighbours from `first` on add to the rows.
__device__ __forceinline__ DqTurn neighbours_turn(int first, int tile) {
  return turn_after(tile == first ? -1 : tile - 1);
}

// The last of the tiles first ... end - 1 for which `works(tile)`, or -1. The whole warp.
template <class Works>
__device__ __forceinline__ int last_that_works(int first, int end, const Works& works) {
#pragma unroll 1
  for (; end > first; end -= 32) {
    const int tile = end - 1 - static_cast<int>(threadIdx.x % 32);
    const uint32_t found = __ballot_sync(~0u, tile >= first && works(tile));
    if (found != 0) return end - __ffs(found);
  }
  return -1;
}

}  // namespace jaxflash
