// A mask whose rows see intervals of keys, and keys intervals of rows: segments, packed sequences.
#pragma once

#include "common/mask.cuh"

namespace jaxflash {

// A band, and within it the intervals of problem.ranges. With kIds only equal ids see each other,
// too; a row with other ids inside its interval is then summarised as one that shares no key, so
// that its tiles are tested by element. With kOfProgram what a score program hides is summarised
// likewise, and gaps are known.
//
// Answers about many rows or keys come from summaries of blocks of kRangeBlock: what some of them
// see may be too wide, what all and what none of them see too narrow.
template <bool kIds, bool kOfProgram = false>
class RangeMask {
 public:
  static constexpr bool kTestsElements = kIds;
  static constexpr bool kKnowsProgram = kOfProgram;
  static constexpr bool kVaries = true;
  static constexpr bool kHasGaps = kOfProgram;
  static constexpr bool kWalks = false;
  static constexpr bool kFindsTurns = false;
  using Hidden = HiddenElements;

  __device__ __forceinline__ RangeMask(const Problem& problem, int64_t batch)
      : band_(problem, batch), problem_(&problem), batch_(static_cast<int>(batch)) {}

  __device__ __forceinline__ int q_len() const { return band_.q_len(); }
  __device__ __forceinline__ int kv_len() const { return band_.kv_len(); }

  __device__ __forceinline__ Interval keys(Interval rows) const {
    return both(band_.keys(rows), hull(ranges().row_blocks, problem_->q_len, rows));
  }
  __device__ __forceinline__ Interval common_keys(Interval rows) const {
    return both(band_.common_keys(rows),
                shared<kCommon>(ranges().row_blocks, problem_->q_len, rows));
  }
  __device__ __forceinline__ Interval rows(Interval keys) const {
    return both(band_.rows(keys), hull(ranges().key_blocks, problem_->kv_len, keys));
  }
  __device__ __forceinline__ Interval common_rows(Interval keys) const {
    return both(band_.common_rows(keys),
                shared<kCommon>(ranges().key_blocks, problem_->kv_len, keys));
  }
  __device__ __forceinline__ Interval gap_of_keys(Interval rows) const {
    if constexpr (kOfProgram) {
      return shared<kGap>(ranges().row_blocks, problem_->q_len, rows);
    } else {
      return {0, 0};
    }
  }
  __device__ __forceinline__ Interval gap_of_rows(Interval keys) const {
    if constexpr (kOfProgram) {
      return shared<kGap>(ranges().key_blocks, problem_->kv_len, keys);
    } else {
      return {0, 0};
    }
  }
  // The program says itself what of an element's intervals it hides, and so do ids.
  __device__ __forceinline__ Interval keys_of_row(int row) const {
    const Interval keys = band_.keys_of_row(row);
    if constexpr (kOfProgram) {
      return keys;
    } else {
      return both(keys, one(ranges().keys_of_row, problem_->q_len, min(row, problem_->q_len - 1)));
    }
  }
  __device__ __forceinline__ Interval rows_of_key(int key) const {
    const Interval rows = band_.rows_of_key(key);
    if constexpr (kOfProgram) {
      return rows;
    } else {
      return both(rows,
                  one(ranges().rows_of_key, problem_->kv_len, min(key, problem_->kv_len - 1)));
    }
  }
  __device__ __forceinline__ Interval seen_keys() const {
    return both(band_.seen_keys(), one(ranges().hulls, kHulls, kSeenKeys));
  }
  __device__ __forceinline__ Hidden hidden_keys(bool some) const {
    return {*problem_, batch_, kHiddenKeys, some};
  }
  __device__ __forceinline__ Hidden hidden_rows(bool some) const {
    return {*problem_, batch_, kHiddenRows, some};
  }
  __device__ __forceinline__ bool hides_keys(Interval keys) const {
    return hidden_keys(true).meet(keys);
  }
  __device__ __forceinline__ bool hides_rows(Interval rows) const {
    return hidden_rows(true).meet(rows);
  }
  __device__ __forceinline__ bool full(Interval rows, Interval keys) const {
    const Interval common = common_keys(rows);
    return rows.end <= q_len() && common.begin <= keys.begin && keys.end <= common.end;
  }
  __device__ __forceinline__ bool visible(int row, int key) const {
    const Interval keys = keys_of_row(row);
    return row < q_len() && key >= keys.begin && key < keys.end && same_id(row, key);
  }
  // Whether two of the arrays' positions have one id.
  __device__ __forceinline__ bool same_id(int row, int key) const {
    if constexpr (!kIds) {
      return true;
    } else {
      const int32_t q_id = __ldg(ranges().q_ids + element(problem_->q_len, row));
      return q_id == __ldg(ranges().kv_ids + element(problem_->kv_len, key));
    }
  }

 protected:
  __device__ __forceinline__ const BandMask& band() const { return band_; }
  __device__ __forceinline__ const Problem& problem() const { return *problem_; }
  __device__ __forceinline__ int batch() const { return batch_; }

 private:
  __device__ __forceinline__ const Ranges& ranges() const { return problem_->ranges; }
  __device__ __forceinline__ int64_t element(int length, int i) const {
    return int64_t{batch_} * length + min(i, length - 1);
  }
  __device__ __forceinline__ static Interval both(Interval a, Interval b) {
    return {max(a.begin, b.begin), min(a.end, b.end)};
  }
  __device__ __forceinline__ Interval one(const int32_t* intervals, int length, int i) const {
    const int2 interval = __ldg(reinterpret_cast<const int2*>(intervals) + element(length, i));
    return {interval.x, interval.y};
  }
  // Of the blocks that meet `part`, all of them inside `length`, their intervals of one kind: the
  // hull of all, or what they share.
  template <RangeSummary kKind, class Merge>
  __device__ __forceinline__ Interval summary(const int32_t* blocks, int length, Interval part,
                                              Interval neutral, const Merge& merge) const {
    const int count = (length + kRangeBlock - 1) / kRangeBlock;
    int left = (min(part.end, length) - 1) / kRangeBlock - part.begin / kRangeBlock;
    // In 32 bits, see kMaxRangeBlocks, and one by one: planning warps have few registers.
    const uint32_t first = static_cast<uint32_t>(batch_) * count + part.begin / kRangeBlock;
    const auto* next = reinterpret_cast<const int2*>(blocks) + first * kSummaries + kKind;
#pragma unroll 1
    for (; left >= 0; --left, next += kSummaries) {
      const int2 interval = __ldg(next);
      neutral = merge(neutral, Interval{interval.x, interval.y});
    }
    return neutral;
  }
  __device__ __forceinline__ Interval hull(const int32_t* blocks, int length, Interval part) const {
    return summary<kHull>(blocks, length, part, {kMaxLength, 0}, [](Interval a, Interval b) {
      return Interval{min(a.begin, b.begin), max(a.end, b.end)};
    });
  }
  template <RangeSummary kKind>
  __device__ __forceinline__ Interval shared(const int32_t* blocks, int length,
                                             Interval part) const {
    return summary<kKind>(blocks, length, part, {0, kMaxLength}, both);
  }

  BandMask band_;
  const Problem* problem_;
  int batch_;
};

}  // namespace jaxflash
