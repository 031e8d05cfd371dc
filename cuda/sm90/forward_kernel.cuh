// The forward kernel. A block walks over tiles of query rows; for each, K and V stream through
// rings of shared-memory buffers.
//
//   warpgroups 0 ... kWarpGroups - 1   consumers: a unit of 64 rows each, products and softmax
//   last warpgroup, one warp each      plans and loads Q, loads K, loads V, stores the output
//
// The planning warp announces tiles ahead of time, so that the others only read what they need. A
// consumer begins the next tile with its first scores, which run beside the epilogue of this one.
//
// A consumer stages its output where its rows of Q lay, so a Q buffer is empty once the output has
// left it; with two Q buffers the next tile streams in meanwhile. With one, the output is stored
// straight from registers, so that the next Q streams in as soon as the last scores are there.
#pragma once

#include "attention.h"
#include "common/divisor.h"
#include "common/mask.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"
#include "sm90/scheduler.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tile_config.h"
#include "sm90/wgmma.cuh"

namespace jaxflash::sm90 {

struct ForwardArgs {
  TensorMap q;    // boxes of a unit x 64 columns
  TensorMap k;    // boxes of kKeys x 64
  TensorMap v;    // boxes of kKeys x 64
  TensorMap out;  // boxes of a unit x 64 columns
  // What an index along each batch axis of the maps is multiplied with: 0 broadcasts.
  int32_t q_batch_step[2];
  int32_t k_batch_step[2];
  int32_t v_batch_step[2];
  UnitShape unit;
  int32_t group;     // query heads of a kv head
  Divisor by_units;  // of one position
  Divisor by_kv_heads;
  Divisor by_inner_batch;  // extent of the fastest batch axis of the maps
  TileOrder order;
  Problem problem;
  float* lse;
  uint16_t* out_data;  // for direct stores; strides in elements, batch axes as in the maps
  int64_t out_batch_stride[2];
  int64_t out_seq_stride;
  int64_t out_head_stride;
  float scale_log2;
};

template <class Tile_, Math kMath_, class Mask_>
struct ForwardTraits {
  using Tile = Tile_;
  using Mask = Mask_;
  static constexpr Math kMath = kMath_;

  static constexpr int kWarpGroups = Tile::kWarpGroups;
  static constexpr int kThreads = 128 * (kWarpGroups + 1);
  // A block can only redistribute what it is launched with: 4 x 128 or 3 x 168 registers.
  static_assert(kWarpGroups == 2 || kWarpGroups == 3);
  static constexpr int kConsumerRegisters = kWarpGroups == 3 ? 160 : 232;
  static constexpr int kProducerRegisters = kWarpGroups == 3 ? 32 : 40;

  // An operand lies in panels 64 elements (128 bytes) wide, each swizzled.
  static constexpr int kPanelRowBytes = 128;
  static constexpr int kPanels = (Tile::kHeadDim + 63) / 64;
  static constexpr int kValuePanels = (Tile::kValueDim + 63) / 64;
  static constexpr int kQPanelBytes = 64 * kPanelRowBytes;
  static constexpr int kKeyPanelBytes = Tile::kKeys * kPanelRowBytes;
  static constexpr int kQBytes = kPanels * kQPanelBytes;  // of one warpgroup
  static constexpr int kKBytes = kPanels * kKeyPanelBytes;
  static constexpr int kVBytes = kValuePanels * kKeyPanelBytes;

  static_assert(Tile::kKeys % 16 == 0 && Tile::kKeys <= 256);
  static_assert(Tile::kHeadDim % 16 == 0 && Tile::kValueDim % 16 == 0);
  static constexpr bool kDirect = Tile::kOutput == Output::kDirect;
  static_assert(kDirect || Tile::kValueDim <= Tile::kHeadDim, "staged in Q's buffer");
  static_assert(!kDirect || Tile::kValueDim % 32 == 0, "four lanes exchange 32 columns");

  using Plan = TilePlan<Mask, kWarpGroups>;
  // A tile is planned before Q of the one before it is loaded, which may be two ahead of the
  // consumers: with four slots the planning warp never waits for one.
  using Plans = Mailbox<Plan, 4>;
  // Warps that read plans: all but the planning one, and the storing one where it has no work.
  static constexpr int kPlanReaders = 4 * kWarpGroups + (kDirect ? 2 : 3);

