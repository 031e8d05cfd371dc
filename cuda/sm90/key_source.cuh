// Where the forward kernel's key tiles come from. A warp that loads K or V makes a source for each
// tile of query rows, and asks it for key tiles from the last one to the first.
#pragma once

#include "sm90/forward_traits.cuh"

namespace jaxflash::sm90 {

// A sequence's own rows of the arrays: a box is a panel of a tile. One lane does all.
template <int kKeys>
class ContiguousKeys {
 public:
  static constexpr bool kByWarp = false;

  template <class Plan>
  __device__ __forceinline__ ContiguousKeys(const ForwardArgs&, const Plan& plan,
                                            const int32_t (&batch_step)[2])
      : kv_head_(plan.kv_head),
        inner_(plan.inner * batch_step[0]),
        outer_(plan.outer * batch_step[1]) {}

  // Panels of the tile that begins at `first_key` to `target`, announced at `landed`.
  template <int kPanels>
  __device__ __forceinline__ void load(const TensorMap& map, const uint8_t* target, Barrier& landed,
                                       int first_key) {
    constexpr int kPanelBytes = kKeys * 128;
    landed.arrive_expecting(kPanels * kPanelBytes);
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      tensor_load(shared_address(target + panel * kPanelBytes), &map, landed.address(), panel * 64,
                  first_key, kv_head_, inner_, outer_);
    }
  }

 private:
  int kv_head_;
  int inner_;
  int outer_;
};

// Rows of a pool of pages: a box is a panel of a page, or of as much of it as divides a tile. Its
// rows fill whole periods of the swizzle, so that a tile lies in shared memory as any other. The
// lanes look up a page each, a tile ahead, and the first one issues all copies.
template <int kKeys>
class PagedKeys {
 public:
  static constexpr bool kByWarp = true;

  template <class Plan>
  __device__ __forceinline__ PagedKeys(const ForwardArgs& args, const Plan& plan,
                                       const int32_t (&)[2])
      : pages_(args.pages),
        table_(args.pages.in.table +
               int64_t{plan.batch} * (args.problem.kv_len >> args.pages.in.log2_size)),
        kv_head_(plan.kv_head),
        seen_(plan.seen) {
    row_ = row_of((plan.tiles.end - 1) * kKeys);
  }

  template <int kPanels>
  __device__ __forceinline__ void load(const TensorMap& map, const uint8_t* target, Barrier& landed,
                                       int first_key) {
    constexpr int kPanelBytes = kKeys * 128;
    const bool first_lane = threadIdx.x % 32 == 0;
    if (first_lane) landed.arrive_expecting(kPanels * kPanelBytes);
    const int box_bytes = 128 << pages_.log2_box;
#pragma unroll 1
    for (int box = 0; box < kKeys >> pages_.log2_box; ++box) {
      const int row = __shfl_sync(~0u, row_, box);
      if (!first_lane) continue;
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        tensor_load(shared_address(target + panel * kPanelBytes + box * box_bytes), &map,
                    landed.address(), panel * 64, row, kv_head_, 0, 0);
      }
    }
    row_ = row_of(first_key - kKeys);
  }

 private:
  // The row of the pool where the lane's box of a tile begins; behind the pool, where TMA reads
  // zeros, if no key of it is seen.
  __device__ __forceinline__ int row_of(int first_key) const {
    const int key = first_key + (threadIdx.x % 32 << pages_.log2_box);
    const int log2_size = pages_.in.log2_size;
    int page = pages_.in.count;
    if (first_key >= 0 && key < seen_.end) {
      page = min(max(__ldg(table_ + (key >> log2_size)), 0), pages_.in.count - 1);
    }
    return (page << log2_size) + (key & (pages_.in.size() - 1));
  }

  const PageBoxes& pages_;
  const int32_t* table_;
  int kv_head_;
  Interval seen_;
  int row_;
};

}  // namespace jaxflash::sm90
