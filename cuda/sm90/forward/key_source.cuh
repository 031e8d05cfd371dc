// Where the forward kernel's key tiles come from. A warp that loads K or V makes a source for each
// tile of query rows, and asks it for key tiles from the last one to the first.
#pragma once

#include "sm90/forward_traits.cuh"

namespace jaxflash::sm90 {

// A sequence's own rows of the arrays: a box is a panel of a tile. One lane does all.
template <int kKeys>
class ContiguousKeys<kKeys, 1> {
 public:
  static constexpr bool kByWarp = false;

  template <class Plan>
  __device__ __forceinline__ ContiguousKeys(const ForwardArgs&, const Plan& plan,
                                            const int32_t (&batch_step)[2])
      : kv_head_(plan.kv_head),
        inner_(plan.batches[0].inner * batch_step[0]),
        outer_(plan.batches[0].outer * batch_step[1]) {}

  // Panels of the tile that begins at `first_key` to `target`, announced at `landed`.
  template <int kPanels, int kPanelBytes>
  __device__ __forceinline__ void load(const TensorMap& map, const uint8_t* target, Barrier& landed,
                                       int first_key) {
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

// The same of kBatches batch elements, which follow one another: their tiles lie one behind the
// other. Where each one's keys are is computed anew for each tile: producers are short of
// registers.
template <int kKeys, int kBatches>
class ContiguousKeys {
 public:
  static constexpr bool kByWarp = false;

  template <class Plan>
  __device__ __forceinline__ ContiguousKeys(const ForwardArgs& args, const Plan& plan,
                                            const int32_t (&batch_step)[2])
      : args_(args),
        batch_step_(batch_step),
        kv_head_(plan.kv_head),
        first_(plan.batches[0].number),
        last_(plan.batches[kBatches - 1].number) {}

  template <int kPanels, int kPanelBytes>
  __device__ __forceinline__ void load(const TensorMap& map, const uint8_t* target, Barrier& landed,
                                       int first_key) {
    landed.arrive_expecting(kBatches * kPanels * kPanelBytes);
#pragma unroll 1
    for (int i = 0; i < kBatches; ++i) {
      const int batch = min(first_ + i, last_);
      const int inner = args_.by_inner_batch.remainder(batch) * batch_step_[0];
      const int outer = args_.by_inner_batch.quotient(batch) * batch_step_[1];
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        tensor_load(shared_address(target + (i * kPanels + panel) * kPanelBytes), &map,
                    landed.address(), panel * 64, first_key, kv_head_, inner, outer);
      }
    }
  }

 private:
  const ForwardArgs& args_;
  const int32_t (&batch_step_)[2];
  int kv_head_;
  int first_;
  int last_;  // behind the batch there are none
};

// Rows of a pool of pages: a box is a panel of a page, or of as much of it as divides a tile. Its
// rows fill whole periods of the swizzle, so that a tile lies in shared memory as any other. Each
// lane looks up a page of a set of neighbouring tiles, a set ahead, and the first one issues all
// copies: a table is in memory, and tile by tile the ring would fill at the pace of its answers.
template <int kKeys>
class PagedKeys {
 public:
  static constexpr bool kByWarp = true;

  template <class Plan>
  __device__ __forceinline__ PagedKeys(const ForwardArgs& args, const Plan& plan,
                                       const int32_t (&)[2])
      : pages_(args.pages),
        table_(args.pages.in.table +
               int64_t{plan.batches[0].number} * (args.problem.kv_len >> args.pages.in.log2_size)),
        kv_head_(plan.kv_head),
        seen_(plan.batches[0].seen),
        boxes_(kKeys >> args.pages.log2_box) {
    while (boxes_ << (log2_tiles_ + 1) <= 32) ++log2_tiles_;
    const int lane = threadIdx.x % 32;
    own_tile_ = lane / boxes_;
    own_key_ = own_tile_ * kKeys + ((lane - own_tile_ * boxes_) << pages_.log2_box);
    set_ = (plan.tiles.end - 1) >> log2_tiles_;
    page_ = look_up(set_);
    next_page_ = look_up(set_ - 1);
  }

  template <int kPanels, int kPanelBytes>
  __device__ __forceinline__ void load(const TensorMap& map, const uint8_t* target, Barrier& landed,
                                       int first_key) {
    static_assert(kPanelBytes == kKeys * 128);
    const bool first_lane = threadIdx.x % 32 == 0;
    if (first_lane) landed.arrive_expecting(kPanels * kPanelBytes);
    const int tile = first_key / kKeys;
    move_to(tile >> log2_tiles_);
    const int box_bytes = 128 << pages_.log2_box;
    const int own_row = row_of_page();
    const int first_box = (tile & ((1 << log2_tiles_) - 1)) * boxes_;
#pragma unroll 1
    for (int box = 0; box < boxes_; ++box) {
      const int row = __shfl_sync(~0u, own_row, first_box + box);
      if (!first_lane) continue;
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        tensor_load(shared_address(target + panel * kPanelBytes + box * box_bytes), &map,
                    landed.address(), panel * 64, row, kv_head_, 0, 0);
      }
    }
  }

 private:
  // The first key of the lane's box, and whether some key of the box is seen. Before the first set
  // the number wraps around, and is behind whatever is seen.
  __device__ __forceinline__ uint32_t key_in(int set) const {
    return static_cast<uint32_t>(set) * (kKeys << log2_tiles_) + own_key_;
  }
  __device__ __forceinline__ bool is_seen(int set) const {
    return own_tile_ >> log2_tiles_ == 0 && key_in(set) < static_cast<uint32_t>(seen_.end);
  }
  // As the table has it. Nothing here waits for the number.
  __device__ __forceinline__ int look_up(int set) const {
    return is_seen(set) ? __ldg(table_ + (key_in(set) >> pages_.in.log2_size)) : 0;
  }
  __device__ __forceinline__ void move_to(int set) {
    if (set == set_) return;
    page_ = set == set_ - 1 ? next_page_ : look_up(set);  // tiles may be skipped
    next_page_ = look_up(set - 1);
    set_ = set;
  }
  // The row of the pool where the box that was looked up begins; if no key of it is seen, one
  // behind the pool, where TMA reads zeros.
  __device__ __forceinline__ int row_of_page() const {
    const int existing = min(max(page_, 0), pages_.in.count - 1);
    const int page = is_seen(set_) ? existing : pages_.in.count;
    return (page << pages_.in.log2_size) + (key_in(set_) & (pages_.in.size() - 1));
  }

  const PageBoxes& pages_;
  const int32_t* table_;
  int kv_head_;
  Interval seen_;
  int boxes_;           // of a tile
  int log2_tiles_ = 0;  // of a set: as many as there are lanes for
  int own_tile_;        // of a set: where the lane's box lies, if that is part of it
  int own_key_;
  int set_;
  int page_;
  int next_page_;  // of the set before
};

}  // namespace jaxflash::sm90
