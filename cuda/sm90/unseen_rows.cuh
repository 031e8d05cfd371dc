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
  __device__ __forceinline__ bool unseen(int row) const {
    return row < valid.begin || row >= valid.end || hidden.hold(row);
  }
};

// The other rows of a tile of kRows, found by a warp while the tile is on its way. They become
// zeros: what a probability of 0 is multiplied by must not be NaN.
template <int kRows, int kPanelRowBytes>
class UnseenRows {
 public:
  template <class Hidden>
  __device__ __forceinline__ UnseenRows(int first, int length, const SeenRows<Hidden>& seen) {
    const int rows = min(kRows, length - first);
    const auto lane = static_cast<int>(laneid());
#pragma unroll 1
    for (int i = 0; i < kWords; ++i) {
      const int row = 32 * i + lane;
      const uint32_t word = __ballot_sync(~0u, row < rows && seen.unseen(first + row));
      own_ |= (word >> lane / kPieces & kEveryStep) << i;
    }
  }

  // In all panels of the tile. Swizzling moves 16-byte pieces inside a row of a panel only.
  template <int kPanels>
  __device__ __forceinline__ void clear(const uint8_t* tile) const {
    const uint32_t first = shared_address(tile) + laneid() * 16;
    for (uint32_t left = own_; left != 0; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      const int row = 32 * (bit % kStepRows) + bit / kStepRows * kStepRows;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        store_shared_zero(first + (panel * kRows + row) * kPanelRowBytes);
      }
    }
  }

 private:
  static constexpr int kWords = (kRows + 31) / 32;
  static constexpr int kPieces = kPanelRowBytes / 16;  // a lane's
  static constexpr int kStepRows = 32 / kPieces;       // that a warp clears at a time
  static constexpr uint32_t kEveryStep = ~0u / ((1u << kStepRows) - 1);
  static_assert(kWords <= kStepRows);

  // Of rows whose piece is this lane's: bit kStepRows * j + i for row kStepRows * j of word i.
  uint32_t own_ = 0;
};

}  // namespace jaxflash::sm90
