// Where in a sequence the elements of each segment lie, by a table that has a bucket for each
// remainder of their ids.
#pragma once

#include "common/mask.cuh"
#include "problem.h"

namespace jaxflash {

inline constexpr int kSegmentThreads = 256;

// Ids in their order, as numbers without a sign.
__device__ __forceinline__ uint32_t segment_rank(int32_t id) {
  return static_cast<uint32_t>(id) ^ 0x80000000u;
}

// Which of the buckets for `size` elements is that of an id.
__device__ __forceinline__ uint32_t bucket_of(int32_t id, int size) {
  return segment_rank(id) % static_cast<uint32_t>(segment_buckets(size));
}

// `equal`: the lanes of neighbouring elements that have the same to enter, often all of a warp.
// They do so together.
__device__ __forceinline__ void enter_segment(SegmentBucket& to, int32_t id, int element,
                                              uint32_t equal) {
  const int lane = threadIdx.x % 32;
  if (lane != __ffs(equal) - 1) return;
  const int last = element - lane + 31 - __clz(equal);
  atomicMin(&to.first, static_cast<uint32_t>(element));
  atomicMin(&to.inverted_last, ~static_cast<uint32_t>(last));
  atomicMin(&to.low, segment_rank(id));
  atomicMin(&to.inverted_high, ~segment_rank(id));
  atomicAdd(&to.less_than_number, __popc(equal));
}

struct SegmentMatch {
  Interval interval;
  bool solid;

  // What the bucket of an id says of its equals.
  __device__ __forceinline__ SegmentMatch(const SegmentBucket& found, int32_t id) {
    const uint32_t last = ~found.inverted_last, number = found.less_than_number + 1;
    const bool is_shared = found.low < ~found.inverted_high;
    // Nothing has been entered into an empty bucket: its first element is behind its last.
    const bool exists = found.first <= last && (is_shared || found.low == segment_rank(id));
    interval = {exists ? static_cast<int>(found.first) : 0,
                exists ? static_cast<int>(last) + 1 : 0};
    solid =
        !exists || (!is_shared && number == static_cast<uint32_t>(interval.end - interval.begin));
  }
};

// Rows or keys of a sequence, and those that are matched with them.
struct SegmentSide {
  const int32_t* ids;
  int size;
  const int32_t* other_ids;
  int other_size;
  int32_t* intervals;
  int64_t first;  // of this sequence's elements among those of all

  __device__ __forceinline__ SegmentSide(const SegmentMatchesParams& params, int64_t number,
                                         bool of_rows) {
    const int32_t* const q_ids = params.q_ids + number * params.rows;
    const int32_t* const kv_ids = params.kv_ids + number * params.keys;
    size = of_rows ? params.rows : params.keys;
    other_size = of_rows ? params.keys : params.rows;
    ids = of_rows ? q_ids : kv_ids;
    other_ids = of_rows ? kv_ids : q_ids;
    first = number * size;
    intervals = (of_rows ? params.keys_of_row : params.rows_of_key) + 2 * first;
  }
};

// A thread for each row and key.
template <bool kEnters>
__global__ void __launch_bounds__(kSegmentThreads)
    segments_kernel(const __grid_constant__ SegmentMatchesParams params) {
  const int64_t elements = int64_t{params.rows} + params.keys;
  const int64_t at = int64_t{blockIdx.x} * kSegmentThreads + threadIdx.x;
  const int64_t number = at / elements;
  const uint32_t lanes = __ballot_sync(~0u, number < params.count);
  if (number >= params.count) return;
  const int64_t of_sequence = at - number * elements;
  const bool of_rows = of_sequence < params.rows;
  const SegmentSide side(params, number, of_rows);
  const int element = static_cast<int>(of_rows ? of_sequence : of_sequence - params.rows);
  const int32_t id = side.ids[element];
  // Of a sequence the buckets of keys, where rows look, then those of rows.
  SegmentBucket* const of_keys = params.buckets + number * segment_buckets(elements);
  SegmentBucket* const of_queries = of_keys + segment_buckets(params.keys);
  if constexpr (kEnters) {
    SegmentBucket& to = (of_rows ? of_queries : of_keys)[bucket_of(id, side.size)];
    const uint32_t equal =
        __match_any_sync(lanes, id) & __match_any_sync(lanes, reinterpret_cast<uint64_t>(&to));
    enter_segment(to, id, element, equal);
  } else {
    const SegmentBucket* const others = of_rows ? of_keys : of_queries;
    const SegmentMatch match(others[bucket_of(id, side.other_size)], id);
    store_interval(side.intervals, element, match.interval);
    (of_rows ? params.keys_solid : params.rows_solid)[side.first + element] = match.solid;
  }
}

}  // namespace jaxflash
