// Dropout: which probabilities are kept. jaxflash/_dropout.py defines the same bits.
//
// The generator's rounds are of 32-bit products and byte permutations, which run in different
// units; with the 64-bit products of Philox a forward pass took a quarter longer, with Threefry's
// rotations a seventh. A call decides on eight elements: two queries 8 apart, and two neighbouring
// keys with those 8 after them. Where rows of an accumulator fragment are queries, they are one
// thread's. Where rows are keys, they are those of two lanes, which draw a half for each other.
#pragma once

#include "common/bytes.cuh"
#include "common/conditional.h"
#include "common/integers.h"

namespace jaxflash {

struct RandomWords {
  uint32_t x0;
  uint32_t x1;

  __device__ __forceinline__ RandomWords plus(uint32_t y0, uint32_t y1) const {
    return {x0 + y0, x1 + y1};
  }
};

inline constexpr int kRandomRounds = 7;

// The permutation of 64 bits that all draws are made of: its rounds from kFirst to kEnd.
template <int kFirst = 0, int kEnd = kRandomRounds>
__device__ __forceinline__ RandomWords permute(RandomWords x) {
  uint32_t multiplier = 1;
#pragma unroll
  for (int round = 0; round < kEnd; ++round) {
    multiplier *= 0x9e3779b1u;
    if (round < kFirst) continue;
    x.x0 = x.x0 * multiplier + x.x1;
    x.x1 ^= permute_bytes<0x0123>(x.x0, x.x0);
  }
  return x;
}

// Of the fragment's elements of a thread, in columns of kColumns: a bit each. Element i is one of
// two rows 8 apart, (i / 2) % 2, in the columns i / 4 * 8 + i % 2. Dense bits take more
// instructions and fewer registers.
template <bool kRowsAreQueries_, int kColumns_, bool kDense>
struct KeepBits {
  static constexpr bool kRowsAreQueries = kRowsAreQueries_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kBlocks = kColumns / 16;  // of columns, one call each
  // How many blocks share a word.
  static constexpr int kSharers = kDense ? 8 : 1;
  static constexpr int kWords = (kBlocks + kSharers - 1) / kSharers;
  static_assert(kColumns % 16 == 0, "a call's elements are 8 columns apart");
  // Of even columns and of odd ones. Of a block four bytes, of two queries 8 apart and for each of
  // two keys 8 apart, have the same bit: the upper one, or those below for further blocks.
  uint32_t words[2][kWords];

  __device__ __forceinline__ static constexpr int byte(int i) {
    const int lower = i / 2 % 2, right = i / 4 % 2;
    return kRowsAreQueries ? lower * 2 + right : right * 2 + lower;
  }
  // The block's bits, those of even or odd columns, as the upper ones of their bytes.
  __device__ __forceinline__ uint32_t signs(int block, int odd) const {
    return words[odd][block / kSharers] << block % kSharers;
  }

  __device__ __forceinline__ float of(int i, float x) const {
    const uint32_t word = words[i % 2][i / 8 / kSharers];
    return (word >> (byte(i) * 8 + 7 - i / 8 % kSharers) & 1) != 0 ? x : 0.f;
  }
  // Of the elements i and i + 1, i even, packed into the halves of a word.
  __device__ __forceinline__ uint32_t of_pair(int i, uint32_t pair) const {
    const uint32_t even = signs(i / 8, 0), odd = signs(i / 8, 1);
    switch (byte(i)) {
      case 0:
        return pair & permute_bytes<0xcc88>(even, odd);
      case 1:
        return pair & permute_bytes<0xdd99>(even, odd);
      case 2:
        return pair & permute_bytes<0xeeaa>(even, odd);
      default:
        return pair & permute_bytes<0xffbb>(even, odd);
    }
  }
  // Of two queries that are not 8 apart, each drawn with the one that is 8 from it: the first one's
  // from here, the other's from `others`. `lower`: it is the lower one of its two.
  __device__ __forceinline__ void take_rows(bool lower, const KeepBits& others, bool other_lower) {
    static_assert(kRowsAreQueries);
    const uint32_t bytes = (lower ? 0x32u : 0x10u) | (other_lower ? 0x7600u : 0x5400u);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[odd][i] = __byte_perm(words[odd][i], others.words[odd][i], bytes);
      }
    }
  }
  __device__ __forceinline__ void keep_all() {
#pragma unroll
    for (auto& of_parity : words) {
#pragma unroll
      for (uint32_t& word : of_parity) word = ~0u;
    }
  }
};

