// The consumers of the backward kernel: products and pointwise work of two warpgroups, once for
// scores with keys as rows, once for scores with queries as rows.
#pragma once

#include "common/dependency.cuh"
#include "common/mask.cuh"
#include "sm90/backward_kernel.cuh"
#include "sm90/softmax.cuh"
#include "sm90/wgmma.cuh"

namespace jaxflash::sm90 {

// The old values are not needed: the compiler need not keep them for a product that overwrites
// them.
template <int kElements>
__device__ __forceinline__ void discard(float (&registers)[kElements]) {
#pragma unroll
  for (float& value : registers) asm volatile("" : "=f"(value));
}

// The thread's index in its warpgroup, in a way that the compiler cannot compute ahead: what is
// derived from it outside of the main loop holds no register there.
__device__ __forceinline__ int late_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread & 127;
}

// One arrival a warp: a warp's wait covers its own part of a product only.
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  if (late_thread() % 32 == 0) barrier.arrive();
}

// The step from a product to its logit, in units of log 2.
struct ScaledLogits {
  float scale_log2;

  __device__ __forceinline__ float logit(float s, int /*row*/, int /*key*/) const {
    return s * scale_log2;
  }
};

// Writes packed accumulators (64 rows of a warpgroup x kColumns) transposed into a swizzled panel,
// whose 64 columns are those rows and whose rows start at `panel`.
template <int kColumns>
__device__ __forceinline__ void store_transposed(uint32_t panel,
                                                 const uint32_t (&packed)[kColumns / 4]) {
  const int thread = late_thread();
  const int row = thread % 32 / 16 * 8 + thread % 8;
  const int piece = thread / 32 * 2 + thread % 16 / 8;
  const uint32_t target = panel + row * 128 + (piece ^ row % 8) * 16;
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    stmatrix_x4_trans(target + step * 16 * 128, packed + 4 * step);
  }
}

// A consumer's place in the rings of q and dout, which move once a step, and how many steps of the
// tile remain: all in one word, because registers are short.
template <class Traits>
class ConsumerSteps {
  using Tile = typename Traits::Tile;
  static constexpr int kQStages = Tile::kQStages;
  static constexpr int kDoutStages = Tile::kDoutStages;
  static_assert((kQStages & (kQStages - 1)) == 0 && (kDoutStages & (kDoutStages - 1)) == 0);
  static_assert(kQStages <= 4 && kDoutStages <= 4, "twice around every ring in 8 steps");

 public:
  __device__ __forceinline__ explicit ConsumerSteps(typename Traits::SharedMemory& smem)
      : smem_(smem) {}

  __device__ __forceinline__ void begin(int steps) { place_ = step() - 8 * steps; }
  __device__ __forceinline__ bool more() const { return place_ < 0; }
  __device__ __forceinline__ bool last() const { return place_ >= -8; }
  __device__ __forceinline__ void advance() { place_ = (place_ - step() + 8) + (step() + 1) % 8; }

  __device__ __forceinline__ int q_stage() const { return step() % kQStages; }
  __device__ __forceinline__ int dout_stage() const { return step() % kDoutStages; }
  __device__ __forceinline__ int odd() const { return step() % 2; }
  __device__ __forceinline__ void wait_q() const {
    smem_.q_full[q_stage()].wait(step() / kQStages % 2);
  }
  __device__ __forceinline__ void wait_dout() const {
    smem_.dout_full[dout_stage()].wait(step() / kDoutStages % 2);
  }
  __device__ __forceinline__ void release_q() const { arrive_warp(smem_.q_empty[q_stage()]); }
  __device__ __forceinline__ void release_dout() const {
    arrive_warp(smem_.dout_empty[dout_stage()]);
  }
  __device__ __forceinline__ uint64_t q_offset() const {
    return q_stage() * descriptor_step(Traits::kQBytes);
  }
  __device__ __forceinline__ uint64_t dout_offset() const {
    return dout_stage() * descriptor_step(Traits::kDoutBytes);
  }

