// The producer warps of the backward kernel: they draw tiles, load, store, and add dq.
#pragma once

#include "common/memory_order.cuh"
#include "sm90/backward/stored_gradient.cuh"
#include "sm90/backward_traits.cuh"
#include "sm90/unseen_rows.cuh"

namespace jaxflash::sm90 {

template <class Traits, class Mask, class Score>
struct BackwardProducers {
  using Tile = typename Traits::Tile;
  using SharedMemory = typename Traits::SharedMemory;
  using Block = KeyBlock<Traits::kRows, Traits::kTileKeys, Mask>;
  using Turns = DqTurns<Traits::kRows, Traits::kTileKeys, Mask>;
  using Reader = TicketReader<Traits::kBlocks>;
  using Hidden = typename Mask::Hidden;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;

  // Coordinates of the batch axes of the maps.
  __device__ __forceinline__ static int inner_batch(const BackwardArgs& args, int batch) {
    return args.by_inner_batch.remainder(batch);
  }
  __device__ __forceinline__ static int outer_batch(const BackwardArgs& args, int batch) {
    return args.by_inner_batch.quotient(batch);
  }

  // Where the tiles of one operand come from.
  struct Source {
    const TensorMap* map;
    int inner, outer;  // coordinates of the batch axes
    int length;        // of the array along the sequence
    SeenRows<Hidden> seen;
    int column = 0;  // the first
  };

  // Of query rows.
  __device__ __forceinline__ static Source source(const BackwardArgs& args, const TensorMap& map,
                                                  const int32_t (&step)[2], const Block& block,
                                                  const Hidden& hidden) {
    return {&map,
            inner_batch(args, block.batch) * step[0],
            outer_batch(args, block.batch) * step[1],
            args.problem.q_len,
            {block.rows, hidden}};
  }

  // Loads a tile of kTileRows positions of a head and, with kVector, a float of `vector` for each.
  // The whole warp. A tile that reaches past what takes part, inside the array, is cleaned before
  // it is announced: a probability of 0 times NaN would be NaN.
  //
  // Tiles with a vector are rows, which the blocks of a cluster have in common: unless a tile has
  // to be cleaned, each block loads its share of the panels for all. The buffer is then free in all
  // of them, and whoever is first may deliver to a barrier that does not expect it yet.
  template <int kTileRows, int kPanels, bool kVector>
  __device__ __forceinline__ static void load_tile(const Source& from, int first, int head,
                                                   const uint8_t* target, const float* vector,
                                                   const float* vector_target, Barrier& full,
                                                   Barrier& landed, uint32_t& landed_phase) {
    constexpr int kPanelBytes = kTileRows * Traits::kPanelRowBytes;
    constexpr int kVectorBytes = kVector ? kTileRows * 4 : 0;
    const int lane = threadIdx.x % 32;
    const bool cut = from.seen.cut(first, kTileRows, from.length);
    const uint32_t barrier = cut ? landed.address() : full.address();
    if (lane == 0) {
      mbarrier_arrive_expect_tx(barrier, kPanels * kPanelBytes + kVectorBytes);
      if (kVector && Traits::kPaired && !cut) {
        constexpr int kShare = (kPanels + Traits::kBlocks - 1) / Traits::kBlocks;
        const int begin = cluster_rank() * kShare;
        // A constant number of panels where they can be divided evenly.
        const int end =
            kShare * Traits::kBlocks > kPanels ? min(begin + kShare, kPanels) : begin + kShare;
#pragma unroll 1
        for (int panel = begin; panel < end; ++panel) {
          tensor_load_multicast(shared_address(target + panel * kPanelBytes), from.map, barrier,
                                (1 << Traits::kBlocks) - 1, from.column + panel * 64, first, head,
                                from.inner, from.outer);
        }
      } else {
#pragma unroll 1
        for (int panel = 0; panel < kPanels; ++panel) {
          tensor_load(shared_address(target + panel * kPanelBytes), from.map, barrier,
                      from.column + panel * 64, first, head, from.inner, from.outer);
        }
      }
      if (kVector) bulk_load(shared_address(vector_target), vector + first, barrier, kVectorBytes);
    }
    __syncwarp();
    if (!cut) return;
    const UnseenRows<kTileRows, Traits::kPanelRowBytes> unseen(first, from.length, from.seen);
    landed.wait(landed_phase);
    landed_phase ^= 1;
    unseen.template clear<kPanels>(target);
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) full.arrive();
  }

