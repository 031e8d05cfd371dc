// The producers of the forward kernel: a warp each that plans tiles and loads Q, that loads K, that
// loads V, and that stores the output.
#pragma once

#include "common/mask.cuh"
#include "sm90/forward/key_source.cuh"
#include "sm90/forward/key_terms.cuh"
#include "sm90/forward/start_source.cuh"
#include "sm90/forward_traits.cuh"
#include "sm90/unseen_rows.cuh"

namespace jaxflash::sm90 {

// What the warp that loads K leaves beside a tile where masks walk.
template <bool kWalks>
struct TilesAhead {
  template <class Tiles>
  __device__ __forceinline__ explicit TilesAhead(const Tiles& /*tiles*/) {}
  template <class Tiles>
  __device__ __forceinline__ void look(const Tiles& /*tiles*/, int /*tile*/) {}
  template <class Tiles>
  __device__ __forceinline__ int next(const Tiles& tiles, int tile) const {
    return tiles.before(tile);
  }
  __device__ __forceinline__ void leave(StagedTile* /*staged*/) const {}
};
template <>
class TilesAhead<true> {
 public:
  template <class Walk>
  __device__ __forceinline__ explicit TilesAhead(const Walk& walk) {
    if (walk.begin < walk.end) ahead_.next_sights = walk.sights(walk.end - 1);
  }
  // All lanes.
  template <class Walk>
  __device__ __forceinline__ void look(const Walk& walk, int tile) {
    ahead_.next = walk.before(tile);
    ahead_.sights = ahead_.next_sights;
    if (ahead_.next >= walk.begin) ahead_.next_sights = walk.sights(ahead_.next);
  }
  template <class Walk>
  __device__ __forceinline__ int next(const Walk& /*walk*/, int /*tile*/) const {
    return ahead_.next;
  }
  __device__ __forceinline__ void leave(StagedTile* staged) const {
    if (threadIdx.x % 32 == 0) *staged = ahead_;
  }

 private:
  StagedTile ahead_{};
};

// A tile of V with keys that nobody sees, which is cleaned before it is announced.
template <class Traits>
class CleanedTile {
 public:
  using Unseen = UnseenRows<Traits::Tile::kKeys, Traits::kPanelRowBytes, Traits::kBatches,
                            Traits::Mask::kVaries>;

  // All lanes.
  __device__ __forceinline__ void set(int stage, const Unseen& unseen) {
    stage_ = stage;
    unseen_ = unseen;
  }
  __device__ __forceinline__ bool waits() const { return stage_ >= 0; }
  template <class SharedMemory>
  __device__ __forceinline__ void announce(SharedMemory& smem) {
    if (!waits()) return;
    smem.v_landed[stage_].wait(phases_ >> stage_ & 1);
    phases_ ^= 1u << stage_;
    unseen_.template clear<Traits::kValuePanels>(smem.v[stage_]);
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem.v_full[stage_].arrive();
    stage_ = -1;
  }

 private:
  int stage_ = -1;       // -1: there is none
  uint32_t phases_ = 0;  // of v_landed, a bit for each stage
  Unseen unseen_;
};

template <class Traits, class Scores>
struct ForwardProducers {
  // TileOrder::batch_fastest
  static constexpr bool kBatchMayBeFastest = Scores::kStarts;
  using Tile = typename Traits::Tile;
  using Mask = typename Traits::Mask;
  using Plan = typename Traits::Plan;
  using Unit = typename Plan::Unit;
  using Keys = typename Traits::Keys;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr int kWarpGroups = Traits::kWarpGroups;
  static constexpr int kBatches = Traits::kBatches;
  static constexpr int kUnits = Traits::kUnits;

