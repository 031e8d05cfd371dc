// The backward kernel: dk and dv of one tile of keys at a time, and what these keys add to dq.
//
// Keys are stationary. A block draws a tile of keys of one kv head, and tiles of query rows (q and
// dout) stream past it through rings of shared-memory buffers, for all query heads of the group.
//
//   warpgroups 0 and 1    consumers: the products (backward_single.cuh)
//   last warpgroup        warp 0 draws tiles and loads rows; warp 2 loads k and v, stores dk and
//                         dv, and clears dq for later tiles; warps 1 and 3 add dq where it leaves
//                         through shared memory, one for each consumer warpgroup; otherwise warp 1
//                         keeps the order of the adds
//
// A block stays and draws the next tile when it is done with one: the first rows of the next tile,
// and its keys where they have buffers of their own, are loaded while dk and dv of this one leave.
#pragma once

#include "common/dependency.cuh"
#include "sm90/backward_producers.cuh"
#include "sm90/backward_queries.cuh"
#include "sm90/backward_single.cuh"

namespace jaxflash::sm90 {

template <class Traits, class Mask, class Score>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  using Producers = BackwardProducers<Traits, Mask>;
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
    for (int stage = 0; stage < Tile::kKeyStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.v_full[stage].init(1);
      smem.k_empty[stage].init(Traits::kConsumerThreads / 32);
      smem.v_empty[stage].init(Traits::kConsumerThreads / 32);
    }
    smem.dkv_full.init(Traits::kConsumerThreads);
    smem.dkv_empty.init(1);
    for (int stage = 0; stage < Tile::kQStages; ++stage) {
      smem.q_full[stage].init(1);
      smem.q_empty[stage].init(Traits::kConsumerThreads / 32);
    }
    for (int stage = 0; stage < Tile::kDoutStages; ++stage) {
      smem.dout_full[stage].init(1);
      smem.dout_empty[stage].init(Traits::kConsumerThreads / 32);
    }
    smem.rows_landed.init(1);
    smem.keys_landed.init(1);
    smem.tickets.init(Traits::ticket_readers(args.deterministic));
    fence_mbarrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_for_previous_kernel();

  if (group < 2) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    if constexpr (Traits::kKeysAsRows) {
      KeysAsRows<Traits, Mask, Score>::consume(args, smem, group);
    } else {
      QueriesAsRows<Traits, Mask, Score>::consume(args, smem, group);
    }
    return;
  }
  setmaxnreg_dec<Traits::kProducerRegisters>();
  switch (threadIdx.x / 32 % 4) {
    case 0:
      return Producers::load_rows(args, smem);
    case 1:
      if constexpr (Traits::kDqWriter) {
        Producers::add_dq(args, smem, 0);
      } else if (args.deterministic) {
        Producers::keep_turns(args, smem);
      }
      return;
    case 2:
      return Producers::move_keys(args, smem);
    default:
      if constexpr (Traits::kDqWriter) Producers::add_dq(args, smem, 1);
      return;
  }
}

}  // namespace jaxflash::sm90
