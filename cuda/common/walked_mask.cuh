// What a score program shows of blocks, and the mask of a kernel that walks over them.
#pragma once

#include "common/dependency.cuh"
#include "common/mask.cuh"
#include "common/range_mask.cuh"
#include "common/workspace.h"

namespace jaxflash {

// Of some rows and some keys, whether some of the rows see some of the keys, and whether all see
// all of them.
struct Sight {
  bool some;
  bool all;
};

// The blocks of keys as those of kOwn blocks of rows see them, neighbours or some way apart, of
// which the first one exists; or the other way round. See Ranges.
template <int kOwn>
class SeenBlocks {
 public:
  // Of a sequence's words those of `block` and what follows, of blocks of `length` rows or keys;
  // `others`: how many there are to be seen.
  __device__ __forceinline__ SeenBlocks(const int32_t* visits, int64_t batch, int block, int length,
                                        int others, int stride = 1)
      : words_(reinterpret_cast<const uint2*>(visits) +
               (batch * blocks_of(length) + block) * block_words_of(others)),
        count_(block_words_of(others)),
        step_(stride * count_),
        own_(kOwn == 1 ? 1 : min(kOwn, (blocks_of(length) - block + stride - 1) / stride)) {}

  // Of 32 blocks, a bit for each of which something is seen.
  __device__ __forceinline__ uint32_t shown(int word) const {
    uint32_t seen = __ldg(&words_[word].x);
#pragma unroll
    for (int i = 1; i < kOwn; ++i) {
      if (i < own_) seen |= __ldg(&words_[i * step_ + word].x);
    }
    return seen;
  }

  // The last block below `end` > 0 of which something is seen; -1 if there is none.
  __device__ __forceinline__ int last_below(int end) const {
    end = min(end, 32 * count_);
    int word = (end - 1) / 32;
    uint32_t asked = ~0u >> (31 - (end - 1) % 32);
#pragma unroll 1
    for (; word >= 0; --word, asked = ~0u) {
      const uint32_t seen = shown(word) & asked;
      if (seen != 0) return 32 * word + 31 - __clz(seen);
    }
    return -1;
  }
  // The first one from `begin` on; if there is none, a number beyond all of them.
  __device__ __forceinline__ int first_from(int begin) const {
    int word = begin / 32;
    uint32_t asked = ~0u << begin % 32;
#pragma unroll 1
    for (; word < count_; ++word, asked = ~0u) {
      const uint32_t seen = shown(word) & asked;
      if (seen != 0) return 32 * word + __ffs(seen) - 1;
    }
    return 32 * count_;
  }

  __device__ __forceinline__ Sight sight(Interval blocks) const {
    Sight sight{false, true};
    blocks.end = min(blocks.end, 32 * count_);
#pragma unroll 1
    for (int word = blocks.begin / 32; 32 * word < blocks.end; ++word) {
      const uint32_t asked = bits_within(blocks, 32 * word);
      sight.some = sight.some || (shown(word) & asked) != 0;
      sight.all = sight.all && (~whole(word) & asked) == 0;
    }
    return sight;
  }

  // Of groups of kSize neighbours, how many have a block among these of which something is seen.
  template <int kSize>
  __device__ __forceinline__ int groups_seen(Interval blocks) const {
    static_assert(kSize == 1 || kSize == 2);
    int groups = 0;
    blocks.end = min(blocks.end, 32 * count_);
#pragma unroll 1
    for (int word = blocks.begin / 32; 32 * word < blocks.end; ++word) {
      uint32_t seen = shown(word) & bits_within(blocks, 32 * word);
      if (kSize == 2) seen = (seen | seen >> 1) & 0x55555555;
      groups += __popc(seen);
    }
    return groups;
  }

 private:
  __device__ __forceinline__ uint32_t whole(int word) const {
    uint32_t seen = __ldg(&words_[word].y);
    for (int i = 1; i < own_; ++i) seen &= __ldg(&words_[i * step_ + word].y);
    return seen;
  }

  const uint2* words_;
  int count_;
  int step_;  // from one's words to the next one's
  int own_;
};

// A mask of ranges of a program in a kernel that visits only what the program shows, however many
// gaps there are.
template <class Mask>
class Walked : public Mask {
 public:
  using Mask::Mask;
  static constexpr bool kHasGaps = false;
  static constexpr bool kWalks = true;

  // What kOwn blocks of rows see, `stride` apart.
  template <int kOwn>
  __device__ __forceinline__ SeenBlocks<kOwn> seen_by(int row_block, int stride = 1) const {
    const Problem& problem = this->problem();
    return {
        problem.ranges.row_visits, of_visits(), row_block, problem.q_len, problem.kv_len, stride};
  }
  // What sees kOwn blocks of keys.
  template <int kOwn>
  __device__ __forceinline__ SeenBlocks<kOwn> seeing(int key_block) const {
    const Problem& problem = this->problem();
    return {problem.ranges.key_visits, of_visits(), key_block, problem.kv_len, problem.q_len};
  }
  // What all of some rows see, or of some keys are seen by, but for what the program hides.
  __device__ __forceinline__ Interval open_keys(Interval rows) const {
    return Mask::kTestsElements ? Interval{0, 0} : this->band().common_keys(rows);
  }
  __device__ __forceinline__ Interval open_rows(Interval keys) const {
    return Mask::kTestsElements ? Interval{0, 0} : this->band().common_rows(keys);
  }

 private:
  __device__ __forceinline__ int of_visits() const {
    return this->problem().ranges.shares_visits ? 0 : this->batch();
  }
};

__device__ __forceinline__ WalkCounts walk_counts_of(const Ranges& ranges, int64_t sequence) {
  const Interval pair = interval_at(ranges.hulls, kHulls * sequence + kWalkCounts);
  return {pair.begin, pair.end};
}

// Whether a kernel with this mask does a call's work, where one with gaps and one that walks run
// one after the other: only the plan, which the device has, says which of them is faster. All lanes
// of a warp.
template <class Mask>
__device__ __forceinline__ bool takes_call(const Problem& problem) {
  if constexpr (!Mask::kHasGaps && !Mask::kWalks) {
    return true;
  } else {
    if (!problem.ranges.has_walk) return !Mask::kWalks;
    // Walking costs up to 13 %, where nothing is left out, and saves 1 to 21 % where a tenth of the
    // blocks of a causal mask is, 2 to 18 % of random ones.
    constexpr float kLeastGain = 0.06f;
    const int64_t sequences = batch_size(problem);
    float gain = 0.f;
    for (int64_t i = threadIdx.x % 32; i < sequences; i += 32) {
      const WalkCounts counts = walk_counts_of(problem.ranges, i);
      gain += static_cast<float>(counts.left_out) - kLeastGain * static_cast<float>(counts.visited);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      gain += __shfl_xor_sync(~0u, gain, distance);
    }
    return (gain > 0.f) == Mask::kWalks;
  }
}

// For one that does not. All blocks but one make room for the other kernel at once; it relies on
// this one to be done after what came before.
__device__ __forceinline__ void leave_call() {
  if (blockIdx.x == 0) wait_for_previous_kernel();
}

}  // namespace jaxflash
