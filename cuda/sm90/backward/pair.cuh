// The consumers of a pair of blocks that share a tile of keys.
#pragma once

#include "sm90/backward/consumers.cuh"
#include "sm90/backward/scores.cuh"

namespace jaxflash::sm90 {

// A pair of blocks. The first warpgroup computes p and owns dv, the second computes ds and owns dk:
// both have all of the block's keys as rows, so that p^T and ds^T feed these products out of
// registers, and hand p over in the order of the registers. The blocks exchange ds, and each
// computes dq for half of the columns, from the ds of both: half as much to add.
//
// dq runs late, so that the exchange is not waited for: its product runs beside the pointwise work
// of the next step, and leaves beside the products for dv and dk.
template <class Traits, class Mask, class Score>
struct PairConsumers {
  using Tile = typename Traits::Tile;
  using SharedMemory = typename Traits::SharedMemory;
  using Block = KeyBlock<Traits::kRows, Traits::kTileKeys, Mask>;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr Math kMath = Traits::kMath;
  // The thread that deals with the other block.
  static constexpr int kMessenger = 128;

  // Once ds of a step lies in shared memory: gets ready for the other block's, and sends it this
  // block's.
  __device__ __forceinline__ static void exchange_ds(SharedMemory& smem, int odd) {
    const uint32_t peer = cluster_rank() ^ 1;
    smem.peer_ds_full[odd].arrive_expecting(Traits::kScoreBytes);
    bulk_store_remote(remote_address(shared_address(smem.peer_ds[odd]), peer),
                      shared_address(smem.ds[odd]), Traits::kScoreBytes,
                      remote_address(smem.peer_ds_full[odd].address(), peer));
  }

  // Where the thread hands over its elements of p: four at a time.
  __device__ __forceinline__ static uint32_t handed_p(const SharedMemory& smem) {
    return shared_address(smem.p) + late_thread() * 16;
  }
  static constexpr int kHandedBytes = 128 * 16;

  // Stores ds of a step, for this block and the other one.
  __device__ __forceinline__ static void send_ds(SharedMemory& smem,
                                                 const ConsumerSteps<Traits>& steps, int odd,
                                                 const uint32_t (&packed)[kRows / 4]) {
    smem.ds_empty[odd].wait(steps.odd_phase() ^ 1);
    store_transposed<kRows>(shared_address(smem.ds[odd]), packed);
    fence_proxy_async();
    named_barrier_sync(kDsStored, 128);
    if (threadIdx.x == kMessenger) exchange_ds(smem, odd);
    __syncwarp();
  }

  __device__ __forceinline__ static void hand_over_p(const SharedMemory& smem,
                                                     const float (&p)[kRows / 2]) {
    const uint32_t target = handed_p(smem);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) store_shared_f32x4(target + i * kHandedBytes, p + 4 * i);
  }

  // In the order of the fragments, for the warp that adds them.
  template <int kGroup, int kElements>
  __device__ __forceinline__ static void stage_dq(const SharedMemory& smem, int odd,
                                                  const float (&dq)[kElements]) {
    const int thread = late_thread();
    const uint32_t target = smem.staged_dq(kGroup * 4 + thread / 32, odd) + thread % 32 * 16;
#pragma unroll
    for (int i = 0; i < kElements / 4; ++i) store_shared_f32x4(target + i * 512, dq + 4 * i);
    named_barrier_arrive(kDqFull, Traits::kConsumerThreads + 32);
  }

