// The consumers of the forward kernel: a warpgroup each for a unit of rows, products and softmax.
#pragma once

#include "common/mask.cuh"
#include "sm90/forward_scores.cuh"
#include "sm90/forward_traits.cuh"
#include "sm90/softmax.cuh"
#include "sm90/store_rows.cuh"
#include "sm90/wgmma.cuh"

namespace jaxflash::sm90 {

template <class Traits, class Scores>
struct ForwardConsumers {
  using Tile = typename Traits::Tile;
  using Plan = typename Traits::Plan;
  using Unit = typename Plan::Unit;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr int kWarpGroups = Traits::kWarpGroups;
  // With one Q buffer in which the output is staged, Q of the next tile only comes after it.
  static constexpr bool kEarlyScores = Tile::kQStages > 1 || Traits::kDirect;

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

  // s = Q K^T of one tile, or s += Q K^T where scores start, in flight on return.
  __device__ __forceinline__ static void issue_scores(float (&s)[kKeys / 2], uint64_t q,
                                                      uint64_t k) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kHeadDim / 16; ++step) {
      const int panel = step / 4;
      const int inside = step % 4 * 32;  // bytes of 16 columns
      Wgmma<kKeys>::template ss<Traits::kMath, 0, 0>(
          s, q + descriptor_step(panel * Traits::kQPanelBytes + inside),
          k + descriptor_step(panel * Traits::kKeyPanelBytes + inside),
          Scores::kStarts || step != 0);
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

  // A part of the output from registers to its rows in the workspace: whole sectors of 32 bytes
  // from four lanes.
  __device__ __forceinline__ static void store_part(const float (&o)[Tile::kValueDim / 2],
                                                    const float (&inverse)[2],
                                                    float* const (&target)[2], int value_dim,
                                                    int lane) {
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; i += 2) {
      const int r = Fragment::lower(i);
      const int column = Fragment::column_of(i) + lane % 4 * 2;
      if (target[r] == nullptr || column >= value_dim) continue;
      *reinterpret_cast<float2*>(target[r] + column) =
          make_float2(o[i] * inverse[r], o[i + 1] * inverse[r]);
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
    Scores scores(args);
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
    const auto position = [&](const Unit& unit, int r) {
      return unit.position + args.unit.position(Fragment::row(thread) + 8 * r);
    };
    const auto begin_rows = [&](const Plan& plan) {
      const Unit& unit = plan.units[group];
      const RowPositions rows{position(unit, 0), position(unit, 1)};
      scores.begin_rows(args, plan.mask, plan.batch, unit.head, rows);
    };
    // What the products of a tile start from: loaded ahead of waits, computed behind them. Into the
    // turn ptxas cannot move what a store depends on.
    const auto load_start = [&] {
      if constexpr (Scores::kStarts) scores.load_start(s, tile * kKeys, Fragment::column(thread));
    };
    const auto start = [&] {
      if constexpr (Scores::kStarts) {
        scores.begin_keys(tile * kKeys + Fragment::column(thread));
        scores.start(s);
        float all[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < kKeys / 2; i += 2) {
          all[Fragment::lower(i)] = fmaf(s[i], s[i + 1], all[Fragment::lower(i)]);
        }
        store_shared_volatile(pin, all[0] + all[1]);
      }
    };
    // Key tiles that other warpgroups of the block need and this one does not.
    const auto skip_to = [&](const Plan& plan, int end) {
      for (; tile >= end; tile = plan.tiles.before(tile)) {
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
        skip_to(plan, own.end);
      }
      if (own.begin == own.end) return meanwhile();
      if constexpr (Scores::kStarts) begin_rows(plan);
      load_start();
      wait_k();
      start();
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
      constexpr bool kKnown = !Scores::kMasks || Traits::Mask::kKnowsProgram;
      const Interval full = kKnown ? unit.full : Interval{0, 0};

      uint32_t p[kKeys / 4];
      Kept<Scores::kDrops, true, kKeys> kept;
      float o[Tile::kValueDim / 2];
      OnlineSoftmax<kKeys / 2, Traits::kMath> softmax;
      float sum[2] = {0.f, 0.f};  // over a whole row; stays 0 where it sees no key
      float inverse[2];
      bool has_empty_rows = true;
      softmax.reset();
#pragma unroll
      for (float& value : o) value = 0.f;
      hold(o);  // cleared here, not again on each way to a product

      const auto pack_tile = [&] {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) {
          p[i] = kept.of_pair(2 * i, pack<Traits::kMath>(s[2 * i], s[2 * i + 1]));
        }
      };
      // s becomes probabilities; true when o has to be rescaled.
      const auto normalize = [&] {
        const int key = tile * kKeys + Fragment::column(thread);
        const auto cut = [&] { return tile < full.begin || tile >= full.end; };
        scores.begin_keys(key);
        // Packed at once, unless P V is still reading the p of the tile before: then s becomes p.
        const auto emit = [&](int i, float (&e)[kKeys / 2]) {
          if (Tile::kOverlap != Overlap::kNone) {
            s[i] = e[i];
          } else if (i % 2 == 1) {
            p[i / 2] = kept.of_pair(i - 1, pack<Traits::kMath>(e[i - 1], e[i]));
          }
        };
        constexpr bool kSpeculates = Tile::kOverlap == Overlap::kNone;
        const auto held = [&](const auto& logits) {
          return kSpeculates && softmax.settled() && softmax.exponentials_if_held(s, logits, emit);
        };
        // A reference that moves only once something has outgrown it would be looked at in vain,
        // tile after tile, by rows whose many probabilities are just below that.
        constexpr float kSlack = kSpeculates ? 0.f : 8.f;
        const auto advance = [&](const auto& logits) {
          const bool rescale = softmax.advance(s, logits.factor(), kSlack);
          softmax.exponentials(s, logits, emit);
          return rescale;
        };
        const RowPositions rows{position(unit, 0), position(unit, 1)};
        if constexpr (Scores::kRewrites && !Scores::kStarts) {
          // A logit of -inf would not stay so: what is masked is masked after the rewriting.
          if (!cut() && held(scores)) return false;
          scores.rewrite(s);
          if (cut()) {
            apply_mask(s, plan.mask, rows, key);
            hide(s, scores);
          }
          return advance(Logits{});
        } else {
          if (cut()) apply_mask(s, plan.mask, rows, key);
          if constexpr (Scores::kMasks) {
            if (cut()) {
              if (held(TestedScores<Scores>{scores})) return false;
              hide(s, scores);
              return advance(scores);
            }
          }
          if (held(scores)) return false;
          return advance(scores);
        }
      };
      const auto draw = [&] { scores.draw(kept, tile * kKeys + Fragment::column(thread)); };
      const auto rescale_output = [&] {
#pragma unroll
        for (int i = 0; i < Tile::kValueDim / 2; ++i) {
          o[i] *= softmax.correction(Fragment::lower(i));
        }
      };

      if (own.begin < own.end) {
        release_k();
        if (tile == own.begin) release_q();
        if constexpr (!Scores::kStarts) begin_rows(plan);
        draw();
        normalize();  // o is still 0
        if (Tile::kOverlap != Overlap::kNone) pack_tile();
        bool landed = false;
        while ((tile = plan.tiles.before(tile)) >= own.begin) {
          load_start();
          if (!landed) {
            wait_k();
            wait_v();
          }
          start();
          take_turn(group);
          if constexpr (Tile::kOverlap == Overlap::kNone) {
            issue_values(o, p, v_tile());
            issue_scores(s, q, k_tile());
            pass_turn(group);
            draw();
            wgmma_wait<0>();
            hold(s);
            hold(o);
            release_v();
            release_k();
            if (tile == own.begin) release_q();
            if (normalize()) rescale_output();
          } else {
            issue_scores(s, q, k_tile());
            issue_values(o, p, v_tile());
            pass_turn(group);
            landed = next_landed();
            draw();
            wgmma_wait<1>();
            hold(s);
            release_k();
            if (tile == own.begin) release_q();
            const bool rescale = normalize();
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
          if (position(unit, r) >= plan.mask.q_len()) sum[r] = 0.f;
          inverse[r] = rcp_approx(sum[r]);
          if constexpr (Scores::kHasSink) {
            // Of a part, the merge adds it.
            bool adds = sum[r] != 0.f;
            if constexpr (Traits::kShares) adds = adds && plan.part[group] == nullptr;
            if (adds) inverse[r] = softmax.add_sink(scores.sink(r), sum[r], r);
          }
          if constexpr (Scores::kDrops) inverse[r] *= scores.kept_scale();
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
      skip_to(plan, plan.tiles.begin);

      // Whether the thread's row r is one of the arrays', and where.
      const auto stored = [&](int r) {
        return args.unit.head(Fragment::row(thread) + 8 * r) < args.unit.heads &&
               position(unit, r) < args.problem.q_len;
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
        if constexpr (Traits::kShares) {
          if (float* const part = plan.part[group]; part != nullptr) {
            float* target[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int row = Fragment::row(thread) + 8 * r;
              target[r] = stored(r) ? part + row * args.problem.value_dim : nullptr;
              if (stored(r) && lane % 4 == 0) {
                unit.lse[row] = sum[r] == 0.f ? -INFINITY : softmax.lse(sum[r], r);
              }
            }
            return store_part(o, inverse, target, args.problem.value_dim, lane);
          }
        }
        if constexpr (Traits::kDirect) {
          uint16_t* target[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            target[r] = stored(r) ? unit.out + offset(r, args.out_seq_stride, args.out_head_stride)
                                  : nullptr;
          }
          store_rows<Traits::kMath>(o, inverse, target, args.problem.value_dim, lane);
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

}  // namespace jaxflash::sm90
