// The step from products to logits, in units of log 2. A policy is told what it works on
// (begin_head, begin_tile); elements are then named by their distance from the tile's first one.
#pragma once

#include "common/approx.cuh"
#include "common/logarithms.h"
#include "common/program.cuh"
#include "common/thread.cuh"

namespace jaxflash::sm80 {

// What the words of a program show of a tile to a thread's rows, inside the intervals of a mask.
template <bool kHasWords, int kRowTiles, int kKeys>
class Shown {};
template <int kRowTiles, int kKeys>
class Shown<true, kRowTiles, kKeys> {
 public:
  // Loads the words of the tile from `tile_key` on for the rows from `row` on, the thread's first.
  // Ahead of products, beside which they come.
  template <class Program>
  __device__ __forceinline__ void load(const typename Program::Head& head, int row, int tile_key) {
    const uint32_t group = tile_key >> 7, rows = Program::word_rows(head);
    const int end = min(tile_key + kKeys, 128 * Program::word_groups(head));
    using OfRow = uint32_t[4];
    const auto* const first = reinterpret_cast<const OfRow*>(Program::words(head) + laneid() % 4) +
                              uint64_t{group} * rows;
    for_each_row([&](auto& words, int distance) {
      const OfRow* own = first + min(static_cast<uint32_t>(row + distance), rows - 1);
#pragma unroll
      for (int i = 0; i < kCount; ++i, own += rows) {
        if (i != 0 && (tile_key & -128) + 128 * i >= end) break;  // of the tile or the mask
        load_word_here(*own, words[i]);
      }
    });
  }
  // Makes bits of them, those of the thread's keys in order from `key` on.
  template <class Program, class Mask>
  __device__ __forceinline__ void make_bits(const Mask& mask, int row, int key) {
    const uint32_t shift = Program::bit(key & 112);
    for_each_row([&](auto& words, int distance) {
      const Interval keys = mask.keys_of_row(row + distance);
      words[0] = __funnelshift_r(words[0], kCount == 2 ? words[kCount - 1] : 0, shift) &
                 bits_before(keys.end - key) & ~bits_before(keys.begin - key);
    });
  }
  // An element by its distance from the thread's first.
  __device__ __forceinline__ bool has(int row, int key) const {
    return (words_[row / 16][row / 8 % 2][0] >> count_before(key) & 1) != 0;
  }

 private:
  static_assert(kKeys < 128);
  static constexpr int kMultiple = kKeys & -kKeys;  // that tiles begin at
  static constexpr int kCount = (128 - kMultiple + kKeys + 127) / 128;

  // Of the thread's keys, those that are less than `distance` from the first: two in each eight.
  __device__ __forceinline__ static constexpr int count_before(int distance) {
    return distance / 8 * 2 + (distance % 8 < 2 ? distance % 8 : 2);
  }
  __device__ __forceinline__ static uint32_t bits_before(int distance) {
    return (1u << count_before(min(max(distance, 0), kKeys))) - 1;
  }
  template <class Of>
  __device__ __forceinline__ void for_each_row(const Of& of) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) of(words_[i / 2][i % 2], 8 * i);
  }

  uint32_t words_[kRowTiles][2][kCount] = {};
};

// A factor.
class ScaledScores {
 public:
  static constexpr bool kUnitSlope = true;
  static constexpr bool kMasks = false;
  static constexpr bool kHasWords = false;
  static constexpr bool kHasSink = false;
  static constexpr bool kDrops = false;
  template <int kKeys>
  static constexpr int kTileMultiple = 1;

  __device__ __forceinline__ explicit ScaledScores(const Problem& problem)
      : scale_log2_(problem.scale * kLog2E) {}

  template <class Mask>
  __device__ __forceinline__ void begin_head(const Captures&, const Problem&, const Mask&,
                                             int64_t /*batch*/, int /*head*/) {}
  __device__ __forceinline__ void begin_tile(int /*row*/, int /*key*/) {}
  __device__ __forceinline__ void draw(KeepAll&, int /*row*/, int /*key*/) const {}

  // A positive factor is left to the exponential, and the products need no rewriting: otherwise 0.
  __device__ __forceinline__ float factor() const { return scale_log2_ > 0.f ? scale_log2_ : 0.f; }
  __device__ __forceinline__ float logit(float s, int /*row*/, int /*key*/) const {
    return s * scale_log2_;
  }
  __device__ __forceinline__ bool shows(int /*row*/, int /*key*/) const { return true; }

 private:
  float scale_log2_;
};

// A program of common/program.cuh. The rows of fragments are queries, or keys.
template <class Program, bool kRowsAreQueries>
class ProgramScores {
 public:
  static constexpr bool kUnitSlope = Program::kUnitSlope;
  static constexpr bool kMasks = Program::kMasks;
  static constexpr bool kHasWords = Program::kHasWords && kRowsAreQueries;
  static constexpr bool kHasSink = Program::kHasSink;
  static constexpr bool kDrops = Program::kDrops;
  // What a tile of kKeys keys has to begin at a multiple of.
  template <int kKeys>
  static constexpr int kTileMultiple = kHasWords                         ? kKeys & -kKeys
                                       : kDrops || Program::kSharesLoads ? 16
                                                                         : 1;

