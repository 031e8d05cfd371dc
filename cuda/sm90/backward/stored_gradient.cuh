// d score where that is a gradient: stored as it is, or, where batch elements share the gradient,
// kept in the workspace until the last of them has it, and then added up.
#pragma once

#include "common/memory_order.cuh"
#include "sm90/backward_traits.cuh"

namespace jaxflash::sm90 {

// A tile of one batch element in the workspace: BatchSumWorkspace.
class BatchSumTile {
 public:
  __device__ __forceinline__ BatchSumTile(const BackwardArgs& args, uint32_t position)
      : element_(args.order.element(position)) {
    const uint32_t group = args.order.group(position);
    turn_ = args.sums.by_slots.quotient(group);
    slot_ = static_cast<int>(group - turn_ * args.sums.slots);
  }

  // Among all matrices (T, kSumTileKeys), that of the first query head of an element's key head.
  __device__ __forceinline__ int matrix(const BackwardArgs& args, int element, int heads) const {
    return (slot_ * args.stored.batch_sum + element) * heads;
  }
  __device__ __forceinline__ int own_matrix(const BackwardArgs& args, int heads) const {
    return matrix(args, element_, heads);
  }

  // A slot has had as many groups before.
  __device__ __forceinline__ void wait_for_slot(const BackwardArgs& args, int part) const {
    while (load_acquire(added(args, part)) < turn_) {
    }
  }
  // Whether all elements of the group are there, of which this is one.
  __device__ __forceinline__ bool completes(const BackwardArgs& args, int part) const {
    const uint32_t before = add_acquire_release(there(args, part), 1);
    return before + 1 == (turn_ + 1) * args.stored.batch_sum;
  }
  __device__ __forceinline__ void free_slot(const BackwardArgs& args, int part) const {
    store_release(added(args, part), turn_ + 1);
  }

 private:
  __device__ __forceinline__ uint32_t* there(const BackwardArgs& args, int part) const {
    return args.sums.counters + (slot_ * kSumParts + part) * 2;
  }
  __device__ __forceinline__ uint32_t* added(const BackwardArgs& args, int part) const {
    return there(args, part) + 1;
  }

  int slot_;
  uint32_t turn_;
  int element_;  // of those of the sum
};

// What the warp does that adds dq of a consumer warpgroup: it stores the ds of the warpgroup's 64
// keys. The warpgroup writes to its panel again two steps later, and before that waits for the dq
// beside which this leaves.
template <class Traits, class Block, class Score>
class GradientStore {
  using SharedMemory = typename Traits::SharedMemory;

 public:
  __device__ __forceinline__ void begin_tile(const BackwardArgs& args, const Block& block,
                                             uint32_t position, int part) {
    if constexpr (Score::kSumsBatch) {
      if (args.stored.batch_sum == 1 || !is_lane()) return;
      const BatchSumTile tile(args, position);
      tile.wait_for_slot(args, part);
      fence_proxy_async_global();  // what has been read there, ahead of the stores
      first_matrix_ = tile.own_matrix(args, block.group) - block.first_head();
    }
  }
  // Ahead of a step at `row` of a head, of which store() follows.
  __device__ __forceinline__ void prepare(const BackwardArgs& args, const Block& block, int row,
                                          int head) {
    if (row != block.first_row || !is_lane()) return;
    if (Score::kSumsBatch && args.stored.batch_sum > 1) {
      matrix_ = first_matrix_ + head;
    } else {
      matrix_ = Score::gradient_matrix(args, block.batch, head);
    }
  }
  __device__ __forceinline__ void store(const BackwardArgs& args, SharedMemory& smem,
                                        const Block& block, int part, int row) {
    if (!is_lane()) return;
    if (args.stored.data != nullptr) {
      const bool summed = Score::kSumsBatch && args.stored.batch_sum > 1;
      tensor_store(&args.stored_map, shared_address(smem.ds[odd_]) + part * Traits::kRowPanelBytes,
                   (summed ? 0 : block.first_key) + 64 * part, row, matrix_, 0, 0);
    }
    bulk_commit_group();
    odd_ ^= 1;
  }
  // Until what is stored has been read.
  __device__ __forceinline__ void wait() {
    if (is_lane()) bulk_wait_group_read<0>();
  }
  // The whole warp.
  __device__ __forceinline__ void end_tile(const BackwardArgs& args, SharedMemory& smem,
                                           uint32_t position, int part) {
    if constexpr (Score::kSumsBatch) {
      if (args.stored.batch_sum == 1) return;
      bool completes = false;
      if (is_lane()) {
        bulk_wait_group<0>();
        fence_proxy_async_global();
        completes = BatchSumTile(args, position).completes(args, part);
      }
      completes = __any_sync(~0u, completes);
      auto& mailbox = smem.sum_is_due[part];
      if (threadIdx.x % 32 == 0) mailbox.prepare(tiles_) = completes;
      __syncwarp();
      mailbox.send(tiles_++);
    }
  }

