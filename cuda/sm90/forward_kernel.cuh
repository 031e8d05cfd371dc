// The forward kernel. A block walks over tiles of query rows; for each, K and V stream through
// rings of shared-memory buffers.
//
//   warpgroups 0 ... kWarpGroups - 1   consumers (forward/consumers.cuh): a unit of 64 rows each
//   last warpgroup, one warp each      producers (forward/producers.cuh): plans and loads Q, loads
//                                      K and what products start from, loads V, stores the output
//
// The planning warp announces tiles ahead of time, so that the others only read what they need. A
// consumer begins the next tile with its first scores, which run beside the epilogue of this one.
//
// A consumer stages its output where its rows of Q lay, so a Q buffer is empty once the output has
// left it; with two Q buffers the next tile streams in meanwhile. With one, the output is stored
// straight from registers, so that the next Q streams in as soon as the last scores are there.
//
// Where tiles of queries are few, blocks share their keys (KeyShares): a block may then have a part
// of a tile only, which it leaves in a workspace for merge_kernel (forward/merge_kernel.cuh).
#pragma once

#include "common/dependency.cuh"
#include "sm90/forward/consumers.cuh"
#include "sm90/forward/producers.cuh"

namespace jaxflash::sm90 {

template <class Traits, class Scores>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Producers = ForwardProducers<Traits, Scores>;
  using Tile = typename Traits::Tile;
  // With which the host launches.
  using Launched = ForwardTraits<Tile, Traits::kMath, BandMask, typename Traits::Keys>;
  static_assert(Traits::kSharedBytes == Launched::kSharedBytes);
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedMemory*>(shared_bytes);

  // Through a shuffle the compiler knows it to be the same in the whole warp.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.q);
    prefetch_tensor_map(&args.k);
    prefetch_tensor_map(&args.v);
    prefetch_tensor_map(&args.out);
    if constexpr (Traits::kLoadsStarts) prefetch_tensor_map(&args.starts);
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
      smem.v_landed[stage].init(1);
    }
    if constexpr (Traits::kHoldsStarts) smem.starts_read.init();
    smem.plans.init(Traits::kPlanReaders);
    if constexpr (Traits::Mask::kWalks) {
      for (int32_t& visits : smem.visits_of_strides) visits = 0;
    }
    fence_mbarrier_init();
  }
  if (!takes_call<typename Traits::Mask>(args.problem)) return leave_call();
  // Rows that belong to no head are never loaded; what is not a number there would keep the softmax
  // from holding on to its reference.
  if (args.unit.rows() < 64) {
    for (int byte = threadIdx.x * 16; byte < static_cast<int>(sizeof(smem.q));
         byte += Traits::kThreads * 16) {
      store_shared_zero(shared_address(&smem.q[0][0][0]) + byte);
    }
    fence_proxy_async();
  }
  if constexpr (Traits::kKeyTerms) KeyTermColumns<Traits>::init(smem);
  __syncthreads();
  if constexpr (Traits::Mask::kWalks) {
    // Heads that share keys fill tiles with few blocks, or with one: they stay in order.
    if (args.group == 1) {
      RowOrder<Traits::kWarpGroups>::template count<typename Traits::Mask>(args.problem,
                                                                           smem.visits_of_strides);
    }
    __syncthreads();
  }

  // The merge, or the other kernel of the call.
  if constexpr (Traits::kShares || Traits::Mask::kWalks) launch_dependents();

  if (group < Traits::kWarpGroups) {
    if constexpr (Traits::kRedistributes) setmaxnreg_inc<Traits::kConsumerRegisters>();
    ForwardConsumers<Traits, Scores>::consume(args, smem, group);
    return;
  }
  if constexpr (Traits::kRedistributes) setmaxnreg_dec<Traits::kProducerRegisters>();
  switch (threadIdx.x / 32 % 4) {
    case 0:
      return Producers::load_q(args, smem);
    case 1:
      return Producers::load_k(args, smem);
    case 2:
      return Producers::load_v(args, smem);
    default:
      return Producers::store_out(args, smem);
  }
}

}  // namespace jaxflash::sm90