  // All lanes of the warp: the first ones work out a unit each, the very first the rest too.
  // `mirrored`: the first warpgroup takes the last unit.
  template <class WalkedTile>
  __device__ __forceinline__ static void plan_tile(const ForwardArgs& args,
                                                   const SharedMemory& smem, const WalkedTile& tile,
                                                   bool mirrored, Plan& plan) {
    const Problem& problem = args.problem;
    const int lane = threadIdx.x % 32;
    int batch = args.by_kv_heads.quotient(tile.head);
    int kv_head = args.by_kv_heads.remainder(tile.head);
    if (kBatchMayBeFastest && args.order.batch_fastest) {
      const uint32_t batches = args.by_kv_heads.quotient(args.order.heads);
      kv_head = tile.head / batches;
      batch = tile.head - kv_head * batches;
    }
    // Of the lane's unit, or of the last one.
    bool exists = true;
    if constexpr (kBatches > 1) {
      batch = batch * kBatches + Plan::batch_index(min(lane, kWarpGroups - 1));
      const int last = static_cast<int>(batch_size(problem)) - 1;
      exists = batch <= last;
      batch = min(batch, last);
    }
    const int inner = args.by_inner_batch.remainder(batch);
    const int outer = args.by_inner_batch.quotient(batch);
    const int first_unit = tile.index * kUnits;
    const int positions = args.unit.positions();
    const auto position_of = [&](int unit) {
      return static_cast<int>(args.by_units.quotient(unit) << args.unit.log2_positions);
    };
    const Mask mask(problem, batch);
    // Of the lane's unit.
    int position = kMaxLength;
    if constexpr (Mask::kWalks) {
      const RowOrder<kWarpGroups> order(smem.visits_of_strides, blocks_of(problem.q_len));
      if (lane < kWarpGroups) position = position_of(order.block(first_unit + lane));
    }
    const Interval rows = tile_rows<kUnits>(args, tile.index);
    Interval covered;
    if constexpr (Traits::kShares) {
      covered = tile.tiles;
    } else {
      covered = covering_tiles<kKeys>(mask.keys(rows));
    }
    VisitsOf<Mask> tiles = visits_of<kKeys>(mask, rows, covered, position);
    // What one of the batch elements visits, gaps of another or not.
    if constexpr (kBatches > 1) tiles = {hull_of_lanes(covered), {0, 0}};
    if (lane == 0) {
      plan.kv_head = kv_head;
      plan.tiles = tiles;
    }
    if (kBatches == 1 ? lane == 0 : lane < kWarpGroups && Plan::index_in_batch(lane) == 0) {
      typename Plan::BatchElement& element = plan.batches[Plan::batch_index(lane)];
      element.number = batch;
      element.inner = inner;
      element.outer = outer;
      element.mask = mask;
      element.seen = mask.seen_keys();
      if constexpr (Mask::kVaries) element.hides_keys = mask.hides_keys(element.seen);
    }
    if (lane < kWarpGroups) {
      // Those after the last one of the kv head, or of a batch element that is none, lie behind the
      // sequence: they see no key, and TMA neither reads nor writes there.
      Unit& unit = plan.units[mirrored ? kWarpGroups - 1 - lane : lane];
      const int number = first_unit + Plan::index_in_batch(lane);
      if constexpr (!Mask::kWalks) position = exists ? position_of(number) : problem.q_len;
      const int head = kv_head * args.group + args.by_units.remainder(number) * args.unit.heads;
      const Interval unit_rows = {position, position + positions};
      unit.full = inner_tiles<kKeys>(mask.common_keys(unit_rows));
      Interval own = part_of<kKeys>(tiles, mask, unit_rows);
      if (Traits::kShares) own = intersection(own, tiles);
      unit.position = position;
      unit.head = head;
      unit.tiles = own.begin < own.end ? own : Interval{tiles.begin, tiles.begin};
      unit.lse = args.lse + (int64_t{batch} * problem.q_len + position) * problem.q_heads + head;
      if (Traits::kDirect) {
        unit.out = args.out_data + outer * args.out_batch_stride[1] +
                   inner * args.out_batch_stride[0] + head * args.out_head_stride +
                   position * args.out_seq_stride;
      }
      if constexpr (Traits::kShares) {
        const int64_t row = int64_t{tile.slot} * args.sharing.rows + lane * args.unit.rows();
        const bool is_part = tile.slot >= 0;
        plan.part[&unit - plan.units] =
            is_part ? args.sharing.out + row * problem.value_dim : nullptr;
        if (is_part) unit.lse = args.sharing.lse + row;
      }
    }
  }