 private:
  __device__ __forceinline__ uint32_t step() const { return static_cast<uint32_t>(place_) % 8; }

  typename Traits::SharedMemory& smem_;
  int place_ = 0;  // 8 * (minus the remaining steps) + (steps so far) % 8
};

// x = A B^T over the columns of two operands whose panels are 64 columns wide; in flight on return.
template <Math kMath, int kColumns, int kPanelBytesA, int kPanelBytesB, int kN>
__device__ __forceinline__ void issue_scores(float (&x)[kN / 2], uint64_t a, uint64_t b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    const int inside = step % 4 * 32;  // bytes of 16 columns
    Wgmma<kN>::template ss<kMath, 0, 0>(x, a + descriptor_step(step / 4 * kPanelBytesA + inside),
                                        b + descriptor_step(step / 4 * kPanelBytesB + inside),
                                        step != 0);
  }
  wgmma_commit();
}

// dq = ds k for 64 queries and one panel of columns; in flight on return.
template <class Traits>
__device__ __forceinline__ void issue_dq(float (&dq)[32], uint64_t ds, uint64_t k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Traits::kKeys / 16; ++step) {
    Wgmma<64>::template ss<Traits::kMath, 0, 1>(
        dq, ds + descriptor_step(step / 4 * Traits::kRowPanelBytes + step % 4 * 32),
        k + descriptor_step(step * 16 * Traits::kPanelRowBytes), step != 0);
  }
  wgmma_commit();
}

// Each warpgroup owns 64 keys. Its p^T and ds^T go from the accumulators straight into the products
// for dv and dk; ds also goes to shared memory, where both warpgroups read it for dq.
template <class Traits, class Mask, class Score>
struct KeysAsRows {
  using Tile = typename Traits::Tile;
  using SharedMemory = typename Traits::SharedMemory;
  using Block = KeyBlock<Traits::kRows, Traits::kKeys, Mask>;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr Math kMath = Traits::kMath;
  // On a diagonal, half of a block's keys may see none of a step's rows. Steps of 128 rows are as
  // long as the block is wide, and then it happens at ragged ends only.
  static constexpr bool kIdleSteps = kRows < kKeys;
  // Packing p while dp's product runs keeps it beside its float32 values: too much for 128 rows.
  static constexpr bool kEarlyPack = Tile::kEarlyValues || kRows <= 64;

  // acc += a B, with a from registers and B (queries x columns) in shared memory; in flight on
  // return.
  template <int kN>
  __device__ __forceinline__ static void issue_gradient(float (&acc)[kN / 2],
                                                        const uint32_t (&a)[kRows / 4],
                                                        uint64_t b) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      Wgmma<kN>::template rs<kMath, 1>(acc, a + 4 * step,
                                       b + descriptor_step(step * 16 * Traits::kPanelRowBytes), 1);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ static void exponentials(float (&s)[kRows / 2], const float* lse,
                                                      const Score& score, int row, int key) {
#pragma unroll
    for (int block = 0; block < kRows / 8; ++block) {
      const float2 pair = *reinterpret_cast<const float2*>(lse + block * 8);
#pragma unroll
      for (int i = 4 * block; i < 4 * block + 4; ++i) {
        const float logit =
            score.logit(s[i], row + Fragment::column_of(i), key + 8 * Fragment::lower(i));
        s[i] = exp2_approx(logit - (i % 2 == 0 ? pair.x : pair.y));
      }
    }
  }