  struct SharedMemory {
    alignas(1024) uint8_t q[Tile::kQStages][kWarpGroups][kQBytes];
    alignas(1024) uint8_t k[Tile::kStages][kKBytes];
    alignas(1024) uint8_t v[Tile::kStages][kVBytes];
    Barrier q_full[Tile::kQStages][kWarpGroups];   // Q has landed
    Barrier o_full[Tile::kQStages][kWarpGroups];   // the output lies in Q's place
    Barrier q_empty[Tile::kQStages][kWarpGroups];  // and has been read out; or Q has been used up
    Barrier k_full[Tile::kStages];
    Barrier k_empty[Tile::kStages];  // every consumer warp is through with it
    Barrier v_full[Tile::kStages];
    Barrier v_empty[Tile::kStages];
    Barrier v_landed;  // a tile of V that the loader edits before it announces it
    Plans plans;
    float pin[kWarpGroups * 128];
  };
  static constexpr int kSharedBytes = sizeof(SharedMemory);
  static_assert(kSharedBytes <= 227 * 1024);
};

template <class Traits, class Scores>
struct Forward {
  using Tile = typename Traits::Tile;
  using Mask = typename Traits::Mask;
  using Plan = typename Traits::Plan;
  using Unit = typename Plan::Unit;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr int kWarpGroups = Traits::kWarpGroups;
  // With one Q buffer in which the output is staged, Q of the next tile only comes after it.
  static constexpr bool kEarlyScores = Tile::kQStages > 1 || Traits::kDirect;

  // --- producers --------------------------------------------------------------------------------

  // All lanes of the warp: the first ones work out a unit each, the very first the rest too.
  __device__ __forceinline__ static void plan_tile(const ForwardArgs& args, const QueryTile& tile,
                                                   Plan& plan) {
    const Problem& problem = args.problem;
    const int lane = threadIdx.x % 32;
    const int batch = args.by_kv_heads.quotient(tile.head);
    const int kv_head = args.by_kv_heads.remainder(tile.head);
    const int inner = args.by_inner_batch.remainder(batch);
    const int outer = args.by_inner_batch.quotient(batch);
    const int first_unit = tile.index * kWarpGroups;
    const int positions = args.unit.positions();
    const auto position_of = [&](int unit) {
      return static_cast<int>(args.by_units.quotient(unit) << args.unit.log2_positions);
    };
    const Mask mask(problem, batch);
    const Interval tiles = covering_tiles<kKeys>(mask.keys(
        {position_of(first_unit), position_of(first_unit + kWarpGroups - 1) + positions}));
    if (lane == 0) {
      plan.kv_head = kv_head;
      plan.inner = inner;
      plan.outer = outer;
      plan.mask = mask;
      plan.seen = mask.keys({0, mask.q_len()});
      plan.tiles = tiles;
    }
    if (lane < kWarpGroups) {
      // Those after the last one of the kv head lie behind the sequence: they see no key, and TMA
      // neither reads nor writes there.
      Unit& unit = plan.units[lane];
      const int position = position_of(first_unit + lane);
      const int head =
          kv_head * args.group + args.by_units.remainder(first_unit + lane) * args.unit.heads;
      const Interval rows = {position, position + positions};
      const Interval own = covering_tiles<kKeys>(mask.keys(rows));
      unit.position = position;
      unit.head = head;
      unit.tiles = own.begin < own.end ? own : Interval{tiles.begin, tiles.begin};
      unit.full = inner_tiles<kKeys>(mask.common_keys(rows));
      unit.lse = args.lse + (int64_t{batch} * problem.q_len + position) * problem.q_heads + head;
      if (Traits::kDirect) {
        unit.out = args.out_data + outer * args.out_batch_stride[1] +
                   inner * args.out_batch_stride[0] + head * args.out_head_stride +
                   position * args.out_seq_stride;
      }
    }
  }

