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
    look_up((plan.tiles.end - 1) * kKeys);
  }

  template <int kPanels>
  __device__ __forceinline__ void load(const TensorMap& map, const uint8_t* target, Barrier& landed,
                                       int first_key) {
    constexpr int kPanelBytes = kKeys * 128;
    const bool first_lane = threadIdx.x % 32 == 0;
    if (first_lane) landed.arrive_expecting(kPanels * kPanelBytes);
    const int box_bytes = 128 << pages_.log2_box;
    const int own_row = row_of(first_key);
#pragma unroll 1
    for (int box = 0; box < kKeys >> pages_.log2_box; ++box) {
      const int row = __shfl_sync(~0u, own_row, box);
      if (!first_lane) continue;
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        tensor_load(shared_address(target + panel * kPanelBytes + box * box_bytes), &map,
                    landed.address(), panel * 64, row, kv_head_, 0, 0);
      }
    }
    look_up(first_key - kKeys);
  }

 private:
  // The first key of the lane's box of a tile, and whether some key of the box is seen.
  __device__ __forceinline__ int key_of(int first_key) const {
    return first_key + (threadIdx.x % 32 << pages_.log2_box);
  }
  __device__ __forceinline__ bool is_seen(int first_key) const {
    return first_key >= 0 && key_of(first_key) < seen_.end;
  }
  // Nothing here waits for the number.
  __device__ __forceinline__ void look_up(int first_key) {
    if (is_seen(first_key)) page_ = __ldg(table_ + (key_of(first_key) >> pages_.in.log2_size));
  }
  // The row of the pool where the box that was looked up begins; if no key of it is seen, one
  // behind the pool, where TMA reads zeros.
  __device__ __forceinline__ int row_of(int first_key) const {
    const int existing = min(max(page_, 0), pages_.in.count - 1);
    const int page = is_seen(first_key) ? existing : pages_.in.count;
    return (page << pages_.in.log2_size) + (key_of(first_key) & (pages_.in.size() - 1));
  }

  const PageBoxes& pages_;
  const int32_t* table_;
  int kv_head_;
  Interval seen_;
  int page_ = 0;  // as the table has it
};

}  // namespace jaxflash::sm90
