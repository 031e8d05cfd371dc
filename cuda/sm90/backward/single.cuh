// The consumers of a block that has a tile of keys to itself.
#pragma once

#include "sm90/backward/consumers.cuh"
#include "sm90/backward/scores.cuh"

namespace jaxflash::sm90 {

// What a warpgroup's products read, as descriptors. Of keys: in the first of their buffers.
template <class Traits>
struct SingleOperands {
  // dq: one warpgroup takes a half of the columns, or of the rows where steps have as many as both
  // can take.
  static constexpr bool kDivideColumns = Traits::kRows == Traits::kDqPartRows;
  static constexpr int kColumnBytes =
      Traits::kDqPartDims == 64 ? Traits::kKeyPanelBytes : Traits::kDqPartDims * 2;

  __device__ __forceinline__ SingleOperands(const typename Traits::SharedMemory& smem, int group)
      : group_bytes(group * 64 * Traits::kPanelRowBytes),
        k(wgmma_descriptor(shared_address(smem.k[0]) + group_bytes, 16, 1024)),
        v(wgmma_descriptor(shared_address(smem.v[0]) + group_bytes, 16, 1024)),
        q(wgmma_descriptor(shared_address(smem.q[0]), 16, 1024)),
        dout(wgmma_descriptor(shared_address(smem.dout[0]), 16, 1024)),
        q_columns(wgmma_descriptor(shared_address(smem.q[0]), Traits::kRowPanelBytes, 1024)),
        dout_columns(wgmma_descriptor(shared_address(smem.dout[0]), Traits::kRowPanelBytes, 1024)),
        ds(wgmma_descriptor(shared_address(smem.ds[0]) + (kDivideColumns ? 0 : group_bytes), 16,
                            1024)),
        k_columns(wgmma_descriptor(
            shared_address(smem.k[0]) + (kDivideColumns ? group * kColumnBytes : 0),
            Traits::kKeyPanelBytes, 1024)),
        ds_panel(shared_address(smem.ds[0]) + group * Traits::kRowPanelBytes) {}

  int group_bytes;
  // As A: the warpgroup's 64 keys. As B: all queries of a step. The transposed view of q and dout
  // (queries x columns) reads the same bytes with another major axis.
  uint64_t k, v, q, dout, q_columns, dout_columns;
  uint64_t ds, k_columns;  // for dq
  uint32_t ds_panel;       // where the warpgroup's ds goes
};

// Each warpgroup owns 64 keys. Its p^T and ds^T go from the accumulators straight into the products
// for dv and dk; ds also goes to shared memory, where both warpgroups read it for dq.
//
// An object is the warpgroup's part of one tile. What it has in registers are variables of
// consume(), which it refers to.
template <class Traits, class Mask, class Score>
class SingleConsumers {
  using Tile = typename Traits::Tile;
  using SharedMemory = typename Traits::SharedMemory;
  using Block = KeyBlock<Traits::kRows, Traits::kTileKeys, Mask>;
  using Operands = SingleOperands<Traits>;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr Math kMath = Traits::kMath;
  // On a diagonal, half of a block's keys may see none of a step's rows. Steps of 128 rows are as
  // long as the block is wide, and then it happens at ragged ends only.
  static constexpr bool kIdleSteps = kRows < kKeys;
  // Packing p while dp's product runs keeps it beside its float32 values: too much for 128 rows.
  static constexpr bool kEarlyPack = kRows <= 64;
  // What products start from is loaded by the threads that need it, a step ahead.
  static constexpr bool kLoadsAhead = Score::kStarts && !Tile::kLoadsStarts;
  static_assert(Score::kStarts || !Tile::kLoadsStarts);

  // Of a thread.
  using Scores = float[kRows / 2];
  using PackedScores = uint32_t[kRows / 4];
  using Dq = float[Traits::kDqPartDims / 2];
  using Kept = jaxflash::Kept<Score::kDrops, false, kRows>;
  struct Registers {
    float dk[Tile::kHeadDim / 2];
    float dv[Tile::kValueDim / 2];
    Scores dp;  // between two steps what the next scores start from
    KeySums<Score::kKeySums> key_sums;
    HeldOperand<Tile::kHeldSteps> held_k;
  };