  // Plans tiles, each before it loads Q of the one before.
  __device__ __forceinline__ static void load_q(const ForwardArgs& args, SharedMemory& smem) {
    const bool first_lane = threadIdx.x % 32 == 0;
    Ring<Tile::kQStages> ring;
    TileWalk walk(args.order);
    for (uint32_t count = 0;; ++count, walk.advance()) {
      const bool exists = !walk.done();
      Plan& plan = smem.plans.prepare(count);
      if (exists) plan_tile(args, walk.tile(), plan);
      if (first_lane) plan.exists = exists;
      smem.plans.send(count);
      if (count > 0) {
        const Plan& loaded = smem.plans.sent(count - 1);
        if (first_lane) {
#pragma unroll 1
          for (int group = 0; group < kWarpGroups; ++group) {
            Barrier& full = smem.q_full[ring.stage][group];
            smem.q_empty[ring.stage][group].wait(ring.phase ^ 1);
            full.arrive_expecting(Traits::kPanels * args.unit.rows() * Traits::kPanelRowBytes);
#pragma unroll 1
            for (int panel = 0; panel < Traits::kPanels; ++panel) {
              const uint8_t* target = smem.q[ring.stage][group] + panel * Traits::kQPanelBytes;
              tensor_load(shared_address(target), &args.q, full.address(), panel * 64,
                          loaded.units[group].position, loaded.units[group].head,
                          loaded.inner * args.q_batch_step[0], loaded.outer * args.q_batch_step[1]);
            }
          }
        }
        __syncwarp();
        ring.advance();
      }
      if (!exists) return;
    }
  }

  __device__ __forceinline__ static void load_k(const ForwardArgs& args, SharedMemory& smem) {
    Ring<Tile::kStages> ring;
    for (uint32_t count = 0;; ++count) {
      const Plan& plan = smem.plans.receive(count);
      if (!plan.exists) return;
      const Interval tiles = plan.tiles;
      const int kv_head = plan.kv_head;
      const int inner = plan.inner * args.k_batch_step[0];
      const int outer = plan.outer * args.k_batch_step[1];
      smem.plans.release(count);
      if (threadIdx.x % 32 == 0) {
        for (int tile = tiles.end - 1; tile >= tiles.begin; --tile, ring.advance()) {
          Barrier& full = smem.k_full[ring.stage];
          smem.k_empty[ring.stage].wait(ring.phase ^ 1);
          full.arrive_expecting(Traits::kKBytes);
#pragma unroll 1
          for (int panel = 0; panel < Traits::kPanels; ++panel) {
            const uint8_t* target = smem.k[ring.stage] + panel * Traits::kKeyPanelBytes;
            tensor_load(shared_address(target), &args.k, full.address(), panel * 64, tile * kKeys,
                        kv_head, inner, outer);
          }
        }
      }
      __syncwarp();
    }
  }

  // The whole warp: a tile that reaches past the keys which the sequence sees, inside the array, is
  // cleaned before it is announced, because a probability of 0 times NaN would be NaN.
  __device__ __forceinline__ static void load_v(const ForwardArgs& args, SharedMemory& smem) {
    const int lane = threadIdx.x % 32;
    Ring<Tile::kStages> ring;
    uint32_t landed_phase = 0;
    for (uint32_t count = 0;; ++count) {
      const Plan& plan = smem.plans.receive(count);
      if (!plan.exists) return;
      const Interval seen = plan.seen;
      const Interval tiles = plan.tiles;
      const int kv_head = plan.kv_head;
      const int inner = plan.inner * args.v_batch_step[0];
      const int outer = plan.outer * args.v_batch_step[1];
      smem.plans.release(count);
      for (int tile = tiles.end - 1; tile >= tiles.begin; --tile, ring.advance()) {
        const int first_key = tile * kKeys;
        const bool cut =
            first_key < seen.begin || min(first_key + kKeys, args.problem.kv_len) > seen.end;
        Barrier& landed = cut ? smem.v_landed : smem.v_full[ring.stage];
        smem.v_empty[ring.stage].wait(ring.phase ^ 1);
        const uint8_t* target = smem.v[ring.stage];
        if (lane == 0) {
          landed.arrive_expecting(Traits::kVBytes);
#pragma unroll 1
          for (int panel = 0; panel < Traits::kValuePanels; ++panel) {
            tensor_load(shared_address(target + panel * Traits::kKeyPanelBytes), &args.v,
                        landed.address(), panel * 64, first_key, kv_head, inner, outer);
          }
        }
        // No lane may fall a whole round of the ring behind: it would misread the parity.
        __syncwarp();
        if (!cut) continue;
        landed.wait(landed_phase);
        landed_phase ^= 1;
        // Swizzling moves 16-byte pieces inside a row of a panel only.
        constexpr int kPieces = Traits::kPanelRowBytes / 16;
#pragma unroll 1
        for (int piece = lane; piece < Traits::kVBytes / 16; piece += 32) {
          const int key = first_key + piece / kPieces % kKeys;
          if (key >= seen.begin && key < seen.end) continue;
          store_shared_zero(shared_address(target + piece * 16));
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) smem.v_full[ring.stage].arrive();
      }
    }
  }

