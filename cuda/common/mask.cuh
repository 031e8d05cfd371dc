// The mask as the kernels see it: which tiles, and which elements. Forward and backward ask the
// same object, so that a mask is written once.
#pragma once

#include "common/conditional.h"
#include "common/thread.cuh"
#include "problem.h"

namespace jaxflash {

struct Interval {
  int begin;
  int end;  // exclusive; end <= begin is empty
};

// Of an array of pairs.
__device__ __forceinline__ Interval interval_at(const int32_t* intervals, int64_t i) {
  const int2 interval = __ldg(reinterpret_cast<const int2*>(intervals) + i);
  return {interval.x, interval.y};
}
__device__ __forceinline__ void store_interval(int32_t* intervals, int64_t i, Interval interval) {
  reinterpret_cast<int2*>(intervals)[i] = make_int2(interval.begin, interval.end);
}

// The tiles of kSize elements that cover an interval.
template <int kSize>
__device__ __forceinline__ Interval covering_tiles(Interval elements) {
  if (elements.end <= elements.begin) return {0, 0};
  return {elements.begin / kSize, (elements.end + kSize - 1) / kSize};
}

// Those of 32 elements from `first` on that lie in an interval.
__device__ __forceinline__ uint32_t bits_within(Interval interval, int first) {
  const int begin = max(interval.begin - first, 0), end = min(interval.end - first, 32);
  return begin < end ? ~0u << begin & ~0u >> (32 - end) : 0;
}

// What is left of an interval whose ends may lie in a gap.
__device__ __forceinline__ Interval outside(Interval interval, Interval gap) {
  if (interval.begin >= gap.begin && interval.begin < gap.end) interval.begin = gap.end;
  if (interval.end > gap.begin && interval.end <= gap.end) interval.end = gap.begin;
  return interval;
}

// Where the next tile begins that has anything outside of a gap: at a multiple of `multiple` from
// `next` on, which is one.
__device__ __forceinline__ int beyond(Interval gap, int next, int multiple) {
  const bool inside = next >= gap.begin && next < gap.end;
  return inside ? max(next, gap.end / multiple * multiple) : next;
}

// Rows that see no key, or keys that no row sees, between others.
class HiddenElements {
 public:
  // kHiddenKeys or kHiddenRows of a sequence; `some`: whether there may be any where it is asked.
  __device__ __forceinline__ HiddenElements(const Problem& problem, int batch, RangeHull which,
                                            bool some)
      : problem_(&problem), batch_(batch), which_(which), some_(some) {}

  // They lie in this part of the array. Loaded each time: producers would spill.
  __device__ __forceinline__ Interval hull() const {
    if (!some_) return {0, 0};
    const int2 hull =
        __ldg(reinterpret_cast<const int2*>(problem_->ranges.hulls) + batch() * kHulls + which_);
    return {hull.x, hull.y};
  }
  __device__ __forceinline__ bool meet(Interval elements) const {
    const Interval hull = this->hull();
    return elements.begin < hull.end && elements.end > hull.begin;
  }
  __device__ __forceinline__ bool hold(int element) const {
    return meet({element, element + 1}) && (bits<32>(element / 32 * 32) >> element % 32 & 1) != 0;
  }
  // A bit for each of kCount elements, 16 or 32, from `first` on, a multiple of kCount; also
  // outside of the hull.
  template <int kCount>
  __device__ __forceinline__ uint32_t bits(int first) const {
    using Word = Conditional<kCount == 32, uint32_t, uint16_t>;
    const Ranges& ranges = problem_->ranges;
    const bool of_rows = which_ == kHiddenRows;
    const int length = of_rows ? problem_->q_len : problem_->kv_len;
    if (!some_ || first >= length) return 0;
    const int32_t* blocks = of_rows ? ranges.row_blocks : ranges.key_blocks;
    const int64_t block = batch() * blocks_of(length) + first / kRangeBlock;
    const auto* words = reinterpret_cast<const Word*>(blocks + (block * kSummaries + kHidden) * 2);
    return __ldg(words + first % kRangeBlock / kCount);
  }

