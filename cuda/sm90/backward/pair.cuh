// The consumers of a pair of blocks that share a tile of keys.
#pragma once

#include "sm90/backward/consumers.cuh"
#include "sm90/backward/scores.cuh"

namespace jaxflash::sm90 {

// The first warpgroup of a block computes p and owns dv, the second computes ds and owns dk.
enum class PairRole { kValues, kKeys };

// What a warpgroup's products read, as descriptors.
template <class Traits, PairRole kRole>
struct PairOperands {
  static constexpr bool kValues = kRole == PairRole::kValues;
  // Of dq: a panel of columns, or a half of one.
  using DqPart = typename Traits::template DqPart<kValues ? 0 : 1>;

  __device__ __forceinline__ explicit PairOperands(const typename Traits::SharedMemory& smem) {
    column = Fragment::column(threadIdx.x % 128);
    rows_a = wgmma_descriptor(shared_address(kValues ? smem.k[0] : smem.v[0]), 16, 1024);
    rows_b = wgmma_descriptor(shared_address(kValues ? smem.q[0] : smem.dout[0]), 16, 1024);
    columns_b = wgmma_descriptor(shared_address(kValues ? smem.dout[0] : smem.q[0]),
                                 Traits::kRowPanelBytes, 1024);
    const int rank = cluster_rank();
    const int dq_bytes = DqPart::column_in_panel(rank) * 2;
    ds = wgmma_descriptor(shared_address(smem.ds[0]), 16, 1024);
    peer_ds = wgmma_descriptor(shared_address(smem.peer_ds[0]), 16, 1024);
    k_columns = wgmma_descriptor(
        shared_address(smem.k[0]) + DqPart::panel(rank) * Traits::kKeyPanelBytes + dq_bytes,
        Traits::kKeyPanelBytes, 1024);
    peer_k_columns = wgmma_descriptor(
        shared_address(smem.peer_k) + DqPart::own_panel(rank) * Traits::kKeyPanelBytes + dq_bytes,
        Traits::kKeyPanelBytes, 1024);
  }

  int column;  // of s or dp, the thread's first; worked out ahead, which NVRTC 12.9 needs
  uint64_t rows_a, rows_b;           // of s or dp
  uint64_t columns_b;                // of dv or dk
  uint64_t ds, k_columns;            // of dq
  uint64_t peer_ds, peer_k_columns;  // and what the other block has of it
};

// A pair of blocks. Both warpgroups of a block have all of its keys as rows, so that p^T and ds^T
// feed the products for dv and dk out of registers, and hand p over in the order of the registers.
// The blocks exchange ds, and each computes dq for half of the columns, from the ds of both: half
// as much to add.
//
// dq runs late, so that the exchange is not waited for: its product runs beside the pointwise work
// of the next step, and leaves beside the products for dv and dk.
//
// An object is a warpgroup's part of one tile. What it has in registers are variables of consume(),
// which it refers to.
template <class Traits, class Mask, class Score, PairRole kRole>
class PairConsumers {
  using Tile = typename Traits::Tile;
  using SharedMemory = typename Traits::SharedMemory;
  using Block = KeyBlock<Traits::kRows, Traits::kTileKeys, Mask>;
  using Operands = PairOperands<Traits, kRole>;
  using DqPart = typename Operands::DqPart;
  static constexpr bool kValues = Operands::kValues;
  static constexpr int kGroup = kValues ? 0 : 1;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr Math kMath = Traits::kMath;
  // Of s or dp, what it sums over; of dv or dk, its columns.
  static constexpr int kScoreDim = kValues ? Tile::kHeadDim : Tile::kValueDim;
  static constexpr int kSumDim = kValues ? Tile::kValueDim : Tile::kHeadDim;
  static constexpr int kSums = kValues ? 0 : Score::kKeySums;
  static constexpr bool kStarts = kValues && Score::kStarts;
  // The thread that deals with the other block.
  static constexpr int kMessenger = 128;

  // Of a thread.
  using Scores = float[kRows / 2];
  using PackedScores = uint32_t[kRows / 4];
  using Kept = jaxflash::Kept<Score::kDrops, false, kRows>;
  struct Registers {
    KeySums<kSums> key_sums;
    float sum[kSumDim / 2];          // dv or dk
    float dq[DqPart::kColumns / 2];  // of the step before
    Scores x;                        // s or dp; between two steps what the next scores start from
  };

