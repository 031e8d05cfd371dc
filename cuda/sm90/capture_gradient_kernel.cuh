// Gradients of captures on Hopper: see common/capture_gradient_sums.cuh.
//
//   warpgroups 0 ... kWarpGroups - 1   consumers: 64 rows of the block's tile each
//   last warpgroup                     one warp looks for the items of the block, one loads their q
//                                      and k, dout and v, one moves what the items of a piece have
//                                      in common; the last one idles
//
// A consumer issues both products of an item and works on the probabilities while the second one
// runs. A tile of the gradient, and of what products start from, goes through shared memory where
// TMA takes it.
#pragma once

#include "common/capture_gradient_sums.cuh"
#include "common/mask.cuh"
#include "sm90/capture_gradient_traits.h"
#include "sm90/fragment_panels.cuh"
#include "sm90/hardware/pipeline.cuh"
#include "sm90/hardware/wgmma.cuh"
#include "sm90/products.cuh"
#include "sm90/scores.cuh"
#include "sm90/softmax.cuh"
#include "sm90/start_row.cuh"

namespace jaxflash::sm90 {

// An item of a piece, with what the program knows of its head: whoever looks for items has that.
// Or, where it does not exist, the end of the piece, or of all.
template <class Program>
struct GradientMessage {
  GradientItem item;
  GradientPiece piece;
  bool ends;
  typename Program::Head head;
  Dropout dropout;
};

template <class Traits>
struct CaptureGradientSharedMemory {
  alignas(1024) uint8_t operands[Traits::kStages][Traits::kStageBytes];
  alignas(1024) uint8_t staging[Traits::kStagingBytes];  // with kHasTiles kTiles of kTileBytes
  Barrier full[Traits::kStages];
  Barrier empty[Traits::kStages];             // every consumer warp is through with it
  Barrier tile_full[Traits::kTiles];          // a piece may begin: what it starts from is there
  Barrier tile_done[Traits::kTiles];          // every consumer warp is through with the piece
  uint16_t pin[Traits::Fragments::kThreads];  // written, never read

  __device__ __forceinline__ uint32_t tile(int stage) const {
    return shared_address(staging) + stage * Traits::kTileBytes;
  }
};

// What the items of a piece have in common, where it is a tile.
template <class Traits, class Program, class Load>
struct GradientTiles {
  static constexpr bool kOwned = Traits::kHasTiles;
  __device__ __forceinline__ static constexpr bool has_narrow_starts() {
    if constexpr (Program::kStarts) {
      return sizeof(typename Program::Neighbour) == 2;
    } else {
      return false;
    }
  }
  // Their products start from the same.
  static constexpr bool kOneStart = kOwned && Program::kStarts && Load::kOfStart;
  // It lies in the piece's tile: laid there by TMA, or else by threads, from the first item on.
  static constexpr bool kKeepsStart = kOneStart && has_narrow_starts();
  static constexpr bool kLoadsStart =
      kKeepsStart && Traits::kStaging == GradientStaging::kStartTiles;
  // The sums may leave through the tile.
  static constexpr bool kMayStore = kOwned && sizeof(typename Load::Result) == 2;
};

// Of a program, whose sizes the host does not know.
template <class Walk, class Program>
struct CaptureGradientState {
  // What a program knows of a head may be large.
  static constexpr int kSlots = sizeof(GradientMessage<Program>) <= 384 ? 4 : 2;
  Mailbox<GradientMessage<Program>, kSlots> messages;
  Walk walk;  // the producer has no registers to spare
};

template <class Traits, class State, class Program, class Load>
struct CaptureGradientProducer {
  using Tiles = GradientTiles<Traits, Program, Load>;
  using Tile = typename Traits::Tile;
  using SharedMemory = CaptureGradientSharedMemory<Traits>;
  using Message = GradientMessage<Program>;

