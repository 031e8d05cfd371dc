// What is known of blocks of 64 rows or keys, and of sequences, given the intervals of all
// elements.
#pragma once

#include "common/mask.cuh"
#include "problem.h"

namespace jaxflash {

inline constexpr int kRangeSummaryThreads = 256;
static_assert(kRangeBlock == 64, "two elements a lane, and bits of a word");

// What a warp finds of a block, two elements a lane.
struct RangeBlock {
  Interval hull{kMaxLength, 0};
  Interval common{0, kMaxLength};
  uint64_t hidden = 0;

  // The number of this lane's element `i`.
  __device__ __forceinline__ static int element(int own, int i) {
    return own * kRangeBlock + 32 * i + threadIdx.x % 32;
  }

  // All lanes. `solid`: all that lies in the interval is seen.
  __device__ __forceinline__ void take(int i, bool exists, Interval interval, bool solid) {
    const bool empty = interval.begin >= interval.end;
    if (exists && !empty) {
      hull = {min(hull.begin, interval.begin), max(hull.end, interval.end)};
    }
    if (exists) {
      common = !empty && solid
                   ? Interval{max(common.begin, interval.begin), min(common.end, interval.end)}
                   : Interval{kMaxLength, 0};
    }
    hidden |= uint64_t{__ballot_sync(~0u, exists && empty)} << 32 * i;
  }

  __device__ __forceinline__ void reduce() {
    hull = {__reduce_min_sync(~0u, hull.begin), __reduce_max_sync(~0u, hull.end)};
    common = {__reduce_max_sync(~0u, common.begin), __reduce_min_sync(~0u, common.end)};
  }

  // One lane, of block `own` of a sequence's rows or keys.
  __device__ __forceinline__ void store(const RangeSummaryParams& params, int64_t number,
                                        bool of_rows, int own) const {
    const int64_t at = number * blocks_of(of_rows ? params.rows : params.keys) + own;
    const int32_t* inside = of_rows ? params.keys_inside : params.rows_inside;
    Interval seen = common, gap = {hull.end, hull.end};
    if (inside != nullptr) {
      const Interval whole = interval_at(inside, 2 * at);
      seen = {max(seen.begin, whole.begin), min(seen.end, whole.end)};
      gap = interval_at(inside, 2 * at + 1);
    }
    int32_t* summary = of_rows ? params.row_blocks : params.key_blocks;
    store_interval(summary, 3 * at, hull);
    store_interval(summary, 3 * at + 1, seen.begin < seen.end ? seen : Interval{0, 0});
    store_interval(summary, 3 * at + 2, gap);
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
  RangeBlock block;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int element = RangeBlock::element(own, i);
    const bool exists = element < size;
    const int64_t at = number * size + element;
    block.take(i, exists, exists ? interval_at(intervals, at) : Interval{0, 0},
               solid == nullptr || (exists && solid[at] != 0));
  }
  block.reduce();
  if (threadIdx.x % 32 != 0) return;
  block.store(params, number, of_rows, own);
  params.hidden[work] = block.hidden;
}

// One thread: those of a sequence.
__device__ __forceinline__ void store_hulls(const RangeSummaryParams& params, int64_t number,
                                            Interval seen, Interval hidden_keys,
                                            Interval hidden_rows) {
  store_interval(params.hulls, 3 * number, seen);
  store_interval(params.hulls, 3 * number + 1, hidden_keys);
  store_interval(params.hulls, 3 * number + 2, hidden_rows);
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
  if (threadIdx.x == 0) store_hulls(params, number, hull, keys, rows);
}

}  // namespace jaxflash
