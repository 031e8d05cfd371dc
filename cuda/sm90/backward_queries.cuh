// The consumers where scores have queries as rows.
#pragma once

#include "sm90/backward_consumers.cuh"

namespace jaxflash::sm90 {

// Each warpgroup computes the scores of half of the keys and owns half of the columns of dk, dv and
// dq; p and ds go through shared memory.
template <class Traits, class Mask, class Score>
struct QueriesAsRows {
  using Tile = typename Traits::Tile;
  using SharedMemory = typename Traits::SharedMemory;
  using Block = KeyBlock<Traits::kRows, Traits::kKeys, Mask>;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kHalfKeys = kKeys / 2;
  static constexpr Math kMath = Traits::kMath;
  // Panels of columns (of 64) that a warpgroup owns.
  static constexpr int kOwnPanels = Traits::kPanels / 2;

  // acc^T += operand^T scores, for the warpgroup's panels of columns; in flight on return.
  __device__ __forceinline__ static void issue_gradient(float (&acc)[kOwnPanels][kKeys / 2],
                                                        uint64_t operand, uint64_t scores) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      const uint64_t queries = descriptor_step(step * 16 * Traits::kPanelRowBytes);
#pragma unroll
      for (int panel = 0; panel < kOwnPanels; ++panel) {
        Wgmma<kKeys>::template ss<kMath, 1, 1>(
            acc[panel], operand + queries + descriptor_step(panel * Traits::kRowPanelBytes),
            scores + queries, 1);
      }
    }
    wgmma_commit();
  }

  // The warpgroup's columns of p or ds, 64 queries x kHalfKeys.
  __device__ __forceinline__ static void store_scores(uint8_t* tile,
                                                      const uint32_t (&packed)[kHalfKeys / 4],
                                                      int group) {
    const int thread = threadIdx.x % 128;
    const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int block = 0; block < kHalfKeys / 8; ++block) {
      const int piece = group * (kHalfKeys / 8) + block;
      stmatrix_x2(shared_address(tile) + piece / 8 * Traits::kRowPanelBytes +
                      row * Traits::kPanelRowBytes + (piece % 8 ^ row % 8) * 16,
                  packed[2 * block], packed[2 * block + 1]);
    }
  }

  __device__ __forceinline__ static void stage(uint8_t* tile,
                                               const float (&acc)[kOwnPanels][kKeys / 2],
                                               float scale, int first_key, Interval seen,
                                               int group) {
#pragma unroll
    for (int panel = 0; panel < kOwnPanels; ++panel) {
      uint32_t packed[kKeys / 4];
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = first_key + Fragment::column_of(2 * i) + e;
          pair[e] = key >= seen.begin && key < seen.end ? acc[panel][2 * i + e] * scale : 0.f;
        }
        packed[i] = pack<kMath>(pair[0], pair[1]);
      }
      store_transposed<kKeys>(
          shared_address(tile) + (group * kOwnPanels + panel) * Traits::kKeyPanelBytes, packed);
    }
  }

  __device__ __forceinline__ static void consume(const BackwardArgs& args, SharedMemory& smem,
                                                 int group) {
    const int thread = threadIdx.x % 128;
    const Score score{args.scale_log2};

    const int half_bytes = group * kHalfKeys * Traits::kPanelRowBytes;
    const uint64_t q_rows = wgmma_descriptor(shared_address(smem.q[0]), 16, 1024);
    const uint64_t dout_rows = wgmma_descriptor(shared_address(smem.dout[0]), 16, 1024);
    const uint64_t k_half = wgmma_descriptor(shared_address(smem.k[0]) + half_bytes, 16, 1024);
    const uint64_t v_half = wgmma_descriptor(shared_address(smem.v[0]) + half_bytes, 16, 1024);
    // Transposed views of the warpgroup's panels of columns.
    const int own_panel = group * kOwnPanels;
    const uint64_t q_columns =
        wgmma_descriptor(shared_address(smem.q[0]) + own_panel * Traits::kRowPanelBytes,
                         Traits::kRowPanelBytes, 1024);
    const uint64_t dout_columns =
        wgmma_descriptor(shared_address(smem.dout[0]) + own_panel * Traits::kRowPanelBytes,
                         Traits::kRowPanelBytes, 1024);
    const uint64_t k_columns =
        wgmma_descriptor(shared_address(smem.k[0]) + own_panel * Traits::kKeyPanelBytes,
                         Traits::kKeyPanelBytes, 1024);
    const uint64_t p_columns =
        wgmma_descriptor(shared_address(smem.scores[0]), Traits::kRowPanelBytes, 1024);
    const uint64_t ds_columns =
        wgmma_descriptor(shared_address(smem.scores[1]), Traits::kRowPanelBytes, 1024);
    const uint64_t ds_rows = wgmma_descriptor(shared_address(smem.scores[1]), 16, 1024);

    ConsumerSteps<Traits> steps(smem);
    TicketReader<1> reader;

    for (;;) {
      const uint32_t position = reader.next(smem.tickets);
      if (position >= args.order.tiles()) break;
      const Block block(args.problem, args.order.at(position));
      const int key = block.first_key + group * kHalfKeys + Fragment::column(thread);
      int row = block.first_row;
      int head = block.first_head();

      float dk[kOwnPanels][kKeys / 2];
      float dv[kOwnPanels][kKeys / 2];
#pragma unroll
      for (int panel = 0; panel < kOwnPanels; ++panel) {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) dk[panel][i] = dv[panel][i] = 0.f;
      }

      smem.k_full[0].wait(reader.parity());
      smem.v_full[0].wait(reader.parity());
#pragma unroll 1
      for (steps.begin(block.steps()); steps.more(); steps.advance()) {
        float s[kHalfKeys / 2];
        float dp[kHalfKeys / 2];
        uint32_t packed[kHalfKeys / 4];
        float dq[32];

        steps.wait_q();
        discard(s);
        issue_scores<kMath, Tile::kHeadDim, Traits::kRowPanelBytes, Traits::kKeyPanelBytes,
                     kHalfKeys>(s, q_rows + steps.q_offset(), k_half);
        steps.wait_dout();
        discard(dp);
        issue_scores<kMath, Tile::kValueDim, Traits::kRowPanelBytes, Traits::kKeyPanelBytes,
                     kHalfKeys>(dp, dout_rows + steps.dout_offset(), v_half);
        if (args.deterministic) {
          __threadfence();  // the adds of the step before have been performed: see keep_turns
          named_barrier_arrive(kAdded, Traits::kConsumerThreads + 32);
        }
        wgmma_wait<1>();
        hold(s);
        const int thread_row = Fragment::row(thread);
        if (!block.mask.full({row, row + kRows}, {block.first_key, block.first_key + kKeys})) {
          apply_mask(s, block.mask, {row + thread_row, row + thread_row + 8}, key);
        }
        const float* const lse = &smem.lse[steps.q_stage()][thread_row];
        const float lse_reg[2] = {lse[0], lse[8]};
#pragma unroll
        for (int i = 0; i < kHalfKeys / 2; ++i) {
          const float logit = score.logit(s[i], row + thread_row + 8 * Fragment::lower(i),
                                          key + Fragment::column_of(i));
          s[i] = exp2_approx(logit - lse_reg[Fragment::lower(i)]);
        }
#pragma unroll
        for (int i = 0; i < kHalfKeys / 4; ++i) packed[i] = pack<kMath>(s[2 * i], s[2 * i + 1]);
        named_barrier_sync(kScoresFree, Traits::kConsumerThreads);
        store_scores(smem.scores[0], packed, group);
        wgmma_wait<0>();
        hold(dp);
        const float* const delta = &smem.delta[steps.dout_stage()][thread_row];
        const float delta_reg[2] = {delta[0], delta[8]};
#pragma unroll
        for (int i = 0; i < kHalfKeys / 4; ++i) {
          const float d = delta_reg[i % 2];
          packed[i] = pack<kMath>(s[2 * i] * (dp[2 * i] - d), s[2 * i + 1] * (dp[2 * i + 1] - d));
        }
        store_scores(smem.scores[1], packed, group);
        fence_proxy_async();
        named_barrier_sync(kConsumers, Traits::kConsumerThreads);

        // Adds a panel of dq from the registers: in the order of the fragments a warp covers whole
        // lines.
        const int64_t head_index = int64_t{block.batch} * args.problem.q_heads + head;
        float* const dq_gmem =
            args.workspace.dq_of(args.workspace_data, head_index) + thread % 32 * 4;
        const auto add_dq = [&](int panel) {
          hold(dq);
          const int column = (own_panel + panel) * 64;
          // Panels that the problem's head size does not reach do not exist in the workspace.
          if (column >= args.workspace.dims) return;
          float* const target =
              dq_gmem + DqOrder::offset(args.workspace, row + thread / 32 * 16, column);
#pragma unroll
          for (int i = 0; i < 8; ++i) red_add_f32x4(target + i * DqOrder::kPiece, dq + 4 * i);
        };
        issue_gradient(dv, dout_columns + steps.dout_offset(), p_columns);
        discard(dq);
        issue_dq<Traits>(dq, ds_rows, k_columns);
        wgmma_wait<0>();
        steps.release_dout();
        if (args.deterministic) named_barrier_sync(kTurn, Traits::kConsumerThreads + 32);
        add_dq(0);
        discard(dq);
        issue_dq<Traits>(dq, ds_rows, k_columns + descriptor_step(Traits::kKeyPanelBytes));
        issue_gradient(dk, q_columns + steps.q_offset(), ds_columns);
        wgmma_wait<1>();
        add_dq(1);
        wgmma_wait<0>();
        steps.release_q();
        block.advance(row, head);
      }

#pragma unroll
      for (int panel = 0; panel < kOwnPanels; ++panel) {
        hold(dk[panel]);
        hold(dv[panel]);
      }
      if (args.deterministic) __threadfence();
      // k and v may be overwritten once both warpgroups are through with them.
      named_barrier_sync(kConsumers, Traits::kConsumerThreads);
      if (args.deterministic && threadIdx.x == 0 && block.rows.end > block.first_row) {
        const int last_row = (block.rows.end - 1) / kRows * kRows;
        const int last_head = block.first_head() + block.group - 1;
        store_release(dq_counter(args, block, last_row, last_head),
                      dq_turn(args.order, block, last_row) + 1);
      }
      const Interval seen = block.mask.keys({0, block.mask.q_len()});
      const int first_key = block.first_key + Fragment::column(thread);
      stage(smem.v[0], dv, 1.f, first_key, seen, group);
      stage(smem.k[0], dk, args.problem.scale, first_key, seen, group);
      fence_proxy_async();
      smem.dkv_full.arrive();
    }
  }
};

}  // namespace jaxflash::sm90
