// The tangent kernel: sm80/tangent_kernel.cuh has the formulas. A block computes one tile of query
// rows; k, v and their tangents stream through rings of shared-memory buffers.
//
//   warpgroups 0 ... kWarpGroups - 1   consumers: 64 rows each
//   last warpgroup, a warp each        loads q and k, and v; the others idle
//
// A step of a consumer issues the products of a tile's weights with v and tv beside those for the
// next tile's scores, and waits for all of them; meanwhile the others work on their weights.
#pragma once

#include "common/mask.cuh"
#include "common/tangent_reference.h"
#include "common/tensor.cuh"
#include "sm90/hardware/pipeline.cuh"
#include "sm90/hardware/wgmma.cuh"
#include "sm90/products.cuh"
#include "sm90/scores.cuh"
#include "sm90/softmax.cuh"
#include "sm90/store_rows.cuh"
#include "sm90/tangent_traits.h"
#include "sm90/unseen_keys.cuh"

namespace jaxflash::sm90 {

template <class Traits>
struct TangentSharedMemory {
  using Tile = typename Traits::Tile;
  alignas(1024) uint8_t q[Traits::kWarpGroups][Traits::kQBytes];
  uint8_t tq[Traits::kWarpGroups][Traits::kQBytes];
  uint8_t k[Tile::kKeyStages][Traits::kKBytes];
  uint8_t tk[Tile::kKeyStages][Traits::kKBytes];
  uint8_t v[Tile::kValueStages][Traits::kVBytes];
  uint8_t tv[Tile::kValueStages][Traits::kVBytes];
  Barrier q_full[Traits::kWarpGroups];
  Barrier k_full[Tile::kKeyStages];
  Barrier k_empty[Tile::kKeyStages];  // every consumer warp is through with it
  Barrier v_full[Tile::kValueStages];
  Barrier v_empty[Tile::kValueStages];
  Barrier v_landed;  // a tile of values that the loader edits before it announces it
};

// What a block works on.
template <class Traits, class Mask>
struct TangentWork {
  static constexpr int kKeys = Traits::Tile::kKeys;
  int batch, inner, outer;  // the flat index over the batch axes, and those of the maps
  int head, kv_head;
  int first_row;
  Mask mask;
  Visits<Mask::kHasGaps> tiles;  // of keys

  __device__ __forceinline__ static TangentWork of(const TangentArgs& args) {
    const uint32_t block = blockIdx.x;
    const int batch_head = args.by_head_tiles.quotient(block);
    const int index = args.by_head_tiles.remainder(block);
    const int tile = args.last_is_longest ? args.head_tiles - 1 - index : index;
    const int batch = args.by_q_heads.quotient(batch_head);
    const int head = args.by_q_heads.remainder(batch_head);
    TangentWork work{batch,
                     static_cast<int>(args.by_inner_batch.remainder(batch)),
                     static_cast<int>(args.by_inner_batch.quotient(batch)),
                     head,
                     static_cast<int>(args.by_group.quotient(head)),
                     tile * Traits::kTileRows,
                     Mask(args.problem, batch),
                     {}};
    const Interval rows = {work.first_row, work.first_row + Traits::kTileRows};
    work.tiles = {covering_tiles<kKeys>(work.mask.keys(rows)),
                  inner_tiles<kKeys>(work.mask.gap_of_keys(rows))};
    return work;
  }
};

template <class Traits, class Mask>
struct TangentProducers {
  using Tile = typename Traits::Tile;
  using Work = TangentWork<Traits, Mask>;
  using SharedMemory = TangentSharedMemory<Traits>;
  static constexpr int kKeys = Tile::kKeys;

  __device__ __forceinline__ static void load(const MappedOperand& operand, uint8_t* target,
                                              int panels, int panel_bytes, const Barrier& full,
                                              const Work& work, int first, int head) {
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel) {
      tensor_load(shared_address(target + panel * panel_bytes), &operand.map, full.address(),
                  panel * 64, first, head, work.inner * operand.batch_step[0],
                  work.outer * operand.batch_step[1]);
    }
  }