  __device__ __forceinline__ static void load_q(const ForwardArgs& args, SharedMemory& smem) {
    if constexpr (Traits::kShares) {
      const typename Traits::Slices slices(args);
      load_q(args, smem, ShareWalk<typename Traits::Slices>(slices, args.order.blocks));
    } else if constexpr (Traits::kDraws) {
      load_q(args, smem, DrawnTiles(args.order, args.drawn));
    } else {
      load_q(args, smem, TileWalk(args.order));
    }
  }

  // Plans tiles, each before it loads Q of the one before; what is drawn, only once Q of the one
  // before has been loaded, for a tile that waits in a block that is still busy unbalances the
  // blocks.
  template <class Walk>
  __device__ __forceinline__ static void load_q(const ForwardArgs& args, SharedMemory& smem,
                                                Walk walk) {
    const bool first_lane = threadIdx.x % 32 == 0;
    Ring<Tile::kQStages> ring;
    const auto load = [&](uint32_t count) {
      const Plan& loaded = smem.plans.sent(count);
      if (first_lane) {
#pragma unroll 1
        for (int group = 0; group < kWarpGroups; ++group) {
          const auto& batch = loaded.batch_of(group);
          Barrier& full = smem.q_full[ring.stage][group];
          smem.q_empty[ring.stage][group].wait(ring.phase ^ 1);
          full.arrive_expecting(Traits::kPanels * args.unit.rows() * Traits::kPanelRowBytes);
#pragma unroll 1
          for (int panel = 0; panel < Traits::kPanels; ++panel) {
            const uint8_t* target = smem.q[ring.stage][group] + panel * Traits::kQPanelBytes;
            tensor_load(shared_address(target), &args.q, full.address(), panel * 64,
                        loaded.units[group].position, loaded.units[group].head,
                        batch.inner * args.q_batch_step[0], batch.outer * args.q_batch_step[1]);
          }
        }
      }
      __syncwarp();
      ring.advance();
    };
    for (uint32_t count = 0;; ++count) {
      if (Traits::kDraws && count > 0) load(count - 1);
      Plan& plan = smem.plans.prepare(count);
      if (count > 0) walk.advance();
      const bool exists = !walk.done();
      // Units at one end of a tile see fewer keys, or are empty: warpgroups take them alternately,
      // but for what they start from, where that stays.
      const bool mirrored = !Traits::kHoldsStarts && count % 2 != 0;
      if (exists) plan_tile(args, smem, walk.tile(), mirrored, plan);
      if (first_lane) plan.exists = exists;
      smem.plans.send(count);
      if (!Traits::kDraws && count > 0) load(count - 1);
      if (!exists) return;
    }
  }

  __device__ __forceinline__ static void load_k(const ForwardArgs& args, SharedMemory& smem) {
    Ring<Tile::kStages> ring;
    StartSource<Traits, Scores> starts;
    typename Scores::template KeyTerms<Traits> terms;
    const bool first_lane = threadIdx.x % 32 == 0;
    for (uint32_t count = 0;; ++count) {
      const Plan& plan = smem.plans.receive(count);
      if (!plan.exists) return;
      const auto tiles = way_over<kKeys>(plan.tiles, plan.batches[0].mask, plan.position_of_lane());
      Keys keys(args, plan, args.k_batch_step);
      starts.begin(args, plan, smem, count);
      terms.begin(args, plan);
      smem.plans.release(count);
      if (Keys::kByWarp || Traits::kKeyTerms || Mask::kWalks || first_lane) {
        TilesAhead<Mask::kWalks> ahead(tiles);
        for (int tile = tiles.end - 1; tile >= tiles.begin;
             tile = ahead.next(tiles, tile), ring.advance()) {
          ahead.look(tiles, tile);
          terms.load(tile * kKeys);
          smem.k_empty[ring.stage].wait(ring.phase ^ 1);
          ahead.leave(&smem.staged[ring.stage]);
          if (!Mask::kWalks || first_lane) starts.load(args.starts, smem, ring.stage, tile);
          terms.store(smem, ring.stage, tile * kKeys);
          if (Keys::kByWarp || first_lane) {
            keys.template load<Traits::kPanels, Traits::kKeyPanelBytes>(
                args.k, smem.k[ring.stage], smem.k_full[ring.stage], tile * kKeys);
          }
          // No lane may fall a whole round of the ring behind: it would misread the parity.
          if constexpr (Traits::kKeyTerms || Mask::kWalks) __syncwarp();
        }
      }
      __syncwarp();
    }
  }

