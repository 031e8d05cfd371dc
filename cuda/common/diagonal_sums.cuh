// Sums along the diagonals of a warp's part of a tile, out of its accumulators: fragments of 16
// rows x 8 columns, of which thread (g, c) = (lane / 4, lane % 4) holds columns 2 c and 2 c + 1 of
// rows g and g + 8.
//
// Elements (row, column) and (row + 8, column + 8) are one thread's, which adds them. What is left
// are pairs of a row g: kPairs of them, eight columns from one to the next. Diagonals that are a
// multiple of eight apart have their elements in the same threads, so that eight addends of each
// become one by exchanges with three other threads: one of halves, which gives each thread the
// diagonals of one remainder, then two of every other diagonal.
#pragma once

#include "common/thread.cuh"

namespace jaxflash {

template <int kPairs>
class DiagonalSums {
 public:
  // A thread's share of the sums.
  static constexpr int kCount = (kPairs + 1 + 3) / 4;

  // Adds to the first or second element of a pair.
  __device__ __forceinline__ void add(int pair, int second, float value) {
    float& sum = pairs_[pair][second];
    bool& begun = begun_[pair][second];
    sum = begun ? sum + value : value;
    begun = true;
  }

  // By a whole warp. use(column - row, sum) for each of the thread's diagonals, relative to the
  // first pair's first column and to row 0; some of these lie outside, and their sums are 0.
  template <class Use>
  __device__ __forceinline__ void reduce(const Use& use) const {
    const auto lane = static_cast<int>(laneid());
    const int row = lane >> 2, column = (lane & 3) * 2;
    // The lane of a row further down, whose place in the row is one more or less.
    const auto of_row = [&](int further, int places) {
      return ((row + further) << 2) + ((lane + places) & 3);
    };
    // Of one remainder by eight, where a diagonal begins depends on the thread.
    float by_remainder[2][kDiagonals];
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const bool below = column + second < row;
#pragma unroll
      for (int i = 0; i < kDiagonals; ++i) {
        const float earlier = i > 0 && i <= kPairs ? pairs_[i - 1][second] : 0.f;
        const float same = i < kPairs ? pairs_[i][second] : 0.f;
        by_remainder[second][i] = below ? same : earlier;
      }
    }
    // Whose second element has the remainder of this thread's first one.
    const int beside = (row & 1) == 0 ? of_row(1, 0) : of_row(-1, 3);
    float sums[kDiagonals];
#pragma unroll
    for (int i = 0; i < kDiagonals; ++i) {
      sums[i] = 0.f;
      if (i <= kPairs) sums[i] = by_remainder[0][i] + __shfl_sync(~0u, by_remainder[1][i], beside);
    }
    const bool upper_pair = (row & 2) == 0, upper_half = row < 4;
    const int two_away = upper_pair ? of_row(2, 1) : of_row(-2, 3);
    float halves[kDiagonals / 2];
    share(sums, halves, upper_pair, two_away);
    float quarters[kCount];
    share(halves, quarters, upper_half, lane ^ 18);
    const int first = (upper_half ? 0 : 16) + (upper_pair ? 0 : 8) + ((column - row) & 7) - 8;
#pragma unroll
    for (int i = 0; i < kCount; ++i) use(first + 32 * i, quarters[i]);
  }

 private:
  static constexpr int kDiagonals = 4 * kCount;  // of one remainder

  // Of every two neighbours the thread keeps one, and gets what `other` has of it.
  template <int kHalf>
  __device__ __forceinline__ static void share(const float (&all)[2 * kHalf], float (&kept)[kHalf],
                                               bool keeps_first, int other) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float sent = keeps_first ? all[2 * i + 1] : all[2 * i];
      kept[i] = (keeps_first ? all[2 * i] : all[2 * i + 1]) + __shfl_sync(~0u, sent, other);
    }
  }

  float pairs_[kPairs][2] = {};
  bool begun_[kPairs][2] = {};  // the compiler knows
};

}  // namespace jaxflash
