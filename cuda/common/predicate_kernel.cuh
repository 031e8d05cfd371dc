// What blocks of 64 rows and 64 keys show of a predicate, which is evaluated once for each element.
#pragma once

#include "common/mask.cuh"
#include "common/predicate_work.h"
#include "common/program.cuh"
#include "problem.h"

namespace jaxflash {

static_assert(kRangeBlock == 64, "bits of two words");

// A lane's keys, each with the rows of the band.
template <class Program>
class PredicateKeys {
 public:
  static constexpr int kCount = kPredicateBlocks * 2;

  __device__ __forceinline__ PredicateKeys(const PredicateParams& params, int64_t number,
                                           const BandMask& band, int first_key)
      : head_(head_of(params, number)), first_(first_key + static_cast<int>(threadIdx.x % 32)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      columns_[i] = Program::column(head_, key(i));
      rows_[i] = key(i) < params.keys ? band.rows_of_key(key(i)) : Interval{0, 0};
    }
  }

  // Of 32 rows a bit for each that sees key i.
  __device__ __forceinline__ void evaluate(int first_row, uint32_t (&bits)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] = 0;
    constexpr int kStep = 8;  // of which the compiler knows the bits
#pragma unroll 1
    for (int begin = 0; begin < 32; begin += kStep) {
      uint32_t part[kCount] = {};
#pragma unroll
      for (int r = 0; r < kStep; ++r) {
        const int q = first_row + begin + r;
        const auto row = Program::row(head_, q);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (shows(row, i, q)) part[i] |= 1u << r;
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) bits[i] |= part[i] << begin;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] &= bits_within(rows_[i], first_row);
  }

  __device__ __forceinline__ int key(int i) const { return first_ + 32 * i; }

 private:
  __device__ __forceinline__ static typename Program::Head head_of(const PredicateParams& params,
                                                                   int64_t number) {
    const Problem& problem = params.problem;
    const int64_t at = capture_offset(params.head_numbers_stride, problem, number);
    const int h = __ldg(params.head_numbers + at);
    const int b = batch_number(params.captures, problem, number);
    return Program::head(params.captures, problem, number, b, h);
  }

  template <class Row>
  __device__ __forceinline__ bool shows(const Row& row, int i, int q) const {
    if constexpr (Program::kMasks) {
      return Program::visible(head_, row, columns_[i], q, key(i), static_cast<float>(q - key(i)));
    } else {
      return true;
    }
  }

  typename Program::Head head_;
  int first_;
  typename Program::Column columns_[kCount];
  Interval rows_[kCount];
};

// A warp for 64 rows and 128 keys.
template <class Program>
__global__ void __launch_bounds__(kPredicateThreads)
    predicate_kernel(const __grid_constant__ PredicateParams params) {
  using Keys = PredicateKeys<Program>;
  const int row_blocks = blocks_of(params.rows), key_blocks = blocks_of(params.keys);
  const int across = (key_blocks + kPredicateBlocks - 1) / kPredicateBlocks;
  const int64_t work = (int64_t{blockIdx.x} * kPredicateThreads + threadIdx.x) / 32;
  const int64_t number = work / across / row_blocks;
  if (number >= params.count) return;
  const int key_block = static_cast<int>(work % across) * kPredicateBlocks;
  const int row_block = static_cast<int>(work / across % row_blocks);
  const int first_row = row_block * kRangeBlock, first_key = key_block * kRangeBlock;
  const BandMask band(params.problem, number);

  uint32_t row_sees[2] = {0, 0}, key_is_seen[Keys::kCount] = {};
  uint8_t blocks[kPredicateBlocks] = {};
  const Interval of_band = band.keys({first_row, first_row + kRangeBlock});
  if (of_band.begin < first_key + kPredicateBlocks * kRangeBlock && of_band.end > first_key) {
    const Keys keys(params, number, band, first_key);
    bool whole[kPredicateBlocks];
#pragma unroll
    for (int k = 0; k < kPredicateBlocks; ++k) whole[k] = true;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      uint32_t bits[Keys::kCount];
      keys.evaluate(first_row + 32 * half, bits);
      const uint32_t beyond = ~bits_within({0, params.rows}, first_row + 32 * half);
      uint32_t rows = 0;
#pragma unroll
      for (int i = 0; i < Keys::kCount; ++i) {
        rows |= bits[i];
        key_is_seen[i] |= bits[i];
        whole[i / 2] &= keys.key(i) >= params.keys || (bits[i] | beyond) == ~0u;
      }
      rows = __reduce_or_sync(~0u, rows);
      (half == 0 ? row_sees[0] : row_sees[1]) = rows;
    }
#pragma unroll
    for (int i = 0; i < Keys::kCount; ++i) key_is_seen[i] = __ballot_sync(~0u, key_is_seen[i] != 0);
#pragma unroll
    for (int k = 0; k < kPredicateBlocks; ++k) {
      const bool shown = (key_is_seen[2 * k] | key_is_seen[2 * k + 1]) != 0;
      blocks[k] = (shown ? PredicateBlocks::kShown : 0) |
                  (__all_sync(~0u, whole[k]) ? PredicateBlocks::kWhole : 0);
    }
  }
  if (threadIdx.x % 32 != 0) return;
  uint8_t* target = params.blocks + (number * row_blocks + row_block) * key_blocks + key_block;
  uint32_t* row_words = params.row_sees + 2 * (number * row_blocks + row_block);
  uint32_t* key_words = params.key_is_seen + 2 * (number * key_blocks + key_block);
#pragma unroll
  for (int k = 0; k < kPredicateBlocks; ++k) {
    if (key_block + k < key_blocks) target[k] = blocks[k];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row_sees[i] != 0) atomicOr(row_words + i, row_sees[i]);
  }
#pragma unroll
  for (int i = 0; i < Keys::kCount; ++i) {
    if (key_is_seen[i] != 0) atomicOr(key_words + i, key_is_seen[i]);
  }
}

}  // namespace jaxflash