  // The whole warp. A tile that is cleaned waits for its keys to land: meanwhile the next one is on
  // its way, if there is a buffer for it.
  __device__ __forceinline__ static void load_v(const ForwardArgs& args, SharedMemory& smem) {
    using Unseen = typename CleanedTile<Traits>::Unseen;
    const int lane = threadIdx.x % 32;
    const int kv_len = args.problem.kv_len;
    Ring<Tile::kStages> ring;
    CleanedTile<Traits> cleaned;
    for (uint32_t count = 0;; ++count) {
      const Plan& plan = smem.plans.receive(count);
      if (!plan.exists) return;
      const auto& batch = plan.batches[Unseen::tile_of_lane()];
      const SeenRows<typename Mask::Hidden> seen{
          batch.seen, {args.problem, batch.number, kHiddenKeys, batch.hides_keys}};
      const auto tiles = way_over<kKeys>(plan.tiles, plan.batches[0].mask, plan.position_of_lane());
      Keys keys(args, plan, args.v_batch_step);
      smem.plans.release(count);
      for (int tile = tiles.end - 1; tile >= tiles.begin;
           tile = tiles.before(tile), ring.advance()) {
        const int first_key = tile * kKeys;
        // Where nothing but the ends of a sequence cuts tiles, most are whole: no more is asked.
        Unseen unseen;
        bool cut = Mask::kVaries || __any_sync(~0u, seen.cut(first_key, kKeys, kv_len));
        if (cut) {
          unseen = Unseen(first_key, kv_len, seen);
          cut = unseen.some();
        }
        Barrier& landed = cut ? smem.v_landed[ring.stage] : smem.v_full[ring.stage];
        const Barrier& empty = smem.v_empty[ring.stage];
        if (cleaned.waits() && !__all_sync(~0u, empty.completed(ring.phase ^ 1))) {
          cleaned.announce(smem);
        }
        empty.wait(ring.phase ^ 1);
        if (Keys::kByWarp || lane == 0) {
          keys.template load<Traits::kValuePanels, Traits::kKeyPanelBytes>(
              args.v, smem.v[ring.stage], landed, first_key);
        }
        // No lane may fall a whole round of the ring behind: it would misread the parity.
        __syncwarp();
        cleaned.announce(smem);
        if (cut) cleaned.set(ring.stage, unseen);
      }
      cleaned.announce(smem);
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
          const auto& batch = plan.batch_of(group);
          smem.o_full[ring.stage][group].wait(ring.phase);
#pragma unroll 1
          for (int panel = 0; panel * 64 < args.problem.value_dim; ++panel) {
            const uint8_t* source = smem.q[ring.stage][group] + panel * Traits::kQPanelBytes;
            tensor_store(&args.out, shared_address(source), panel * 64, plan.units[group].position,
                         plan.units[group].head, batch.inner, batch.outer);
          }
          bulk_commit_group();
          bulk_wait_group_read<0>();
          smem.q_empty[ring.stage][group].arrive();
        }
      }
      smem.plans.release(count);
    }
  }
};

}  // namespace jaxflash::sm90