  // One thread.
  __device__ __forceinline__ static void load_keys(const TangentArgs& args, SharedMemory& smem,
                                                   const Work& work) {
    if (work.tiles.begin >= work.tiles.end) return;
#pragma unroll 1
    for (int group = 0; group < Traits::kWarpGroups; ++group) {
      Barrier& full = smem.q_full[group];
      const int row = work.first_row + group * 64;
      full.arrive_expecting(2 * Traits::kQBytes);
      load(args.q, smem.q[group], Traits::kPanels, Traits::kQPanelBytes, full, work, row,
           work.head);
      load(args.tq, smem.tq[group], Traits::kPanels, Traits::kQPanelBytes, full, work, row,
           work.head);
    }
    Ring<Tile::kKeyStages> ring;
    for (int tile = work.tiles.end - 1; tile >= work.tiles.begin;
         tile = work.tiles.before(tile), ring.advance()) {
      Barrier& full = smem.k_full[ring.stage];
      smem.k_empty[ring.stage].wait(ring.phase ^ 1);
      full.arrive_expecting(2 * Traits::kKBytes);
      load(args.k, smem.k[ring.stage], Traits::kPanels, Traits::kKeyPanelBytes, full, work,
           tile * kKeys, work.kv_head);
      load(args.tk, smem.tk[ring.stage], Traits::kPanels, Traits::kKeyPanelBytes, full, work,
           tile * kKeys, work.kv_head);
    }
  }

  // The whole warp: see ForwardProducers::load_v.
  __device__ __forceinline__ static void load_values(const TangentArgs& args, SharedMemory& smem,
                                                     const Work& work) {
    const int lane = threadIdx.x % 32;
    const Interval seen = work.mask.seen_keys();
    Ring<Tile::kValueStages> ring;
    uint32_t landed_phase = 0;
    for (int tile = work.tiles.end - 1; tile >= work.tiles.begin;
         tile = work.tiles.before(tile), ring.advance()) {
      const int first_key = tile * kKeys;
      const bool cut = holds_unseen_keys<kKeys>(first_key, seen, args.problem.kv_len);
      Barrier& landed = cut ? smem.v_landed : smem.v_full[ring.stage];
      smem.v_empty[ring.stage].wait(ring.phase ^ 1);
      if (lane == 0) {
        landed.arrive_expecting(2 * Traits::kVBytes);
        load(args.v, smem.v[ring.stage], Traits::kValuePanels, Traits::kKeyPanelBytes, landed, work,
             first_key, work.kv_head);
        load(args.tv, smem.tv[ring.stage], Traits::kValuePanels, Traits::kKeyPanelBytes, landed,
             work, first_key, work.kv_head);
      }
      __syncwarp();
      if (!cut) continue;
      landed.wait(landed_phase);
      landed_phase ^= 1;
      clear_unseen_keys<kKeys, Traits::kVBytes>(smem.v[ring.stage], first_key, seen, lane);
      clear_unseen_keys<kKeys, Traits::kVBytes>(smem.tv[ring.stage], first_key, seen, lane);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) smem.v_full[ring.stage].arrive();
    }
  }
};

template <class Traits, class Mask, class Scores>
struct TangentConsumers {
  using Tile = typename Traits::Tile;
  using Work = TangentWork<Traits, Mask>;
  using SharedMemory = TangentSharedMemory<Traits>;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr Math kMath = Traits::kMath;
  using Held = HeldOperand<Tile::kHeldSteps>;

  // s = Q K^T and t = Q tK^T + tQ K^T of one tile, in flight on return.
  __device__ __forceinline__ static void issue_scores(float (&s)[kKeys / 2], float (&t)[kKeys / 2],
                                                      const Held& held, uint64_t q, uint64_t tq,
                                                      uint64_t k, uint64_t tk) {
    constexpr int kColumns = Tile::kHeadDim;
    constexpr int kA = Traits::kQPanelBytes, kB = Traits::kKeyPanelBytes;
    sm90::issue_scores<kMath, kColumns, kA, kB, kKeys>(s, q, k, held);
    sm90::issue_scores<kMath, kColumns, kA, kB, kKeys>(t, q, tk, held);
    sm90::issue_scores<kMath, kColumns, kA, kB, kKeys, 0, true>(t, tq, k);
  }

  static constexpr int kScoreGroups = 3;  // of the above, as wgmma_wait counts

