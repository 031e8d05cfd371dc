// The consumers of the forward kernel: a warpgroup each for a unit of rows, products and softmax.
#pragma once

#include "sm90/forward/buffers.cuh"
#include "sm90/forward/output.cuh"
#include "sm90/forward/probabilities.cuh"

namespace jaxflash::sm90 {

template <class Traits, class Scores>
struct ForwardConsumers {
  using Tile = typename Traits::Tile;
  using Plan = typename Traits::Plan;
  using Unit = typename Plan::Unit;
  using SharedMemory = typename Traits::SharedMemory;
  using Probabilities = sm90::Probabilities<Traits, Scores>;
  using Buffers = ConsumerBuffers<Traits>;
  using Product = ScoreProduct<Traits, Scores>;
  using Output = OutputRows<Traits, Scores>;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr bool kWalks = Traits::Mask::kWalks;
  // With one Q buffer in which the output is staged, Q of the next tile only comes after it.
  static constexpr bool kEarlyScores = Tile::kQStages > 1 || Traits::kDirect;

  // P V of the tile before and Q K^T of the present one together, then the softmax.
  template <class LookAhead, class Release>
  __device__ __forceinline__ static void step(Buffers& buffers, Product& product,
                                              Probabilities& probabilities, Output& output,
                                              uint64_t q, const LookAhead& look_ahead,
                                              const Release& release_scores) {
    output.issue(probabilities.packed(), buffers.v());
    product.issue(q, buffers.k(), buffers.ones(), buffers.key_terms());
    buffers.pass_turn();
    look_ahead();
    probabilities.prepare();
    wgmma_wait<0>();
    product.hold();
    output.hold();
    buffers.release_v();
    release_scores();
    probabilities.normalize(output.softmax(), [&] { output.rescale(); });
  }

  // P V of the tile before runs beside the softmax of the present one. Returns whether the next
  // tile has landed.
  template <class LookAhead, class Release>
  __device__ __forceinline__ static bool step_beside_values(
      Buffers& buffers, Product& product, Probabilities& probabilities, Output& output, uint64_t q,
      const LookAhead& look_ahead, const Release& release_scores, uint32_t pin) {
    product.issue(q, buffers.k(), buffers.ones(), buffers.key_terms());
    output.issue(probabilities.packed(), buffers.v());
    buffers.pass_turn();
    look_ahead();
    const bool landed = buffers.next_landed();
    probabilities.prepare();
    wgmma_wait<1>();
    product.hold();
    release_scores();
    bool rescale = false;
    probabilities.normalize(output.softmax(), [&] { rescale = true; });
    // ptxas would move the wait above the exponentials; a store of what depends on all of them
    // cannot follow it.
    store_shared_volatile(pin, output.softmax().sum_of_sums());
    wgmma_wait<0>();
    output.hold();
    buffers.release_v();
    probabilities.pack_tile();
    if (rescale) output.rescale();
    return landed;
  }

  // The first scores of a run of tiles, with `meanwhile` beside them.
  template <class Meanwhile>
  __device__ __forceinline__ static void begin_scores(Buffers& buffers, Product& product, int tile,
                                                      uint64_t q, const Meanwhile& meanwhile) {
    product.load_start(tile);
    buffers.wait_k();
    product.start(tile, buffers.starts(tile));
    buffers.take_turn();
    product.issue(q, buffers.k(), buffers.ones(), buffers.key_terms());
    buffers.pass_turn();
    meanwhile();
    wgmma_wait<0>();
    product.hold();
  }

  // o = P V over tiles of the unit's keys, as long as next_tile() says that there is another one,
  // whose first scores are there. The last product is in flight on return.
  template <class Next, class LookAhead, class Release>
  __device__ __forceinline__ static void attend(Buffers& buffers, Product& product,
                                                Probabilities& probabilities, Output& output,
                                                const int& tile, uint64_t q, uint32_t pin,
                                                const Next& next_tile, const LookAhead& look_ahead,
                                                const Release& release_scores) {
    probabilities.prepare();
    probabilities.normalize(output.softmax(), [&] {
      if (kWalks) output.rescale();  // otherwise o is still 0
    });
    if (Tile::kOverlap != Overlap::kNone) probabilities.pack_tile();
    bool landed = false;
    while (next_tile()) {
      product.load_start(tile);
      if (!landed) {
        buffers.wait_k();
        buffers.wait_v();
      }
      product.start(tile, buffers.starts(tile));
      buffers.take_turn();
      if constexpr (Tile::kOverlap == Overlap::kNone) {
        step(buffers, product, probabilities, output, q, look_ahead, release_scores);
      } else {
        landed = step_beside_values(buffers, product, probabilities, output, q, look_ahead,
                                    release_scores, pin);
      }
    }
    buffers.wait_v();
    output.issue(probabilities.packed(), buffers.v());
  }