 private:
  // One behind those that add dq.
  __device__ __forceinline__ static bool is_lane() { return threadIdx.x % 32 == 4; }

  int odd_ = 0;  // as of the consumers' steps
  int matrix_;   // the head's
  int first_matrix_;
  uint32_t tiles_ = 0;
};

// What a consumer warpgroup does at the end of a tile: if its block was the last to have the tile's
// keys, it adds up d score of its half of them, element after element, in float32.
template <class Traits, class Block, class Score>
class BatchSum {
  using Element = typename MathTraits<Traits::kMath>::Element;
  static constexpr int kPieces = 64 / 8;  // of 16 bytes, of a row: a lane each
  static constexpr int kRowStep = 128 / kPieces;
  // Of a thread's at once, of all elements: the time that one load takes is waited for each time.
  static constexpr int kRows = 8;

 public:
  __device__ __forceinline__ void add_up(const BackwardArgs& args,
                                         typename Traits::SharedMemory& smem, const Block& block,
                                         uint32_t position, int part) {
    if (args.stored.batch_sum == 1) return;
    auto& mailbox = smem.sum_is_due[part];
    const bool due = mailbox.receive(tiles_);
    mailbox.release(tiles_++);
    if (!due) return;
    const BatchSumTile tile(args, position);
    const int key = part * 64 + late_thread() % kPieces * 8;
    if (block.first_key + key < args.problem.kv_len) {
#pragma unroll 1
      for (int head = 0; head < block.group; ++head) {
        const int first_row = block.first_row + late_thread() / kPieces;
        const int64_t matrix = Score::gradient_matrix(args, block.batch, block.first_head() + head);
        Element* sums = static_cast<Element*>(args.stored.data) + block.first_key + key +
                        (matrix * args.problem.q_len + first_row) * args.problem.kv_len;
        const int64_t terms_row =
            int64_t{tile.matrix(args, 0, block.group) + head} * args.problem.q_len + first_row;
        const Element* terms =
            static_cast<const Element*>(args.sums.tiles) + terms_row * kSumTileKeys + key;
#pragma unroll 1
        for (int rows = block.rows.end - first_row; rows > 0; rows -= kRows * kRowStep) {
          if (rows > (kRows - 1) * kRowStep) {
            add_rows<true>(args, block, sums, terms, rows);
          } else {
            add_rows<false>(args, block, sums, terms, rows);
          }
          sums += int64_t{kRows * kRowStep} * args.problem.kv_len;
          terms += kRows * kRowStep * kSumTileKeys;
        }
      }
    }
    named_barrier_sync(kSumStored + part, 128);
    if (late_thread() == 0) tile.free_slot(args, part);
  }

 private:
  // Of `rows` that there are the thread's.
  template <bool kAllRows>
  __device__ __forceinline__ static void add_rows(const BackwardArgs& args, const Block& block,
                                                  Element* sums, const Element* terms, int rows) {
    const int64_t element = int64_t{block.group} * args.problem.q_len * kSumTileKeys;
    uint4 words[kMaxBatchSum][kRows] = {};
#pragma unroll
    for (int i = 0; i < kMaxBatchSum; ++i) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (i >= args.stored.batch_sum || (!kAllRows && j * kRowStep >= rows)) continue;
        words[i][j] = __ldcs(
            reinterpret_cast<const uint4*>(terms + i * element + j * kRowStep * kSumTileKeys));
      }
    }
    float sum[kRows][8] = {};
#pragma unroll
    for (int i = 0; i < kMaxBatchSum; ++i) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        add_pair(sum[j], words[i][j].x);
        add_pair(sum[j] + 2, words[i][j].y);
        add_pair(sum[j] + 4, words[i][j].z);
        add_pair(sum[j] + 6, words[i][j].w);
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (!kAllRows && j * kRowStep >= rows) return;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = jaxflash::pack<Element>(sum[j][2 * i], sum[j][2 * i + 1]);
      }
      store_global(sums + int64_t{j * kRowStep} * args.problem.kv_len, words);
    }
  }
  __device__ __forceinline__ static void add_pair(float* sum, uint32_t pair) {
    sum[0] += to_float(Element{static_cast<uint16_t>(pair)});
    sum[1] += to_float(Element{static_cast<uint16_t>(pair >> 16)});
  }

  uint32_t tiles_ = 0;
};

}  // namespace jaxflash::sm90