  // o += weights V, in flight on return.
  __device__ __forceinline__ static void issue_values(float (&o)[Tile::kValueDim / 2],
                                                      const uint32_t (&weights)[kKeys / 4],
                                                      uint64_t v) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      Wgmma<Tile::kValueDim>::template rs<kMath, 1>(
          o, weights + 4 * step, v + descriptor_step(step * 16 * Traits::kPanelRowBytes), 1);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ static float sum_of_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }

  __device__ __forceinline__ static void consume(const TangentArgs& args, SharedMemory& smem,
                                                 const Work& work, int group) {
    const Problem& problem = args.problem;
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const uint64_t q = wgmma_descriptor(shared_address(smem.q[group]), 16, 1024);
    const uint64_t tq = wgmma_descriptor(shared_address(smem.tq[group]), 16, 1024);
    const uint64_t k_base = wgmma_descriptor(shared_address(smem.k[0]), 16, 1024);
    const uint64_t tk_base = wgmma_descriptor(shared_address(smem.tk[0]), 16, 1024);
    const uint64_t v_base =
        wgmma_descriptor(shared_address(smem.v[0]), Traits::kKeyPanelBytes, 1024);
    const uint64_t tv_base =
        wgmma_descriptor(shared_address(smem.tv[0]), Traits::kKeyPanelBytes, 1024);

    const int group_row = work.first_row + group * 64;
    const Interval rows = {group_row, group_row + 64};
    Interval own =
        work.tiles.of(intersection(covering_tiles<kKeys>(work.mask.keys(rows)), work.tiles));
    if (own.begin >= own.end) own = {work.tiles.begin, work.tiles.begin};
    const Interval full = inner_tiles<kKeys>(work.mask.common_keys(rows));
    const int row = group_row + Fragment::row(thread);
    const RowPositions positions{{row, row + 8}};
    Scores scores(args);
    scores.begin_rows(args, work.mask, work.batch, work.head, positions);

    const int64_t first_of_rows = int64_t{work.batch} * problem.q_len;
    float lse_log2[2];  // infinity for a row that sees no key: its probabilities are 0
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = positions.of[r];
      const float lse =
          position < work.mask.q_len()
              ? __ldg(args.lse + (first_of_rows + position) * problem.q_heads + work.head)
              : -INFINITY;
      lse_log2[r] = lse == -INFINITY ? INFINITY : lse * kLog2E;
    }
    float reference[2] = {0.f, 0.f};
    bool has_reference[2] = {lse_log2[0] == INFINITY, lse_log2[1] == INFINITY};
    bool settled = false;          // all rows of the warp have one
    float moment[2] = {0.f, 0.f};  // sum of P (tS - reference), this thread's part
    float total[2] = {0.f, 0.f};   // of P; with a sink

    float s[kKeys / 2], t[kKeys / 2];
    uint32_t p[kKeys / 4], weights[kKeys / 4];
    float o[Tile::kValueDim / 2];
#pragma unroll
    for (float& value : o) value = 0.f;
    Kept<Scores::kDrops, true, kKeys> kept;

    // s and t become weights of tv and v.
    const auto weigh = [&](int tile) {
      const int key = tile * kKeys + Fragment::column(thread);
      const bool cut = tile < full.begin || tile >= full.end;
      scores.begin_keys(key);
      scores.draw(kept, key);
      if constexpr (Scores::kRewrites) scores.rewrite(s, t, problem.scale);
      if (cut) {
        apply_mask(s, work.mask, positions, key);
        if constexpr (Scores::kMasks || Mask::kTestsElements) {
          typename Scores::template Shown<Mask, kKeys> shown;
          scores.look(shown, work.mask, tile * kKeys, Fragment::column(thread));
          scores.hide(s, shown);
        }
        // What is hidden may have any tangent.
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) t[i] = s[i] == -INFINITY ? 0.f : t[i];
      }
      const float factor = Scores::kRewrites ? 1.f : args.scale_log2;
      const float scale = scores.tangent_scale(problem.scale);
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        s[i] = exp2_approx(fmaf(s[i], factor, -lse_log2[Fragment::lower(i)]));
      }
      if (!settled) {
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
          if (has_reference[r] || weight == 0.f) continue;
          has_reference[r] = true;
          if (weight >= kReferenceWeight && fabsf(mean) < INFINITY) reference[r] = mean;
        }
        settled = __all_sync(~0u, has_reference[0] && has_reference[1]);
      }