// Without dropout.
struct KeepAll {
  __device__ __forceinline__ float of(int /*i*/, float x) const { return x; }
  __device__ __forceinline__ uint32_t of_pair(int /*i*/, uint32_t pair) const { return pair; }
};

// The bits of one batch element and head.
class Dropout {
 public:
  Dropout() = default;
  // `parameters`: two words of the seed, and how many of 32768 are dropped. `b` and `h`: numbers.
  __device__ __forceinline__ Dropout(const uint32_t* parameters, int b, int h)
      : start_(permute(key_of({__ldg(parameters), __ldg(parameters + 1)}).plus(h, b))),
        threshold_(__ldg(parameters + 2)) {}

  // `row` and `column` of the thread's first element, in fragments that start at multiples of 16.
  // Where rows are keys, for all lanes of a warp at once.
  template <bool kRowsAreQueries, int kColumns, bool kDense>
  __device__ __forceinline__ void draw(KeepBits<kRowsAreQueries, kColumns, kDense>& bits, int row,
                                       int column) const {
    using Bits = KeepBits<kRowsAreQueries, kColumns, kDense>;
    constexpr uint32_t kUpper = 0x80808080u;
    // Each lane calls for its keys, or for those of its two neighbouring queries whose number is
    // as odd as its key's. The counter is that of the first element.
    const int odd_row = kRowsAreQueries ? 0 : row & 1;
    const uint32_t query = kRowsAreQueries ? row : column + odd_row;
    const uint32_t key = kRowsAreQueries ? column : row - odd_row;
#pragma unroll
    for (int block = 0; block < Bits::kBlocks; ++block) {
      const RandomWords before = permute<0, kRandomRounds - 1>(start_.plus(
          key + (kRowsAreQueries ? 16 * block : 0), query + (kRowsAreQueries ? 0 : 16 * block)));
      const RandomWords x = permute<kRandomRounds - 1>(before);
      // The threshold in 7 bits, rounded by 8 of the call: the upper byte, for four at once. There
      // the upper bit survives where the other 7 are no less.
      const uint32_t rounded = (threshold_ << 16) + (before.x0 >> 8);
      const uint32_t threshold = permute_bytes<0x3333>(rounded, rounded);
      const uint32_t kept[2] = {(x.x0 | kUpper) - threshold, (x.x1 | kUpper) - threshold};
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        uint32_t& word = bits.words[odd][block / Bits::kSharers];
        const int place = block % Bits::kSharers;
        const uint32_t mask = kUpper >> place;
        word = place == 0 ? kept[odd] : (word & ~mask) | (kept[odd] >> place & mask);
      }
    }
#pragma unroll
    for (int i = 0; i < Bits::kWords; ++i) {
      uint32_t &even = bits.words[0][i], &odd = bits.words[1][i];
      if (!kRowsAreQueries) {
        // Here of even and odd keys, for a query; from the lane of the next key for the other one.
        const uint32_t own = odd_row ? odd : even;
        const uint32_t other = __shfl_xor_sync(~0u, odd_row ? even : odd, 4);
        even = odd_row ? other : own;
        odd = odd_row ? own : other;
      }
      asm("" : "+r"(even), "+r"(odd));  // or the blocks' words stay apart
    }
  }
  __device__ __forceinline__ void draw(KeepAll&, int, int) const {}

  // Whether any is dropped: a rate close to 0 is none.
  __device__ __forceinline__ bool drops() const { return threshold_ != 0; }
  // The share of probabilities that are kept.
  __device__ __forceinline__ float share() const {
    return 1.f - static_cast<float>(threshold_) * 0x1p-15f;
  }

 private:
  // Not permute(seed), which is 0 for 0.
  __device__ __forceinline__ static RandomWords key_of(RandomWords seed) {
    return permute(seed.plus(0x243f6a88u, 0x85a308d3u));
  }

  RandomWords start_;   // x0 counts keys, x1 queries
  uint32_t threshold_;  // of 32768
};

template <bool kDrops, bool kRowsAreQueries, int kColumns, bool kDense = !kRowsAreQueries>
using Kept = Conditional<kDrops, KeepBits<kRowsAreQueries, kColumns, kDense>, KeepAll>;

}  // namespace jaxflash
