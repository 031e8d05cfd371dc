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
    const Interval hidden_words = {static_cast<int>(hidden), static_cast<int>(hidden >> 32)};
    int32_t* summary = of_rows ? params.row_blocks : params.key_blocks;
    store_interval(summary, kSummaries * at + kHull, hull);
    store_interval(summary, kSummaries * at + kCommon,
                   seen.begin < seen.end ? seen : Interval{0, 0});
    store_interval(summary, kSummaries * at + kGap, gap);
    store_interval(summary, kSummaries * at + kHidden, hidden_words);
  }
};

// What a block of rows visits, for a whole warp.
class RowWalk {
 public:
  RowWalk() = default;
  // Loads early what is needed late.
  __device__ __forceinline__ RowWalk(const RangeSummaryParams& params, int64_t number, int own)
      : words_(block_words_of(params.keys)) {
    const int64_t at = number * blocks_of(params.rows) + own;
    visits_ = reinterpret_cast<const uint2*>(params.row_visits);
    visits_ += (params.shares_visits ? own : at) * words_;
    gap_ = interval_at(params.keys_inside, 2 * at + 1);
    const int word = threadIdx.x % 32;
    shown_ = word < words_ ? visits_[word].x : 0;
  }

  // `hull`: of the keys that the rows see.
  __device__ __forceinline__ WalkCounts count(Interval hull) const {
    const Interval seen = covering_tiles<kRangeBlock>(hull);
    const Interval gap = {(gap_.begin + kRangeBlock - 1) / kRangeBlock, gap_.end / kRangeBlock};
    WalkCounts counts{0, 0};
    uint32_t all_shown = shown_;
    for (int word = threadIdx.x % 32; word < words_; word += 32) {
      if (word >= 32) all_shown = visits_[word].x;
      const uint32_t inside = bits_within(seen, 32 * word);
      const uint32_t shown = all_shown & inside;
      counts.visited += __popc(shown);
      counts.left_out += __popc(inside & ~shown & ~bits_within(gap, 32 * word));
    }
    return {__reduce_add_sync(~0u, counts.visited), __reduce_add_sync(~0u, counts.left_out)};
  }

 private:
  int words_;
  const uint2* visits_;
  Interval gap_;
  uint32_t shown_;  // in the lane's first word
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
  const bool counts_walk = of_rows && params.row_visits != nullptr;
  const RowWalk walk = counts_walk ? RowWalk(params, number, own) : RowWalk{};
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
  WalkCounts counts{0, 0};
  if (counts_walk) counts = walk.count(block.hull);
  if (threadIdx.x % 32 != 0) return;
  block.store(params, number, of_rows, own);
  if (counts_walk) params.walks[number * row_blocks + own] = counts;
}

// One thread: a pair of those of a sequence.
__device__ __forceinline__ void store_hull(const RangeSummaryParams& params, int64_t number,
                                           RangeHull which, Interval pair) {
  store_interval(params.hulls, kHulls * number + which, pair);
}

// What is found of a sequence's rows.
struct SequenceSummary {
  Interval seen;    // the hull of all keys
  Interval hidden;  // the hull of rows that see nothing
  int64_t visited;  // see WalkCounts
  int64_t left_out;
};

__device__ __forceinline__ Interval joined(Interval a, Interval b) {
  return {min(a.begin, b.begin), max(a.end, b.end)};
}
__device__ __forceinline__ SequenceSummary joined(const SequenceSummary& a,
                                                  const SequenceSummary& b) {
  return {joined(a.seen, b.seen), joined(a.hidden, b.hidden), a.visited + b.visited,
          a.left_out + b.left_out};
}

// The same of all threads of a block, to each of them; once for a type.
template <class Found>
__device__ __forceinline__ Found joined_over_block(Found found) {
  constexpr int kWarps = kRangeSummaryThreads / 32;
  constexpr int kWords = sizeof(Found) / sizeof(int);
  __shared__ Found of_warps[kWarps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    int words[kWords];
    memcpy(words, &found, sizeof(Found));
    for (int& word : words) word = __shfl_xor_sync(~0u, word, distance);
    Found other;
    memcpy(&other, words, sizeof(Found));
    found = joined(found, other);
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  found = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) found = joined(found, of_warps[warp]);
  return found;
}

// The hull of hidden elements, a bit each, of a block of them among `part`.
__device__ __forceinline__ Interval hull_of_hidden(uint64_t hidden, int block, Interval part) {
  const int first = block * kRangeBlock;
  const int begin = max(part.begin - first, 0), end = min(part.end - first, kRangeBlock);
  if (begin >= end) return {kMaxLength, 0};
  const uint64_t bits = hidden & ~uint64_t{0} << begin & ~uint64_t{0} >> (64 - end);
  if (bits == 0) return {kMaxLength, 0};
  return {first + __ffsll(static_cast<long long>(bits)) - 1,
          first + 64 - __clzll(static_cast<long long>(bits))};
}

// A block for each sequence.
__global__ void __launch_bounds__(kRangeSummaryThreads)
    range_hulls_kernel(const __grid_constant__ RangeSummaryParams params) {
  const int64_t number = blockIdx.x;
  const int row_blocks = blocks_of(params.rows), key_blocks = blocks_of(params.keys);
  const bool of_mask = params.keys_inside != nullptr;
  const auto hidden_of = [](const int32_t* blocks, int64_t block) {
    const Interval words = interval_at(blocks, kSummaries * block + kHidden);
    return uint64_t{static_cast<uint32_t>(words.end)} << 32 | static_cast<uint32_t>(words.begin);
  };
  SequenceSummary found{{kMaxLength, 0}, {kMaxLength, 0}, 0, 0};
  for (int block = threadIdx.x; block < row_blocks; block += kRangeSummaryThreads) {
    const int64_t at = number * row_blocks + block;
    SequenceSummary own{interval_at(params.row_blocks, kSummaries * at + kHull),
                        hull_of_hidden(hidden_of(params.row_blocks, at), block, {0, params.rows}),
                        0, 0};
    if (params.row_visits != nullptr) {
      const WalkCounts walk = params.walks[at];
      own.visited = walk.visited;
      own.left_out = walk.left_out;
    }
    found = joined(found, own);
  }
  found = joined_over_block(found);
  const Interval among = of_mask ? found.seen : Interval{0, params.keys};
  Interval hidden_keys{kMaxLength, 0};
  for (int block = threadIdx.x; block < key_blocks; block += kRangeSummaryThreads) {
    const uint64_t hidden = hidden_of(params.key_blocks, number * key_blocks + block);
    hidden_keys = joined(hidden_keys, hull_of_hidden(hidden, block, among));
  }
  hidden_keys = joined_over_block(hidden_keys);
  if (threadIdx.x != 0) return;
  const auto clamped = [](int64_t count) {
    return static_cast<int32_t>(min(count, int64_t{kMaxLength}));
  };
  store_hull(params, number, kSeenKeys, found.seen);
  store_hull(params, number, kHiddenKeys, hidden_keys);
  store_hull(params, number, kHiddenRows, found.hidden);
  store_hull(params, number, kWalkCounts, {clamped(found.visited), clamped(found.left_out)});
}

}  // namespace jaxflash
