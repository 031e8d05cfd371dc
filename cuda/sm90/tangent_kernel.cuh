// The tangent kernel: sm80/tangent_kernel.cuh has the formulas. A block computes one tile of query
// rows; k, v and their tangents stream through one ring of stages, a piece of a tile in each.
//
//   warpgroups 0 ... kWarpGroups - 1   consumers: 64 rows each
//   last warpgroup, a warp each        loads q, k and v, and their tangents; the others idle
//
// A step of a consumer issues the products of a tile's weights with v and tv, behind them those for
// the next tile's scores, and waits for all of them; meanwhile the others work on their weights.
// Weights take the registers of t: the next s is issued while they are read, the next t after.
#pragma once

#include "common/approx.cuh"
#include "common/mask.cuh"
#include "common/tangent_reference.h"
#include "common/tensor.cuh"
#include "common/thread.cuh"
#include "sm90/hardware/pipeline.cuh"
#include "sm90/hardware/wgmma.cuh"
#include "sm90/products.cuh"
#include "sm90/scores.cuh"
#include "sm90/softmax.cuh"
#include "sm90/store_rows.cuh"
#include "sm90/tangent_traits.h"
#include "sm90/unseen_rows.cuh"

namespace jaxflash::sm90 {

template <class Traits>
struct TangentSharedMemory {
  using Tile = typename Traits::Tile;
  // [2]: and of the tangent.
  alignas(1024) uint8_t q[2][Traits::kWarpGroups][Traits::kQBytes];
  uint8_t stages[Tile::kStages][2][Traits::kPieceBytes];  // of k or v
  float pin[Traits::kWarpGroups * 128];
  Barrier q_full[Traits::kWarpGroups];
  Barrier full[Tile::kStages];
  Barrier empty[Tile::kStages];  // every consumer warp is through with it
  Barrier v_landed[2];           // values that a loader edits before it announces them
};

// The rows of a block.
template <class Traits>
struct TangentRows {
  int batch;  // flat index over the batch axes
  int head;
  int first_row;

  __device__ __forceinline__ TangentRows(const TangentArgs& args, uint32_t block) {
    const int batch_head = args.by_head_tiles.quotient(block);
    const int index = args.by_head_tiles.remainder(block);
    const int tile = args.last_is_longest ? args.head_tiles - 1 - index : index;
    batch = args.by_q_heads.quotient(batch_head);
    head = args.by_q_heads.remainder(batch_head);
    first_row = tile * Traits::kTileRows;
  }
};

// What a block works on.
template <class Traits, class Mask>
struct TangentWork : TangentRows<Traits> {
  static constexpr int kKeys = Traits::Tile::kKeys;
  int inner, outer;  // the batch, along the axes of the maps
  int kv_head;
  Mask mask;
  VisitsOf<Mask> tiles;  // of keys

  __device__ __forceinline__ static TangentWork of(const TangentArgs& args) {
    const TangentRows<Traits> own(args, blockIdx.x);
    TangentWork work{own,
                     static_cast<int>(args.by_inner_batch.remainder(own.batch)),
                     static_cast<int>(args.by_inner_batch.quotient(own.batch)),
                     static_cast<int>(args.by_group.quotient(own.head)),
                     Mask(args.problem, own.batch),
                     {}};
    const Interval rows = {work.first_row, work.first_row + Traits::kTileRows};
    work.tiles = visits_of<kKeys>(work.mask, rows, covering_tiles<kKeys>(work.mask.keys(rows)),
                                  work.position_of_lane());
    return work;
  }

  // Over the key tiles. Where masks walk, each role does for itself.
  __device__ __forceinline__ auto way() const {
    return way_over<kKeys>(tiles, mask, position_of_lane());
  }