  // Loads what products start from, beside the rows of each step. The elements behind the last key
  // or row are others' or zeros: nobody uses their products.
  class StartLoader {
   public:
    // A step at `row` of a head; the warp's first lane.
    __device__ __forceinline__ void load(const BackwardArgs& args, SharedMemory& smem,
                                         const Block& block, int row, int head) {
      if constexpr (Tile::kLoadsStarts) {
        if (row == block.first_row) first_ = Score::start_row(args, block.batch, head, 0);
        smem.starts_empty[ring_.stage].wait(ring_.phase ^ 1);
        Barrier& full = smem.starts_full[ring_.stage];
        full.arrive_expecting(2 * Traits::kStartBytes);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          tensor_load(shared_address(smem.starts[ring_.stage][group]), &args.starts, full.address(),
                      block.first_key + 64 * group, first_ + row, 0, 0, 0);
        }
        ring_.advance();
      }
    }

   private:
    Ring<Tile::kLoadsStarts ? Tile::kStartStages : 1> ring_;
    int first_;  // the head's first row, among all rows of the capture
  };

  // Draws tiles, and loads the query rows that see them. Runs ahead into the next tile while dk and
  // dv of the last one leave.
  __device__ __forceinline__ static void load_rows(const BackwardArgs& args, SharedMemory& smem) {
    const Problem& problem = args.problem;
    Ring<Tile::kQStages> q_ring;
    Ring<Tile::kDoutStages> dout_ring;
    StartLoader starts;
    uint32_t landed_phase = 0;
    // Tickets stay below 2^31: the low word of the counter does.
    const auto counter = [&] {
      auto* ticket = args.workspace.ticket_of(args.workspace_data);
      return args.draw ? reinterpret_cast<uint32_t*>(ticket) : nullptr;
    };
    TicketDrawer<Traits::kBlocks> drawer;
    for (;;) {
      const uint32_t position = drawer.next(smem.tickets, counter());
      if (position >= args.order.tiles()) return;
      const Block block(problem, args.tile<Score>(position));
      // Looked up for each tile: whether there are any at all would take registers of consumers,
      // which spill 80 bytes instead of 32 with segments and a table read along diagonals.
      const Hidden hidden = block.mask.hidden_rows(true);
      const Source q = source(args, args.q, args.q_batch_step, block, hidden);
      const Source dout = source(args, args.dout, args.dout_batch_step, block, hidden);
      int row = block.first_row;
      int head = block.first_head();
#pragma unroll 1
      for (int step = block.steps(); step > 0; --step) {
        const int64_t head_index = int64_t{block.batch} * problem.q_heads + head;
        const StagedRows staged = block.staged(row, head);
        smem.q_empty[q_ring.stage].wait(q_ring.phase ^ 1);
        if (Mask::kWalks && threadIdx.x % 32 == 0) smem.staged[q_ring.stage] = staged;
        load_tile<kRows, Traits::kPanels, true>(
            q, row, head, smem.q[q_ring.stage],
            args.workspace.lse_of(args.workspace_data, head_index), smem.lse[q_ring.stage],
            smem.q_full[q_ring.stage], smem.rows_landed, landed_phase);
        q_ring.advance();
        if (threadIdx.x % 32 == 0) starts.load(args, smem, block, row, head);
        __syncwarp();
        smem.dout_empty[dout_ring.stage].wait(dout_ring.phase ^ 1);
        load_tile<kRows, Traits::kValuePanels, true>(
            dout, row, head, smem.dout[dout_ring.stage],
            args.workspace.delta_of(args.workspace_data, head_index), smem.delta[dout_ring.stage],
            smem.dout_full[dout_ring.stage], smem.rows_landed, landed_phase);
        dout_ring.advance();
        block.advance(staged, row, head);
      }
    }
  }

  // Where a tile's k, v, dk and dv lie: this block's part.
  struct Keys {
    int first_key, kv_head, inner, outer;
    SeenRows<Hidden> seen;
    bool has_rows;  // that see some of the tile
  };

  __device__ __forceinline__ static Keys keys_at(const BackwardArgs& args, uint32_t position) {
    const Block block(args.problem, args.tile<Score>(position));
    const Interval tile = {block.first_key, block.first_key + Traits::kTileKeys};
    return {Traits::first_key(block),
            block.kv_head,
            inner_batch(args, block.batch),
            outer_batch(args, block.batch),
            {block.mask.seen_keys(), block.mask.hidden_keys(block.mask.hides_keys(tile))},
            block.steps() > 0};
  }

  template <int kPanels>
  __device__ __forceinline__ static void load_keys(const BackwardArgs& args, const TensorMap& map,
                                                   const int32_t (&step)[2], const Keys& keys,
                                                   const uint8_t* target, Barrier& full,
                                                   Barrier& landed, uint32_t& landed_phase) {
    load_tile<kKeys, kPanels, false>(
        {&map, keys.inner * step[0], keys.outer * step[1], args.problem.kv_len, keys.seen},
        keys.first_key, keys.kv_head, target, nullptr, nullptr, full, landed, landed_phase);
  }
  __device__ __forceinline__ static void load_k(const BackwardArgs& args, SharedMemory& smem,
                                                const Keys& keys, int stage,
                                                uint32_t& landed_phase) {
    load_keys<Traits::kPanels>(args, args.k, args.k_batch_step, keys, smem.k[stage],
                               smem.k_full[stage], smem.keys_landed, landed_phase);
  }
  __device__ __forceinline__ static void load_v(const BackwardArgs& args, SharedMemory& smem,
                                                const Keys& keys, int stage,
                                                uint32_t& landed_phase) {
    load_keys<Traits::kValuePanels>(args, args.v, args.v_batch_step, keys, smem.v[stage],
                                    smem.v_full[stage], smem.keys_landed, landed_phase);
  }

  // Of the other block's k, the columns that this one computes dq for.
  __device__ __forceinline__ static void load_peer_k(const BackwardArgs& args, SharedMemory& smem,
                                                     const Keys& keys, uint32_t& landed_phase) {
    const int peer_key = keys.first_key ^ kKeys;  // a tile starts at a multiple of 2 kKeys
    const int column = cluster_rank() * Traits::kDqPanelsBefore * Traits::kPanelColumns;
    load_tile<kKeys, Traits::kDqPanels, false>(
        {&args.k, keys.inner * args.k_batch_step[0], keys.outer * args.k_batch_step[1],
         args.problem.kv_len, keys.seen, column},
        peer_key, keys.kv_head, smem.peer_k, nullptr, nullptr, smem.peer_k_full, smem.keys_landed,
        landed_phase);
  }

  // Brings k and v into the L2, ahead of the time when there is room for them.
  __device__ __forceinline__ static void prefetch_keys(const BackwardArgs& args, const Keys& keys) {
#pragma unroll 1
    for (int panel = 0; panel < Traits::kPanels; ++panel) {
      tensor_prefetch(&args.k, panel * 64, keys.first_key, keys.kv_head,
                      keys.inner * args.k_batch_step[0], keys.outer * args.k_batch_step[1]);
    }
#pragma unroll 1
    for (int panel = 0; panel < Traits::kValuePanels; ++panel) {
      tensor_prefetch(&args.v, panel * 64, keys.first_key, keys.kv_head,
                      keys.inner * args.v_batch_step[0], keys.outer * args.v_batch_step[1]);
    }
  }

  // 64 keys of dk or dv.
  __device__ __forceinline__ static void store_part(const TensorMap& map, const Keys& keys,
                                                    int part, const uint8_t* staged, int columns) {
#pragma unroll 1
    for (int panel = 0; panel * 64 < columns; ++panel) {
      tensor_store(&map, shared_address(staged + panel * Traits::kStoredPanelBytes), panel * 64,
                   keys.first_key + part * Traits::kStoredKeys, keys.kv_head, keys.inner,
                   keys.outer);
    }
  }

  // Loads k and v, and stores dk and dv. The last step of a tile is through with v before it is
  // through with k; both are loaded as soon as there is room. Of a tile without rows neither is.
  __device__ __forceinline__ static void move_keys(const BackwardArgs& args, SharedMemory& smem) {
    const bool first_lane = threadIdx.x % 32 == 0;
    Ring<Tile::kKeyStages> ring;
    uint32_t landed_phase = 0;
    Reader reader;
    uint32_t position = reader.next(smem.tickets);
    if (position >= args.order.tiles()) return;
    const auto load = [&](const Keys& keys) {
      if (!keys.has_rows) return;
      smem.v_empty[ring.stage].wait(ring.phase ^ 1);
      load_v(args, smem, keys, ring.stage, landed_phase);
      smem.k_empty[ring.stage].wait(ring.phase ^ 1);
      load_k(args, smem, keys, ring.stage, landed_phase);
      ring.advance();
    };
    Keys stored = keys_at(args, position);
    load(stored);
    for (uint32_t dkv_phase = 0;; dkv_phase ^= 1) {
      position = reader.next(smem.tickets);
      const bool more = position < args.order.tiles();
      Keys loaded = stored;
      if (more) {
        loaded = keys_at(args, position);
        if (Tile::kKeyStages == 1 && first_lane && loaded.has_rows) prefetch_keys(args, loaded);
        __syncwarp();
        load(loaded);
      }
      smem.dkv_full.wait(dkv_phase);
      if (first_lane) {
#pragma unroll 1
        for (int part = 0; part < kKeys / Traits::kStoredKeys; ++part) {
          store_part(args.dk, stored, part, smem.dq[part], args.problem.head_dim);
          store_part(args.dv, stored, part, smem.ds[part], args.problem.value_dim);
        }
        bulk_commit_group();
        bulk_wait_group_read<0>();
        smem.dkv_empty.arrive();
      }
      __syncwarp();
      // In place of the warps that add dq: it was not dq that lay there.
      named_barrier_arrive(kDqEmpty, 128 + 32);
      named_barrier_arrive(kDqEmpty + 1, 128 + 32);
      if (!more) return;
      stored = loaded;
    }
  }

  // A pair's: dk and dv lie where k and v of the next tile go. dv is complete before the last part
  // of dq is, so that v is loaded beside that.
  __device__ __forceinline__ static void move_pair_keys(const BackwardArgs& args,
                                                        SharedMemory& smem) {
    const bool first_lane = threadIdx.x % 32 == 0;
    uint32_t landed_phase = 0;
    Reader reader;
    uint32_t position = reader.next(smem.tickets);
    if (position >= args.order.tiles()) return;
    Keys stored = keys_at(args, position);
    load_k(args, smem, stored, 0, landed_phase);
    load_v(args, smem, stored, 0, landed_phase);
    load_peer_k(args, smem, stored, landed_phase);
    for (uint32_t phase = 0;; phase ^= 1) {
      position = reader.next(smem.tickets);
      const bool more = position < args.order.tiles();
      const Keys loaded = more ? keys_at(args, position) : stored;
      if (more && first_lane) prefetch_keys(args, loaded);
      __syncwarp();
      smem.dv_full.wait(phase);
      if (first_lane) {
        store_part(args.dv, stored, 0, smem.v[0], args.problem.value_dim);
        bulk_commit_group();
        bulk_wait_group_read<0>();
      }
      __syncwarp();
      if (more) load_v(args, smem, loaded, 0, landed_phase);
      smem.dk_full.wait(phase);
      if (first_lane) {
        store_part(args.dk, stored, 0, smem.k[0], args.problem.head_dim);
        bulk_commit_group();
      }
      __syncwarp();
      if (more) load_peer_k(args, smem, loaded, landed_phase);
      if (first_lane) bulk_wait_group_read<0>();
      __syncwarp();
      if (!more) return;
      load_k(args, smem, loaded, 0, landed_phase);
      stored = loaded;
    }
  }

  // Stores a complete part of dq.
  __device__ __forceinline__ static void store_dq(const BackwardArgs& args, SharedMemory& smem,
                                                  const Block& block, int part, int row, int col,
                                                  int head) {
    if (col >= args.problem.head_dim) return;
    tensor_store(&args.dq, shared_address(smem.dq[part]), col, row, head,
                 inner_batch(args, block.batch), outer_batch(args, block.batch));
  }

  // The warp's adds have been performed, not only read, and precede what it releases from here on.
  __device__ __forceinline__ static void complete_adds(bool adds) {
    if (adds) {
      bulk_wait_group<0>();
      fence_proxy_async_global();
    }
    __syncwarp();
  }

  // The warp has added all that it does of a tile: what the conversion of dq waits for.
  __device__ __forceinline__ static void announce_adds(const BackwardArgs& args, const Block& block,
                                                       bool adds) {
    complete_adds(adds);
    const int64_t first_head = int64_t{block.batch} * args.problem.q_heads + block.first_head();
#pragma unroll 1
    for (int head = threadIdx.x % 32; head < block.group; head += 32) {
      add_release(args.workspace.added_of(args.workspace_data, first_head + head), 1);
    }
  }

  // Ordered adds: the lanes that add wait for the turn, if there is one, and the warp ends it.
  __device__ __forceinline__ static bool wait_for_turn(const BackwardArgs& args, const Turns& turns,
                                                       const Block& block, int row,
                                                       const uint32_t* counter, bool adds) {
    const DqTurn turn = turns.at(args.order, block, row);
    if (adds && turn.exists) {
      while (load_acquire(counter) != turn.after) {
      }
      fence_proxy_async_global();  // the adds of the turn before, ahead of ours
    }
    return turn.exists;
  }
  __device__ __forceinline__ static void end_turn(const BackwardArgs& args, const Block& block,
                                                  uint32_t* counter, bool adds) {
    complete_adds(adds);
    if (threadIdx.x % 32 == 0) store_release(counter, args.order.rank(block.index) + 1);
  }

  // Adds a consumer warpgroup's part of dq: four lanes, one for each of its warps, add 16 rows by
  // 64 or 32 columns. Each part has its own turns. The proxy fence is on this side of the barrier:
  // it waits for the stores, which products slow down, and consumers have products to issue. What
  // the warpgroup's ds is the gradient of is stored beside.
  __device__ __forceinline__ static void add_dq(const BackwardArgs& args, SharedMemory& smem,
                                                int part) {
    // Beside one another.
    constexpr int kParts = Traits::kPanels * Traits::kPanelColumns / Traits::kDqPartDims;
    const int lane = threadIdx.x % 32;
    const int col = part % kParts * Traits::kDqPartDims;
    named_barrier_arrive(kDqEmpty + part, 128 + 32);
    Reader reader;
    GradientStore<Traits, Block, Score> gradient;
    for (;;) {
      const uint32_t position = reader.next(smem.tickets);
      if (position >= args.order.tiles()) break;
      const Block block(args.problem, args.tile<Score>(position));
      const Turns turns(args.order, block);
      int row = block.first_row;
      int head = block.first_head();
      if constexpr (Score::kStoresGradient) gradient.begin_tile(args, block, part);
#pragma unroll 1
      for (int step = block.steps(); step > 0; --step) {
        const int64_t head_index = int64_t{block.batch} * args.problem.q_heads + head;
        uint32_t* const counter = dq_counter(args, block, row, head) + part;
        // The turn first: it usually comes while the consumers are still at it.
        const bool ordered =
            args.ordered() && wait_for_turn(args, turns, block, row, counter, lane < 4);
        if constexpr (Score::kStoresGradient) gradient.prepare(args, block, row, head);
        __syncwarp();
        named_barrier_sync(kDqFull + part, 128 + 32);
        if constexpr (Score::kStoresGradient) {
          // Those who wrote ds have fenced it, for the products of dq.
          gradient.store(args, smem, block, part, row);
          __syncwarp();
        }
        if (lane < 4) {
          fence_proxy_async();  // what the consumers have stored, ahead of the adds that read it
          const int part_row = row + part / kParts * Traits::kDqPartRows + 16 * lane;
          if (args.direct_dq) {
            if (lane == 0) store_dq(args, smem, block, part, part_row, col, head);
          } else {
            const int bytes =
                DqOrder::row_bytes(args.workspace, part_row, col, Traits::kDqPartDims);
            if (bytes > 0) {
              bulk_reduce_add(args.workspace.dq_of(args.workspace_data, head_index) +
                                  DqOrder::offset(args.workspace, part_row, col),
                              shared_address(smem.dq[part]) + lane * Traits::kDqWarpBytes, bytes);
            }
          }
          bulk_commit_group();
        }
        if (lane < 4) bulk_wait_group_read<0>();
        if constexpr (Score::kStoresGradient) gradient.wait();
        __syncwarp();
        named_barrier_arrive(kDqEmpty + part, 128 + 32);
        if (ordered) end_turn(args, block, counter, lane < 4);
        block.advance(row, head);
      }
      announce_adds(args, block, lane < 4);
      if constexpr (Score::kStoresGradient) gradient.end_tile(args);
    }
  }

  // Adds dq of a pair's block: eight lanes, one for each consumer warp, add 16 rows by its columns.
  __device__ __forceinline__ static void add_pair_dq(const BackwardArgs& args, SharedMemory& smem) {
    const int lane = threadIdx.x % 32;
    const bool adds = lane < Traits::kConsumerThreads / 32;
    using First = typename Traits::template DqPart<0>;
    using Second = typename Traits::template DqPart<1>;
    const bool second = lane / 4 % 2 == 1;
    const int rank = cluster_rank();
    const int col = second ? Second::column(rank) : First::column(rank);
    const int columns = second ? Second::kColumns : First::kColumns;
    named_barrier_arrive(kDqEmpty, 128 + 32);
    Reader reader;
    uint32_t odd = 0;
    for (;;) {
      const uint32_t position = reader.next(smem.tickets);
      if (position >= args.order.tiles()) break;
      const Block block(args.problem, args.tile<Score>(position));
      const Turns turns(args.order, block);
      int row = block.first_row;
      int head = block.first_head();
#pragma unroll 1
      for (int step = block.steps(); step > 0; --step, odd ^= 1) {
        const int64_t head_index = int64_t{block.batch} * args.problem.q_heads + head;
        uint32_t* const counter = dq_counter(args, block, row, head) + cluster_rank();
        const bool ordered =
            args.deterministic && wait_for_turn(args, turns, block, row, counter, adds);
        __syncwarp();
        named_barrier_sync(kDqFull, Traits::kConsumerThreads + 32);
        if (adds) {
          fence_proxy_async();  // on this side of the barrier as in add_dq
          const int part_row = row + lane % 4 * 16;
          const int bytes = DqOrder::row_bytes(args.workspace, part_row, col, columns);
          if (bytes > 0) {
            bulk_reduce_add(args.workspace.dq_of(args.workspace_data, head_index) +
                                DqOrder::offset(args.workspace, part_row, col),
                            smem.staged_dq(lane, odd), bytes);
          }
          bulk_commit_group();
        }
        // The first warpgroup's part goes first: p waits for its buffer.
        if (lane < 4) bulk_wait_group_read<0>();
        __syncwarp();
        named_barrier_arrive(kDqEmpty, 128 + 32);
        if (adds) bulk_wait_group_read<0>();
        __syncwarp();
        if (lane == 0) {
          smem.ds_empty[odd].arrive();
          smem.ds_empty[odd].arrive_remote(cluster_rank() ^ 1);
        }
        if (ordered) end_turn(args, block, counter, adds);
        block.advance(row, head);
      }
      announce_adds(args, block, adds);
    }
  }
};

}  // namespace jaxflash::sm90
