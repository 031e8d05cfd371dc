// Gradients of captures on Hopper: see common/capture_gradient_sums.cuh.
//
//   warpgroups 0 ... kWarpGroups - 1   consumers: 64 rows of the block's tile each
//   last warpgroup                     one warp looks for the items of the block, one loads their q
//                                      and k, dout and v; the others idle
//
// A consumer issues both products of an item and works on the probabilities while the second one
// runs.
#pragma once

#include "common/capture_gradient_sums.cuh"
#include "common/mask.cuh"
#include "sm90/capture_gradient_traits.h"
#include "sm90/hardware/pipeline.cuh"
#include "sm90/hardware/wgmma.cuh"
#include "sm90/products.cuh"
#include "sm90/scores.cuh"
#include "sm90/softmax.cuh"

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
  alignas(16) uint8_t other[Traits::kOtherBytes - 1024];  // starts or sums, see the traits
  Barrier full[Traits::kStages];
  Barrier empty[Traits::kStages];             // every consumer warp is through with it
  uint16_t pin[Traits::Fragments::kThreads];  // written, never read
};

// Of a program, whose sizes the host does not know.
template <class Walk, class Program>
struct CaptureGradientState {
  // What a program knows of a head may be large.
  static constexpr int kSlots = sizeof(GradientMessage<Program>) <= 384 ? 4 : 2;
  Mailbox<GradientMessage<Program>, kSlots> messages;
  Walk walk;  // the producer has no registers to spare
};