 private:
  // Of the first row of a warpgroup.
  __device__ __forceinline__ int position_of_lane() const {
    const int lane = threadIdx.x % 32;
    return lane < Traits::kWarpGroups ? this->first_row + lane * 64 : kMaxLength;
  }
};

// A warp that loads q, k and v, or their tangents.
template <class Traits, class Mask>
struct TangentLoader {
  using Tile = typename Traits::Tile;
  using Work = TangentWork<Traits, Mask>;
  using SharedMemory = TangentSharedMemory<Traits>;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr int kPieceKeys = Traits::kPieceKeys;

  // Boxes of kRows rows from (`column`, `row`) on, side by side. One thread.
  template <int kRows, int kPanels>
  __device__ __forceinline__ static void load(const MappedOperand& operand, uint8_t* target,
                                              Barrier& landed, const Work& work, int column,
                                              int row, int head) {
    constexpr int kPanelBytes = kRows * Traits::kPanelRowBytes;
    landed.arrive_expecting(kPanels * kPanelBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      tensor_load(shared_address(target + panel * kPanelBytes), &operand.map, landed.address(),
                  column + panel * 64, row, head, work.inner * operand.batch_step[0],
                  work.outer * operand.batch_step[1]);
    }
  }

  __device__ __forceinline__ static void load_q(const TangentArgs& args, SharedMemory& smem,
                                                const Work& work, int i) {
#pragma unroll 1
    for (int group = 0; group < Traits::kWarpGroups; ++group) {
      load<64, Traits::kPanels>(args.q[i], smem.q[i][group], smem.q_full[group], work, 0,
                                work.first_row + group * 64, work.head);
    }
  }

  // In the order in which consumers want them: of each tile the keys, then the values. `i`: 0, or 1
  // for tangents.
  __device__ __forceinline__ static void load_all(const TangentArgs& args, SharedMemory& smem,
                                                  const Work& work, int i) {
    const int lane = threadIdx.x % 32;
    const Interval keys = work.mask.seen_keys();
    const SeenRows<typename Mask::Hidden> seen{keys,
                                               work.mask.hidden_keys(work.mask.hides_keys(keys))};
    Ring<Tile::kStages> ring;
    uint32_t landed_phase = 0;
    if (lane == 0 && work.tiles.begin < work.tiles.end) load_q(args, smem, work, i);
    const auto tiles = work.way();
    for (int tile = tiles.end - 1; tile >= tiles.begin; tile = tiles.before(tile)) {
#pragma unroll 1
      for (int piece = 0; piece < Tile::kPieces; ++piece, ring.advance()) {
        smem.empty[ring.stage].wait(ring.phase ^ 1);
        if (lane == 0) {
          load<kKeys, Traits::kPiecePanels>(
              args.k[i], smem.stages[ring.stage][i], smem.full[ring.stage], work,
              piece * Traits::kPieceColumns, tile * kKeys, work.kv_head);
        }
        __syncwarp();
      }
#pragma unroll 1
      for (int piece = 0; piece < Tile::kPieces; ++piece, ring.advance()) {
        const int first_key = tile * kKeys + piece * kPieceKeys;
        uint8_t* const stage = smem.stages[ring.stage][i];
        Barrier& full = smem.full[ring.stage];
        // See ForwardProducers::load_v.
        const bool cut = seen.cut(first_key, kPieceKeys, args.problem.kv_len);
        smem.empty[ring.stage].wait(ring.phase ^ 1);
        if (lane == 0) {
          load<kPieceKeys, Traits::kValuePanels>(args.v[i], stage, cut ? smem.v_landed[i] : full,
                                                 work, 0, first_key, work.kv_head);
        }
        __syncwarp();
        if (!cut) continue;
        const UnseenRows<kPieceKeys, Traits::kPanelRowBytes> unseen(first_key, args.problem.kv_len,
                                                                    seen);
        smem.v_landed[i].wait(landed_phase);
        landed_phase ^= 1;
        unseen.template clear<Traits::kValuePanels>(stage);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) full.arrive();
      }
    }
  }
};

// The place of a consumer warpgroup in the ring of stages, and its turn. A stage that it has waited
// for is there until it releases it.
template <class Traits>
class TangentBuffers {
  using Tile = typename Traits::Tile;
  using SharedMemory = TangentSharedMemory<Traits>;

