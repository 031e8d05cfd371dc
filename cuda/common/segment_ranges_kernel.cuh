// The ranges of segments in one kernel: as common/segment_matches_kernel.cuh and
// common/range_summary_kernel.cuh, with the table in the shared memory of a cluster.
#pragma once

#include "common/range_summary_kernel.cuh"
#include "common/segment_matches_kernel.cuh"

namespace jaxflash {

inline constexpr int kSegmentRangesThreads = 512;

// The blocks of this one's cluster; before sm_90 each is alone.
struct Cluster {
  unsigned size = 1;
  unsigned rank = 0;

  __device__ __forceinline__ Cluster() {
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  }

  // All threads.
  __device__ __forceinline__ void sync() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
  }

  // Another block's counterpart of something in shared memory.
  template <class T>
  __device__ __forceinline__ T* of(unsigned other_rank, T* own) const {
#if __CUDA_ARCH__ >= 900
    uint64_t address;
    asm("mapa.u64 %0, %1, %2;"
        : "=l"(address)
        : "l"(reinterpret_cast<uint64_t>(own)), "r"(other_rank));
    return reinterpret_cast<T*>(address);
#else
    return own;
#endif
  }
};

// A cluster for the rows of each sequence, and one for its keys.
__global__ void __launch_bounds__(kSegmentRangesThreads)
    segment_ranges_kernel(const __grid_constant__ SegmentRangesParams params) {
  extern __shared__ SegmentBucket table[];  // the buckets whose remainder by the blocks is the rank
  // In the first block: the hulls of what all rows see, and of what sees, or is seen by, nothing.
  __shared__ Interval seen, hidden;
  const Cluster cluster;
  const auto work = static_cast<int64_t>(blockIdx.x / cluster.size);
  const int64_t number = work / 2;
  const bool of_rows = work % 2 == 0;
  const SegmentSide side(params.matches, number, of_rows);
  const auto bucket = [&](int32_t id) -> SegmentBucket& {
    const uint32_t at = bucket_of(id, side.other_size);
    return *cluster.of(at % cluster.size, table + at / cluster.size);
  };
  const int lane = threadIdx.x % 32;
  const int warp = static_cast<int>(cluster.rank * (kSegmentRangesThreads / 32) + threadIdx.x / 32);
  const int warps = static_cast<int>(cluster.size * (kSegmentRangesThreads / 32));

  const auto buckets = static_cast<uint32_t>(segment_buckets(side.other_size));
  const uint32_t words =
      (buckets + cluster.size - 1) / cluster.size * (sizeof(SegmentBucket) / sizeof(uint32_t));
  for (uint32_t i = threadIdx.x; i < words; i += kSegmentRangesThreads) {
    reinterpret_cast<uint32_t*>(table)[i] = ~0u;
  }
  if (threadIdx.x == 0) seen = hidden = {kMaxLength, 0};
  cluster.sync();

  for (int first = 32 * warp; first < side.other_size; first += 32 * warps) {
    const int element = first + lane;
    const uint32_t lanes = __ballot_sync(~0u, element < side.other_size);
    if (element >= side.other_size) break;
    const int32_t id = side.other_ids[element];
    enter_segment(bucket(id), id, element, __match_any_sync(lanes, id));
  }
  cluster.sync();

  for (int own = warp; own < blocks_of(side.size); own += warps) {
    RangeBlock block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int element = RangeBlock::element(own, i);
      const bool exists = element < side.size;
      const int32_t id = exists ? side.ids[element] : 0;
      const SegmentMatch match(bucket(id), id);
      if (exists) store_interval(side.intervals, element, match.interval);
      block.take(i, exists, match.interval, match.solid);
    }
    block.reduce();
    if (lane != 0) continue;
    block.store(params.summary, number, of_rows, own);
    const auto join = [&](Interval* hull, Interval own_part) {
      Interval& all = *cluster.of(0, hull);
      atomicMin(&all.begin, own_part.begin);
      atomicMax(&all.end, own_part.end);
    };
    if (of_rows) join(&seen, block.hull);
    if (block.hidden != 0) join(&hidden, hull_of_hidden(block.hidden, own, {0, side.size}));
  }
  cluster.sync();  // nobody asks this block any more
  if (cluster.rank != 0 || threadIdx.x != 0) return;
  store_hull(params.summary, number, of_rows ? kHiddenRows : kHiddenKeys, hidden);
  if (of_rows) {
    store_hull(params.summary, number, kSeenKeys, seen);
    store_hull(params.summary, number, kWalkCounts, {0, 0});
  }
}

}  // namespace jaxflash
