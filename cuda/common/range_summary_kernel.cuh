// What is known of blocks of 64 rows or keys, and of sequences, given the intervals of all
// elements.
#pragma once

#include "common/mask.cuh"
#include "problem.h"

namespace jaxflash {

inline constexpr int kRangeSummaryThreads = 256;
static_assert(kRangeBlock == 64, "two elements a lane, and bits of a word");

__device__ __forceinline__ Interval interval_at(const int32_t* intervals, int64_t i) {
  const int2 interval = __ldg(reinterpret_cast<const int2*>(intervals) + i);
  return {interval.x, interval.y};
}
__device__ __forceinline__ void store_interval(int32_t* intervals, int64_t i, Interval interval) {
  reinterpret_cast<int2*>(intervals)[i] = make_int2(interval.begin, interval.end);
}

// One warp's blocks.
struct RangeBlock {
  Interval hull{kMaxLength, 0};
  Interval common{0, kMaxLength};
  uint64_t hidden = 0;

  // All lanes. Intervals of `size` elements, of which this is block `own`.
  __device__ __forceinline__ RangeBlock(const int32_t* intervals, const uint8_t* solid, int own,
                                        int size) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int element = own * kRangeBlock + 32 * i + threadIdx.x % 32;
      const bool exists = element < size;
      const Interval interval = exists ? interval_at(intervals, element) : Interval{0, 0};
      const bool empty = interval.begin >= interval.end;
      if (!empty) {
        hull = {min(hull.begin, interval.begin), max(hull.end, interval.end)};
      }
      if (exists) {
        const bool shares = !empty && (solid == nullptr || solid[element] != 0);
        common = shares ? Interval{max(common.begin, interval.begin), min(common.end, interval.end)}
                        : Interval{kMaxLength, 0};
      }
      hidden |= uint64_t{__ballot_sync(~0u, exists && empty)} << 32 * i;
    }
    hull = {__reduce_min_sync(~0u, hull.begin), __reduce_max_sync(~0u, hull.end)};
    common = {__reduce_max_sync(~0u, common.begin), __reduce_min_sync(~0u, common.end)};
  }
};

// A warp for each block of rows or keys.
__global__ void __launch_bounds__(kRangeSummaryThreads)
    range_blocks_kernel(const __grid_constant__ RangeSummaryParams params) {
  const int row_blocks = blocks_of(params.rows), key_blocks = blocks_of(params.keys);
  const int64_t work = (int64_t{blockIdx.x} * kRangeSummaryThreads + threadIdx.x) / 32;
  const int64_t number = work / (row_blocks + key_blocks);
  if (number >= params.count) return;
  int own = static_cast<int>(work % (row_blocks + key_blocks));
  const bool of_rows = own < row_blocks;
  if (!of_rows) own -= row_blocks;
  const int size = of_rows ? params.rows : params.keys;
  const int32_t* intervals = of_rows ? params.keys_of_row : params.rows_of_key;
  const uint8_t* solid = of_rows ? params.keys_solid : params.rows_solid;
  const RangeBlock block(intervals + 2 * number * size,
                         solid == nullptr ? nullptr : solid + number * size, own, size);
  if (threadIdx.x % 32 != 0) return;

  const int64_t at = number * (of_rows ? row_blocks : key_blocks) + own;
  const int32_t* inside = of_rows ? params.keys_inside : params.rows_inside;
  Interval common = block.common, gap = {block.hull.end, block.hull.end};
  if (inside != nullptr) {
    const Interval whole = interval_at(inside, 2 * at);
    common = {max(common.begin, whole.begin), min(common.end, whole.end)};
    gap = interval_at(inside, 2 * at + 1);
  }
  int32_t* summary = of_rows ? params.row_blocks : params.key_blocks;
  store_interval(summary, 3 * at, block.hull);
  store_interval(summary, 3 * at + 1, common.begin < common.end ? common : Interval{0, 0});
  store_interval(summary, 3 * at + 2, gap);
  params.hidden[work] = block.hidden;
}

// Over a block of threads: every thread gets the result.
template <class Reduce>
__device__ __forceinline__ int reduced(int value, const Reduce& reduce) {
  __shared__ int of_warps[kRangeSummaryThreads / 32];
  value = reduce(value);
  __syncthreads();  // the numbers of the time before have been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  return reduce(of_warps[threadIdx.x % (kRangeSummaryThreads / 32)]);
}
__device__ __forceinline__ Interval joined(Interval interval) {
  const int begin = reduced(interval.begin, [](int x) { return __reduce_min_sync(~0u, x); });
  const int end = reduced(interval.end, [](int x) { return __reduce_max_sync(~0u, x); });
  return {begin, end};
}

// The hull of the hidden elements among `part`, of those of some blocks.
__device__ __forceinline__ Interval hull_of_hidden(const uint64_t* hidden, int blocks,
                                                   Interval part) {
  Interval hull = {kMaxLength, 0};
  for (int block = threadIdx.x; block < blocks; block += kRangeSummaryThreads) {
    const int first = block * kRangeBlock;
    const int begin = max(part.begin - first, 0), end = min(part.end - first, kRangeBlock);
    if (begin >= end) continue;
    const uint64_t bits = hidden[block] & ~uint64_t{0} << begin & ~uint64_t{0} >> (64 - end);
    if (bits == 0) continue;
    hull.begin = min(hull.begin, first + __ffsll(static_cast<long long>(bits)) - 1);
    hull.end = max(hull.end, first + 64 - __clzll(static_cast<long long>(bits)));
  }
  return joined(hull);
}

// A block for each sequence.
__global__ void __launch_bounds__(kRangeSummaryThreads)
    range_hulls_kernel(const __grid_constant__ RangeSummaryParams params) {
  const int64_t number = blockIdx.x;
  const int row_blocks = blocks_of(params.rows), key_blocks = blocks_of(params.keys);
  Interval hull = {kMaxLength, 0};
  for (int block = threadIdx.x; block < row_blocks; block += kRangeSummaryThreads) {
    const Interval own = interval_at(params.row_blocks, 3 * (number * row_blocks + block));
    hull = {min(hull.begin, own.begin), max(hull.end, own.end)};
  }
  hull = joined(hull);
  Interval keys = {0, 0}, rows = {0, 0};
  if (params.keys_inside != nullptr) {
    const uint64_t* hidden = params.hidden + number * (row_blocks + key_blocks);
    keys = hull_of_hidden(hidden + row_blocks, key_blocks, hull);
    rows = hull_of_hidden(hidden, row_blocks, {0, params.rows});
  }
  if (threadIdx.x != 0) return;
  store_interval(params.hulls, 3 * number, hull);
  store_interval(params.hulls, 3 * number + 1, keys);
  store_interval(params.hulls, 3 * number + 2, rows);
}

}  // namespace jaxflash
