// The backward kernel: dk and dv of one tile of keys at a time, and what these keys add to dq.
//
// Keys are stationary. A block draws a tile of keys of one kv head, and tiles of query rows (q and
// dout) stream past it through rings of shared-memory buffers, for all query heads of the group.
// Two blocks can share a tile as a cluster: each has half of the keys, and computes half of the
// columns of dq.
//
//   warpgroups 0 and 1    consumers: the products (backward/single.cuh, backward/pair.cuh)
//   last warpgroup        producers (backward/producers.cuh): warp 0 draws tiles and loads rows,
//                         with some tiles also what their products start from;
//                         warp 2 loads k and v and stores dk and dv; warp 1 adds dq, in a block by
//                         itself that of one consumer warpgroup, and warp 3 that of the other,
//                         and stores ds where that is a gradient
//
// A block stays and draws the next tile when it is done with one: the first rows of the next tile,
// and its keys where dk and dv have buffers of their own, are loaded while dk and dv of this one
// leave.
#pragma once

#include "common/dependency.cuh"
#include "sm90/backward/pair.cuh"
#include "sm90/backward/producers.cuh"
#include "sm90/backward/single.cuh"

namespace jaxflash::sm90 {

template <class Traits, class AnyMask, class Score>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  using Mask = MaskBeside<AnyMask, Score>;
  using Producers = BackwardProducers<Traits, Mask, Score>;
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
    if constexpr (Tile::kLoadsStarts) prefetch_tensor_map(&args.starts);
    if (Score::kStoresGradient && args.stored.data != nullptr) {
      prefetch_tensor_map(&args.stored_map);
    }
    smem.init_barriers();
    smem.init_start_barriers(Traits::kConsumerThreads / 32);
    for (int stage = 0; stage < Tile::kKeyStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.v_full[stage].init(1);
    }
    constexpr int kConsumerWarps = Traits::kBlocks * Traits::kConsumerThreads / 32;
    for (int stage = 0; stage < Tile::kQStages; ++stage) {
      smem.q_full[stage].init(1);
      smem.q_empty[stage].init(kConsumerWarps);
    }
    for (int stage = 0; stage < Tile::kDoutStages; ++stage) {
      smem.dout_full[stage].init(1);
      smem.dout_empty[stage].init(kConsumerWarps);
    }
    smem.rows_landed.init(1);
    smem.keys_landed.init(1);
    smem.tickets.init(Traits::kTicketReaders);
    fence_mbarrier_init();
  }
  if (!takes_call<Mask>(args.problem)) return leave_call();
  if constexpr (Traits::kPaired) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  // In this order: the next kernel reads counters that the one before has cleared.
  wait_for_previous_kernel();
  launch_dependents();

  if (group < 2) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    if constexpr (Traits::kPaired) {
      if (group == 0) {
        PairConsumers<Traits, Mask, Score, PairRole::kValues>::consume(args, smem);
      } else {
        PairConsumers<Traits, Mask, Score, PairRole::kKeys>::consume(args, smem);
      }
    } else {
      SingleConsumers<Traits, Mask, Score>::consume(args, smem, group);
    }
  } else {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    switch (threadIdx.x / 32 % 4) {
      case 0:
        Producers::load_rows(args, smem);
        break;
      case 1:
        if constexpr (Traits::kPaired) {
          Producers::add_pair_dq(args, smem);
        } else {
          Producers::add_dq(args, smem, 0);
        }
        break;
      case 2:
        if constexpr (Traits::kPaired) {
          Producers::move_pair_keys(args, smem);
        } else {
          Producers::move_keys(args, smem);
        }
        break;
      default:
        if constexpr (!Traits::kPaired) Producers::add_dq(args, smem, 1);
    }
  }
  // Shared memory stays until the other block has sent its last arrival.
  if constexpr (Traits::kPaired) cluster_sync();
}

}  // namespace jaxflash::sm90