  __device__ __forceinline__ explicit ProgramScores(const Problem&) {}

  template <class Mask>
  __device__ __forceinline__ void begin_head(const Captures& captures, const Problem& problem,
                                             const Mask& mask, int64_t batch, int head) {
    const int b = batch_number(captures, problem, batch), h = head_number(captures, head);
    head_ = Program::head(captures, problem, batch, b, h);
    if constexpr (kDrops) dropout_ = Program::dropout(captures, problem, batch, b, h);
    diagonal_ = diagonal_of(problem, mask);
  }
  __device__ __forceinline__ void begin_tile(int row, int key) {
    row_ = row;
    key_ = key;
    distance_ = static_cast<float>(row + diagonal_ - key);
  }

  __device__ __forceinline__ float factor() const { return 0.f; }
  __device__ __forceinline__ float logit(float s, int row, int key) const {
    const int q = q_of(row), kv = kv_of(key);
    return Program::logit(head_, Program::row(head_, q), Program::column(head_, kv), q, kv,
                          distance_ + (row - key), s);
  }
  __device__ __forceinline__ float logit_and_slope(float s, int row, int key, float* slope) const {
    const int q = q_of(row), kv = kv_of(key);
    return Program::logit_and_slope(head_, Program::row(head_, q), Program::column(head_, kv), q,
                                    kv, distance_ + (row - key), s, slope);
  }
  // Of tiles that are not known to be visible as a whole; what words say is asked of those.
  __device__ __forceinline__ bool shows(int row, int key) const {
    if constexpr (!kMasks || (kHasWords && Program::kAllInWords)) {
      return true;
    } else {
      const int q = q_of(row), kv = kv_of(key);
      const auto of_row = Program::row(head_, q);
      const auto of_column = Program::column(head_, kv);
      const float distance = distance_ + (row - key);
      if constexpr (kHasWords) {
        return Program::visible_beside(head_, of_row, of_column, q, kv, distance);
      } else {
        return Program::visible(head_, of_row, of_column, q, kv, distance);
      }
    }
  }

  template <class Shown>
  __device__ __forceinline__ void load(Shown& shown, int row, int tile_key) const {
    shown.template load<Program>(head_, row, tile_key);
  }
  template <class Shown, class Mask>
  __device__ __forceinline__ static void make_bits(Shown& shown, const Mask& mask, int row,
                                                   int key) {
    shown.template make_bits<Program>(mask, row, key);
  }

  // The tangent of a logit, given that of its product times the slope.
  __device__ __forceinline__ float tangent(float t, float s, int row, int key) const {
    if constexpr (Program::kCapturesMove) {
      const int q = q_of(row), kv = kv_of(key);
      t += Program::capture_tangent(head_, Program::row(head_, q), Program::column(head_, kv), q,
                                    kv, distance_ + (row - key), s);
    }
    return t;
  }
  __device__ __forceinline__ float sink() const { return Program::sink(head_); }

  // Which elements of a fragment are kept. Tiles start at multiples of 16.
  template <class Bits>
  __device__ __forceinline__ void draw(Bits& kept, int row, int key) const {
    if constexpr (kDrops) {
      static_assert(Bits::kRowsAreQueries == kRowsAreQueries);
      const int q = row_ + row, kv = key_ + key;
      dropout_.draw(kept, kRowsAreQueries ? q : kv, kRowsAreQueries ? kv : q);
    }
  }
  // The share that is kept.
  __device__ __forceinline__ float share() const { return dropout_.share(); }

 private:
  // Along the columns of a fragment, of which a thread has pairs. Where neighbours share a load, by
  // "or", which the compiler sees through: tiles begin at multiples of 16.
  __device__ __forceinline__ static int column_of(int first, int distance) {
    if constexpr (Program::kSharesLoads) {
      return ((first & -16) + distance / 16 * 16) | (first & 6) | distance % 16;
    } else {
      return first + distance;
    }
  }
  __device__ __forceinline__ int q_of(int row) const {
    return kRowsAreQueries ? row_ + row : column_of(row_, row);
  }
  __device__ __forceinline__ int kv_of(int key) const {
    return kRowsAreQueries ? column_of(key_, key) : key_ + key;
  }

  typename Program::Head head_;
  int diagonal_;  // from a row number to its position among the keys
  int row_, key_;
  float distance_;   // between the positions of these two
  Dropout dropout_;  // with kDrops
};

// Whether a thread sees an element of a tile that is not visible as a whole; `row` and `key` are
// the thread's first.
template <bool kHasWords, int kRowTiles, int kKeys, class Mask>
__device__ __forceinline__ bool is_inside(const Shown<kHasWords, kRowTiles, kKeys>& shown,
                                          const Mask& mask, int row, int key, int row_distance,
                                          int key_distance) {
  if constexpr (!kHasWords) {
    return mask.visible(row + row_distance, key + key_distance);
  } else if constexpr (Mask::kTestsElements) {
    return shown.has(row_distance, key_distance) &&
           mask.same_id(row + row_distance, key + key_distance);
  } else {
    return shown.has(row_distance, key_distance);
  }
}

}  // namespace jaxflash::sm80