  // Roles refer to variables of this function instead of having members, and hardly to one another:
  // members become registers later, or in another order, and ptxas makes other code of that.
  __device__ __forceinline__ static void consume(const ForwardArgs& args, SharedMemory& smem,
                                                 int group) {
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    Scores scores(args);
    Ring<Tile::kStages> v_ring;
    Ring<Tile::kStages> k_ring;
    Buffers buffers(smem, group, lane, k_ring, v_ring);
    const uint32_t pin = shared_address(&smem.pin[threadIdx.x]);
    // The first turn is the first warpgroup's.
    if (group == Traits::kWarpGroups - 1) buffers.pass_turn();

    float s[kKeys / 2];
    Product product(scores, s, thread);
    const UnitRows rows(args, thread);
    uint32_t count = 0;  // tiles of query rows so far
    Interval own{0, 0};  // key tiles of the unit
    int tile = 0;        // of keys
    // Where masks walk: whether all rows see all of the tile, and the tile after it.
    bool whole = false;
    int next = 0;
    Sight next_sight{false, false};
    uint64_t q;
    bool more;

    const auto begin_rows = [&](const Plan& plan) {
      const Unit& unit = plan.units[group];
      const RowPositions positions = rows.positions(unit);
      const auto& batch = plan.batch_of(group);
      scores.begin_rows(args, batch.mask, batch.number, unit.head, positions);
    };
    // Once keys have landed: the tile after theirs.
    const auto look_ahead = [&] {
      if constexpr (kWalks) {
        const StagedTile& staged = buffers.staged_tile();
        next = staged.next;
        next_sight = staged.next_sights.of(group);
      }
    };
    const auto advance = [&](const Plan& plan) {
      if constexpr (kWalks) {
        tile = next;
        whole = next_sight.all;
      } else {
        tile = plan.tiles.before(tile);
      }
    };
    const auto skip_keys = [&](const Plan& plan) {
      if constexpr (kWalks) {
        buffers.wait_k();
        look_ahead();
        __syncwarp();  // all lanes have looked
      }
      buffers.skip_keys();
      advance(plan);
    };
    const auto skip_to = [&](const Plan& plan, int end) {
      while (tile >= end) skip_keys(plan);
    };
    // Receives a tile and computes its first scores, with `meanwhile` beside them.
    const auto begin_tile = [&](const auto& meanwhile) {
      const Plan& plan = smem.plans.receive(count);
      more = plan.exists;
      own = {0, 0};
      if (more) {
        own = plan.units[group].tiles;
        tile = plan.tiles.end - 1;
        buffers.wait_q();
        q = buffers.q();
        skip_to(plan, own.end);
      }
      if (own.begin == own.end) return meanwhile();
      if constexpr (Product::kStarts) begin_rows(plan);
      if constexpr (kWalks) {
        buffers.wait_k();
        whole = buffers.staged_tile().sights.of(group).all;
        look_ahead();
      }
      begin_scores(buffers, product, tile, q, meanwhile);
    };
    // K of the tile has been read, and with the last one Q.
    const auto release_scores = [&] {
      buffers.release_k();
      if (tile == own.begin) buffers.release_q();
    };

    begin_tile([] {});
    while (more) {
      // Read where it is needed: registers are short.
      const Plan& plan = smem.plans.sent(count);
      uint32_t p[kKeys / 4];
      uint32_t waiting[kKeys / 4];  // see Probabilities::kWaits
      typename Probabilities::Kept kept;
      typename Probabilities::Shown shown;
      Probabilities probabilities(scores, rows, plan, group, thread, tile, whole, s, p, waiting,
                                  kept, shown);
      float o[Tile::kValueDim / 2];
      typename Probabilities::Softmax softmax;
      Output output(o, softmax);
      float sum[2] = {0.f, 0.f};  // over a whole row; stays 0 where it sees no key
      float inverse[2];
      bool has_empty_rows = true;
      output.clear();

      if (own.begin < own.end) {
        release_scores();
        if constexpr (!Product::kStarts) begin_rows(plan);
        const auto next_tile = [&] {
          advance(plan);
          return tile >= own.begin && (!kWalks || next_sight.some);
        };
        for (;;) {
          attend(buffers, product, probabilities, output, tile, q, pin, next_tile, look_ahead,
                 release_scores);
          if (!kWalks || tile < own.begin) break;
          // Tiles that only other units see. V of the one before must not be held meanwhile.
          wgmma_wait<0>();
          output.hold();
          buffers.release_v();
          do {
            skip_keys(plan);
          } while (!next_sight.some);
          buffers.wait_k();
          look_ahead();
          begin_scores(buffers, product, tile, q, [] {});
          release_scores();
        }
        // Beside the last product: what the output needs.
        has_empty_rows = output.sum_up(sum, inverse, scores, rows, plan, group);
        // Four warps through with the last scores may overwrite Q with the output.
        if (!Traits::kDirect) named_barrier_sync(kFirstWarpGroup + group, 128);
        wgmma_wait<0>();
        output.hold();
        buffers.release_v();
      } else {
        buffers.release_q();
      }
      skip_to(plan, plan.tiles.begin);
      buffers.release_starts();

      const OutputStore<Traits, Scores> store(args, rows, plan, group, o, inverse, sum, softmax,
                                              has_empty_rows, buffers.staged_output(),
                                              buffers.output_full(), thread);
      buffers.advance_q();
      ++count;
      if (kEarlyScores) {
        begin_tile(store);
      } else {
        store();
        begin_tile([] {});
      }
      smem.plans.release(count - 1);
    }
    if (group == 0) buffers.take_turn();  // nobody leaves an arrival behind
  }
};

}  // namespace jaxflash::sm90