 public:
  __device__ __forceinline__ static void consume(const BackwardArgs& args, SharedMemory& smem,
                                                 int group) {
    Score score(args);
    const Operands operands(smem, group);
    ConsumerSteps<Traits> steps(smem);
    Ring<Tile::kKeyStages> keys;
    TicketReader<Traits::kBlocks> reader;

    for (;;) {
      const uint32_t position = reader.next(smem.tickets);
      if (position >= args.order.tiles()) break;
      const Block block(args.problem, args.tile<Score>(position));
      int row = block.first_row;
      int head = 0;
      Registers registers;
      SingleConsumers tile(args, smem, operands, block, group, keys, reader.parity(), score, steps,
                           row, head, registers);
      tile.begin();
#pragma unroll 1
      for (steps.begin(block.steps()); steps.more(); steps.advance()) tile.step();
      tile.finish();
    }
    named_barrier_sync(kDqEmpty + group, 128 + 32);  // the last arrival
  }

 private:
  __device__ __forceinline__ SingleConsumers(const BackwardArgs& args, SharedMemory& smem,
                                             const Operands& operands, const Block& block,
                                             int group, Ring<Tile::kKeyStages>& keys,
                                             uint32_t parity, Score& score,
                                             ConsumerSteps<Traits>& steps, int& row, int& head,
                                             Registers& registers)
      : args_(args),
        smem_(smem),
        operands_(operands),
        block_(block),
        group_(group),
        keys_(keys),
        parity_(parity),
        own_key_(block.first_key + group * 64),
        own_rows_(block.mask.rows({own_key_, own_key_ + 64})),
        common_rows_(block.mask.common_rows({own_key_, own_key_ + 64})),
        k_(operands.k + keys.stage * descriptor_step(Traits::kKBytes)),
        v_(operands.v + keys.stage * descriptor_step(Traits::kVBytes)),
        k_columns_(operands.k_columns + keys.stage * descriptor_step(Traits::kKBytes)),
        score_(score),
        steps_(steps),
        row_(row),
        head_(head),
        registers_(registers) {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (float& value : registers_.dk) value = 0.f;
#pragma unroll
    for (float& value : registers_.dv) value = 0.f;
    if (block_.steps() > 0) {
      smem_.k_full[keys_.stage].wait(keys_.phase);
      smem_.v_full[keys_.stage].wait(keys_.phase);
      registers_.held_k.template load<Tile::kHeadDim, Traits::kKeyPanelBytes>(
          shared_address(smem_.k[keys_.stage]) + operands_.group_bytes);
      if (kLoadsAhead) prepare(row_, head_);
    }
  }

  __device__ __forceinline__ void step() {
    registers_.key_sums.begin_step(args_, block_, row_, head_, own_key_);
    if constexpr (!kLoadsAhead) prepare(row_, head_);
    steps_.wait_q();
    steps_.wait_starts();
    Interval seeing = own_rows_, seeing_all = common_rows_;
    StagedRows after{};
    if constexpr (Mask::kWalks) {
      after = staged();
      const Interval open = block_.mask.open_rows({own_key_, own_key_ + 64});
      after.template refine<kRows>(group_, row_, open, seeing, seeing_all);
    }
    const bool idle = kIdleSteps && (row_ + kRows <= seeing.begin || row_ >= seeing.end);
    if (__builtin_expect(idle, false)) {  // behind the other code
      idle_step();
      prepare_next(after);
      return block_.advance(after, row_, head_);
    }
    busy_step(seeing_all);
    if constexpr (Mask::kWalks) {
      after = staged();
      __syncwarp();  // all lanes have read
    }
    steps_.release_q();
    block_.advance(after, row_, head_);
  }

  __device__ __forceinline__ void finish() {
    hold(registers_.dk);
    hold(registers_.dv);
    registers_.key_sums.end_tile(args_, block_, own_key_);
    if (block_.steps() > 0) keys_.advance();
    bool seen[2];
    find_seen(seen, block_.mask, own_key_);
    // dv replaces ds once both warpgroups are through with it (and dv of the tile before has left,
    // where this one has no rows), and dk replaces dq once that has left. Where ds leaves too, it
    // does so beside dq.
    if (Score::kStoresGradient) named_barrier_sync(kDqEmpty + group_, 128 + 32);
    named_barrier_sync(kConsumers, Traits::kConsumerThreads);
    wait_for_ds_buffer();
    stage<Traits, Tile::kValueDim>(smem_.ds[group_], registers_.dv, 1.f, seen);
    if (!Score::kStoresGradient) named_barrier_sync(kDqEmpty + group_, 128 + 32);
    stage<Traits, Tile::kHeadDim>(smem_.dq[group_], registers_.dk, args_.problem.scale, seen);
    fence_proxy_async();
    smem_.dkv_full.arrive();
  }