  // apply_mask for transposed scores. Before the exponentials, where the accumulators are still in
  // place: afterwards it takes more registers than there are.
  __device__ __forceinline__ static void apply_mask(float (&s)[kRows / 2], const Mask& mask,
                                                    int row, int key) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const Interval rows = mask.rows_of_key(key + 8 * lower);
      const int begin = rows.begin - row, end = rows.end - row;
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        if (Fragment::lower(i) != lower) continue;
        const int column = Fragment::column_of(i);
        s[i] = begin <= column && column < end ? s[i] : -INFINITY;
      }
    }
  }

  // Stages dk or dv of the warpgroup's 64 keys, or its part of dq.
  template <int kColumns>
  __device__ __forceinline__ static void stage(uint8_t* tile, const float (&acc)[kColumns / 2],
                                               float scale, const bool (&seen)[2]) {
    const int thread = late_thread();
    const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int element = column / 2 + 2 * i;
        packed[i] = pack<kMath>(seen[i % 2] ? acc[element] * scale : 0.f,
                                seen[i % 2] ? acc[element + 1] * scale : 0.f);
      }
      const int piece = column % 64 / 8 + thread % 32 / 16;
      stmatrix_x4(shared_address(tile) + column / 64 * Traits::kStoredPanelBytes +
                      row * Traits::kPanelRowBytes + (piece ^ row % 8) * 16,
                  packed);
    }
  }

  // The warpgroup's part of dq, to the warp that moves it on.
  __device__ __forceinline__ static void hand_over_dq(const BackwardArgs& args, SharedMemory& smem,
                                                      const float (&dq)[32], int group) {
    const int thread = late_thread();
    const uint32_t target =
        shared_address(smem.dq[group]) + thread / 32 * Traits::kDqWarpBytes + thread % 32 * 16;
    named_barrier_sync(kDqEmpty + group, 128 + 32);
    if (args.direct_dq) {
      constexpr bool kSeen[2] = {true, true};
      stage<64>(smem.dq[group], dq, args.problem.scale, kSeen);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) store_shared_f32x4(target + i * 512, dq + 4 * i);
    }
    fence_proxy_async();
    named_barrier_arrive(kDqFull + group, 128 + 32);
  }

  __device__ __forceinline__ static void consume(const BackwardArgs& args, SharedMemory& smem,
                                                 int group) {
    const int thread = threadIdx.x & 127;
    const int column = Fragment::column(thread);
    const Score score{args.scale_log2};

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
    // dq: one warpgroup takes a half of the columns, or of the rows where there is one panel only.
    constexpr bool kDivideColumns = Tile::kHeadDim > 64;
    const uint64_t dq_ds = wgmma_descriptor(
        shared_address(smem.scores[0]) + (kDivideColumns ? 0 : group_bytes), 16, 1024);
    const uint64_t dq_k_base = wgmma_descriptor(
        shared_address(smem.k[0]) + (kDivideColumns ? group * Traits::kKeyPanelBytes : 0),
        Traits::kKeyPanelBytes, 1024);
    const uint32_t ds_panel = shared_address(smem.scores[0]) + group * Traits::kRowPanelBytes;

    ConsumerSteps<Traits> steps(smem);
    Ring<Tile::kKeyStages> keys;
    TicketReader reader;

    for (;;) {
      const uint32_t position = reader.next(smem.tickets);
      if (position >= args.order.tiles()) break;
      const Block block(args.problem, args.order.at(position));
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

      // dk and dv of the tile before may still be on their way out of where ds goes.
      const auto wait_for_ds_buffer = [&] {
        if (head == 0 && row == block.first_row) smem.dkv_empty.wait(reader.parity() ^ 1);
      };

      smem.k_full[keys.stage].wait(keys.phase);
      smem.v_full[keys.stage].wait(keys.phase);
#pragma unroll 1
      for (steps.begin(block.steps()); steps.more(); steps.advance()) {
        uint32_t ds[kRows / 4];
        float dq[32];

        steps.wait_q();
        if (kIdleSteps && (row + kRows <= own_rows.begin || row >= own_rows.end)) {
          // The warpgroup's keys see none of these rows: its ds is 0. What remains is its half of
          // dq, to which the other keys contribute.
          steps.wait_dout();
          wait_for_ds_buffer();
#pragma unroll
          for (uint32_t& pair : ds) pair = 0;
          store_transposed<kRows>(ds_panel + steps.odd() * Traits::kScoreBytes, ds);
          fence_proxy_async();
          named_barrier_sync(kConsumers, Traits::kConsumerThreads);
          steps.release_q();
          steps.release_dout();
          discard(dq);
          issue_dq<Traits>(dq, dq_ds + steps.odd() * descriptor_step(Traits::kScoreBytes), dq_k);
          wgmma_wait<0>();
          hold(dq);
          if (steps.last()) {
            arrive_warp(smem.v_empty[keys.stage]);
            arrive_warp(smem.k_empty[keys.stage]);
          }
          hand_over_dq(args, smem, dq, group);
          block.advance(row, head);
          continue;
        }
        float s[kRows / 2];
        float dp[kRows / 2];
        uint32_t p[kRows / 4];
        discard(s);
        issue_scores<kMath, Tile::kHeadDim, Traits::kKeyPanelBytes, Traits::kRowPanelBytes, kRows>(
            s, k_rows, q_base + steps.q_offset());
        steps.wait_dout();
        discard(dp);
        issue_scores<kMath, Tile::kValueDim, Traits::kKeyPanelBytes, Traits::kRowPanelBytes, kRows>(
            dp, v_rows, dout_base + steps.dout_offset());
        wgmma_wait<1>();
        hold(s);
        if (row < common_rows.begin || row + kRows > common_rows.end) {
          const int masked = late_thread();
          apply_mask(s, block.mask, row + Fragment::column(masked),
                     own_key + Fragment::row(masked));
        }
        exponentials(s, &smem.lse[steps.q_stage()][column], score, row + column,
                     own_key + Fragment::row(thread));
        // ptxas would move the wait above the exponentials; a store of what depends on all of them
        // cannot follow it.
        uint32_t all = 0;
        if (kEarlyPack) {
#pragma unroll
          for (int i = 0; i < kRows / 4; ++i) {
            p[i] = pack<kMath>(s[2 * i], s[2 * i + 1]);
            all ^= p[i];
          }
        } else {
#pragma unroll
          for (int i = 0; i < kRows / 2; ++i) all ^= __float_as_uint(s[i]);
        }
        store_shared_volatile(shared_address(&smem.pin[group * 128 + late_thread()]),
                              static_cast<uint16_t>(all));
        if (Tile::kEarlyValues) {
          issue_gradient<Tile::kValueDim>(dv, p, dout_columns + steps.dout_offset());
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        hold(dp);
        if (steps.last()) arrive_warp(smem.v_empty[keys.stage]);
        const float* const delta = &smem.delta[steps.dout_stage()][column];
#pragma unroll
        for (int i = 0; i < kRows / 4; i += 2) {
          const float2 pair = *reinterpret_cast<const float2*>(delta + i / 2 * 8);
          ds[i] =
              pack<kMath>(s[2 * i] * (dp[2 * i] - pair.x), s[2 * i + 1] * (dp[2 * i + 1] - pair.y));
          ds[i + 1] = pack<kMath>(s[2 * i + 2] * (dp[2 * i + 2] - pair.x),
                                  s[2 * i + 3] * (dp[2 * i + 3] - pair.y));
          if (!kEarlyPack) {
            p[i] = pack<kMath>(s[2 * i], s[2 * i + 1]);
            p[i + 1] = pack<kMath>(s[2 * i + 2], s[2 * i + 3]);
          }
        }
        // Two buffers: whoever passes the barrier below knows that both warpgroups are through with
        // the step before, so that a buffer is free again one step later.
        const int odd = steps.odd();
        wait_for_ds_buffer();
        store_transposed<kRows>(ds_panel + odd * Traits::kScoreBytes, ds);
        if (!Tile::kEarlyValues) {
          issue_gradient<Tile::kValueDim>(dv, p, dout_columns + steps.dout_offset());
        }
        fence_proxy_async();
        named_barrier_sync(kConsumers, Traits::kConsumerThreads);

        discard(dq);
        issue_dq<Traits>(dq, dq_ds + odd * descriptor_step(Traits::kScoreBytes), dq_k);
        if (!Tile::kEarlyValues) {
          wgmma_wait<1>();
          steps.release_dout();
        }
        issue_gradient<Tile::kHeadDim>(dk, ds, q_columns + steps.q_offset());
        wgmma_wait<1>();
        hold(dq);
        if (steps.last()) arrive_warp(smem.k_empty[keys.stage]);
        if (Tile::kEarlyValues) steps.release_dout();
        // dq leaves while dk's product runs.
        hand_over_dq(args, smem, dq, group);
        wgmma_wait<0>();
        steps.release_q();
        block.advance(row, head);
      }

      hold(dk);
      hold(dv);
      if (block.steps() == 0) {
        arrive_warp(smem.v_empty[keys.stage]);
        arrive_warp(smem.k_empty[keys.stage]);
      }
      keys.advance();
      const Interval seen_keys = block.mask.keys({0, block.mask.q_len()});
      const int key = own_key + Fragment::row(late_thread());
      const bool seen[2] = {key >= seen_keys.begin && key < seen_keys.end,
                            key + 8 >= seen_keys.begin && key + 8 < seen_keys.end};
      // dv replaces ds once both warpgroups are through with it (and dv of the tile before has
      // left, where this one has no rows), and dk replaces dq once that has left.
      named_barrier_sync(kConsumers, Traits::kConsumerThreads);
      wait_for_ds_buffer();
      stage<Tile::kValueDim>(smem.scores[group], dv, 1.f, seen);
      named_barrier_sync(kDqEmpty + group, 128 + 32);
      stage<Tile::kHeadDim>(smem.dq[group], dk, args.problem.scale, seen);
      fence_proxy_async();
      smem.dkv_full.arrive();
    }
    named_barrier_sync(kDqEmpty + group, 128 + 32);  // the last arrival
  }
};

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
    TicketReader reader;

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

