// Rows of a tile in shared memory that take no part: keys that nobody sees, queries that see none.
#pragma once

#include "common/mask.cuh"
#include "common/thread.cuh"
#include "sm90/hardware/ptx.cuh"

namespace jaxflash::sm90 {

// Which rows of an array take part: those of an interval but for hidden ones. Behind the end of the
// array, at `length`, TMA itself writes zeros.
template <class Hidden>
struct SeenRows {
  Interval valid;
  Hidden hidden;

  // Whether a tile, which begins inside the array, may hold others.
  __device__ __forceinline__ bool cut(int first, int rows, int length) const {
    const int end = min(first + rows, length);
    return first < valid.begin || end > valid.end || hidden.meet({first, end});
  }
};

// The other rows of a tile of kRows, or of kTiles of them that lie one behind the other, found by a
// warp while they are on their way. They become zeros: what a probability of 0 is multiplied by
// must not be NaN. kAllAtOnce: where many tiles have such rows, and there are registers for it.
template <int kRows, int kPanelRowBytes, int kTiles = 1, bool kAllAtOnce = false>
class UnseenRows {
 public:
  UnseenRows() = default;
  // The tile that this lane asks about.
  __device__ __forceinline__ static int tile_of_lane() {
    return min(laneid() / kParts, kTiles - 1u);
  }
  // Of tiles that begin at `first`, a multiple of kRows. `seen`: of the array that tile_of_lane()
  // is of.
  template <class Hidden>
  __device__ __forceinline__ UnseenRows(int first, int length, const SeenRows<Hidden>& seen) {
    const int part = first + laneid() % kParts * kPartRows;
    const Interval inside = {part, min(part + kPartRows, length)};
    unseen_ = bits_within(inside, part) & ~bits_within(seen.valid, part) |
              seen.hidden.template bits<kPartRows>(part);
  }

  // All lanes.
  __device__ __forceinline__ bool some() const { return __any_sync(~0u, unseen_ != 0); }

  // In all panels of the tiles. Swizzling moves 16-byte pieces inside a row of a panel only.
  template <int kPanels>
  __device__ __forceinline__ void clear(const uint8_t* tiles) const {
    constexpr int kAtOnce = kAllAtOnce ? kParts : 1;
    const uint32_t lane = laneid();
    const uint32_t target = shared_address(tiles) + lane * 16;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll 1
      for (int part = 0; part < kParts; part += kAtOnce) {
        uint32_t unseen[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          unseen[i] = __shfl_sync(~0u, unseen_, tile * kParts + part + i);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (unseen[i] == 0) continue;
          const uint32_t own = unseen[i] >> lane / kPieces;
#pragma unroll
          for (int row = 0; row < kPartRows; row += kStepRows) {
            if ((own >> row & 1) == 0) continue;
            const int at = kPartRows * (part + i) + row;
#pragma unroll
            for (int panel = tile * kPanels; panel < (tile + 1) * kPanels; ++panel) {
              store_shared_zero(target + (panel * kRows + at) * kPanelRowBytes);
            }
          }
        }
      }
    }
  }

 private:
  static constexpr int kPartRows = kRows % 32 == 0 ? 32 : 16;  // that a lane asks about
  static constexpr int kParts = kRows / kPartRows;
  static constexpr int kPieces = kPanelRowBytes / 16;  // a lane's
  static constexpr int kStepRows = 32 / kPieces;       // that a warp clears at a time
  static_assert(kRows % 16 == 0 && kTiles * kParts <= 32);

  // Of lane kParts * tile + i, a bit for each row of part i.
  uint32_t unseen_ = 0;
};

}  // namespace jaxflash::sm90