 private:
  // Forgotten, or the roles of a kernel share addresses and keep them: consumers of the backward
  // one at head size 64 spill 68 bytes.
  __device__ __forceinline__ int64_t batch() const { return forget(batch_); }

  const Problem* problem_;
  int batch_;
  RangeHull which_;
  bool some_;
};

// Those of a mask that does not know.
struct NoneHidden {
  NoneHidden() = default;
  __device__ __forceinline__ NoneHidden(const Problem&, int /*batch*/, RangeHull, bool) {}
  __device__ __forceinline__ Interval hull() const { return {0, 0}; }
  __device__ __forceinline__ bool meet(Interval) const { return false; }
  __device__ __forceinline__ bool hold(int) const { return false; }
  template <int kCount>
  __device__ __forceinline__ uint32_t bits(int) const {
    return 0;
  }
};

// From a row's number to its position among the keys.
template <class Mask>
__device__ __forceinline__ int diagonal_of(const Problem& problem, const Mask& mask) {
  return problem.band.bottom_right ? mask.kv_len() - mask.q_len() : 0;
}

// A band around the diagonal, cut at the sequence's own lengths: row i sees the keys
// i + lo ... i + hi (both included) that lie in [0, kv_len), if i < q_len.
class BandMask {
 public:
  // Whether what lies in an element's intervals may still be hidden.
  static constexpr bool kTestsElements = false;
  // Whether what all of some rows or keys see has regard to what the score program hides.
  static constexpr bool kKnowsProgram = false;
  // Whether how much rows see is known to the device alone.
  static constexpr bool kVaries = false;
  // Whether nobody may see what lies between two parts that are seen: the longest such gap is left
  // out.
  static constexpr bool kHasGaps = false;
  // Whether nobody may see what lies between any number of such parts, see Walked.
  static constexpr bool kWalks = false;
  // Whether key tiles that work on a row tile need not be neighbours, see DqTurn.
  static constexpr bool kFindsTurns = false;
  using Hidden = NoneHidden;

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

  // The keys that some row of the sequence sees lie in this interval.
  __device__ __forceinline__ Interval seen_keys() const { return keys({0, q_len_}); }

  // Those of them that no row sees, and rows that see none; `some`: as of HiddenElements. And
  // whether some of those lie there.
  __device__ __forceinline__ Hidden hidden_keys(bool /*some*/) const { return {}; }
  __device__ __forceinline__ Hidden hidden_rows(bool /*some*/) const { return {}; }
  __device__ __forceinline__ bool hides_keys(Interval /*keys*/) const { return false; }
  __device__ __forceinline__ bool hides_rows(Interval /*rows*/) const { return false; }

  // The keys that this row sees.
  __device__ __forceinline__ Interval keys_of_row(int row) const { return keys({row, row + 1}); }

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

  // Keys that no row of `rows` sees, and rows that see no key of `keys`: only to be skipped.
  __device__ __forceinline__ Interval gap_of_keys(Interval /*rows*/) const { return {0, 0}; }
  __device__ __forceinline__ Interval gap_of_rows(Interval /*keys*/) const { return {0, 0}; }

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

// A mask beside a score program that hides something of which it does not know: every tile is
// tested.
template <class Mask>
class Tested : public Mask {
 public:
  using Mask::Mask;
  __device__ __forceinline__ Interval common_keys(Interval) const { return {0, 0}; }
  __device__ __forceinline__ Interval common_rows(Interval) const { return {0, 0}; }
  __device__ __forceinline__ bool full(Interval, Interval) const { return false; }
};

// A mask of ranges in a backward pass whose adds to dq have an order.
template <class Mask>
class Ordered : public Mask {
 public:
  using Mask::Mask;
  static constexpr bool kFindsTurns = true;
};

// The mask that a kernel with these scores asks in place of another one.
template <class Mask, class Scores>
using MaskBeside = Conditional<Scores::kMasks && !Mask::kKnowsProgram, Tested<Mask>, Mask>;

}  // namespace jaxflash