  // A whole warp, whose lanes look at 32 candidates at once: divisions and loads take longer than
  // the products of an item.
  __device__ __forceinline__ static void find_items(const CaptureGradientArgs& args, State& state) {
    auto& messages = state.messages;
    auto& walk = state.walk;
    const Problem& problem = args.problem;
    const Captures& captures = args.captures;
    const int lane = threadIdx.x % 32;
    uint32_t count = 0;
    const auto send = [&](int sender, const auto& write) {
      Message& message = messages.prepare(count);
      if (lane == sender) write(message);
      messages.send(count);
      ++count;
    };
    for (int64_t round = 0; round * gridDim.x < args.parts; ++round) {
      const int64_t part = part_of(args, round);
      if (part >= args.parts) continue;
      if (lane == 0) walk.begin(problem, args.plan, part);
      __syncwarp();
      for (int64_t first = walk.next; first < walk.end; first += 32) {
        GradientItem item = {};
        typename Program::Head head;
        Dropout dropout;
        bool takes_part = first + lane < walk.end;
        if (takes_part) {
          item = walk.item_of(problem, args.plan, first + lane);
          takes_part = walk.is_visible(problem, item);
        }
        if (takes_part) {
          const int b = batch_number(captures, problem, item.batch);
          const int h = head_number(captures, item.head);
          head = Program::head(captures, problem, item.batch, b, h);
          takes_part = walk.reads_piece(item, head);
          if constexpr (Program::kDrops) {
            dropout = Program::dropout(captures, problem, item.batch, b, h);
          }
        }
        uint32_t left = __ballot_sync(~0u, takes_part);
        for (; left != 0; left &= left - 1) {
          send(__ffs(static_cast<int>(left)) - 1, [&](Message& message) {
            message.item = item;
            message.piece = walk.piece;
            message.head = head;
            message.dropout = dropout;
          });
        }
      }
      send(0, [&](Message& message) {
        message.item.exists = false;
        message.piece = walk.piece;
        message.ends = false;
      });
    }
    send(0, [&](Message& message) {
      message.item.exists = false;
      message.ends = true;
    });
  }

  // A whole warp.
  __device__ __forceinline__ static void load_items(const CaptureGradientArgs& args,
                                                    SharedMemory& smem, State& state) {
    Ring<Traits::kStages> ring;
    bool is_first = true;  // of its piece
    for (uint32_t count = 0;; ++count) {
      const Message& message = state.messages.receive(count);
      const GradientItem item = message.item;
      const bool ends = !item.exists && message.ends;
      if constexpr (Tiles::kOneStart && !Tiles::kLoadsStart) {
        if (item.exists && is_first) prefetch_start(item, message.head);
        is_first = !item.exists;
      }
      state.messages.release(count);
      if (ends) return;
      if (!item.exists) continue;
      load(args, args.q, args.k, item, smem, ring);
      load(args, args.dout, args.v, item, smem, ring);
    }
  }

  // A whole warp. A tile is that of the piece after the next: its sums leave when that one is
  // found, two pieces later.
  __device__ __forceinline__ static void move_tiles(const CaptureGradientArgs& args,
                                                    SharedMemory& smem, State& state) {
    const int lane = threadIdx.x % 32;
    Ring<Traits::kTiles> ring;
    StoredTile older = {}, newer = {};
    bool is_first = true;  // of its piece
    for (uint32_t count = 0;; ++count) {
      const Message& message = state.messages.receive(count);
      const bool exists = message.item.exists;
      const bool ends = !exists && message.ends;
      if (!ends && is_first && lane == 0) {
        store_tile(args, smem, older, ring);
        older = newer;
        newer = stored_tile(args, message.piece);
        begin_tile(args, smem, message, ring);
      }
      if (!ends && is_first) ring.advance();
      is_first = !exists;
      state.messages.release(count);
      if (ends) break;
    }
    if (lane == 0) {
      store_tile(args, smem, older, ring);
      ring.advance();
      store_tile(args, smem, newer, ring);
    }
  }

 private:
  // Where a tile goes, as TMA has it.
  struct StoredTile {
    bool exists;
    int key, row, matrix;
  };

