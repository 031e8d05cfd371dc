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
  // The same, which asks about some row of the hull in any case, so that answers for several rows
  // may be loaded at the same time.
  __device__ __forceinline__ bool unseen_at_once(int row) const {
    const Interval hull = hidden.hull();
    const bool are = hidden.are(min(max(row, hull.begin), max(hull.end, 1) - 1));
    return row < valid.begin || row >= valid.end || (row >= hull.begin && row < hull.end && are);
  }
};

// The other rows of a tile of kRows, or of kTiles of them that lie one behind the other, found by a
// warp while they are on their way. They become zeros: what a probability of 0 is multiplied by
// must not be NaN. kAtOnce: words of 32 rows that are asked about at the same time, where there are
// registers.
template <int kRows, int kPanelRowBytes, int kTiles = 1, int kAtOnce = 1>
class UnseenRows {
 public:
  UnseenRows() = default;
  // Of tiles that begin at `first`. `seen_of`: the SeenRows of the array that a tile is of.
  template <class SeenOf>
  __device__ __forceinline__ UnseenRows(int first, int length, const SeenOf& seen_of) {
    const int rows = min(kRows, length - first);
    const auto lane = static_cast<int>(laneid());
#pragma unroll 1
    for (int i = 0; i < kWords; i += kAtOnce) {
      bool unseen[kTiles][kAtOnce];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const auto seen = seen_of(tile);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int row = 32 * (i + j) + lane;
          if constexpr (kAtOnce == 1) {
            unseen[tile][j] = row < rows && seen.unseen(first + row);
          } else {
            unseen[tile][j] = static_cast<int>(seen.unseen_at_once(first + row)) & (row < rows);
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const uint32_t word = __ballot_sync(~0u, unseen[tile][j]);
          own_[tile] |= (word >> lane / kPieces & kEveryStep) << (i + j);
        }
      }
    }
  }

  // In all panels of the tiles. Swizzling moves 16-byte pieces inside a row of a panel only.
  template <int kPanels>
  __device__ __forceinline__ void clear(const uint8_t* tiles) const {
    const uint32_t first = shared_address(tiles) + laneid() * 16;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      for (uint32_t left = own_[tile]; left != 0; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        const int row = 32 * (bit % kStepRows) + bit / kStepRows * kStepRows;
#pragma unroll
        for (int panel = tile * kPanels; panel < (tile + 1) * kPanels; ++panel) {
          store_shared_zero(first + (panel * kRows + row) * kPanelRowBytes);
        }
      }
    }
  }

 private:
  static constexpr int kWords = (kRows + 31) / 32;
  static constexpr int kPieces = kPanelRowBytes / 16;  // a lane's
  static constexpr int kStepRows = 32 / kPieces;       // that a warp clears at a time
  static constexpr uint32_t kEveryStep = ~0u / ((1u << kStepRows) - 1);
  static_assert(kWords < kStepRows || kWords % kAtOnce == 0);

  // Of rows whose piece is this lane's: bit kStepRows * j + i for row kStepRows * j of word i.
  uint32_t own_[kTiles] = {};
};

}  // namespace jaxflash::sm90
