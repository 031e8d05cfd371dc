// Whose turn it is to add to dq, where gradients are to be bitwise the same from run to run.
#pragma once

#include "common/mask.cuh"

namespace jaxflash {

// When a key tile may add to a tile of rows. The tiles of a head are numbered in the order in which
// they add, and a counter holds the number of the last that has, plus 1; it is 0 at first.
struct DqTurn {
  bool exists;     // false: what is added is 0, at any time, and the counter is left alone
  uint32_t after;  // what the counter has to be
};

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

// `seen`: the tiles that some of the rows see something of. `works(tile)`: whether a tile's block
// works on the rows; a tile of which they see nothing may, too, because what it works on is an
// interval. With kFindsTurns the whole warp.
template <bool kFindsTurns, class Works>
__device__ __forceinline__ DqTurn dq_turn(Interval seen, int tile, const Works& works) {
  if constexpr (!kFindsTurns) {  // all of them work on the rows
    return {true, static_cast<uint32_t>(tile == seen.begin ? 0 : tile)};
  } else {
    if (tile < seen.begin || tile >= seen.end) return {false, 0};
    return {true, static_cast<uint32_t>(last_that_works(seen.begin, tile, works) + 1)};
  }
}

}  // namespace jaxflash