  __device__ __forceinline__ static void store_out(const ForwardArgs& args, SharedMemory& smem) {
    if (Traits::kDirect) return;
    Ring<Tile::kQStages> ring;
    for (uint32_t count = 0;; ++count, ring.advance()) {
      const Plan& plan = smem.plans.receive(count);
      if (!plan.exists) return;
      if (threadIdx.x % 32 == 0) {
#pragma unroll 1
        for (int group = 0; group < kWarpGroups; ++group) {
          smem.o_full[ring.stage][group].wait(ring.phase);
#pragma unroll 1
          for (int panel = 0; panel * 64 < args.problem.value_dim; ++panel) {
            const uint8_t* source = smem.q[ring.stage][group] + panel * Traits::kQPanelBytes;
            tensor_store(&args.out, shared_address(source), panel * 64, plan.units[group].position,
                         plan.units[group].head, plan.inner, plan.outer);
          }
          bulk_commit_group();
          bulk_wait_group_read<0>();
          smem.q_empty[ring.stage][group].arrive();
        }
      }
      smem.plans.release(count);
    }
  }

  // --- consumers --------------------------------------------------------------------------------

  // The warpgroups issue their products in turn, one turn for every tile of the block: left alone
  // they fall into step, and the matrix units idle while all of them work on a softmax.
  __device__ __forceinline__ static void take_turn(int group) {
    if constexpr (Tile::kTurns) named_barrier_sync(kFirstTurn + group, 256);
  }
  __device__ __forceinline__ static void pass_turn(int group) {
    if constexpr (Tile::kTurns) {
      named_barrier_arrive(kFirstTurn + (group + 1 == kWarpGroups ? 0 : group + 1), 256);
    }
  }