  // Of a step whose rows have not been released.
  __device__ __forceinline__ const StagedRows& staged() const {
    return smem_.staged[steps_.q_stage()];
  }
  __device__ __forceinline__ void prepare(int row, int head) {
    if (row == block_.first_row) score_.begin_head(args_, block_, head, own_key_);
    if constexpr (kLoadsAhead) score_.load_start(registers_.dp, row, own_key_);
  }
  __device__ __forceinline__ void prepare_next(const StagedRows& after) {
    if constexpr (kLoadsAhead) {
      if (steps_.last()) return;
      int next_row = row_, next_head = head_;
      block_.advance(after, next_row, next_head);
      prepare(next_row, next_head);
    }
  }
  // dk and dv of the tile before may still be on their way out of where ds goes.
  __device__ __forceinline__ void wait_for_ds_buffer() const {
    if (head_ == 0 && row_ == block_.first_row) smem_.dkv_empty.wait(parity_ ^ 1);
  }

  // The warpgroup's keys see none of the rows: its ds is 0. What remains is its half of dq, to
  // which the other keys contribute.
  __device__ __forceinline__ void idle_step() {
    PackedScores ds;
    Dq dq;
    steps_.wait_dout();
    wait_for_ds_buffer();
#pragma unroll
    for (uint32_t& pair : ds) pair = 0;
    store_ds(ds);
    announce_ds();
    steps_.release_q();
    steps_.release_starts();
    steps_.release_dout();
    issue_dq(dq);
    wgmma_wait<0>();
    hold(dq);
    if (steps_.last()) {
      arrive_warp(smem_.v_empty[keys_.stage]);
      arrive_warp(smem_.k_empty[keys_.stage]);
    }
    hand_over_dq(dq);
  }

  __device__ __forceinline__ void busy_step(const Interval& seeing_all) {
    Scores s;
    PackedScores p, ds;
    const int column = Fragment::column(threadIdx.x & 127);
    const float* const lse = &smem_.lse[steps_.q_stage()][column];
    ColumnValues first_lse;
    first_lse.load(lse);
    issue_score_products(s);
    Kept kept;
    if constexpr (Score::kDrops) score_.draw(kept, row_, own_key_);
    wgmma_wait<1>();
    hold(s);
    pin(weigh_and_pack<kMath, kEarlyPack>(score_, s, p, kept, first_lse, lse, block_, seeing_all,
                                          row_, own_key_));
    wgmma_wait<0>();
    hold(registers_.dp);
    const float* const delta = &smem_.delta[steps_.dout_stage()][column];
    ColumnValues first_delta;
    first_delta.load(delta);
    if (steps_.last()) arrive_warp(smem_.v_empty[keys_.stage]);
    typename Score::template AlongDiagonals<kRows> along_diagonals;
    differentiate(s, p, ds, kept, first_delta, delta, along_diagonals);
    add_gradients(p, ds, along_diagonals);
  }

  // s and dp; in flight on return.
  __device__ __forceinline__ void issue_score_products(Scores& s) {
    if constexpr (Score::kStarts) {
      if constexpr (kLoadsAhead) {
        score_.transpose_start(s, registers_.dp);
      } else {
        score_.read_start(s, shared_address(smem_.starts[steps_.start_stage()][group_]));
        __syncwarp();  // all lanes have read
        steps_.release_starts();
      }
      score_.start(s, row_, own_key_);
    } else {
      discard(s);
    }
    issue_scores<kMath, Tile::kHeadDim, Traits::kKeyPanelBytes, Traits::kRowPanelBytes, kRows,
                 Tile::kHeldSteps>(s, k_, operands_.q + steps_.q_offset(), Score::kStarts,
                                   registers_.held_k);
    steps_.wait_dout();
    discard(registers_.dp);
    issue_scores<kMath, Tile::kValueDim, Traits::kKeyPanelBytes, Traits::kRowPanelBytes, kRows>(
        registers_.dp, v_, operands_.dout + steps_.dout_offset());
  }

  // ptxas would move a wait above what is computed beside the product; a store of what depends on
  // all of it cannot follow the wait.
  __device__ __forceinline__ void pin(uint32_t value) const {
    store_shared_volatile(shared_address(&smem_.pin[group_ * 128 + late_thread()]),
                          static_cast<uint16_t>(value));
  }