#pragma unroll
      for (int i = 0; i < kKeys / 2; i += 2) {
        const int r = Fragment::lower(i);
        float weight[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          weight[j] = s[i + j] * fmaf(t[i + j], scale, -reference[r]);
          moment[r] += weight[j];
          if constexpr (Scores::kHasSink) total[r] += s[i + j];
        }
        p[i / 2] = kept.of_pair(i, pack<kMath>(s[i], s[i + 1]));
        weights[i / 2] = kept.of_pair(i, pack<kMath>(weight[0], weight[1]));
      }
    };

    Ring<Tile::kKeyStages> k_ring;
    Ring<Tile::kValueStages> v_ring;
    const auto release_keys = [&] {
      if (lane == 0) smem.k_empty[k_ring.stage].arrive();
      k_ring.advance();
    };
    const auto release_values = [&] {
      if (lane == 0) smem.v_empty[v_ring.stage].arrive();
      v_ring.advance();
    };
    const auto wait_keys = [&] { smem.k_full[k_ring.stage].wait(k_ring.phase); };
    const auto wait_values = [&] { smem.v_full[v_ring.stage].wait(v_ring.phase); };
    int tile = work.tiles.end - 1;
    const auto skip_to = [&](int end) {  // tiles that other warpgroups see
      for (; tile >= end; tile = work.tiles.before(tile)) {
        wait_keys();
        release_keys();
        wait_values();
        release_values();
      }
    };
    Held held;
    const auto issue_next_scores = [&] {
      const uint64_t offset = k_ring.stage * descriptor_step(Traits::kKBytes);
      // Or the compiler keeps the descriptors of all steps, in registers that it does not have.
      uint64_t own_q = q, own_tq = tq;
      asm volatile("" : "+l"(own_q), "+l"(own_tq));
      issue_scores(s, t, held, own_q, own_tq, k_base + offset, tk_base + offset);
    };
    const auto issue_both_values = [&] {
      const uint64_t offset = v_ring.stage * descriptor_step(Traits::kVBytes);
      issue_values(o, weights, v_base + offset);
      issue_values(o, p, tv_base + offset);
    };

    // Even where it is not needed: what is on its way must not reach the next block.
    if (work.tiles.begin < work.tiles.end) smem.q_full[group].wait(0);
    skip_to(own.end);
    if (own.begin < own.end) {
      held.template load<Tile::kHeadDim, Traits::kQPanelBytes>(shared_address(smem.q[group]));
      wait_keys();
      issue_next_scores();
      wgmma_wait<0>();
      hold(s);
      hold(t);
      release_keys();
      weigh(tile);
      while ((tile = work.tiles.before(tile)) >= own.begin) {
        wait_keys();
        wait_values();
        issue_both_values();
        issue_next_scores();
        wgmma_wait<kScoreGroups>();
        release_values();
        wgmma_wait<0>();
        hold(s);
        hold(t);
        hold(o);
        release_keys();
        weigh(tile);
      }
      wait_values();
      issue_both_values();
      wgmma_wait<0>();
      hold(o);
      release_values();
    }
    skip_to(work.tiles.begin);

    uint16_t* target[2];
    const uint16_t* out[2];
    float coefficient[2];  // of O
    float inverse[2] = {1.f, 1.f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = positions.of[r];
      const bool exists = position < problem.q_len;
      const bool empty = lse_log2[r] == INFINITY;
      const float sum = sum_of_row(moment[r]);
      const float all = Scores::kHasSink ? sum_of_row(total[r]) : 1.f;
      coefficient[r] = fmaf(reference[r], 1.f - all, -sum);
      if constexpr (Scores::kDrops) inverse[r] = scores.kept_scale();
      const auto row_of = [&](const Tensor& tensor) {
        return static_cast<uint16_t*>(tensor.data) + tensor_offset(tensor, problem, work.batch) +
               work.head * tensor.head_stride + position * tensor.seq_stride;
      };
      target[r] = exists ? row_of(args.tout) : nullptr;
      out[r] = exists && !empty ? row_of(args.out) : nullptr;
      if (exists && lane % 4 == 0) {
        args.tlse[(first_of_rows + position) * problem.q_heads + work.head] =
            empty ? 0.f : fmaf(reference[r], all, sum);
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; i += 2) {
      const int r = Fragment::lower(i);
      const int column = Fragment::column_of(i) + Fragment::column(thread);
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
    store_rows<kMath>(o, ones, target, problem.value_dim, lane);
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
    for (Barrier& full : smem.q_full) full.init(1);
    for (Barrier& full : smem.k_full) full.init(1);
    for (Barrier& empty : smem.k_empty) empty.init(4 * Traits::kWarpGroups);
    for (Barrier& full : smem.v_full) full.init(1);
    for (Barrier& empty : smem.v_empty) empty.init(4 * Traits::kWarpGroups);
    smem.v_landed.init(1);
    fence_mbarrier_init();
  }
  __syncthreads();

  const auto work = TangentWork<Traits, Mask>::of(args);
  if (group < Traits::kWarpGroups) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    TangentConsumers<Traits, Mask, Scores>::consume(args, smem, work, group);
    return;
  }
  setmaxnreg_dec<Traits::kProducerRegisters>();
  using Producers = TangentProducers<Traits, Mask>;
  const int warp = threadIdx.x / 32 % 4;
  if (warp == 0 && threadIdx.x % 32 == 0) Producers::load_keys(args, smem, work);
  if (warp == 1) Producers::load_values(args, smem, work);
}

}  // namespace jaxflash::sm90
