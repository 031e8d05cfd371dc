// The consumers of a block that has a tile of keys to itself.
#pragma once

#include "sm90/backward/consumers.cuh"
#include "sm90/backward/scores.cuh"

namespace jaxflash::sm90 {

// Each warpgroup owns 64 keys. Its p^T and ds^T go from the accumulators straight into the products
// for dv and dk; ds also goes to shared memory, where both warpgroups read it for dq.
template <class Traits, class Mask, class Score>
struct SingleConsumers {
  using Tile = typename Traits::Tile;
  using SharedMemory = typename Traits::SharedMemory;
  using Block = KeyBlock<Traits::kRows, Traits::kTileKeys, Mask>;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kDqElements = Traits::kDqPartDims / 2;  // of a thread
  static constexpr Math kMath = Traits::kMath;
  // On a diagonal, half of a block's keys may see none of a step's rows. Steps of 128 rows are as
  // long as the block is wide, and then it happens at ragged ends only.
  static constexpr bool kIdleSteps = kRows < kKeys;
  // Packing p while dp's product runs keeps it beside its float32 values: too much for 128 rows.
  static constexpr bool kEarlyPack = kRows <= 64;
  // What products start from is loaded by the threads that need it, a step ahead.
  static constexpr bool kLoadsAhead = Score::kStarts && !Tile::kLoadsStarts;
  static_assert(Score::kStarts || !Tile::kLoadsStarts);

  // In flight on return.
  __device__ __forceinline__ static void issue_dq(float (&dq)[kDqElements], uint64_t ds,
                                                  uint64_t k) {
    wgmma_fence();
    multiply_dq<Traits, Traits::kDqPartDims>(dq, ds, k, false);
    wgmma_commit();
  }

  // The warpgroup's part of dq, to the warp that moves it on.
  __device__ __forceinline__ static void hand_over_dq(const BackwardArgs& args, SharedMemory& smem,
                                                      const float (&dq)[kDqElements], int group) {
    const int thread = late_thread();
    const uint32_t target =
        shared_address(smem.dq[group]) + thread / 32 * Traits::kDqWarpBytes + thread % 32 * 16;
    named_barrier_sync(kDqEmpty + group, 128 + 32);
    if (args.direct_dq) {
      constexpr bool kSeen[2] = {true, true};
      stage<Traits, Traits::kDqPartDims>(smem.dq[group], dq, args.problem.scale, kSeen);
    } else {
#pragma unroll
      for (int i = 0; i < kDqElements / 4; ++i) store_shared_f32x4(target + i * 512, dq + 4 * i);
    }
    named_barrier_arrive(kDqFull + group, 128 + 32);
  }

  // The warpgroup's keys see none of the rows: its ds is 0. What remains is its half of dq, to
  // which the other keys contribute.
  template <class Wait>
  __device__ __forceinline__ static void idle_step(const BackwardArgs& args, SharedMemory& smem,
                                                   ConsumerSteps<Traits>& steps,
                                                   const Wait& wait_for_ds_buffer, int key_stage,
                                                   uint32_t ds_panel, uint64_t dq_ds, uint64_t dq_k,
                                                   int group, uint32_t (&ds)[kRows / 4],
                                                   float (&dq)[kDqElements]) {
    steps.wait_dout();
    wait_for_ds_buffer();
#pragma unroll
    for (uint32_t& pair : ds) pair = 0;
    store_transposed<kRows>(ds_panel + steps.odd() * Traits::kScoreBytes, ds);
    fence_proxy_async();
    named_barrier_sync(kConsumers, Traits::kConsumerThreads);
    steps.release_q();
    steps.release_starts();
    steps.release_dout();
    discard(dq);
    issue_dq(dq, dq_ds + steps.odd() * descriptor_step(Traits::kScoreBytes), dq_k);
    wgmma_wait<0>();
    hold(dq);
    if (steps.last()) {
      arrive_warp(smem.v_empty[key_stage]);
      arrive_warp(smem.k_empty[key_stage]);
    }
    hand_over_dq(args, smem, dq, group);
  }