 public:
  __device__ __forceinline__ TangentBuffers(SharedMemory& smem, int group, int lane)
      : smem_(smem), group_(group), lane_(lane) {}

  // The next stage, as what to add to descriptors of the first.
  __device__ __forceinline__ uint64_t wait() {
    smem_.full[next_.stage].wait(next_.phase);
    const uint64_t offset = next_.stage * descriptor_step(2 * Traits::kPieceBytes);
    next_.advance();
    return offset;
  }
  // The oldest one, a warp at a time.
  __device__ __forceinline__ void release() {
    if (lane_ == 0) smem_.empty[oldest_.stage].arrive();
    oldest_.advance();
  }

  // The warpgroups begin their steps in turn, as in the forward kernel.
  __device__ __forceinline__ void take_turn() const {
    if constexpr (Tile::kTurns) named_barrier_sync(kFirstTurn + group_, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Tile::kTurns) {
      named_barrier_arrive(kFirstTurn + (group_ + 1) % Traits::kWarpGroups, 256);
    }
  }

 private:
  SharedMemory& smem_;
  int group_;
  int lane_;
  Ring<Tile::kStages> next_;    // to wait for
  Ring<Tile::kStages> oldest_;  // to release
};

template <class Traits, class Mask, class Scores>
struct TangentConsumers {
  using Tile = typename Traits::Tile;
  using Work = TangentWork<Traits, Mask>;
  using SharedMemory = TangentSharedMemory<Traits>;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr Math kMath = Traits::kMath;
  using Held = HeldOperand<Tile::kHeldSteps>;

  static constexpr int kQPieceBytes = Traits::kPiecePanels * Traits::kQPanelBytes;

  // As sm90::issue_scores, over the columns of a piece.
  template <int kHeld = 0>
  __device__ __forceinline__ static void issue_scores(float (&x)[kKeys / 2], uint64_t a, uint64_t b,
                                                      bool adds,
                                                      const HeldOperand<kHeld>& held = {}) {
    sm90::issue_scores<kMath, Traits::kPieceColumns, Traits::kQPanelBytes, Traits::kKeyPanelBytes,
                       kKeys>(x, a, b, adds, held);
  }

  // What a thread knows of its two rows.
  struct RowState {
    float lse_log2[2];  // infinity for a row that sees no key: its probabilities are 0
    float reference[2] = {0.f, 0.f};
    bool has_reference[2];
    bool settled = false;          // all rows of the warp have one
    float moment[2] = {0.f, 0.f};  // sum of P (tS - reference), this thread's part
    float total[2] = {0.f, 0.f};   // of P; with a sink
  };