  template <int kGroup>
  __device__ __forceinline__ static void consume(const BackwardArgs& args, SharedMemory& smem) {
    constexpr bool kValues = kGroup == 0;
    // Of s or dp, what it sums over; of dv or dk, its columns.
    constexpr int kScoreDim = kValues ? Tile::kHeadDim : Tile::kValueDim;
    constexpr int kSumDim = kValues ? Tile::kValueDim : Tile::kHeadDim;
    constexpr int kSums = kValues ? 0 : Score::kKeySums;
    const int thread = threadIdx.x % 128;
    const int column = Fragment::column(thread);
    Score score(args);

    const uint64_t rows_a =
        wgmma_descriptor(shared_address(kValues ? smem.k[0] : smem.v[0]), 16, 1024);
    const uint64_t rows_b =
        wgmma_descriptor(shared_address(kValues ? smem.q[0] : smem.dout[0]), 16, 1024);
    const uint64_t columns_b = wgmma_descriptor(shared_address(kValues ? smem.dout[0] : smem.q[0]),
                                                Traits::kRowPanelBytes, 1024);
    // dq: a panel of columns, or a half of one.
    using DqPart = typename Traits::template DqPart<kGroup>;
    const int rank = cluster_rank();
    const int dq_bytes = DqPart::column_in_panel(rank) * 2;
    const uint64_t ds_rows = wgmma_descriptor(shared_address(smem.ds[0]), 16, 1024);
    const uint64_t peer_ds_rows = wgmma_descriptor(shared_address(smem.peer_ds[0]), 16, 1024);
    const uint64_t dq_k = wgmma_descriptor(
        shared_address(smem.k[0]) + DqPart::panel(rank) * Traits::kKeyPanelBytes + dq_bytes,
        Traits::kKeyPanelBytes, 1024);
    const uint64_t dq_peer_k = wgmma_descriptor(
        shared_address(smem.peer_k) + DqPart::own_panel(rank) * Traits::kKeyPanelBytes + dq_bytes,
        Traits::kKeyPanelBytes, 1024);

    ConsumerSteps<Traits> steps(smem);
    TicketReader<Traits::kBlocks> reader;

    for (;;) {
      const uint32_t position = reader.next(smem.tickets);
      if (position >= args.order.tiles()) break;
      const Block block(args.problem, args.tile<Score>(position));
      const int first_key = Traits::first_key(block);
      const Interval common_rows = block.mask.common_rows({first_key, first_key + kKeys});
      int row = block.first_row;
      int head = 0;
      int done = 0;  // steps of this tile

      KeySums<kSums> key_sums;
      float sum[kSumDim / 2];  // dv or dk
      float dq[DqPart::kColumns / 2];
#pragma unroll
      for (float& value : sum) value = 0.f;

      // Of the step before the current one; in flight on return. Both warpgroups have passed
      // kDqComputed since this block's ds was stored.
      const auto issue_dq = [&] {
        const uint64_t offset = (steps.odd() ^ 1) * descriptor_step(Traits::kScoreBytes);
        discard(dq);
        wgmma_fence();
        multiply_dq<Traits, DqPart::kColumns>(dq, ds_rows + offset, dq_k, false);
        multiply_dq<Traits, DqPart::kColumns>(dq, peer_ds_rows + offset, dq_peer_k, true);
        wgmma_commit();
      };
      const auto wait_peer_ds = [&] {
        const int odd = steps.odd() ^ 1;
        smem.peer_ds_full[odd].wait(steps.last_odd_phase());
        if (!kValues) {
          if (threadIdx.x == kMessenger) smem.ds_taken[odd].arrive_remote(cluster_rank() ^ 1);
          __syncwarp();
        }
      };
      // After kDqComputed: both warpgroups are through with p and ds that lie there.
      const auto stage_last_dq = [&] {
        if (!kValues) smem.ds_taken[steps.odd() ^ 1].wait(steps.last_odd_phase());
        stage_dq<kGroup>(smem, steps.odd() ^ 1, dq);
      };

      // Stages dv in v's place, dk in k's.
      const auto stage_sum = [&] {
        hold(sum);
        bool seen[2];
        find_seen(seen, block.mask, first_key);
        stage<Traits, kSumDim>(kValues ? smem.v[0] : smem.k[0], sum,
                               kValues ? 1.f : args.problem.scale, seen);
        fence_proxy_async();
        (kValues ? smem.dv_full : smem.dk_full).arrive();
      };
      // Each phase is waited for, also where a tile has no rows: it has to be complete before the
      // next tile is loaded.
      const auto wait_dq_keys = [&] {
        if (!kValues) smem.k_full[0].wait(reader.parity());
        smem.peer_k_full.wait(reader.parity());
      };

      (kValues ? smem.k_full : smem.v_full)[0].wait(reader.parity());
      constexpr bool kStarts = kValues && Score::kStarts;
      float x[kRows / 2];  // s or dp; between two steps what the next scores start from
      const auto prepare = [&](int row, int head) {
        if ((kValues || Score::kDrops || kSums > 0) && row == block.first_row) {
          score.begin_head(args, block, head, first_key);
        }
        if constexpr (kStarts) score.load_start(x, row, first_key);
      };
      const auto prepare_next = [&](const StagedRows& after) {
        if constexpr (kStarts) {
          if (steps.last()) return;
          int next_row = row, next_head = head;
          block.advance(after, next_row, next_head);
          prepare(next_row, next_head);
        }
      };
      if (kStarts && block.steps() > 0) prepare(row, head);
#pragma unroll 1
      for (steps.begin(block.steps()); steps.more(); steps.advance()) {
        uint32_t packed[kRows / 4];
        StagedRows after{};

        key_sums.begin_step(args, block, row, head, first_key);
        if constexpr (!kStarts) prepare(row, head);
        if (kValues) {
          steps.wait_q();
        } else {
          steps.wait_dout();
        }
        const float* const from =
            kValues ? &smem.lse[steps.q_stage()][column] : &smem.delta[steps.dout_stage()][column];
        ColumnValues values;
        values.load(from);
        if constexpr (kStarts) {
          score.transpose_start(x, x);
          score.start(x, row, first_key);
        } else {
          discard(x);
        }
        issue_scores<kMath, kScoreDim, Traits::kKeyPanelBytes, Traits::kRowPanelBytes, kRows>(
            x, rows_a, rows_b + (kValues ? steps.q_offset() : steps.dout_offset()), kStarts);
        // The first step has no dq to compute: what this product makes of the buffers is dropped. A
        // branch around it would make the compiler wait for all others.
        if (done > 0) {
          wait_peer_ds();
        } else {
          wait_dq_keys();
        }
        issue_dq();
        // ptxas would move a wait or a barrier above what is computed before it; a store of what
        // depends on all of it cannot follow.
        const auto pin = [&](uint32_t value) {
          store_shared_volatile(shared_address(&smem.pin[kGroup * 128 + late_thread()]),
                                static_cast<uint16_t>(value));
        };
        Kept<Score::kDrops, false, kRows> kept;
        if constexpr (Score::kDrops) score.draw(kept, row, first_key);
        wgmma_wait<1>();
        hold(x);
        if constexpr (kValues) {
          Interval seeing{}, seeing_all = common_rows;
          if constexpr (Mask::kWalks) {
            after = smem.staged[steps.q_stage()];
            const Interval open = block.mask.open_rows({first_key, first_key + kKeys});
            after.template refine<kRows>(cluster_rank(), row, open, seeing, seeing_all);
          }
          pin(weigh_and_pack<kMath, true>(score, x, packed, kept, values, from, block, seeing_all,
                                          row, first_key));
          // dq that lay in p's buffer has left, unless there was none in the last step.
          if (done != 1) named_barrier_sync(kDqEmpty, 128 + 32);
          hand_over_p(smem, x);
          named_barrier_arrive(kPFull, Traits::kConsumerThreads);
          steps.release_q();
          steps.wait_dout();
          issue_gradient<Traits, kSumDim>(sum, packed, columns_b + steps.dout_offset());
          prepare_next(after);
        } else {
          named_barrier_sync(kPFull, Traits::kConsumerThreads);
          const auto sum_up = score.adder_to(key_sums, row, first_key);
          const uint32_t source = handed_p(smem);
#pragma unroll
          for (int i = 0; i < kRows / 8; ++i) {
            float p[4];
            load_shared_f32x4(source + i * kHandedBytes, p);
            const auto ds = [&](int j) {
              const int k = 4 * i + j;
              const float result = p[j] * (kept.of(k, x[k]) - score.share_of(values.of(k)));
              sum_up(k, result);
              return result;
            };
            packed[2 * i] = pack<kMath>(ds(0), ds(1));
            packed[2 * i + 1] = pack<kMath>(ds(2), ds(3));
          }
          const int odd = steps.odd();
          steps.release_dout();
          send_ds(smem, steps, odd, packed);
          steps.wait_q();
          if constexpr (Mask::kWalks) after = smem.staged[steps.q_stage()];
          issue_gradient<Traits, kSumDim>(sum, packed, columns_b + steps.q_offset());
        }
        wgmma_wait<1>();
        hold(dq);
        // ds of this step is complete, p has been read, and ds of the step before as well.
        named_barrier_sync(kDqComputed, Traits::kConsumerThreads);
        if (done > 0) stage_last_dq();
        wgmma_wait<0>();
        if (kValues) {
          steps.release_dout();
        } else {
          steps.release_q();
        }
        block.advance(after, row, head);
        ++done;
      }
      key_sums.end_tile(args, block, first_key);

      // v is no longer read: the other warpgroup has passed kDqComputed with its last dp.
      if (kValues) {
        smem.v_full[0].wait(reader.parity());
        stage_sum();
      }
      if (done > 0) {
        wait_peer_ds();
        issue_dq();
        wgmma_wait<0>();
        hold(dq);
        if (kValues && done != 1) named_barrier_sync(kDqEmpty, 128 + 32);
        named_barrier_sync(kDqComputed, Traits::kConsumerThreads);
        stage_last_dq();
      } else {
        wait_dq_keys();
      }
      // Nor is k, or what the other block's k was loaded for: both warpgroups have computed dq.
      if (!kValues) stage_sum();
    }
    if (kValues) named_barrier_sync(kDqEmpty, 128 + 32);  // the last arrival
  }
};

}  // namespace jaxflash::sm90
