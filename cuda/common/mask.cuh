// The mask as the kernels see it: which tiles, and which elements. Forward and backward ask the
// same object, so that a mask is written once.
#pragma once

#include "problem.h"

namespace jaxflash {

struct Interval {
  int begin;
  int end;  // exclusive; end <= begin is empty
};

// A band around the diagonal, cut at the sequence's own lengths: row i sees the keys
// i + lo ... i + hi (both included) that lie in [0, kv_len), if i < q_len.
class BandMask {
 public:
  // `batch` is the flat index over the batch axes.
  __device__ __forceinline__ BandMask(const Problem& problem, int64_t batch)
      : q_len_(length(problem.band.q_lengths, batch, problem.q_len)),
        kv_len_(length(problem.band.kv_lengths, batch, problem.kv_len)) {
    const int diagonal = problem.band.bottom_right ? kv_len_ - q_len_ : 0;
    lo_ = problem.band.left >= kUnlimited ? -kMaxLength
                                          : max(diagonal - problem.band.left, -kMaxLength);
    hi_ = problem.band.right >= kUnlimited
              ? kMaxLength
              : min(max(diagonal + problem.band.right, -kMaxLength), kMaxLength);
  }

  __device__ __forceinline__ int q_len() const { return q_len_; }
  __device__ __forceinline__ int kv_len() const { return kv_len_; }

  // The keys that some row of `rows` sees lie in this interval.
  __device__ __forceinline__ Interval keys(Interval rows) const {
    const int last_row = min(rows.end, q_len_) - 1;
    if (last_row < rows.begin) return {0, 0};
    return {max(rows.begin + lo_, 0), min(last_row + hi_, kv_len_ - 1) + 1};
  }

  // Every row of `rows` sees these keys; rows that do not take part are left out.
  __device__ __forceinline__ Interval common_keys(Interval rows) const {
    const int last_row = min(rows.end, q_len_) - 1;
    return {max(last_row + lo_, 0), min(rows.begin + hi_, kv_len_ - 1) + 1};
  }

  // The rows that see some key of `keys` lie in this interval.
  __device__ __forceinline__ Interval rows(Interval keys) const {
    const int last_key = min(keys.end, kv_len_) - 1;
    if (last_key < keys.begin) return {0, 0};
    return {max(keys.begin - hi_, 0), min(last_key - lo_, q_len_ - 1) + 1};
  }

  // These rows see every key of `keys`.
  __device__ __forceinline__ Interval common_rows(Interval keys) const {
    if (keys.end > kv_len_) return {0, 0};
    return {max(keys.end - 1 - hi_, 0), min(keys.begin - lo_, q_len_ - 1) + 1};
  }

  // The rows that see this key.
  __device__ __forceinline__ Interval rows_of_key(int key) const {
    return {max(key - hi_, 0), key < kv_len_ ? min(key - lo_, q_len_ - 1) + 1 : 0};
  }

  // Every row of `rows` sees every key of `keys`: no element needs a test.
  __device__ __forceinline__ bool full(Interval rows, Interval keys) const {
    return rows.end <= q_len_ && keys.end <= kv_len_ && keys.begin >= rows.end - 1 + lo_ &&
           keys.end - 1 <= rows.begin + hi_;
  }

  __device__ __forceinline__ bool visible(int row, int key) const {
    return row < q_len_ && key < kv_len_ && key >= row + lo_ && key <= row + hi_;
  }

 private:
  __device__ __forceinline__ static int length(const int32_t* lengths, int64_t batch, int limit) {
    return lengths == nullptr ? limit : min(max(lengths[batch], 0), limit);
  }

  int q_len_;
  int kv_len_;
  int lo_;
  int hi_;
};

}  // namespace jaxflash
