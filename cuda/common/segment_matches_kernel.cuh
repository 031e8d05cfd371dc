// Where in a sequence the elements of each segment lie, by a table that has a bucket for each
// remainder of their ids.
#pragma once

#include "problem.h"

namespace jaxflash {

inline constexpr int kSegmentThreads = 256;

// Rows or keys of a sequence, and the buckets of those that are matched with them.
struct SegmentSide {
  const int32_t* ids;
  int size;
  SegmentBucket* own;  // where it is entered
  int other_size;
  const SegmentBucket* others;  // where it looks
  int32_t* intervals;
  uint8_t* solid;

  __device__ __forceinline__ SegmentSide(const SegmentMatchesParams& params, int64_t number,
                                         bool of_rows) {
    const int64_t rows = params.rows, keys = params.keys;
    size = of_rows ? params.rows : params.keys;
    other_size = of_rows ? params.keys : params.rows;
    ids = of_rows ? params.q_ids + number * rows : params.kv_ids + number * keys;
    intervals = (of_rows ? params.keys_of_row : params.rows_of_key) + number * size * 2;
    solid = (of_rows ? params.keys_solid : params.rows_solid) + number * size;
    SegmentBucket* const of_keys = params.buckets + number * 2 * (rows + keys);
    SegmentBucket* const of_queries = of_keys + 2 * keys;
    own = of_rows ? of_queries : of_keys;
    others = of_rows ? of_keys : of_queries;
  }

  // Which of the buckets of `size` elements is that of an id.
  __device__ __forceinline__ static int64_t bucket(int32_t id, int size) {
    const int64_t divisor = 2 * int64_t{size};
    const int64_t remainder = id % divisor;
    return remainder < 0 ? remainder + divisor : remainder;
  }
  // Ids in their order, as numbers without a sign.
  __device__ __forceinline__ static uint32_t rank(int32_t id) {
    return static_cast<uint32_t>(id) ^ 0x80000000u;
  }

  // Lanes that have the same to enter do so together: they are often all of one segment.
  __device__ __forceinline__ void enter(int element, uint32_t lanes) const {
    const int32_t id = ids[element];
    SegmentBucket& to = own[bucket(id, size)];
    const uint32_t equal =
        __match_any_sync(lanes, id) & __match_any_sync(lanes, reinterpret_cast<uint64_t>(&to));
    const int lane = threadIdx.x % 32;
    if (lane != __ffs(equal) - 1) return;
    const int last = element - lane + 31 - __clz(equal);
    atomicMin(&to.first, static_cast<uint32_t>(element));
    atomicMin(&to.inverted_last, ~static_cast<uint32_t>(last));
    atomicMin(&to.low, rank(id));
    atomicMin(&to.inverted_high, ~rank(id));
    atomicAdd(&to.less_than_number, __popc(equal));
  }

  __device__ __forceinline__ void look_up(int element) const {
    const int32_t id = ids[element];
    const SegmentBucket found = others[bucket(id, other_size)];
    const uint32_t last = ~found.inverted_last, number = found.less_than_number + 1;
    const bool is_shared = found.low < ~found.inverted_high;
    // Nothing has been entered into an empty bucket: its first element is behind its last.
    const bool exists = found.first <= last && (is_shared || found.low == rank(id));
    const int begin = exists ? static_cast<int>(found.first) : 0;
    const int end = exists ? static_cast<int>(last) + 1 : 0;
    reinterpret_cast<int2*>(intervals)[element] = make_int2(begin, end);
    solid[element] = !exists || (!is_shared && number == static_cast<uint32_t>(end - begin));
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
  if constexpr (kEnters) {
    side.enter(element, lanes);
  } else {
    side.look_up(element);
  }
}

}  // namespace jaxflash