  __device__ __forceinline__ static StoredTile stored_tile(const CaptureGradientArgs& args,
                                                           const GradientPiece& piece) {
    StoredTile tile = {};
    if constexpr (Tiles::kMayStore) {
      if (!args.stores_tiles) return tile;
      tile.exists = true;
      tile.key = piece.key_tile * Tile::kKeys;
      tile.row = piece.row_tile * Tile::kRows;
      const uint32_t rows = exact_quotient(piece.offset, args.plan.extent[Load::kKeyAxis]);
      tile.matrix = static_cast<int>(exact_quotient(rows, args.plan.extent[Load::kQueryAxis]));
    }
    return tile;
  }

  // Returns when a tile of shared memory is free, where it has been in use.
  __device__ __forceinline__ static void store_tile(const CaptureGradientArgs& args,
                                                    SharedMemory& smem, const StoredTile& tile,
                                                    const Ring<Traits::kTiles>& ring) {
    smem.tile_done[ring.stage].wait(ring.phase ^ 1);
    if (!tile.exists) return;
#pragma unroll 1
    for (int panel = 0; panel < Traits::kTilePanels; ++panel) {
      tensor_store(&args.gradient, smem.tile(ring.stage) + panel * Traits::kRowPanelBytes,
                   tile.key + 64 * panel, tile.row, tile.matrix, 0, 0);
    }
    bulk_commit_group();
    bulk_wait_group_read<0>();
  }

  // Elements behind the last key or row are zeros or other rows': no sum takes what depends on
  // them. A piece without items starts from nothing.
  __device__ __forceinline__ static void begin_tile(const CaptureGradientArgs& args,
                                                    SharedMemory& smem, const Message& message,
                                                    const Ring<Traits::kTiles>& ring) {
    Barrier& full = smem.tile_full[ring.stage];
    if constexpr (Tiles::kLoadsStart) {
      const GradientItem& item = message.item;
      if (item.exists) {
        full.arrive_expecting(Traits::kTileBytes);
        const int row = start_row_of<Program>(args.captures, message.head,
                                              Program::row(message.head, item.first_row));
#pragma unroll 1
        for (int panel = 0; panel < Traits::kTilePanels; ++panel) {
          tensor_load(smem.tile(ring.stage) + panel * Traits::kRowPanelBytes, &args.starts,
                      full.address(), item.first_key + 64 * panel, row, 0, 0, 0);
        }
        return;
      }
    }
    full.arrive();
  }

  // Rounds go to and fro, so that a block gets long and short ones where the length of parts
  // depends on their number. Turns are waited for: a block must only wait for parts that others
  // have begun.
  __device__ __forceinline__ static int64_t part_of(const CaptureGradientArgs& args,
                                                    int64_t round) {
    if (args.plan.turns == nullptr) {
      const uint32_t block = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
      return round * gridDim.x + block;
    }
    unsigned long long ticket = 0;
    if (threadIdx.x % 32 == 0) {
      ticket = atomicAdd(reinterpret_cast<unsigned long long*>(args.plan.turns), 1ull);
    }
    return static_cast<int64_t>(__shfl_sync(~0u, ticket, 0));
  }

  // What the products of a piece start from comes to the L2 while the piece before is worked on. A
  // prefetch brings two sectors.
  __device__ __forceinline__ static void prefetch_start(const GradientItem& item,
                                                        const typename Program::Head& head) {
    constexpr int kAtOnce = 64 / sizeof(typename Program::Neighbour);
    constexpr int kOfRow = Tile::kKeys / kAtOnce;
    const int last = Program::neighbours_end(head) - 1;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < Tile::kRows * kOfRow; i += 32) {
      const auto row = Program::row(head, item.first_row + i / kOfRow);
      const int key = item.first_key + i % kOfRow * kAtOnce;
      prefetch_l2(Program::neighbours(head, row) + min(key, last));
    }
  }