// kOneStart: see the consumers.
template <class Traits, class State, class Program, bool kOneStart>
struct CaptureGradientProducer {
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
      if (lane == 0) walk.begin(problem, captures, args.plan, part);
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
      if constexpr (kOneStart) {
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

 private:
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
    for (int piece = 0; piece < Traits::kPieces; ++piece, ring.advance()) {
      Barrier& full = smem.full[ring.stage];
      smem.empty[ring.stage].wait(ring.phase ^ 1);
      if (threadIdx.x % 32 == 0) {
        full.arrive_expecting(Traits::kStageBytes);
        uint32_t target = shared_address(smem.operands[ring.stage]);
        const auto panels = [&](const MappedOperand& operand, int bytes, int first, int head) {
#pragma unroll 1
          for (int panel = 0; panel < Traits::kPanels; ++panel, target += bytes) {
            tensor_load(target, &operand.map, full.address(), piece * Traits::kColumns + panel * 64,
                        first, head, inner * operand.batch_step[0], outer * operand.batch_step[1]);
          }
        };
        panels(rows, Traits::kRowPanelBytes, item.first_row, item.head);
        panels(keys, Traits::kKeyPanelBytes, item.first_key, key_head);
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
  using Scores = ProgramScores<Program>;
  using Sums = CaptureSums<typename Traits::Fragments, Mask, Program, Load, Team>;
  static constexpr Math kMath = Traits::kMath;
  static constexpr int kKeys = Tile::kKeys;

  // x = rows keys^T over the columns of one stage, on top of what is there if `kAdds`; in flight on
  // return.
  template <bool kAdds>
  __device__ __forceinline__ static void issue_piece(float (&x)[kKeys / 2], SharedMemory& smem,
                                                     uint64_t rows, uint64_t keys,
                                                     Ring<Traits::kStages>& ring) {
    smem.full[ring.stage].wait(ring.phase);
    const uint64_t offset = ring.stage * descriptor_step(Traits::kStageBytes);
    issue_scores<kMath, Traits::kColumns, Traits::kRowPanelBytes, Traits::kKeyPanelBytes, kKeys>(
        x, rows + offset, keys + offset, kAdds);
    ring.advance();
  }

  // A product of several pieces waits for stages that the other one has to release: no more than
  // its first piece may be asked for before, and that only if it has a stage of its own.
  static_assert(Traits::kStages >= Traits::kPieces);
  static constexpr bool kBeside = Traits::kStages > Traits::kPieces;

  // The stages of one product.
  __device__ __forceinline__ static void release(SharedMemory& smem, Ring<Traits::kStages>& ring) {
#pragma unroll
    for (int i = 0; i < Traits::kPieces; ++i, ring.advance()) {
      if (threadIdx.x % 32 == 0) smem.empty[ring.stage].arrive();
    }
  }

  // Whether all items of a piece start from the same.
  __device__ __forceinline__ static constexpr bool has_one_start() {
    if constexpr (Sums::kOwnsTiles && Scores::kStarts) {
      return Program::kStartCapture == Load::kCapture;
    } else {
      return false;
    }
  }
  // And a thread keeps it: in 16 bits.
  __device__ __forceinline__ static constexpr bool keeps_start() {
    if constexpr (has_one_start()) {
      return sizeof(typename Program::Neighbour) == 2;
    } else {
      return false;
    }
  }
  // A thread keeps its own, from its first item of the piece on: the pairs that load_start leaves
  // in every other register.
  static constexpr int kStartWords = kKeys / 4;
  __device__ __forceinline__ static float4& kept_start(SharedMemory& smem, int i) {
    auto* const words = reinterpret_cast<float4*>(smem.other);
    return words[i * Traits::Fragments::kThreads + threadIdx.x];
  }
  __device__ __forceinline__ static void load_start(const Scores& scores, SharedMemory& smem,
                                                    float (&s)[kKeys / 2], int first_key,
                                                    bool is_first) {
    if (!keeps_start() || is_first) {
      scores.load_start(s, first_key, Fragment::column(threadIdx.x % 128));
      if constexpr (keeps_start()) {
#pragma unroll
        for (int i = 0; i < kStartWords / 4; ++i) {
          kept_start(smem, i) = make_float4(s[8 * i], s[8 * i + 2], s[8 * i + 4], s[8 * i + 6]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kStartWords / 4; ++i) {
        const float4 words = kept_start(smem, i);
        s[8 * i] = words.x;
        s[8 * i + 2] = words.y;
        s[8 * i + 4] = words.z;
        s[8 * i + 6] = words.w;
      }
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
    const uint64_t keys = wgmma_descriptor(
        shared_address(smem.operands[0]) + Traits::kPanels * Traits::kRowPanelBytes, 16, 1024);
    Sums sums(problem, args.captures, args.plan, reinterpret_cast<float*>(smem.other));
    Scores scores(args);
    Ring<Traits::kStages> ring, released;
    float s[kKeys / 2], dp[kKeys / 2];

    bool is_first = true;  // of its piece
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      const GradientMessage<Program>& message = messages.receive(count);
      const GradientItem& item = message.item;
      if (!item.exists) {
        const bool ends = message.ends;
        if (!ends) sums.store(message.piece, warp);
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
      if constexpr (Scores::kStarts) load_start(scores, smem, s, item.first_key, is_first);
      is_first = false;
      float lse[2], delta[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse[r] = __ldg(args.lse + first_of_rows + 8 * r);
        delta[r] = __ldg(args.delta + first_of_rows + 8 * r);
      }
      if constexpr (Scores::kStarts) scores.start(s);

      issue_piece<Scores::kStarts>(s, smem, rows, keys, ring);
#pragma unroll
      for (int i = 1; i < Traits::kPieces; ++i) issue_piece<true>(s, smem, rows, keys, ring);
      if constexpr (kBeside) issue_piece<false>(dp, smem, rows, keys, ring);
      Kept<Scores::kDrops, true, kKeys> kept;
      scores.draw(kept, key);
      wgmma_wait<kBeside ? 1 : 0>();
      hold(s);
      release(smem, released);
      if constexpr (!kBeside) issue_piece<false>(dp, smem, rows, keys, ring);
#pragma unroll
      for (int i = 1; i < Traits::kPieces; ++i) issue_piece<true>(dp, smem, rows, keys, ring);
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
      wgmma_wait<0>();
      hold(dp);
      release(smem, released);
      // Probabilities that are kept make up for the dropped ones.
      float per_share = 1.f;
      if constexpr (Scores::kDrops) per_share = scores.kept_scale();
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const float kept_dp = Scores::kDrops ? kept.of(i, dp[i]) * per_share : dp[i];
        s[i] *= kept_dp - delta[Fragment::lower(i)];
      }
      sums.add(message.piece, item, {row, key}, warp,
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
    state.messages.init(Traits::Fragments::kThreads / 32 + 1);  // consumers, and the loader
    for (Barrier& full : smem.full) full.init(1);
    for (Barrier& empty : smem.empty) empty.init(Traits::Fragments::kThreads / 32);
    fence_mbarrier_init();
  }
  __syncthreads();

  using Consumers = CaptureGradientConsumers<Traits, State, Mask, Program, Load>;
  if (group < Traits::kWarpGroups) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    Consumers::consume(args, smem, state, group);
    return;
  }
  setmaxnreg_dec<Traits::kProducerRegisters>();
  using Producer = CaptureGradientProducer<Traits, State, Program, Consumers::has_one_start()>;
  const int warp = threadIdx.x / 32 % 4;
  if (warp == 0) Producer::find_items(args, state);
  if (warp == 1) Producer::load_items(args, smem, state);
}

}  // namespace jaxflash::sm90
