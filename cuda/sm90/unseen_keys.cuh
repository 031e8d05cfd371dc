// Keys of a tile in shared memory that nobody sees.
#pragma once

#include "common/mask.cuh"
#include "sm90/hardware/ptx.cuh"

namespace jaxflash::sm90 {

// Which keys of a sequence are seen: those of a hull but for hidden ones.
template <int kKeys, class Hidden = NoneHidden>
class SeenKeys {
 public:
  __device__ __forceinline__ explicit SeenKeys(Interval hull, Hidden hidden = {})
      : hull_(hull), hidden_(hidden) {}

  // Whether a tile of keys inside the array, the next one, may hold some that nobody sees.
  __device__ __forceinline__ bool is_cut(int first_key, int kv_len) {
    first_key_ = first_key;
    return first_key < hull_.begin || min(first_key + kKeys, kv_len) > hull_.end ||
           hidden_.meet({first_key, first_key + kKeys});
  }
  __device__ __forceinline__ bool is_seen(int key_of_tile) const {
    const int key = first_key_ + key_of_tile;
    return key >= hull_.begin && key < hull_.end && !hidden_.hold(key);
  }

 private:
  Interval hull_;
  Hidden hidden_;
  int first_key_ = 0;
};

// Zeros for keys that nobody sees, by a warp: a probability of 0 times NaN would be NaN. Swizzling
// moves 16-byte pieces inside a row of a panel only.
template <int kKeys, int kBytes, int kPanelRowBytes = 128, class Seen>
__device__ __forceinline__ void clear_unseen_keys(const uint8_t* tile, const Seen& seen, int lane) {
  constexpr int kPieces = kPanelRowBytes / 16;
#pragma unroll 1
  for (int piece = lane; piece < kBytes / 16; piece += 32) {
    if (seen.is_seen(piece / kPieces % kKeys)) continue;
    store_shared_zero(shared_address(tile + piece * 16));
  }
}

}  // namespace jaxflash::sm90