  __device__ __forceinline__ static void load(const CaptureGradientArgs& args,
                                              const MappedOperand& rows, const MappedOperand& keys,
                                              const GradientItem& item, SharedMemory& smem,
                                              Ring<Traits::kStages>& ring) {
    const auto batch = static_cast<uint32_t>(item.batch);
    const auto inner = static_cast<int>(args.by_inner_batch.remainder(batch));
    const auto outer = static_cast<int>(args.by_inner_batch.quotient(batch));
    const auto key_head = static_cast<int>(args.by_group.quotient(item.head));
#pragma unroll 1
    for (int column = 0; column < Traits::kHeadDim; column += 64, ring.advance()) {
      Barrier& full = smem.full[ring.stage];
      smem.empty[ring.stage].wait(ring.phase ^ 1);
      if (threadIdx.x % 32 == 0) {
        full.arrive_expecting(Traits::kStageBytes);
        const uint32_t target = shared_address(smem.operands[ring.stage]);
        const auto panel = [&](const MappedOperand& operand, uint32_t to, int first, int head) {
          tensor_load(to, &operand.map, full.address(), column, first, head,
                      inner * operand.batch_step[0], outer * operand.batch_step[1]);
        };
        panel(rows, target, item.first_row, item.head);
        panel(keys, target + Traits::kRowPanelBytes, item.first_key, key_head);
      }
      __syncwarp();
    }
  }
};

template <class Traits, class State, class Mask, class Program, class Load>
struct CaptureGradientConsumers {
  struct Team {
    __device__ __forceinline__ static void sync() {  // 0 is the barrier of __syncthreads
      named_barrier_sync(1, Traits::Fragments::kThreads);
    }
  };
  using Tile = typename Traits::Tile;
  using SharedMemory = CaptureGradientSharedMemory<Traits>;
  using Tiles = GradientTiles<Traits, Program, Load>;
  using Panels = FragmentPanels<Traits::kRowPanelBytes>;
  using Scores = ProgramScores<Program>;
  using Sums = CaptureSums<typename Traits::Fragments, Mask, Program, Load, Team>;
  static constexpr Math kMath = Traits::kMath;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr int kSteps = Traits::kSteps;

  static_assert(Tiles::kOwned == Sums::kOwnsTiles);

  // x = rows keys^T over the columns of one stage, on top of what is there if `kAdds`; in flight on
  // return.
  template <bool kAdds>
  __device__ __forceinline__ static void issue_step(float (&x)[kKeys / 2], SharedMemory& smem,
                                                    uint64_t rows, uint64_t keys,
                                                    Ring<Traits::kStages>& ring) {
    smem.full[ring.stage].poll(ring.phase);  // with segments it spills 80 bytes if it sleeps
    const uint64_t offset = ring.stage * descriptor_step(Traits::kStageBytes);
    issue_scores<kMath, 64, Traits::kRowPanelBytes, Traits::kKeyPanelBytes, kKeys>(
        x, rows + offset, keys + offset, kAdds);
    ring.advance();
  }

  // Waits for the first one of so many steps in flight, whose stage gets free.
  template <int kInFlight>
  __device__ __forceinline__ static void end_step(SharedMemory& smem,
                                                  const Ring<Traits::kStages>& ring) {
    static_assert(kInFlight < Traits::kStages);
    wgmma_wait<kInFlight - 1>();
    const int stage = ring.stage - kInFlight;
    if (threadIdx.x % 32 == 0) smem.empty[stage < 0 ? stage + Traits::kStages : stage].arrive();
  }

  // The warpgroup's rows of the piece's tile.
  __device__ __forceinline__ static Panels panels(const SharedMemory& smem, int stage) {
    const int thread = late_thread();
    const int group = static_cast<int>(tid_x()) / 128;
    return Panels(smem.tile(stage) + group * 64 * Traits::kPanelRowBytes, thread);
  }

  // Pairs of what the products start from, in every other register.
  __device__ __forceinline__ static void load_start(const Scores& scores, const SharedMemory& smem,
                                                    int stage, float (&s)[kKeys / 2], int first_key,
                                                    bool is_first) {
    const bool is_kept = Tiles::kLoadsStart || (Tiles::kKeepsStart && !is_first);
    if (!is_kept) scores.load_start(s, first_key, Fragment::column(threadIdx.x % 128));
    if constexpr (Tiles::kKeepsStart) {
      const Panels tile = panels(smem, stage);
      const auto pair = [&](int column, int i) -> float& { return s[column / 2 + 2 * i]; };
      uint32_t pairs[4];
      if (is_kept) {
#pragma unroll
        for (int column = 0; column < kKeys; column += 16) {
          tile.read(column, pairs);
#pragma unroll
          for (int i = 0; i < 4; ++i) pair(column, i) = __uint_as_float(pairs[i]);
        }
      } else {
#pragma unroll
        for (int column = 0; column < kKeys; column += 16) {
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs[i] = __float_as_uint(pair(column, i));
          tile.write(column, pairs);
        }
      }
    }
  }

