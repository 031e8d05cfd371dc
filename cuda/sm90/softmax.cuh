// From a tile of products to probabilities, on the accumulator fragments of one warpgroup.
#pragma once

#include "common/approx.cuh"
#include "common/logarithms.h"
#include "common/mask.cuh"
#include "common/softmax.cuh"
#include "sm90/hardware/ptx.cuh"

namespace jaxflash::sm90 {

// Where the accumulator of m64nN lies: thread t of a warpgroup holds, for every group of 8 columns,
// two neighbouring columns of row t / 32 * 16 + t % 32 / 4 and the same of the row 8 below.
struct Fragment {
  __device__ __forceinline__ static int row(int thread) {
    return thread / 32 * 16 + thread % 32 / 4;
  }
  __device__ __forceinline__ static int column(int thread) { return thread % 4 * 2; }
  // Of element i, relative to the thread's first row and column.
  __device__ __forceinline__ static constexpr int lower(int i) { return (i >> 1) & 1; }
  __device__ __forceinline__ static constexpr int column_of(int i) {
    return (i >> 2) * 8 + (i & 1);
  }
};

// Of the thread's two rows, along the sequence.
struct RowPositions {
  int of[2];
};

// Scores that are logits already, in units of log 2.
struct Logits {
  __device__ __forceinline__ float factor() const { return 1.f; }
  // Logits of row r, in units of log 2, are scores times the factor and this: a zero that additions
  // do without.
  __device__ __forceinline__ float lacking(int /*r*/) const { return -0.f; }
  // What exp2 takes.
  __device__ __forceinline__ float relative(int /*i*/, float s, float offset) const {
    return s + offset;
  }
};

// What the thread's rows see of a tile, relative to the thread's first column, which is `key`.
template <class Mask>
__device__ __forceinline__ void find_visible(Interval (&visible)[2], const Mask& mask,
                                             RowPositions rows, int key) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Interval keys = mask.keys_of_row(rows.of[r]);
    visible[r] = {keys.begin - key, keys.end - key};
  }
}

// Whether the mask hides something of kColumns columns from a row of the warp.
template <int kColumns, class Mask>
__device__ __forceinline__ bool cuts(const Mask& mask, RowPositions rows, int key) {
  Interval visible[2];
  find_visible(visible, mask, rows, key);
  bool inside = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) inside &= visible[r].begin <= 0 && visible[r].end >= kColumns;
  return !__all_sync(~0u, inside);
}

// Hides what lies outside the intervals that the thread's rows see. Only tiles at the edge of the
// mask come here, most of them cut on one side alone: a comparison and a select for an element,
// with the warp in step.
template <int kElements, class Mask>
__device__ __forceinline__ void apply_mask(float (&s)[kElements], const Mask& mask,
                                           RowPositions rows, int key) {
  constexpr int kColumns = 2 * kElements;
  Interval visible[2];
  find_visible(visible, mask, rows, key);
  if (__any_sync(~0u, visible[0].end < kColumns || visible[1].end < kColumns)) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (Fragment::column_of(i) >= visible[Fragment::lower(i)].end) s[i] = -INFINITY;
    }
  }
  if (__any_sync(~0u, visible[0].begin > 0 || visible[1].begin > 0)) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (Fragment::column_of(i) < visible[Fragment::lower(i)].begin) s[i] = -INFINITY;
    }
  }
}

// Running reference and sum of the thread's two rows. The reference is about the row maximum: it
// only moves once a row has outgrown it by far, because moving it means rescaling the output.
// The sums stay per thread until the end. kBounded: logits are so near to 0 that their exponentials
// need no reference; then it is 0, and exponentials() alone is called.
template <int kElements, Math kMath, bool kBounded = false>
class OnlineSoftmax {
 public:
  __device__ __forceinline__ void reset() {
    offset_[0] = offset_[1] = kBounded ? -0.f : kNoReference<kMath>;
    sum_[0] = sum_[1] = 0.f;
    settled_ = false;
  }