  __device__ __forceinline__ static RowState begin_rows(const TangentArgs& args, const Work& work,
                                                        const RowPositions& positions) {
    const Problem& problem = args.problem;
    const int64_t first_of_rows = int64_t{work.batch} * problem.q_len;
    RowState state;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = positions.of[r];
      const float lse =
          position < work.mask.q_len()
              ? __ldg(args.lse + (first_of_rows + position) * problem.q_heads + work.head)
              : -INFINITY;
      state.lse_log2[r] = lse == -INFINITY ? INFINITY : lse_in_log2(lse);
      state.has_reference[r] = state.lse_log2[r] == INFINITY;
    }
    return state;
  }

  // Rows that see their first keys take a reference; `t` holds tangents of logits over `scale`.
  __device__ __forceinline__ static void settle_references(RowState& state,
                                                           const float (&s)[kKeys / 2],
                                                           const float (&t)[kKeys / 2],
                                                           float scale) {
    if (state.settled) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float weight = 0.f, sum = 0.f;
#pragma unroll
      for (int i = 2 * r; i < kKeys / 2; i += 4) {  // pairs of this row
        weight += s[i] + s[i + 1];
        sum = fmaf(s[i], t[i], fmaf(s[i + 1], t[i + 1], sum));
      }
      weight = sum_of_row(weight);
      const float mean = sum_of_row(sum) / weight * scale;
      if (state.has_reference[r] || weight == 0.f) continue;
      state.has_reference[r] = true;
      if (weight >= kReferenceWeight && fabsf(mean) < INFINITY) state.reference[r] = mean;
    }
    state.settled = __all_sync(~0u, state.has_reference[0] && state.has_reference[1]);
  }

  // Asks anew where it is, so that nothing of this holds registers in the loop.
  __device__ __forceinline__ static void store_out(const TangentArgs& args, const Scores& scores,
                                                   const RowState& state,
                                                   float (&o)[Tile::kValueDim / 2], int group) {
    const Problem& problem = args.problem;
    const TangentRows<Traits> block(args, ctaid_x());
    const int late = late_thread();
    const int first = block.first_row + group * 64 + Fragment::row(late);
    uint16_t* target[2];
    const uint16_t* out[2];
    float coefficient[2];  // of O
    float inverse[2] = {1.f, 1.f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = first + 8 * r;
      const bool exists = position < problem.q_len;
      const bool empty = state.lse_log2[r] == INFINITY;
      const float sum = sum_of_row(state.moment[r]);
      const float all = Scores::kHasSink ? sum_of_row(state.total[r]) : 1.f;
      coefficient[r] = fmaf(state.reference[r], 1.f - all, -sum);
      if constexpr (Scores::kDrops) inverse[r] = scores.kept_scale();
      const auto row_of = [&](const Tensor& tensor) {
        return static_cast<uint16_t*>(tensor.data) + tensor_offset(tensor, problem, block.batch) +
               block.head * tensor.head_stride + position * tensor.seq_stride;
      };
      target[r] = exists ? row_of(args.tout) : nullptr;
      out[r] = exists && !empty ? row_of(args.out) : nullptr;
      if (exists && late % 4 == 0) {
        args.tlse[(int64_t{block.batch} * problem.q_len + position) * problem.q_heads +
                  block.head] = empty ? 0.f : fmaf(state.reference[r], all, sum);
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; i += 2) {
      const int r = Fragment::lower(i);
      const int column = Fragment::column_of(i) + Fragment::column(late);
      const bool taken = out[r] != nullptr && column < problem.value_dim;
      const uint32_t both = taken ? __ldg(reinterpret_cast<const uint32_t*>(out[r] + column)) : 0u;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto bits = static_cast<uint16_t>(both >> 16 * j);
        const float value = to_float(typename MathTraits<kMath>::Element{bits});
        o[i + j] = taken ? fmaf(coefficient[r], value, o[i + j] * inverse[r]) : 0.f;
      }
    }
    const float ones[2] = {1.f, 1.f};
    store_rows<kMath>(o, ones, target, problem.value_dim, late % 32);
  }

  __device__ __forceinline__ static void consume(const TangentArgs& args, SharedMemory& smem,
                                                 const Work& work, int group) {
    const Problem& problem = args.problem;
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const uint64_t q = wgmma_descriptor(shared_address(smem.q[0][group]), 16, 1024);
    const uint64_t tq = wgmma_descriptor(shared_address(smem.q[1][group]), 16, 1024);
    const uint64_t k_base = wgmma_descriptor(shared_address(smem.stages), 16, 1024);
    const uint64_t v_base =
        wgmma_descriptor(shared_address(smem.stages), Traits::kValuePanelBytes, 1024);

    const int group_row = work.first_row + group * 64;
    const Interval rows = {group_row, group_row + 64};
    Interval own = intersection(part_of<kKeys>(work.tiles, work.mask, rows), work.tiles);
    if (own.begin >= own.end) own = {work.tiles.begin, work.tiles.begin};
    const Interval full = inner_tiles<kKeys>(work.mask.common_keys(rows));
    const int row = group_row + Fragment::row(thread);
    const RowPositions positions{{row, row + 8}};
    Scores scores(args);
    scores.begin_rows(args, work.mask, work.batch, work.head, positions);

    RowState state = begin_rows(args, work, positions);

    float s[kKeys / 2], t[kKeys / 2];
    uint32_t p[kKeys / 4], weights[kKeys / 4];
    float o[Tile::kValueDim / 2];
#pragma unroll
    for (float& value : o) value = 0.f;
    Kept<Scores::kDrops, true, kKeys> kept;

    int tile = work.tiles.end - 1;
    const auto cut = [&] { return tile < full.begin || tile >= full.end; };
    // s becomes probabilities.
    const auto exponentiate = [&] {
      if constexpr (Scores::kRewrites && Scores::kKeepsTangents) scores.rewrite(s);
      if (cut()) {
        // Late, or the compiler keeps what the rows see in registers that it does not have.
        const int column = Fragment::column(late_thread());
        const int late_row = group_row + Fragment::row(late_thread());
        apply_mask(s, work.mask, {{late_row, late_row + 8}}, tile * kKeys + column);
        if constexpr (Scores::kMasks || Mask::kTestsElements) {
          typename Scores::template Shown<Mask, kKeys> shown;
          scores.look(shown, work.mask, tile * kKeys, column);
          scores.hide(s, shown);
        }
      }
      constexpr bool kRewritten = Scores::kRewrites || !Scores::kKeepsTangents;
      const float factor = kRewritten ? 1.f : args.scale_log2;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        s[i] = exp2_approx(fmaf(s[i], factor, -state.lse_log2[Fragment::lower(i)]));
      }
    };
    // What can be done with s while t is on its way.
    const auto begin_weights = [&] {
      const int key = tile * kKeys + Fragment::column(thread);
      scores.begin_keys(key);
      scores.draw(kept, key);
      if constexpr (Scores::kKeepsTangents) {
        exponentiate();
        // ptxas would move the wait for t above the exponentials; a store of what depends on all of
        // them cannot follow it.
        uint32_t bits = 0;
#pragma unroll
        for (const float probability : s) bits |= __float_as_uint(probability);
        store_shared_volatile(shared_address(&smem.pin[tid_x()]), __uint_as_float(bits));
      }
    };
    const auto end_weights = [&] {
      if constexpr (!Scores::kKeepsTangents) {
        scores.rewrite(s, t, problem.scale);
        exponentiate();
      }
      if (cut()) {  // what is hidden may have any tangent
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) t[i] = s[i] == 0.f ? 0.f : t[i];
      }
      settle_references(state, s, t, scores.tangent_scale(problem.scale));
    };
    // Those of 16 keys, to 16 bits.
    const auto pack_weights = [&](int step) {
      const float scale = scores.tangent_scale(problem.scale);
#pragma unroll
      for (int i = 8 * step; i < 8 * step + 8; i += 2) {
        const int r = Fragment::lower(i);
        float weight[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          weight[j] = s[i + j] * fmaf(t[i + j], scale, -state.reference[r]);
          state.moment[r] += weight[j];
          if constexpr (Scores::kHasSink) state.total[r] += s[i + j];
        }
        p[i / 2] = kept.of_pair(i, pack<kMath>(s[i], s[i + 1]));
        weights[i / 2] = kept.of_pair(i, pack<kMath>(weight[0], weight[1]));
      }
    };

    TangentBuffers<Traits> buffers(smem, group, lane);
    Held held;
    // s = Q K^T and t = Q tK^T + tQ K^T.
    const auto score = [&](bool behind_values) {
      buffers.pass_turn();
      // Or the compiler keeps the descriptors of all steps, in registers that it does not have.
      uint64_t own_q = q, own_tq = tq;
      asm volatile("" : "+l"(own_q), "+l"(own_tq));
#pragma unroll
      for (int piece = 0; piece < Tile::kPieces; ++piece) {
        const uint64_t k = k_base + buffers.wait();
        const uint64_t tk = k + descriptor_step(Traits::kPieceBytes);
        issue_scores(s, own_q, k, piece > 0, held);
        if (piece > 0 || behind_values) {
          wgmma_wait<1>();
          buffers.release();
        }
        issue_scores(t, own_q, tk, piece > 0, held);
        issue_scores(t, own_tq, k, true);
        own_q += descriptor_step(kQPieceBytes);
        own_tq += descriptor_step(kQPieceBytes);
      }
      wgmma_wait<2>();  // the last two make t
      hold(s);
      begin_weights();
      wgmma_wait<0>();
      hold(t);
      hold(o);
      buffers.release();
      end_weights();
    };
    // o += weights V + P tV, in flight on return. Weights are packed beside the products of others.
    const auto add_values = [&] {
      using Product = Wgmma<Tile::kValueDim>;
#pragma unroll
      for (int piece = 0; piece < Tile::kPieces; ++piece) {
        const uint64_t v = v_base + buffers.wait();
        constexpr int kSteps = Traits::kPieceKeys / 16;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const int step = piece * kSteps + i;
          const uint64_t rows = v + descriptor_step(i * 16 * Traits::kPanelRowBytes);
          pack_weights(step);
          wgmma_fence();
          Product::template rs<kMath, 1>(o, weights + 4 * step, rows, 1);
          Product::template rs<kMath, 1>(o, p + 4 * step,
                                         rows + descriptor_step(Traits::kPieceBytes), 1);
        }
        wgmma_commit();
        if (piece > 0) {
          wgmma_wait<1>();
          buffers.release();
        }
      }
    };
    const auto skip_to = [&](int end) {  // tiles that other warpgroups see
      for (; tile >= end; tile = work.way().before(tile)) {
        buffers.take_turn();
        buffers.pass_turn();
#pragma unroll 1
        for (int stage = 0; stage < 2 * Tile::kPieces; ++stage) {
          buffers.wait();
          buffers.release();
          __syncwarp();  // lane 0 releases for all: no lane falls a round of the ring behind
        }
      }
    };

    // The first turn is the first warpgroup's.
    if (group == Traits::kWarpGroups - 1) buffers.pass_turn();
    // Even where it is not needed: what is on its way must not reach the next block.
    if (work.tiles.begin < work.tiles.end) smem.q_full[group].wait(0);
    skip_to(own.end);
    if (own.begin < own.end) {
      held.template load<Tile::kHeadDim, Traits::kQPanelBytes>(shared_address(smem.q[0][group]));
      buffers.take_turn();
      score(false);
      while ((tile = work.way().before(tile)) >= own.begin) {
        buffers.take_turn();
        add_values();
        score(true);
      }
      add_values();
      wgmma_wait<0>();
      hold(o);
      buffers.release();
    }
    skip_to(work.tiles.begin);
    if (group == 0) buffers.take_turn();  // nobody leaves an arrival behind
    store_out(args, scores, state, o, group);
  }
};

template <class Traits, class AnyMask, class Scores>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    tangent_kernel(const __grid_constant__ TangentArgs args) {
  using Mask = MaskBeside<AnyMask, Scores>;
  using SharedMemory = TangentSharedMemory<Traits>;
  static_assert(sizeof(SharedMemory) == Traits::kSharedBytes);
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& smem = *reinterpret_cast<SharedMemory*>(shared_bytes);

  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (Barrier& full : smem.q_full) full.init(2);  // the loaders
    for (Barrier& full : smem.full) full.init(2);
    for (Barrier& empty : smem.empty) empty.init(4 * Traits::kWarpGroups);
    for (Barrier& landed : smem.v_landed) landed.init(1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (!takes_call<Mask>(args.problem)) return;

  const auto work = TangentWork<Traits, Mask>::of(args);
  if (group < Traits::kWarpGroups) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    TangentConsumers<Traits, Mask, Scores>::consume(args, smem, work, group);
    return;
  }
  setmaxnreg_dec<Traits::kProducerRegisters>();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  if (warp < 2) TangentLoader<Traits, Mask>::load_all(args, smem, work, warp);
}

}  // namespace jaxflash::sm90