  __device__ __forceinline__ static void consume(const BackwardArgs& args, SharedMemory& smem,
                                                 int group) {
    const int thread = threadIdx.x & 127;
    const int column = Fragment::column(thread);
    Score score(args);

    // As A: the warpgroup's 64 keys. As B: all queries of a step. The transposed view of q and dout
    // (queries x columns) reads the same bytes with another major axis.
    const int group_bytes = group * 64 * Traits::kPanelRowBytes;
    const uint64_t k_base = wgmma_descriptor(shared_address(smem.k[0]) + group_bytes, 16, 1024);
    const uint64_t v_base = wgmma_descriptor(shared_address(smem.v[0]) + group_bytes, 16, 1024);
    const uint64_t q_base = wgmma_descriptor(shared_address(smem.q[0]), 16, 1024);
    const uint64_t dout_base = wgmma_descriptor(shared_address(smem.dout[0]), 16, 1024);
    const uint64_t q_columns =
        wgmma_descriptor(shared_address(smem.q[0]), Traits::kRowPanelBytes, 1024);
    const uint64_t dout_columns =
        wgmma_descriptor(shared_address(smem.dout[0]), Traits::kRowPanelBytes, 1024);
    // dq: one warpgroup takes a half of the columns, or of the rows where steps have as many as
    // both can take.
    constexpr bool kDivideColumns = kRows == Traits::kDqPartRows;
    constexpr int kColumnBytes =
        Traits::kDqPartDims == 64 ? Traits::kKeyPanelBytes : Traits::kDqPartDims * 2;
    const uint64_t dq_ds =
        wgmma_descriptor(shared_address(smem.ds[0]) + (kDivideColumns ? 0 : group_bytes), 16, 1024);
    const uint64_t dq_k_base =
        wgmma_descriptor(shared_address(smem.k[0]) + (kDivideColumns ? group * kColumnBytes : 0),
                         Traits::kKeyPanelBytes, 1024);
    const uint32_t ds_panel = shared_address(smem.ds[0]) + group * Traits::kRowPanelBytes;

    ConsumerSteps<Traits> steps(smem);
    Ring<Tile::kKeyStages> keys;
    TicketReader<Traits::kBlocks> reader;

    for (;;) {
      const uint32_t position = reader.next(smem.tickets);
      if (position >= args.order.tiles()) break;
      const Block block(args.problem, args.tile<Score>(position));
      int row = block.first_row;
      int head = 0;
      const int own_key = block.first_key + group * 64;
      const Interval own_rows = block.mask.rows({own_key, own_key + 64});
      const Interval common_rows = block.mask.common_rows({own_key, own_key + 64});
      const uint64_t k_rows = k_base + keys.stage * descriptor_step(Traits::kKBytes);
      const uint64_t v_rows = v_base + keys.stage * descriptor_step(Traits::kVBytes);
      const uint64_t dq_k = dq_k_base + keys.stage * descriptor_step(Traits::kKBytes);

      float dk[Tile::kHeadDim / 2];
      float dv[Tile::kValueDim / 2];
#pragma unroll
      for (float& value : dk) value = 0.f;
#pragma unroll
      for (float& value : dv) value = 0.f;

      KeySums<Score::kKeySums> key_sums;
      // dk and dv of the tile before may still be on their way out of where ds goes.
      const auto wait_for_ds_buffer = [&] {
        if (head == 0 && row == block.first_row) smem.dkv_empty.wait(reader.parity() ^ 1);
      };

      HeldOperand<Tile::kHeldSteps> held_k;
      if (block.steps() > 0) {
        smem.k_full[keys.stage].wait(keys.phase);
        smem.v_full[keys.stage].wait(keys.phase);
        held_k.template load<Tile::kHeadDim, Traits::kKeyPanelBytes>(
            shared_address(smem.k[keys.stage]) + group_bytes);
      }
      float dp[kRows / 2];  // between two steps what the next scores start from
      const auto prepare = [&](int row, int head) {
        if (row == block.first_row) score.begin_head(args, block, head, own_key);
        if constexpr (kLoadsAhead) score.load_start(dp, row, own_key);
      };
      // Of a step whose rows have not been released.
      const auto staged = [&]() -> const StagedRows& { return smem.staged[steps.q_stage()]; };
      const auto prepare_next = [&](const StagedRows& after) {
        if constexpr (kLoadsAhead) {
          if (steps.last()) return;
          int next_row = row, next_head = head;
          block.advance(after, next_row, next_head);
          prepare(next_row, next_head);
        }
      };
      if (kLoadsAhead && block.steps() > 0) prepare(row, head);
#pragma unroll 1
      for (steps.begin(block.steps()); steps.more(); steps.advance()) {
        uint32_t ds[kRows / 4];
        float dq[kDqElements];

        key_sums.begin_step(args, block, row, head, own_key);
        if constexpr (!kLoadsAhead) prepare(row, head);
        steps.wait_q();
        steps.wait_starts();
        Interval seeing = own_rows, seeing_all = common_rows;
        StagedRows after{};
        if constexpr (Mask::kWalks) {
          after = staged();
          const Interval open = block.mask.open_rows({own_key, own_key + 64});
          after.template refine<kRows>(group, row, open, seeing, seeing_all);
        }
        if (kIdleSteps && (row + kRows <= seeing.begin || row >= seeing.end)) {
          idle_step(args, smem, steps, wait_for_ds_buffer, keys.stage, ds_panel, dq_ds, dq_k, group,
                    ds, dq);
          prepare_next(after);
          block.advance(after, row, head);
          continue;
        }
        float s[kRows / 2];
        uint32_t p[kRows / 4];
        Kept<Score::kDrops, false, kRows> kept;
        const float* const lse = &smem.lse[steps.q_stage()][column];
        ColumnValues first_lse;
        first_lse.load(lse);
        if constexpr (Score::kStarts) {
          if constexpr (kLoadsAhead) {
            score.transpose_start(s, dp);
          } else {
            score.read_start(s, shared_address(smem.starts[steps.start_stage()][group]));
            __syncwarp();  // all lanes have read
            steps.release_starts();
          }
          score.start(s, row, own_key);
        } else {
          discard(s);
        }
        issue_scores<kMath, Tile::kHeadDim, Traits::kKeyPanelBytes, Traits::kRowPanelBytes, kRows,
                     Tile::kHeldSteps>(s, k_rows, q_base + steps.q_offset(), Score::kStarts,
                                       held_k);
        steps.wait_dout();
        discard(dp);
        issue_scores<kMath, Tile::kValueDim, Traits::kKeyPanelBytes, Traits::kRowPanelBytes, kRows>(
            dp, v_rows, dout_base + steps.dout_offset());
        // ptxas would move a wait above what is computed beside the product; a store of what
        // depends on all of it cannot follow the wait.
        const auto pin = [&](uint32_t value) {
          store_shared_volatile(shared_address(&smem.pin[group * 128 + late_thread()]),
                                static_cast<uint16_t>(value));
        };
        if constexpr (Score::kDrops) score.draw(kept, row, own_key);
        wgmma_wait<1>();
        hold(s);
        pin(weigh_and_pack<kMath, kEarlyPack>(score, s, p, kept, first_lse, lse, block, seeing_all,
                                              row, own_key));
        wgmma_wait<0>();
        hold(dp);
        const float* const delta = &smem.delta[steps.dout_stage()][column];
        ColumnValues first_delta;
        first_delta.load(delta);
        if (steps.last()) arrive_warp(smem.v_empty[keys.stage]);
        const auto sum_up = score.adder_to(key_sums, row, own_key);
        typename Score::template AlongDiagonals<kRows> along_diagonals;
        for_columns<kRows / 2>(first_delta, delta, [&](int i, float delta_of_row) {
          dp[i] = s[i] * (kept.of(i, dp[i]) - score.share_of(delta_of_row));
          sum_up(i, dp[i]);
          along_diagonals.add(i, dp[i]);
          if (i % 2 == 0) return;
          ds[i / 2] = pack<kMath>(dp[i - 1], dp[i]);
          if (!kEarlyPack) p[i / 2] = kept.of_pair(i - 1, pack<kMath>(s[i - 1], s[i]));
        });
        // Two buffers: whoever passes the barrier below knows that both warpgroups are through with
        // the step before, so that a buffer is free again one step later.
        const int odd = steps.odd();
        wait_for_ds_buffer();
        store_transposed<kRows>(ds_panel + odd * Traits::kScoreBytes, ds);
        issue_gradient<Traits, Tile::kValueDim>(dv, p, dout_columns + steps.dout_offset());
        fence_proxy_async();
        named_barrier_sync(kConsumers, Traits::kConsumerThreads);

        discard(dq);
        issue_dq(dq, dq_ds + odd * descriptor_step(Traits::kScoreBytes), dq_k);
        score.add_up(args, along_diagonals, block, row, own_key);
        prepare_next(staged());
        wgmma_wait<1>();
        steps.release_dout();
        issue_gradient<Traits, Tile::kHeadDim>(dk, ds, q_columns + steps.q_offset());
        wgmma_wait<1>();
        hold(dq);
        if (steps.last()) arrive_warp(smem.k_empty[keys.stage]);
        // dq leaves while dk's product runs.
        hand_over_dq(args, smem, dq, group);
        wgmma_wait<0>();
        if constexpr (Mask::kWalks) {
          after = staged();
          __syncwarp();  // all lanes have read
        }
        steps.release_q();
        block.advance(after, row, head);
      }

      hold(dk);
      hold(dv);
      key_sums.end_tile(args, block, own_key);
      if (block.steps() > 0) keys.advance();
      bool seen[2];
      find_seen(seen, block.mask, own_key);
      // dv replaces ds once both warpgroups are through with it (and dv of the tile before has
      // left, where this one has no rows), and dk replaces dq once that has left. Where ds leaves
      // too, it does so beside dq.
      if (Score::kStoresGradient) named_barrier_sync(kDqEmpty + group, 128 + 32);
      named_barrier_sync(kConsumers, Traits::kConsumerThreads);
      wait_for_ds_buffer();
      stage<Traits, Tile::kValueDim>(smem.ds[group], dv, 1.f, seen);
      if (!Score::kStoresGradient) named_barrier_sync(kDqEmpty + group, 128 + 32);
      stage<Traits, Tile::kHeadDim>(smem.dq[group], dk, args.problem.scale, seen);
      fence_proxy_async();
      smem.dkv_full.arrive();
    }
    named_barrier_sync(kDqEmpty + group, 128 + 32);  // the last arrival
  }
};

}  // namespace jaxflash::sm90