  // Moves the reference where a new tile has outgrown it by 2^slack in one of the warp's rows, but
  // for a row's first one to 2^room above the tile's maximum; true when the output so far must then
  // be multiplied by correction().
  template <class Scores>
  __device__ __forceinline__ bool advance(const float (&s)[kElements], const Scores& scores,
                                          float slack, float room) {
    const float scale_log2 = scores.factor();
    float top[4] = {s[0], s[2], s[4], s[6]};  // two chains a row halve the latency
#pragma unroll
    for (int i = 0; i < kElements; ++i) top[(i >> 1) & 3] = fmaxf(top[(i >> 1) & 3], s[i]);
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], top[r + 2]);
      top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
      outgrown |= fmaf(top[r], scale_log2, offset_[r] + scores.lacking(r)) > slack;
    }
    // One vote for the warp, so that the branch around the multiplications does not diverge.
    const bool rescale = __any_sync(~0u, outgrown);
    if (rescale) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // From the rounded offsets, as the exponentials use them: large logits stay consistent.
        const float logit = top[r] * scale_log2 + scores.lacking(r);
        const float above = offset_[r] < kNoReference<kMath> ? room : 0.f;
        const float offset = fminf(offset_[r], -logit - above);
        correction_[r] = exp2_approx(offset - offset_[r]);
        offset_[r] = offset;
        sum_[r] *= correction_[r];
      }
      settled_ =
          __all_sync(~0u, offset_[0] < kNoReference<kMath> && offset_[1] < kNoReference<kMath>);
    }
    return rescale;
  }

  // Whether all rows of the warp have a reference: one that has seen no key does not, and its first
  // one is sure to outgrow it.
  __device__ __forceinline__ bool settled() const { return settled_; }

  __device__ __forceinline__ float correction(int lower) const { return correction_[lower]; }

  // The probabilities of a tile relative to the reference: emit(i, e) once those up to i are there.
  template <class Scores, class Emit>
  __device__ __forceinline__ void exponentials(const float (&s)[kElements], const Scores& scores,
                                               const Emit& emit) {
    exponentials(s, scores, emit, sum_);
  }

  // The same without a look at the maxima: the sums over the tile bound every probability. False
  // where they are too large, which is rare, or not a number: then nothing has been added to the
  // rows' sums, and advance() comes next. The scores must outlive what `emit` writes.
  template <class Scores, class Emit>
  __device__ __forceinline__ bool exponentials_if_held(const float (&s)[kElements],
                                                       const Scores& scores, const Emit& emit) {
    float sum[2] = {0.f, 0.f};
    exponentials(s, scores, emit, sum);
    if (!__all_sync(~0u, sum[0] + sum[1] <= kMaxSum)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += sum[r];
    return true;
  }

  // A sink joins a row: a logit, in units of log 2, without a value. Updates the row's sum, and
  // returns what the output is multiplied with. The reference may lie far below the sink, as it is
  // that of the keys: then the sink becomes the reference.
  __device__ __forceinline__ float add_sink(float sink, float& row_sum, int lower) {
    const float above = sink + offset_[lower];
    const float smaller = exp2_approx(-fabsf(above));
    if (above <= 0.f) {
      row_sum += smaller;
      return rcp_approx(row_sum);
    }
    offset_[lower] = -sink;
    row_sum = fmaf(row_sum, smaller, 1.f);
    return smaller * rcp_approx(row_sum);
  }

  // Depends on every exponential so far.
  __device__ __forceinline__ float sum_of_sums() const { return sum_[0] + sum_[1]; }

  // Over the whole row; the same in the four threads that share it.
  __device__ __forceinline__ float row_sum(int lower) const {
    float sum = sum_[lower];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum;
  }

  // Natural logarithm of the row's sum of exponentials.
  __device__ __forceinline__ float lse(float row_sum, int lower) const {
    return (log2_approx(row_sum) - offset_[lower]) * kLn2;
  }

 private:
  // The larger, the less often a reference moves, and rows that have seen few keys have low ones.
  // Leaves room in float16 for four such sums, in float32 for values of 1e28.
  static constexpr float kMaxSum = kMath == Math::kFloat16 ? 0x1p14f : 0x1p32f;

  template <class Scores, class Emit>
  __device__ __forceinline__ void exponentials(const float (&s)[kElements], const Scores& scores,
                                               const Emit& emit, float (&sum)[2]) const {
    // Several exponentials in flight before the first is used: one has a latency of several.
    constexpr int kAhead = 6;
    float e[kElements];
#pragma unroll
    for (int i = 0; i < kElements + kAhead; ++i) {
      if (i < kElements) e[i] = exp2_approx(scores.relative(i, s[i], offset_[Fragment::lower(i)]));
      if (i >= kAhead) {
        const int done = i - kAhead;
        sum[Fragment::lower(done)] += e[done];
        emit(done, e);
      }
    }
  }

  float offset_[2];  // minus the reference, in units of log 2
  float sum_[2];
  float correction_[2];
  bool settled_;
};

}  // namespace jaxflash::sm90