 public:
  __device__ __forceinline__ static void consume(const BackwardArgs& args, SharedMemory& smem) {
    Score score(args);
    const Operands operands(smem);
    ConsumerSteps<Traits> steps(smem);
    TicketReader<Traits::kBlocks> reader;

    for (;;) {
      const uint32_t position = reader.next(smem.tickets);
      if (position >= args.order.tiles()) break;
      const Block block(args.problem, args.tile<Score>(position));
      int row = block.first_row;
      int head = 0;
      int done = 0;
      Registers registers;
      PairConsumers tile(args, smem, operands, block, reader.parity(), score, steps, row, head,
                         done, registers);
      tile.begin();
#pragma unroll 1
      for (steps.begin(block.steps()); steps.more(); steps.advance()) tile.step();
      tile.finish();
    }
    if (kValues) named_barrier_sync(kDqEmpty, 128 + 32);  // the last arrival
  }

 private:
  __device__ __forceinline__ PairConsumers(const BackwardArgs& args, SharedMemory& smem,
                                           const Operands& operands, const Block& block,
                                           uint32_t parity, Score& score,
                                           ConsumerSteps<Traits>& steps, int& row, int& head,
                                           int& done, Registers& registers)
      : args_(args),
        smem_(smem),
        operands_(operands),
        block_(block),
        parity_(parity),
        first_key_(Traits::first_key(block)),
        common_rows_(block.mask.common_rows({first_key_, first_key_ + kKeys})),
        score_(score),
        steps_(steps),
        row_(row),
        head_(head),
        done_(done),
        registers_(registers) {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (float& value : registers_.sum) value = 0.f;
    (kValues ? smem_.k_full : smem_.v_full)[0].wait(parity_);
    if (kStarts && block_.steps() > 0) prepare(row_, head_);
  }

  __device__ __forceinline__ void step() {
    PackedScores packed;
    StagedRows after{};
    registers_.key_sums.begin_step(args_, block_, row_, head_, first_key_);
    if constexpr (!kStarts) prepare(row_, head_);
    if (kValues) {
      steps_.wait_q();
    } else {
      steps_.wait_dout();
    }
    const float* const from = kValues ? &smem_.lse[steps_.q_stage()][operands_.column]
                                      : &smem_.delta[steps_.dout_stage()][operands_.column];
    ColumnValues values;
    values.load(from);
    issue_score_product();
    // The first step has no dq to compute: what this product makes of the buffers is dropped. A
    // branch around it would make the compiler wait for all others.
    if (done_ > 0) {
      wait_peer_ds();
    } else {
      wait_dq_keys();
    }
    issue_dq();
    Kept kept;
    if constexpr (Score::kDrops) score_.draw(kept, row_, first_key_);
    wgmma_wait<1>();
    hold(registers_.x);
    if constexpr (kValues) {
      add_to_dv(packed, kept, values, from, after);
    } else {
      add_to_dk(packed, kept, values, after);
    }
    wgmma_wait<1>();
    hold(registers_.dq);
    // ds of this step is complete, p has been read, and ds of the step before as well.
    named_barrier_sync(kDqComputed, Traits::kConsumerThreads);
    if (done_ > 0) stage_last_dq();
    wgmma_wait<0>();
    if (kValues) {
      steps_.release_dout();
    } else {
      steps_.release_q();
    }
    block_.advance(after, row_, head_);
    ++done_;
  }

  __device__ __forceinline__ void finish() {
    registers_.key_sums.end_tile(args_, block_, first_key_);
    // v is no longer read: the other warpgroup has passed kDqComputed with its last dp.
    if (kValues) {
      smem_.v_full[0].wait(parity_);
      stage_sum();
    }
    if (done_ > 0) {
      wait_peer_ds();
      issue_dq();
      wgmma_wait<0>();
      hold(registers_.dq);
      if (kValues && done_ != 1) named_barrier_sync(kDqEmpty, 128 + 32);
      named_barrier_sync(kDqComputed, Traits::kConsumerThreads);
      stage_last_dq();
    } else {
      wait_dq_keys();
    }
    // Nor is k, or what the other block's k was loaded for: both warpgroups have computed dq.
    if (!kValues) stage_sum();
  }