  // ds of s, the weights of dp.
  template <class Along>
  __device__ __forceinline__ void differentiate(const Scores& s, PackedScores& p, PackedScores& ds,
                                                const Kept& kept, const ColumnValues& first_delta,
                                                const float* delta, Along& along_diagonals) {
    Scores& dp = registers_.dp;
    const auto sum_up = score_.adder_to(registers_.key_sums, row_, own_key_);
    for_columns<kRows / 2>(first_delta, delta, [&](int i, float delta_of_row) {
      dp[i] = s[i] * (kept.of(i, dp[i]) - score_.share_of(delta_of_row));
      sum_up(i, dp[i]);
      along_diagonals.add(i, dp[i]);
      if (i % 2 == 0) return;
      ds[i / 2] = pack<kMath>(dp[i - 1], dp[i]);
      if (!kEarlyPack) p[i / 2] = kept.of_pair(i - 1, pack<kMath>(s[i - 1], s[i]));
    });
  }

  // What the step adds to dv, dk and dq.
  template <class Along>
  __device__ __forceinline__ void add_gradients(const PackedScores& p, const PackedScores& ds,
                                                Along& along_diagonals) {
    Dq dq;
    wait_for_ds_buffer();
    store_ds(ds);
    issue_gradient<Traits, Tile::kValueDim>(registers_.dv, p,
                                            operands_.dout_columns + steps_.dout_offset());
    announce_ds();
    issue_dq(dq);
    score_.add_up(args_, along_diagonals, block_, row_, own_key_);
    prepare_next(staged());
    wgmma_wait<1>();
    steps_.release_dout();
    issue_gradient<Traits, Tile::kHeadDim>(registers_.dk, ds,
                                           operands_.q_columns + steps_.q_offset());
    wgmma_wait<1>();
    hold(dq);
    if (steps_.last()) arrive_warp(smem_.k_empty[keys_.stage]);
    // dq leaves while dk's product runs.
    hand_over_dq(dq);
    wgmma_wait<0>();
  }

  // Two buffers: whoever passes announce_ds() knows that both warpgroups are through with the step
  // before, so that a buffer is free again one step later.
  __device__ __forceinline__ void store_ds(const PackedScores& ds) const {
    store_transposed<kRows>(operands_.ds_panel + steps_.odd() * Traits::kScoreBytes, ds);
  }
  __device__ __forceinline__ static void announce_ds() {
    fence_proxy_async();
    named_barrier_sync(kConsumers, Traits::kConsumerThreads);
  }

  // In flight on return.
  __device__ __forceinline__ void issue_dq(Dq& dq) const {
    discard(dq);
    wgmma_fence();
    multiply_dq<Traits, Traits::kDqPartDims>(
        dq, operands_.ds + steps_.odd() * descriptor_step(Traits::kScoreBytes), k_columns_, false);
    wgmma_commit();
  }

  // The warpgroup's part of dq, to the warp that moves it on.
  __device__ __forceinline__ void hand_over_dq(const Dq& dq) const {
    const int thread = late_thread();
    const uint32_t target =
        shared_address(smem_.dq[group_]) + thread / 32 * Traits::kDqWarpBytes + thread % 32 * 16;
    named_barrier_sync(kDqEmpty + group_, 128 + 32);
    if (args_.direct_dq) {
      constexpr bool kSeen[2] = {true, true};
      stage<Traits, Traits::kDqPartDims>(smem_.dq[group_], dq, args_.problem.scale, kSeen);
    } else {
#pragma unroll
      for (int i = 0; i < Traits::kDqPartDims / 8; ++i) {
        store_shared_f32x4(target + i * 512, dq + 4 * i);
      }
    }
    named_barrier_arrive(kDqFull + group_, 128 + 32);
  }

  const BackwardArgs& args_;
  SharedMemory& smem_;
  const Operands& operands_;
  const Block& block_;
  const int group_;
  Ring<Tile::kKeyStages>& keys_;
  const uint32_t parity_;  // of the barriers that complete once a tile
  const int own_key_;      // the first
  const Interval own_rows_, common_rows_;
  const uint64_t k_, v_, k_columns_;  // operands_, in the tile's buffer
  Score& score_;
  ConsumerSteps<Traits>& steps_;
  int& row_;  // of the step
  int& head_;
  Registers& registers_;
};

}  // namespace jaxflash::sm90