  // The sums of a piece, to where its start was: a warp overwrites what no other one reads.
  __device__ __forceinline__ static void stage_sums(Sums& sums, const SharedMemory& smem,
                                                    int stage) {
    sums.hand_over([&](const auto& of_tile) {
      const Panels tile = panels(smem, stage);
#pragma unroll
      for (int column = 0; column < kKeys; column += 16) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto& block = of_tile[0][column / 8 + i / 2];
          pairs[i] = jaxflash::pack<typename Load::Result>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
        }
        tile.write(column, pairs);
      }
    });
    fence_proxy_async();
  }

  // After the last item of a piece.
  __device__ __forceinline__ static void end_piece(const CaptureGradientArgs& args,
                                                   SharedMemory& smem, const GradientPiece& piece,
                                                   Sums& sums, int warp, uint32_t piece_count) {
    if constexpr (Tiles::kMayStore) {
      if (args.stores_tiles) {
        stage_sums(sums, smem, piece_count % Traits::kTiles);
      } else {
        sums.store(piece, warp);
      }
    } else {
      sums.store(piece, warp);
    }
    if constexpr (Tiles::kOwned) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) smem.tile_done[piece_count % Traits::kTiles].arrive();
    }
  }

  __device__ __forceinline__ static void consume(const CaptureGradientArgs& args,
                                                 SharedMemory& smem, State& state, int group) {
    auto& messages = state.messages;
    const Problem& problem = args.problem;
    const int thread = threadIdx.x % 128;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint64_t rows = wgmma_descriptor(
        shared_address(smem.operands[0]) + group * 64 * Traits::kPanelRowBytes, 16, 1024);
    const uint64_t keys =
        wgmma_descriptor(shared_address(smem.operands[0]) + Traits::kRowPanelBytes, 16, 1024);
    Sums sums(problem, args.plan, reinterpret_cast<float*>(smem.staging));
    Scores scores(args);
    Ring<Traits::kStages> ring;
    float s[kKeys / 2], dp[kKeys / 2];

    uint32_t piece_count = 0;
    bool is_first = true;  // of its piece
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      const GradientMessage<Program>& message = messages.receive(count);
      const GradientItem& item = message.item;
      const bool ends = !item.exists && message.ends;
      if constexpr (Tiles::kOwned) {
        // Also where it has been waited for: a predicate takes a register.
        const Barrier& full = smem.tile_full[piece_count % Traits::kTiles];
        if (!ends) full.wait(piece_count / Traits::kTiles % 2);
      }
      if (!item.exists) {
        if (!ends) end_piece(args, smem, message.piece, sums, warp, piece_count);
        ++piece_count;
        messages.release(count);
        is_first = true;
        if (ends) break;
        continue;
      }
      const int row = item.first_row + group * 64 + Fragment::row(thread);
      const int key = item.first_key + Fragment::column(thread);
      const int64_t first_of_rows = (item.batch * problem.q_heads + item.head) * args.rows + row;
      const Mask mask(problem, item.batch);
      scores.begin_rows(problem, mask, message.head, message.dropout, {{row, row + 8}});
      scores.begin_keys(key);
      if constexpr (Scores::kStarts) {
        load_start(scores, smem, piece_count % Traits::kTiles, s, item.first_key, is_first);
      }
      is_first = false;
      float lse[2], delta[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse[r] = __ldg(args.lse + first_of_rows + 8 * r);
        delta[r] = __ldg(args.delta + first_of_rows + 8 * r);
      }
      if constexpr (Scores::kStarts) scores.start(s);

      // Stages get free as steps of a product end, not with the product.
      issue_step<Scores::kStarts>(s, smem, rows, keys, ring);
#pragma unroll
      for (int i = 1; i < kSteps; ++i) {
        if (i > 1) end_step<2>(smem, ring);
        issue_step<true>(s, smem, rows, keys, ring);
      }
      if constexpr (kSteps > 1) end_step<2>(smem, ring);
      issue_step<false>(dp, smem, rows, keys, ring);
      if constexpr (kSteps > 1) issue_step<true>(dp, smem, rows, keys, ring);
      Kept<Scores::kDrops, true, kKeys, true> kept;
      scores.draw(kept, key);
      end_step<(kSteps > 1 ? 3 : 2)>(smem, ring);
      hold(s);
      uint32_t all = 0;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const float partial =
            scores.element(i, [&](const auto& head, const auto& on_row, const auto& on_column,
                                  int q, int kv, float distance) {
              return Load::partial(head, on_row, on_column, q, kv, distance, s[i]);
            });
        s[i] = exp2_approx(scores.relative(i, s[i], -lse[Fragment::lower(i)])) * partial;
        all ^= __float_as_uint(s[i]);
      }
      // ptxas would move the wait above what is computed beside the product; a store of what
      // depends on all of it cannot follow the wait.
      store_shared_volatile(shared_address(&smem.pin[threadIdx.x]), static_cast<uint16_t>(all));