  // s = Q K^T of one tile, in flight on return.
  __device__ __forceinline__ static void issue_scores(float (&s)[kKeys / 2], uint64_t q,
                                                      uint64_t k) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kHeadDim / 16; ++step) {
      const int panel = step / 4;
      const int inside = step % 4 * 32;  // bytes of 16 columns
      Wgmma<kKeys>::template ss<Traits::kMath, 0, 0>(
          s, q + descriptor_step(panel * Traits::kQPanelBytes + inside),
          k + descriptor_step(panel * Traits::kKeyPanelBytes + inside), step != 0);
    }
    wgmma_commit();
  }

  // o += P V of one tile, in flight on return.
  __device__ __forceinline__ static void issue_values(float (&o)[Tile::kValueDim / 2],
                                                      const uint32_t (&p)[kKeys / 4], uint64_t v) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      Wgmma<Tile::kValueDim>::template rs<Traits::kMath, 1>(
          o, p + 4 * step, v + descriptor_step(step * 16 * Traits::kPanelRowBytes), 1);
    }
    wgmma_commit();
  }

  // A row without a visible key, which has the sum 0: its output is 0, whatever V holds.
  __device__ __forceinline__ static void clear_rows(float (&o)[Tile::kValueDim / 2],
                                                    float (&inverse)[2], const float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (sum[r] == 0.f) inverse[r] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; ++i) {
      if (sum[Fragment::lower(i)] == 0.f) o[i] = 0.f;
    }
  }

  // Rows of the output from registers to memory, 16 bytes a lane. `inverse` is 1 / sum of a row;
  // a row without a target is dropped.
  __device__ __forceinline__ static void store_direct(const float (&o)[Tile::kValueDim / 2],
                                                      const float (&inverse)[2],
                                                      uint16_t* const (&target)[2], int value_dim,
                                                      int lane) {
    const bool odd = lane & 1;
    const bool high = lane & 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int column = 0; column < Tile::kValueDim; column += 32) {
        // Four groups of eight columns, of each of which a lane holds two: transpose the lanes
        // that share the row, so that each holds one group.
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int element = column / 2 + 4 * i + 2 * r;
          words[i] = pack<Traits::kMath>(o[element] * inverse[r], o[element + 1] * inverse[r]);
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const uint32_t other = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
          (odd ? words[i] : words[i + 1]) = other;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t other = __shfl_xor_sync(~0u, high ? words[i] : words[i + 2], 2);
          (high ? words[i] : words[i + 2]) = other;
        }
        const int first = column + lane % 4 * 8;
        if (target[r] != nullptr && first < value_dim) store_global(target[r] + first, words);
      }
    }
  }

  // Rows of the output to where the warpgroup's Q was, for the storing warp. All four warps are
  // through with Q.
  __device__ __forceinline__ static void stage_output(const float (&o)[Tile::kValueDim / 2],
                                                      const float (&inverse)[2], uint32_t staged,
                                                      int thread) {
    const int lane = thread % 32;
    const int staged_row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int column = 0; column < Tile::kValueDim; column += 16) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2;
        const int element = column / 2 + 2 * i;
        packed[i] = pack<Traits::kMath>(o[element] * inverse[r], o[element + 1] * inverse[r]);
      }
      const int piece = column % 64 / 8 + lane / 16;
      stmatrix_x4(staged + column / 64 * Traits::kQPanelBytes +
                      staged_row * Traits::kPanelRowBytes + (piece ^ staged_row % 8) * 16,
                  packed);
    }
    fence_proxy_async();
  }

  __device__ __forceinline__ static void consume(const ForwardArgs& args, SharedMemory& smem,
                                                 int group) {
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const Scores scores{args.scale_log2};
    const uint64_t q_base = wgmma_descriptor(shared_address(smem.q[0][group]), 16, 1024);
    const uint64_t k_base = wgmma_descriptor(shared_address(smem.k[0]), 16, 1024);
    const uint64_t v_base =
        wgmma_descriptor(shared_address(smem.v[0]), Traits::kKeyPanelBytes, 1024);
    const uint32_t pin = shared_address(&smem.pin[threadIdx.x]);

    Ring<Tile::kQStages> q_ring;
    Ring<Tile::kStages> k_ring;
    Ring<Tile::kStages> v_ring;
    // One arrival a warp: a warp's wait covers its own part of a product only.
    const auto release_k = [&] {
      if (lane == 0) smem.k_empty[k_ring.stage].arrive();
      k_ring.advance();
    };
    const auto release_v = [&] {
      if (lane == 0) smem.v_empty[v_ring.stage].arrive();
      v_ring.advance();
    };
    // Whether the tiles of K and V after the present ones are there. Asked beside a product,
    // because a wait takes its 60 clocks even where there is nothing to wait for: 1 to 2 % with
    // kValues.
    const auto next_landed = [&] {
      const auto next_k = k_ring.next();
      const auto next_v = v_ring.next();
      return smem.k_full[next_k.stage].completed(next_k.phase) &&
             smem.v_full[next_v.stage].completed(next_v.phase);
    };
    const auto wait_k = [&] { smem.k_full[k_ring.stage].wait(k_ring.phase); };
    const auto wait_v = [&] { smem.v_full[v_ring.stage].wait(v_ring.phase); };
    // Directly stored output leaves Q's buffer alone: it is empty after the last scores.
    const auto release_q = [&] {
      if (Traits::kDirect && lane == 0) smem.q_empty[q_ring.stage][group].arrive();
    };
    const auto k_tile = [&] { return k_base + k_ring.stage * descriptor_step(Traits::kKBytes); };
    const auto v_tile = [&] { return v_base + v_ring.stage * descriptor_step(Traits::kVBytes); };

    if (group == kWarpGroups - 1) pass_turn(group);  // the first turn is the first warpgroup's
    float s[kKeys / 2];
    uint32_t count = 0;  // tiles of query rows so far
    Interval own;        // key tiles of the unit
    int tile;            // of keys
    uint64_t q;
    bool more;
    // Key tiles that other warpgroups of the block need and this one does not.
    const auto skip_to = [&](int end) {
      for (; tile >= end; --tile) {
        wait_k();
        release_k();
        wait_v();
        release_v();
        take_turn(group);
        pass_turn(group);
      }
    };
    // Receives a tile and computes its first scores, with `meanwhile` beside them.
    const auto begin_tile = [&](const auto& meanwhile) {
      const Plan& plan = smem.plans.receive(count);
      more = plan.exists;
      own = {0, 0};
      if (more) {
        own = plan.units[group].tiles;
        tile = plan.tiles.end - 1;
        smem.q_full[q_ring.stage][group].wait(q_ring.phase);
        q = q_base + q_ring.stage * descriptor_step(kWarpGroups * Traits::kQBytes);
        skip_to(own.end);
      }
      if (own.begin == own.end) return meanwhile();
      wait_k();
      take_turn(group);
      issue_scores(s, q, k_tile());
      pass_turn(group);
      meanwhile();
      wgmma_wait<0>();
      hold(s);
    };

    begin_tile([] {});
    while (more) {
      // Read where it is needed: registers are short.
      const Plan& plan = smem.plans.sent(count);
      const Unit& unit = plan.units[group];
      const Interval full = unit.full;
      const auto position = [&](int r) {
        return unit.position + args.unit.position(Fragment::row(thread) + 8 * r);
      };

      uint32_t p[kKeys / 4];
      float o[Tile::kValueDim / 2];
      OnlineSoftmax<kKeys / 2> softmax;
      float sum[2] = {0.f, 0.f};  // over a whole row; stays 0 where it sees no key
      float inverse[2];
      bool has_empty_rows = true;
      softmax.reset();
#pragma unroll
      for (float& value : o) value = 0.f;
      hold(o);  // cleared here, not again on each way to a product

      const auto pack_tile = [&] {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) p[i] = pack<Traits::kMath>(s[2 * i], s[2 * i + 1]);
      };
      // s becomes probabilities; true when o has to be rescaled.
      const auto normalize = [&](bool first) {
        const int key = tile * kKeys + Fragment::column(thread);
        const RowPositions rows{position(0), position(1)};
        scores.on_scores(s, rows, key);
        if (tile < full.begin || tile >= full.end) apply_mask(s, plan.mask, rows, key);
        // Packed at once, unless P V is still reading the p of the tile before: then s becomes p.
        const auto emit = [&](int i, float (&e)[kKeys / 2]) {
          e[i] = scores.on_probability(e[i], rows.of[Fragment::lower(i)],
                                       key + Fragment::column_of(i));
          if (Tile::kOverlap != Overlap::kNone) {
            s[i] = e[i];
          } else if (i % 2 == 1) {
            p[i / 2] = pack<Traits::kMath>(e[i - 1], e[i]);
          }
        };
        if (Tile::kOverlap == Overlap::kNone && !first &&
            softmax.exponentials_if_held(s, scores.scale_log2, emit)) {
          return false;
        }
        const bool rescale = softmax.advance(s, scores.scale_log2);
        softmax.exponentials(s, scores.scale_log2, emit);
        return rescale;
      };
      const auto rescale_output = [&] {
#pragma unroll
        for (int i = 0; i < Tile::kValueDim / 2; ++i) {
          o[i] *= softmax.correction(Fragment::lower(i));
        }
      };

      if (own.begin < own.end) {
        release_k();
        if (tile == own.begin) release_q();
        normalize(true);  // o is still 0
        if (Tile::kOverlap != Overlap::kNone) pack_tile();
        bool landed = false;
        while (--tile >= own.begin) {
          if (!landed) {
            wait_k();
            wait_v();
          }
          take_turn(group);
          if constexpr (Tile::kOverlap == Overlap::kNone) {
            issue_values(o, p, v_tile());
            issue_scores(s, q, k_tile());
            pass_turn(group);
            wgmma_wait<0>();
            hold(s);
            hold(o);
            release_v();
            release_k();
            if (tile == own.begin) release_q();
            if (normalize(false)) rescale_output();
          } else {
            issue_scores(s, q, k_tile());
            issue_values(o, p, v_tile());
            pass_turn(group);
            landed = next_landed();
            wgmma_wait<1>();
            hold(s);
            release_k();
            if (tile == own.begin) release_q();
            const bool rescale = normalize(false);
            // ptxas would move the wait above the exponentials; a store of what depends on all of
            // them cannot follow it.
            store_shared_volatile(pin, softmax.sum_of_sums());
            wgmma_wait<0>();
            hold(o);
            release_v();
            pack_tile();
            if (rescale) rescale_output();
          }
        }
        wait_v();
        issue_values(o, p, v_tile());
        // Beside the last product: what the output needs.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sum[r] = softmax.row_sum(r);
          if (position(r) >= plan.mask.q_len()) sum[r] = 0.f;
          inverse[r] = reciprocal_approx(sum[r]);
        }
        has_empty_rows = __any_sync(~0u, sum[0] == 0.f || sum[1] == 0.f);
        // Four warps through with the last scores may overwrite Q with the output.
        if (!Traits::kDirect) named_barrier_sync(kFirstWarpGroup + group, 128);
        wgmma_wait<0>();
        hold(o);
        release_v();
      } else {
        release_q();
      }
      skip_to(plan.tiles.begin);

      // Whether the thread's row r is one of the arrays', and where.
      const auto stored = [&](int r) {
        return args.unit.head(Fragment::row(thread) + 8 * r) < args.unit.heads &&
               position(r) < args.problem.q_len;
      };
      const auto offset = [&](int r, int64_t position_stride, int64_t head_stride) {
        const int row = Fragment::row(thread) + 8 * r;
        return args.unit.position(row) * position_stride + args.unit.head(row) * head_stride;
      };
      uint8_t* const staged = smem.q[q_ring.stage][group];
      Barrier& o_full = smem.o_full[q_ring.stage][group];
      const auto finish = [&] {
        // ptxas moves arithmetic up between the products, where it would hold the turn, but not
        // across a branch: this one has to come first.
        if (has_empty_rows) clear_rows(o, inverse, sum);
        if constexpr (Traits::kDirect) {
          uint16_t* target[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            target[r] = stored(r) ? unit.out + offset(r, args.out_seq_stride, args.out_head_stride)
                                  : nullptr;
          }
          store_direct(o, inverse, target, args.problem.value_dim, lane);
        } else {
          stage_output(o, inverse, shared_address(staged), thread);
          o_full.arrive();
        }
        if (lane % 4 == 0) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (!stored(r)) continue;
            unit.lse[offset(r, args.problem.q_heads, 1)] =
                sum[r] == 0.f ? -INFINITY : softmax.lse(sum[r], r);
          }
        }
      };
      q_ring.advance();
      ++count;
      if (kEarlyScores) {
        begin_tile(finish);
      } else {
        finish();
        begin_tile([] {});
      }
      smem.plans.release(count - 1);
    }
    if (group == 0) take_turn(group);  // nobody leaves an arrival behind
  }
};