  __device__ __forceinline__ void prepare(int row, int head) {
    if ((kValues || Score::kDrops || kSums > 0) && row == block_.first_row) {
      score_.begin_head(args_, block_, head, first_key_);
    }
    if constexpr (kStarts) score_.load_start(registers_.x, row, first_key_);
  }
  __device__ __forceinline__ void prepare_next(const StagedRows& after) {
    if constexpr (kStarts) {
      if (steps_.last()) return;
      int next_row = row_, next_head = head_;
      block_.advance(after, next_row, next_head);
      prepare(next_row, next_head);
    }
  }

  // s or dp; in flight on return.
  __device__ __forceinline__ void issue_score_product() {
    if constexpr (kStarts) {
      score_.transpose_start(registers_.x, registers_.x);
      score_.start(registers_.x, row_, first_key_);
    } else {
      discard(registers_.x);
    }
    issue_scores<kMath, kScoreDim, Traits::kKeyPanelBytes, Traits::kRowPanelBytes, kRows>(
        registers_.x, operands_.rows_a,
        operands_.rows_b + (kValues ? steps_.q_offset() : steps_.dout_offset()), kStarts);
  }

  // p of s, for the other warpgroup and for dv, whose product is in flight on return.
  __device__ __forceinline__ void add_to_dv(PackedScores& packed, const Kept& kept,
                                            const ColumnValues& values, const float* lse,
                                            StagedRows& after) {
    Interval seeing{}, seeing_all = common_rows_;
    if constexpr (Mask::kWalks) {
      after = smem_.staged[steps_.q_stage()];
      const Interval open = block_.mask.open_rows({first_key_, first_key_ + kKeys});
      after.template refine<kRows>(cluster_rank(), row_, open, seeing, seeing_all);
    }
    pin(weigh_and_pack<kMath, true>(score_, registers_.x, packed, kept, values, lse, block_,
                                    seeing_all, row_, first_key_));
    // dq that lay in p's buffer has left, unless there was none in the last step.
    if (done_ != 1) named_barrier_sync(kDqEmpty, 128 + 32);
    hand_over_p();
    named_barrier_arrive(kPFull, Traits::kConsumerThreads);
    steps_.release_q();
    steps_.wait_dout();
    issue_gradient<Traits, kSumDim>(registers_.sum, packed,
                                    operands_.columns_b + steps_.dout_offset());
    prepare_next(after);
  }
  // ptxas would move a wait or a barrier above what is computed before it; a store of what depends
  // on all of it cannot follow.
  __device__ __forceinline__ void pin(uint32_t value) const {
    store_shared_volatile(shared_address(&smem_.pin[kGroup * 128 + late_thread()]),
                          static_cast<uint16_t>(value));
  }

  // ds of dp and the other warpgroup's p, for both blocks and for dk, whose product is in flight on
  // return.
  __device__ __forceinline__ void add_to_dk(PackedScores& packed, const Kept& kept,
                                            const ColumnValues& delta, StagedRows& after) {
    named_barrier_sync(kPFull, Traits::kConsumerThreads);
    const auto sum_up = score_.adder_to(registers_.key_sums, row_, first_key_);
    const uint32_t source = handed_p();
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      float p[4];
      load_shared_f32x4(source + i * kHandedBytes, p);
      const auto ds = [&](int j) {
        const int k = 4 * i + j;
        const float result = p[j] * (kept.of(k, registers_.x[k]) - score_.share_of(delta.of(k)));
        sum_up(k, result);
        return result;
      };
      packed[2 * i] = pack<kMath>(ds(0), ds(1));
      packed[2 * i + 1] = pack<kMath>(ds(2), ds(3));
    }
    const int odd = steps_.odd();
    steps_.release_dout();
    send_ds(odd, packed);
    steps_.wait_q();
    if constexpr (Mask::kWalks) after = smem_.staged[steps_.q_stage()];
    issue_gradient<Traits, kSumDim>(registers_.sum, packed,
                                    operands_.columns_b + steps_.q_offset());
  }

