// d score where that is a gradient: stored as it is, or added to that of the batch elements before,
// where they share the gradient.
#pragma once

#include "common/memory_order.cuh"
#include "sm90/backward_traits.cuh"

namespace jaxflash::sm90 {

// The turns of the batch elements that share a gradient: at each tile of rows, an element adds
// behind the one before, so that a sum has the same bits each time. Every tile of keys of an
// element has a word for each of its parts, of how many tiles of rows it and all elements before it
// are through with. Waits are for tickets drawn earlier: batch elements come in their order.
//
// One thread, which also stores and adds.
template <int kRows, class Block>
class ElementTurns {
  static constexpr uint32_t kAll = ~0u;

 public:
  __device__ __forceinline__ void begin_tile(const BackwardArgs& args, const Block& block,
                                             int part) {
    const int kv_heads = args.problem.kv_heads;
    const uint32_t element_words = kv_heads * args.order.key_tiles * kSumParts;
    const int element = block.batch % args.stored.batch_sum;
    own_ = args.sum.steps + int64_t{block.batch} * element_words +
           (block.kv_head * args.order.key_tiles + block.index) * kSumParts + part;
    before_ = own_ - element_words;
    seen_ = element == 0 ? kAll : 0;
    is_last_ = element + 1 == args.stored.batch_sum;
    adds_ = element > 0 || args.sum.cleared;
    begun_ = through_ = 0;
  }
  // Whether there is something to add to.
  __device__ __forceinline__ bool adds() const { return adds_; }

  // The turn of a step. That of the one before ends here, if adds are quick, or else when its adds
  // have had the time to reach the memory: otherwise 3.70 ms instead of 3.44.
  __device__ __forceinline__ void begin_step(const BackwardArgs& args, const Block& block, int row,
                                             int head) {
    through_ = begun_;
    if (args.sum.in_cache) end_turn<0>(through_);
    const uint32_t row_tiles = (args.problem.q_len + kRows - 1) / kRows;
    begun_ = (head - block.first_head()) * row_tiles + row / kRows + 1;
    wait_for(begun_);
  }
  // Its adds have been committed; those to dq have not, or the release would wait for them, too:
  // 1.99 ms instead of 1.84 with lengths.
  __device__ __forceinline__ void commit_step(const BackwardArgs& args) const {
    if (!args.sum.in_cache) end_turn<1>(through_);
  }
  __device__ __forceinline__ void end_tile() {
    if (!is_last_) wait_for(kAll);
    end_turn<0>(kAll);
  }

 private:
  __device__ __forceinline__ void wait_for(uint32_t steps) {
    if (seen_ >= steps) return;
    while ((seen_ = load_acquire(before_)) < steps) {
    }
    fence_proxy_async_global();  // the adds of the element before, ahead of ours
  }
  // That of `steps`; kPending more have been begun.
  template <int kPending>
  __device__ __forceinline__ void end_turn(uint32_t steps) const {
    if (is_last_ || steps == 0) return;
    bulk_wait_group<kPending>();
    fence_proxy_async_global();
    store_release(own_, steps);
  }

  uint32_t* own_;
  const uint32_t* before_;
  uint32_t seen_;     // of the element before
  uint32_t begun_;    // of this one, the step that it is at included,
  uint32_t through_;  // and excluded
  bool is_last_;
  bool adds_;
};

// What the warp does that adds dq of a consumer warpgroup: it stores the ds of the warpgroup's 64
// keys. The warpgroup writes to its panel again two steps later, and before that waits for the dq
// beside which this leaves.
template <class Traits, class Block, class Score>
class GradientStore {
  using SharedMemory = typename Traits::SharedMemory;

 public:
  __device__ __forceinline__ void begin_tile(const BackwardArgs& args, const Block& block,
                                             int part) {
    if (is_summed(args) && is_lane()) turns_.begin_tile(args, block, part);
  }
  // Ahead of a step at `row` of a head, of which store() follows.
  __device__ __forceinline__ void prepare(const BackwardArgs& args, const Block& block, int row,
                                          int head) {
    if (!is_lane()) return;
    if (row == block.first_row) matrix_ = Score::gradient_matrix(args, block.batch, head);
    if (is_summed(args)) turns_.begin_step(args, block, row, head);
  }
  __device__ __forceinline__ void store(const BackwardArgs& args, SharedMemory& smem,
                                        const Block& block, int part, int row) {
    if (!is_lane()) return;
    if (args.stored.data != nullptr) {
      const uint32_t source = shared_address(smem.ds[odd_]) + part * Traits::kRowPanelBytes;
      const int key = block.first_key + 64 * part;
      if (is_summed(args) && turns_.adds()) {
        tensor_reduce_add(&args.stored_map, source, key, row, matrix_, 0, 0);
      } else {
        tensor_store(&args.stored_map, source, key, row, matrix_, 0, 0);
      }
    }
    bulk_commit_group();
    if (is_summed(args)) turns_.commit_step(args);
    odd_ ^= 1;
  }
  // Until what is stored has been read.
  __device__ __forceinline__ void wait() {
    if (is_lane()) bulk_wait_group_read<0>();
  }
  __device__ __forceinline__ void end_tile(const BackwardArgs& args) {
    if (is_summed(args) && is_lane()) turns_.end_tile();
  }

 private:
  // One behind those that add dq.
  __device__ __forceinline__ static bool is_lane() { return threadIdx.x % 32 == 4; }
  __device__ __forceinline__ static bool is_summed(const BackwardArgs& args) {
    return Score::kSumsBatch && args.stored.batch_sum > 1;
  }

  int odd_ = 0;  // as of the consumers' steps
  int matrix_;   // the head's
  ElementTurns<Traits::kRows, Block> turns_;
};

}  // namespace jaxflash::sm90