#pragma unroll
      for (int i = 2; i < kSteps; ++i) {
        end_step<2>(smem, ring);
        issue_step<true>(dp, smem, rows, keys, ring);
      }
      if constexpr (kSteps > 1) end_step<2>(smem, ring);
      end_step<1>(smem, ring);
      hold(dp);
      // Probabilities that are kept make up for the dropped ones.
      float per_share = 1.f;
      if constexpr (Scores::kDrops) per_share = scores.kept_scale();
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const float kept_dp = Scores::kDrops ? kept.of(i, dp[i]) * per_share : dp[i];
        s[i] *= kept_dp - delta[Fragment::lower(i)];
      }
      sums.add(
          item, [&]() -> const auto& { return message.head; }, {row, key}, warp,
          [&](int, int n, int i) -> float& { return s[4 * n + i]; });
      messages.release(count);
    }
  }
};

template <class Traits, class AnyMask, class Program, class Load>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    capture_gradient_kernel(const __grid_constant__ CaptureGradientArgs args) {
  using Mask = MaskBeside<AnyMask, Program>;
  using Walk = GradientWalk<Mask, Program, Load, Traits::Tile::kRows, Traits::Tile::kKeys>;
  using SharedMemory = CaptureGradientSharedMemory<Traits>;
  static_assert(sizeof(SharedMemory) <= Traits::kSharedBytes, "fits");
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& smem = *reinterpret_cast<SharedMemory*>(shared_bytes);
  using State = CaptureGradientState<Walk, Program>;
  __shared__ State state;
  static_assert(Traits::kSharedBytes + sizeof(State) <= 227 * 1024, "fits");

  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    constexpr int kWarps = Traits::Fragments::kThreads / 32;  // of consumers
    state.messages.init(kWarps + 1 + (Traits::kHasTiles ? 1 : 0));
    for (Barrier& full : smem.full) full.init(1);
    for (Barrier& empty : smem.empty) empty.init(kWarps);
    for (Barrier& full : smem.tile_full) full.init(1);
    for (Barrier& done : smem.tile_done) done.init(kWarps);
    fence_mbarrier_init();
  }
  __syncthreads();

  using Consumers = CaptureGradientConsumers<Traits, State, Mask, Program, Load>;
  using Producer = CaptureGradientProducer<Traits, State, Program, Load>;
  if (group < Traits::kWarpGroups) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    Consumers::consume(args, smem, state, group);
    return;
  }
  setmaxnreg_dec<Traits::kProducerRegisters>();
  const int warp = threadIdx.x / 32 % 4;
  if (warp == 0) Producer::find_items(args, state);
  if (warp == 1) Producer::load_items(args, smem, state);
  if constexpr (Traits::kHasTiles) {
    if (warp == 2) Producer::move_tiles(args, smem, state);
  }
}

}  // namespace jaxflash::sm90