  // Where the thread hands over its elements of p: four at a time.
  __device__ __forceinline__ uint32_t handed_p() const {
    return shared_address(smem_.p) + late_thread() * 16;
  }
  static constexpr int kHandedBytes = 128 * 16;
  __device__ __forceinline__ void hand_over_p() const {
    const uint32_t target = handed_p();
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      store_shared_f32x4(target + i * kHandedBytes, registers_.x + 4 * i);
    }
  }

  // Stores ds of a step, for this block and the other one.
  __device__ __forceinline__ void send_ds(int odd, const PackedScores& packed) const {
    smem_.ds_empty[odd].wait(steps_.odd_phase() ^ 1);
    store_transposed<kRows>(shared_address(smem_.ds[odd]), packed);
    fence_proxy_async();
    named_barrier_sync(kDsStored, 128);
    if (threadIdx.x == kMessenger) exchange_ds(odd);
    __syncwarp();
  }
  // Once ds of a step lies in shared memory: gets ready for the other block's, and sends it this
  // block's.
  __device__ __forceinline__ void exchange_ds(int odd) const {
    const uint32_t peer = cluster_rank() ^ 1;
    smem_.peer_ds_full[odd].arrive_expecting(Traits::kScoreBytes);
    bulk_store_remote(remote_address(shared_address(smem_.peer_ds[odd]), peer),
                      shared_address(smem_.ds[odd]), Traits::kScoreBytes,
                      remote_address(smem_.peer_ds_full[odd].address(), peer));
  }
  // Of the step before the current one.
  __device__ __forceinline__ void wait_peer_ds() const {
    const int odd = steps_.odd() ^ 1;
    smem_.peer_ds_full[odd].wait(steps_.last_odd_phase());
    if (!kValues) {
      if (threadIdx.x == kMessenger) smem_.ds_taken[odd].arrive_remote(cluster_rank() ^ 1);
      __syncwarp();
    }
  }

  // Each phase is waited for, also where a tile has no rows: it has to be complete before the next
  // tile is loaded.
  __device__ __forceinline__ void wait_dq_keys() const {
    if (!kValues) smem_.k_full[0].wait(parity_);
    smem_.peer_k_full.wait(parity_);
  }
  // Of the step before the current one; in flight on return. Both warpgroups have passed
  // kDqComputed since this block's ds was stored.
  __device__ __forceinline__ void issue_dq() {
    const uint64_t offset = (steps_.odd() ^ 1) * descriptor_step(Traits::kScoreBytes);
    discard(registers_.dq);
    wgmma_fence();
    multiply_dq<Traits, DqPart::kColumns>(registers_.dq, operands_.ds + offset, operands_.k_columns,
                                          false);
    multiply_dq<Traits, DqPart::kColumns>(registers_.dq, operands_.peer_ds + offset,
                                          operands_.peer_k_columns, true);
    wgmma_commit();
  }
  // For the warp that adds it, in the order of the fragments. After kDqComputed: both warpgroups
  // are through with p and ds that lie there.
  __device__ __forceinline__ void stage_last_dq() const {
    if (!kValues) smem_.ds_taken[steps_.odd() ^ 1].wait(steps_.last_odd_phase());
    const int thread = late_thread();
    const uint32_t target =
        smem_.staged_dq(kGroup * 4 + thread / 32, steps_.odd() ^ 1) + thread % 32 * 16;
#pragma unroll
    for (int i = 0; i < DqPart::kColumns / 8; ++i) {
      store_shared_f32x4(target + i * 512, registers_.dq + 4 * i);
    }
    named_barrier_arrive(kDqFull, Traits::kConsumerThreads + 32);
  }

  // Stages dv in v's place, dk in k's.
  __device__ __forceinline__ void stage_sum() {
    hold(registers_.sum);
    bool seen[2];
    find_seen(seen, block_.mask, first_key_);
    stage<Traits, kSumDim>(kValues ? smem_.v[0] : smem_.k[0], registers_.sum,
                           kValues ? 1.f : args_.problem.scale, seen);
    fence_proxy_async();
    (kValues ? smem_.dv_full : smem_.dk_full).arrive();
  }

  const BackwardArgs& args_;
  SharedMemory& smem_;
  const Operands& operands_;
  const Block& block_;
  const uint32_t parity_;  // of the barriers that complete once a tile
  const int first_key_;
  const Interval common_rows_;
  Score& score_;
  ConsumerSteps<Traits>& steps_;
  int& row_;  // of the step
  int& head_;
  int& done_;  // steps of the tile
  Registers& registers_;
};

}  // namespace jaxflash::sm90
