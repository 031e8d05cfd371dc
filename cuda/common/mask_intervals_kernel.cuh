// What can be skipped of a mask, given what there is in blocks of 64 rows and 64 keys.
#pragma once

#include "common/mask.cuh"
#include "problem.h"

namespace jaxflash {

inline constexpr int kMaskIntervalsThreads = 256;
static_assert(kRangeBlock == 64, "bits of two words");

// A block: a bit for each of the 64 rows that see something of it, or of its keys that are seen,
// and whether all of it is visible.
struct SeenBlock {
  uint32_t by[2];
  bool whole;
};

// The blocks of mask `number` as the rows or keys of its block `own` take part in them.
template <class Params>
class MaskBlocks;

template <>
class MaskBlocks<DenseMaskParams> {
 public:
  __device__ __forceinline__ MaskBlocks(const DenseMaskParams& params, int64_t /*number*/,
                                        bool of_rows, int /*own*/)
      : blocks_(params.blocks), of_rows_(of_rows) {}

  __device__ __forceinline__ SeenBlock at(int64_t i) const {
    const MaskBlock block = blocks_[i];
    return {{of_rows_ ? block.rows[0] : block.keys[0], of_rows_ ? block.rows[1] : block.keys[1]},
            block.whole != 0};
  }

 private:
  const MaskBlock* blocks_;
  bool of_rows_;
};

template <>
class MaskBlocks<PredicateBlocks> {
 public:
  __device__ __forceinline__ MaskBlocks(const PredicateBlocks& params, int64_t number, bool of_rows,
                                        int own)
      : blocks_(params.blocks) {
    const int of_mask = blocks_of(of_rows ? params.rows : params.keys);
    const uint32_t* words = of_rows ? params.row_sees : params.key_is_seen;
    words += 2 * (number * of_mask + own);
    by_[0] = words[0];
    by_[1] = words[1];
  }

  // Those that see something anywhere, which is all that intervals of whole blocks ask for.
  __device__ __forceinline__ SeenBlock at(int64_t i) const {
    const uint8_t block = blocks_[i];
    const uint32_t shown = block & PredicateBlocks::kShown ? ~0u : 0;
    return {{by_[0] & shown, by_[1] & shown}, (block & PredicateBlocks::kWhole) != 0};
  }

 private:
  const uint8_t* blocks_;
  uint32_t by_[2];
};

// The longest of runs of neighbouring numbers.
struct LongestRun {
  Interval longest{0, 0};

  __device__ __forceinline__ void offer(Interval run) {
    if (run.end - run.begin > longest.end - longest.begin) longest = run;
  }
};

// Calls of(begin, end) for each run of ones among the bits, from the lowest on.
template <class Of>
__device__ __forceinline__ void for_each_run(uint32_t bits, const Of& of) {
  while (bits != 0) {
    const int begin = __ffs(bits) - 1;
    const uint32_t zeros = ~bits >> begin;  // none above the 32 bits
    const int end = zeros == 0 ? 32 : begin + __ffs(zeros) - 1;
    of(begin, end);
    bits = end == 32 ? 0 : bits >> end << end;
  }
}

// What 64 rows of a call see of its keys, or who sees 64 keys: a warp's work.
template <class Params>
__global__ void __launch_bounds__(kMaskIntervalsThreads)
    mask_intervals_kernel(const __grid_constant__ Params params) {
  const int lane = threadIdx.x % 32;
  const int of_call = blocks_of(params.q_len) + blocks_of(params.kv_len);
  const int64_t work = (int64_t{blockIdx.x} * kMaskIntervalsThreads + threadIdx.x) / 32;
  const int64_t number = work / of_call;
  if (number >= params.count) return;
  int own = static_cast<int>(work % of_call);
  const bool of_rows = own < blocks_of(params.q_len);
  if (!of_rows) own -= blocks_of(params.q_len);
  const int length = of_rows ? params.q_len : params.kv_len;
  const int other_length = of_rows ? params.kv_len : params.q_len;
  // Of the mask, where one row or key may be that of all.
  const int own_size = of_rows ? params.rows : params.keys;
  const int other_size = of_rows ? params.keys : params.rows;
  const int own_block = own_size == 1 ? 0 : own;
  const int others = blocks_of(other_size);
  const int row_blocks = blocks_of(params.rows), key_blocks = blocks_of(params.keys);
  const MaskBlocks<Params> blocks(params, number, of_rows, own_block);
  const int64_t begin =
      number * row_blocks * key_blocks + (of_rows ? int64_t{own_block} * key_blocks : own_block);
  const int step = of_rows ? 1 : key_blocks;
  const int words = block_words_of(other_length);
  auto* visits = reinterpret_cast<uint2*>(of_rows ? params.row_visits : params.key_visits);
  visits += (number * blocks_of(length) + own) * words;

  uint32_t seeing[2] = {0, 0};
  Interval hull{others, 0}, whole{0, 0};
  LongestRun wholes, gaps;
  for (int first = 0; first < others; first += 32) {
    SeenBlock block = {};
    if (first + lane < others) block = blocks.at(begin + int64_t{first + lane} * step);
    seeing[0] |= block.by[0];
    seeing[1] |= block.by[1];
    const uint32_t shown = __ballot_sync(~0u, (block.by[0] | block.by[1]) != 0);
    const uint32_t all_shown = __ballot_sync(~0u, block.whole);
    if (other_size == 1) {  // that of all words
      for (int word = lane; word < words; word += 32) {
        visits[word] = make_uint2(shown != 0 ? ~0u : 0, all_shown != 0 ? ~0u : 0);
      }
    } else if (lane == 0) {
      visits[first / 32] = make_uint2(shown, all_shown);
    }
    for_each_run(shown, [&](int begin, int end) {
      if (hull.end > 0) gaps.offer({hull.end, first + begin});
      hull = {min(hull.begin, first + begin), first + end};
    });
    for_each_run(all_shown, [&](int begin, int end) {
      whole = {whole.end == first + begin ? whole.begin : first + begin, first + end};
      wholes.offer(whole);
    });
  }
  seeing[0] = __reduce_or_sync(~0u, seeing[0]);
  seeing[1] = __reduce_or_sync(~0u, seeing[1]);

  const int unit = other_size == 1 ? other_length : kRangeBlock;
  const auto elements = [&](Interval blocks) {
    return make_int2(blocks.begin * unit, min(blocks.end * unit, other_length));
  };
  int32_t* intervals = of_rows ? params.keys_of_row : params.rows_of_key;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int element = own * kRangeBlock + 32 * i + lane;
    if (element >= length) continue;
    const bool sees = own_size == 1 ? seeing[0] & 1 : seeing[i] >> lane & 1;
    reinterpret_cast<int2*>(intervals)[number * length + element] =
        sees ? elements(hull) : make_int2(0, 0);
  }
  if (lane == 0) {
    // Rows that see nothing are no obstacle to a gap of those beside them.
    const Interval gap = hull.end > 0 ? gaps.longest : Interval{0, others};
    int2* inside = reinterpret_cast<int2*>(of_rows ? params.keys_inside : params.rows_inside);
    inside += (number * blocks_of(length) + own) * 2;
    inside[0] = elements(wholes.longest);
    inside[1] = elements(gap);
  }
}

}  // namespace jaxflash
