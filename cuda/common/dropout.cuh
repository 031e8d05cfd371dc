// Dropout: which probabilities are kept. jaxflash/_dropout.py defines the same bits.
//
// The generator is Philox2x32-7 (Salmon et al. 2011). A call decides on four elements: two queries
// 8 apart and two keys 8 apart. An accumulator fragment holds such elements in one thread, whether
// its rows are queries or keys.
#pragma once

#include "common/bytes.cuh"
#include "common/conditional.h"
#include "common/integers.h"

namespace jaxflash {

struct PhiloxCounter {
  uint32_t c0;
  uint32_t c1;
};

inline constexpr uint32_t kPhiloxWeyl = 0x9e3779b9u;

__device__ __forceinline__ PhiloxCounter philox2x32(PhiloxCounter x, uint32_t key) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    // Of a 64-bit product ptxas would add the upper word of the factors, which is 0.
    x = {__umulhi(0xd256d193u, x.c0) ^ x.c1 ^ key, 0xd256d193u * x.c0};
    key += kPhiloxWeyl;
  }
  return x;
}

// Of the fragment's elements of a thread, in columns of kColumns: a bit each. Element i is one of
// two rows 8 apart, (i / 2) % 2, in the columns i / 4 * 8 + i % 2.
template <bool kRowsAreQueries_, int kColumns_>
struct KeepBits {
  static constexpr bool kRowsAreQueries = kRowsAreQueries_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kSteps = kColumns / 8;  // of two calls in neighbouring columns, one key each
  static_assert(kColumns % 16 == 0, "a call's elements are 8 columns apart");
  uint32_t words[(kSteps + 7) / 8];

  // A step has four elements, a byte each: two neighbouring columns of the first query, two of the
  // one 8 after it. It has the same bit of all four bytes; eight steps share a word.
  __device__ __forceinline__ static constexpr int step(int i) {
    const int lower = i / 2 % 2, right = i / 4 % 2;
    return i / 8 * 2 + (kRowsAreQueries ? right : lower);
  }
  __device__ __forceinline__ static constexpr int byte(int i) {
    const int lower = i / 2 % 2, right = i / 4 % 2;
    return (kRowsAreQueries ? lower : right) * 2 + i % 2;
  }

  __device__ __forceinline__ float of(int i, float x) const {
    return (words[step(i) / 8] >> (byte(i) * 8 + step(i) % 8) & 1) != 0 ? x : 0.f;
  }
  // Of the elements i and i + 1, i even, packed into the halves of a word.
  __device__ __forceinline__ uint32_t of_pair(int i, uint32_t pair) const {
    const uint32_t signs = words[step(i) / 8] << (7 - step(i) % 8);
    return pair & (byte(i) == 0 ? permute_bytes<0x9988>(signs, signs)
                                : permute_bytes<0xbbaa>(signs, signs));
  }
  __device__ __forceinline__ void keep_all() {
#pragma unroll
    for (uint32_t& word : words) word = ~0u;
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
      : start_(philox2x32(
            philox2x32({static_cast<uint32_t>(h), static_cast<uint32_t>(b)}, __ldg(parameters)),
            __ldg(parameters + 1))),
        thresholds_(__ldg(parameters + 2) * 0x10001u) {}

  // `row` and `column` of the thread's first element, in fragments that start at multiples of 16.
  template <bool kRowsAreQueries, int kColumns>
  __device__ __forceinline__ void draw(KeepBits<kRowsAreQueries, kColumns>& bits, int row,
                                       int column) const {
    using Bits = KeepBits<kRowsAreQueries, kColumns>;
    const uint32_t rows = place(row) + (kRowsAreQueries ? start_.c1 : start_.c0);
    const uint32_t columns = place(column) + (kRowsAreQueries ? start_.c0 : start_.c1);
#pragma unroll
    for (uint32_t& word : bits.words) word = 0;
#pragma unroll
    for (int step = 0; step < Bits::kSteps; step += 2) {
      uint32_t kept[2][2];  // of a column and the next one, of a key and the one 8 after it
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const uint32_t there = columns + step * 4 + next;
        // The key of the last round is 0, which leaves its XOR an operand for the OR below.
        const PhiloxCounter x = kRowsAreQueries ? philox2x32({there, rows}, 0u - 6 * kPhiloxWeyl)
                                                : philox2x32({rows, there}, 0u - 6 * kPhiloxWeyl);
        // Both halves at once: the upper bit survives where the other 15 are no less than the
        // threshold.
        kept[next][0] = (x.c0 | 0x80008000u) - thresholds_;
        kept[next][1] = (x.c1 | 0x80008000u) - thresholds_;
      }
#pragma unroll
      for (int high_key = 0; high_key < 2; ++high_key) {
        const int place = step + high_key;
        bits.words[place / 8] |=
            permute_bytes<0xfbd9>(kept[0][high_key], kept[1][high_key]) & 0x01010101u << place % 8;
      }
    }
#pragma unroll
    for (uint32_t& word : bits.words) asm("" : "+r"(word));  // or the steps' words stay apart
  }
  __device__ __forceinline__ void draw(KeepAll&, int, int) const {}

  // Whether any is dropped: a rate close to 0 is none.
  __device__ __forceinline__ bool drops() const { return thresholds_ != 0; }
  // The share of probabilities that are kept.
  __device__ __forceinline__ float share() const {
    return 1.f - static_cast<float>(thresholds_ & 0xffffu) * 0x1p-15f;
  }

 private:
  // A number of queries or keys without its bit of 8.
  __device__ __forceinline__ static uint32_t place(int position) {
    return position / 16u * 8 + position % 8u;
  }

  PhiloxCounter start_;  // c0 counts keys, c1 queries
  uint32_t thresholds_;  // in both halves
};

template <bool kDrops, bool kRowsAreQueries, int kColumns>
using Kept = Conditional<kDrops, KeepBits<kRowsAreQueries, kColumns>, KeepAll>;

}  // namespace jaxflash