template <class Traits, class Scores>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Roles = Forward<Traits, Scores>;
  using Tile = typename Traits::Tile;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedMemory*>(shared_bytes);

  // Through a shuffle the compiler knows it to be the same in the whole warp.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.q);
    prefetch_tensor_map(&args.k);
    prefetch_tensor_map(&args.v);
    prefetch_tensor_map(&args.out);
    for (int stage = 0; stage < Tile::kQStages; ++stage) {
      for (int g = 0; g < Traits::kWarpGroups; ++g) {
        smem.q_full[stage][g].init(1);
        smem.o_full[stage][g].init(128);
        smem.q_empty[stage][g].init(Traits::kDirect ? 4 : 1);  // warps, or the storing one
      }
    }
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.k_empty[stage].init(4 * Traits::kWarpGroups);
      smem.v_full[stage].init(1);
      smem.v_empty[stage].init(4 * Traits::kWarpGroups);
    }
    smem.v_landed.init(1);
    smem.plans.init(Traits::kPlanReaders);
    fence_mbarrier_init();
  }
  __syncthreads();

  if (group < Traits::kWarpGroups) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    Roles::consume(args, smem, group);
    return;
  }
  setmaxnreg_dec<Traits::kProducerRegisters>();
  switch (threadIdx.x / 32 % 4) {
    case 0:
      return Roles::load_q(args, smem);
    case 1:
      return Roles::load_k(args, smem);
    case 2:
      return Roles::load_v(args, smem);
    default:
      return Roles::store_out(args, smem);
  }
}

}  // namespace jaxflash::sm90
