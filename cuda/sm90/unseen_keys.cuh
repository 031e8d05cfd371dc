// Keys of a tile in shared memory that nobody sees.
#pragma once

#include "common/mask.cuh"
#include "sm90/hardware/ptx.cuh"

namespace jaxflash::sm90 {

// Whether a tile of keys inside the array reaches past those that the sequence sees.
template <int kKeys>
__device__ __forceinline__ bool holds_unseen_keys(int first_key, Interval seen, int kv_len) {
  return first_key < seen.begin || min(first_key + kKeys, kv_len) > seen.end;
}

// Zeros for them, by a warp: a probability of 0 times NaN would be NaN. Panels are 128 bytes wide;
// swizzling moves 16-byte pieces inside a row of a panel only.
template <int kKeys, int kBytes>
__device__ __forceinline__ void clear_unseen_keys(const uint8_t* tile, int first_key, Interval seen,
                                                  int lane) {
  constexpr int kPieces = 128 / 16;
#pragma unroll 1
  for (int piece = lane; piece < kBytes / 16; piece += 32) {
    const int key = first_key + piece / kPieces % kKeys;
    if (key >= seen.begin && key < seen.end) continue;
    store_shared_zero(shared_address(tile + piece * 16));
  }
}

}  // namespace jaxflash::sm90