template <class Traits, class Mask, class Score>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  using Producers = BackwardProducers<Traits, Mask>;
  using Tile = typename Traits::Tile;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedMemory*>(shared_bytes);

  // Through a shuffle the compiler knows it to be the same in the whole warp.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.q);
    prefetch_tensor_map(&args.k);
    prefetch_tensor_map(&args.v);
    prefetch_tensor_map(&args.dout);
    prefetch_tensor_map(&args.dk);
    prefetch_tensor_map(&args.dv);
    for (int stage = 0; stage < Tile::kKeyStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.v_full[stage].init(1);
      smem.k_empty[stage].init(Traits::kConsumerThreads / 32);
      smem.v_empty[stage].init(Traits::kConsumerThreads / 32);
    }
    smem.dkv_full.init(Traits::kConsumerThreads);
    smem.dkv_empty.init(1);
    for (int stage = 0; stage < Tile::kQStages; ++stage) {
      smem.q_full[stage].init(1);
      smem.q_empty[stage].init(Traits::kConsumerThreads / 32);
    }
    for (int stage = 0; stage < Tile::kDoutStages; ++stage) {
      smem.dout_full[stage].init(1);
      smem.dout_empty[stage].init(Traits::kConsumerThreads / 32);
    }
    smem.rows_landed.init(1);
    smem.keys_landed.init(1);
    smem.tickets.init(Traits::ticket_readers(args.deterministic));
    fence_mbarrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_for_previous_kernel();

  if (group < 2) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    if constexpr (Traits::kKeysAsRows) {
      KeysAsRows<Traits, Mask, Score>::consume(args, smem, group);
    } else {
      QueriesAsRows<Traits, Mask, Score>::consume(args, smem, group);
    }
    return;
  }
  setmaxnreg_dec<Traits::kProducerRegisters>();
  switch (threadIdx.x / 32 % 4) {
    case 0:
      return Producers::load_rows(args, smem);
    case 1:
      if constexpr (Traits::kDqWriter) {
        Producers::add_dq(args, smem, 0);
      } else if (args.deterministic) {
        Producers::keep_turns(args, smem);
      }
      return;
    case 2:
      return Producers::move_keys(args, smem);
    default:
      if constexpr (Traits::kDqWriter) Producers::add_dq(args, smem, 1);
      return;
  }
}

}  // namespace jaxflash::sm90
