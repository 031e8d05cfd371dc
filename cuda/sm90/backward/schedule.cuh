// Which keys a block of the backward kernel works on, in which order, and how its roles learn of
// it.
#pragma once

#include "common/divisor.h"
#include "common/mask.cuh"
#include "common/walked_mask.cuh"
#include "sm90/hardware/pipeline.cuh"

namespace jaxflash::sm90 {

struct KeyTile {
  int batch;
  int kv_head;
  int group;  // query heads of the kv head
  int index;  // along the keys
};

class KeyTileOrder {
 public:
  uint32_t key_tiles;  // of one kv head
  uint32_t heads;      // kv heads of all batch elements, head fastest; heads * key_tiles < 2^30
  // Heads are taken in sections of this many, whose float32 dq stays in the L2. The tiles of a
  // section go from the first to the last or the other way round, all of its heads in step.
  uint32_t section_heads;
  bool descending;

  KeyTileOrder() = default;
  // `elements`: batch elements that follow one another and have their tiles of the same keys, a
  // group, one after the other. Heads of a section are then one element's.
  KeyTileOrder(const Problem& problem, uint32_t key_tiles, uint32_t heads, uint32_t section_heads,
               bool descending, uint32_t elements = 1)
      : key_tiles(key_tiles),
        heads(heads),
        section_heads(section_heads),
        descending(descending),
        group_(problem.q_heads / problem.kv_heads),
        by_kv_heads_(problem.kv_heads),
        by_section_tiles_(section_heads * key_tiles),
        by_section_heads_(section_heads),
        by_last_heads_((heads / elements - 1) % section_heads + 1),
        elements_(elements),
        by_elements_(elements) {}

  __device__ __forceinline__ uint32_t tiles() const { return key_tiles * heads; }

  __device__ __forceinline__ KeyTile at(uint32_t position) const { return at(position, heads); }

  // Where `elements` may be more than one.
  __device__ __forceinline__ uint32_t group(uint32_t position) const {
    return by_elements_.quotient(position);
  }
  __device__ __forceinline__ int element(uint32_t position) const {
    return static_cast<int>(by_elements_.remainder(position));
  }
  __device__ __forceinline__ KeyTile at_element(uint32_t position) const {
    KeyTile tile = at(group(position), by_elements_.quotient(heads));
    tile.batch = tile.batch * elements_ + element(position);
    return tile;
  }
  // The place of a tile among those of its head, and the tile at a place.
  __device__ __forceinline__ int rank(int tile) const {
    return descending ? static_cast<int>(key_tiles) - 1 - tile : tile;
  }

 private:
  // At a position among the tiles of `heads`.
  __device__ __forceinline__ KeyTile at(uint32_t position, uint32_t heads) const {
    const uint32_t first_head = by_section_tiles_.quotient(position) * section_heads;
    const Divisor& by_heads =
        first_head + section_heads <= heads ? by_section_heads_ : by_last_heads_;
    const uint32_t rest = position - first_head * key_tiles;
    const uint32_t head = first_head + by_heads.remainder(rest);
    return {static_cast<int>(by_kv_heads_.quotient(head)),
            static_cast<int>(by_kv_heads_.remainder(head)), group_, rank(by_heads.quotient(rest))};
  }

  int32_t group_;
  Divisor by_kv_heads_;
  Divisor by_section_tiles_;
  Divisor by_section_heads_;
  Divisor by_last_heads_;  // of the last section
  int32_t elements_;
  Divisor by_elements_;
};

// Of the rows of a step, where masks walk.
struct StagedRows {
  int next_row;   // of the step after it
  uint16_t some;  // a bit for each 64 of the keys: whether the rows see some of them,
  uint16_t all;   // and whether all rows see all

  // Of some keys. `seeing` are rows outside of which none sees them, `common` ones that all see,
  // and `open` ones that do but for what is in gaps: of the tile from `row` on more may be known.
  template <int kRows>
  __device__ __forceinline__ void refine(int part, int row, Interval open, Interval& seeing,
                                         Interval& common) const {
    if ((some >> part & 1) == 0) seeing = {0, 0};
    if ((all >> part & 1) != 0 && open.begin <= row && row + kRows <= open.end) {
      common = {row, row + kRows};
    }
  }
};

// A tile of kKeys keys of one kv head and the query rows that see it: tiles of kRows rows, for one
// head of the group after the other, so that dk and dv are complete at the end.
template <int kRows, int kKeys, class Mask>
struct KeyBlock {
  __device__ __forceinline__ KeyBlock(const Problem& problem, const KeyTile& tile)
      : KeyBlock(Mask(problem, tile.batch), tile) {}
  __device__ __forceinline__ KeyBlock(const Mask& mask, const KeyTile& tile)
      : index(tile.index),
        first_key(tile.index * kKeys),
        batch(tile.batch),
        kv_head(tile.kv_head),
        group(tile.group),
        mask(mask),
        rows(mask.rows({first_key, first_key + kKeys})),
        first_row(rows.begin / kRows * kRows) {
    if constexpr (Mask::kHasGaps) {
      const Interval unseen = mask.gap_of_rows({first_key, first_key + kKeys});
      gap = {(unseen.begin + kRows - 1) / kRows * kRows, unseen.end / kRows * kRows};
      const Interval walked = outside({first_row, rows.end}, gap);
      first_row = walked.begin;
      rows = {max(rows.begin, first_row), walked.end};
      // Strictly inside, or empty.
      if (gap.begin <= first_row || gap.end >= rows.end || gap.end <= gap.begin) gap = {0, 0};
    }
    if constexpr (Mask::kWalks) {
      if (first_row < rows.end) first_row = next_visited(first_row);
      rows.begin = max(rows.begin, first_row);
    }
    if (rows.end <= rows.begin) rows.end = first_row;
  }

  __device__ __forceinline__ int first_head() const { return kv_head * group; }
  __device__ __forceinline__ int steps() const {
    if constexpr (Mask::kWalks) {
      if (rows.end <= first_row) return 0;
      constexpr int kBlocks = kRows / kRangeBlock;
      const Interval tiles{first_row / kRows, (rows.end + kRows - 1) / kRows};
      const Interval blocks{tiles.begin * kBlocks, tiles.end * kBlocks};
      return seeing().template groups_seen<kBlocks>(blocks) * group;
    } else {
      int walked = rows.end - first_row;
      if constexpr (Mask::kHasGaps) walked -= gap.end - gap.begin;
      return (walked + kRows - 1) / kRows * group;
    }
  }
  // On to the next tile of rows, or to the next head where the rows start over.
  __device__ __forceinline__ void advance(int& row, int& head) const {
    row += kRows;
    if constexpr (Mask::kHasGaps) {
      if (row == gap.begin) row = gap.end;
    }
    if constexpr (Mask::kWalks) row = next_visited(row);
    if (row < rows.end) return;
    row = first_row;
    ++head;
  }
  // The same for consumers, to whom the loader leaves what follows where masks walk.
  __device__ __forceinline__ void advance(const StagedRows& staged, int& row, int& head) const {
    if constexpr (Mask::kWalks) {
      if (staged.next_row <= row) ++head;
      row = staged.next_row;
    } else {
      advance(row, head);
    }
  }
  // What it leaves: all lanes of its warp.
  __device__ __forceinline__ StagedRows staged(int row, int head) const {
    StagedRows staged{};
    if constexpr (Mask::kWalks) {
      staged.next_row = row;
      advance(staged.next_row, head);
      const int part = threadIdx.x % 32;
      const int key_block = first_key / kRangeBlock + part;
      Sight sight{false, false};
      if (part < kKeys / kRangeBlock && key_block * kRangeBlock < mask.kv_len()) {
        sight = mask.template seeing<1>(key_block).sight(
            covering_tiles<kRangeBlock>({row, row + kRows}));
      }
      staged.some = static_cast<uint16_t>(__ballot_sync(~0u, sight.some));
      staged.all = static_cast<uint16_t>(__ballot_sync(~0u, sight.all));
    }
    return staged;
  }

  // The tiles of rows that a block works on, by their first rows.
  struct Visited {
    Interval rows;
    Interval gap;  // between them; with kHasGaps
    int index;     // of the tile of keys

    __device__ __forceinline__ bool holds(const Mask& mask, int row) const {
      if constexpr (Mask::kHasGaps) {
        if (row >= gap.begin && row < gap.end) return false;
      }
      if (row < rows.begin || row >= rows.end) return false;
      if constexpr (Mask::kWalks) {
        const Interval tile = covering_tiles<kRangeBlock>({row, row + kRows});
        return seeing(mask, index).sight(tile).some;
      }
      return true;
    }
  };
  // Those of another tile of the same head.
  __device__ __forceinline__ Visited visited_by(int other_index) const {
    const KeyBlock other(mask, {batch, kv_head, group, other_index});
    return {{other.first_row, other.rows.end}, other.gap, other_index};
  }

  int index;
  int first_key;
  int batch;
  int kv_head;
  int group;  // query heads of the kv head
  Mask mask;
  Interval rows;  // that see some of the keys; rows.end == first_row if there are none
  Interval gap;   // between them, of multiples of kRows; {0, 0} if there is none; with kHasGaps
  int first_row;  // a multiple of kRows

 private:
  // What sees a tile of keys, where masks walk.
  __device__ __forceinline__ static auto seeing(const Mask& mask, int index) {
    constexpr int kBlocks = kKeys / kRangeBlock;
    return mask.template seeing<kBlocks>(index * kBlocks);
  }
  __device__ __forceinline__ auto seeing() const { return seeing(mask, index); }
  // The first tile of rows from `row` on that sees some of the keys; behind all rows if none does.
  __device__ __forceinline__ int next_visited(int row) const {
    return seeing().first_from(row / kRangeBlock) * kRangeBlock / kRows * kRows;
  }
};

// The loader draws positions in the order of tiles and hands them to the other roles of its block.
// The blocks of a cluster work on the same tile: the first one draws for all of them.
template <int kBlocks>
struct TicketBox {
  static constexpr int kSlots = 2;
  uint32_t position[kSlots];
  Barrier full[kSlots];
  Barrier empty[kSlots];  // every reading warp has its copy; in a cluster, the first block's counts

  // `readers` of a block, beside its loader.
  __device__ __forceinline__ void init(int readers) {
    for (int slot = 0; slot < kSlots; ++slot) {
      full[slot].init(1);
      empty[slot].init(kBlocks * readers + kBlocks - 1);  // the loaders that do not draw read
    }
  }

  // One thread of the block that draws.
  __device__ __forceinline__ void fill(int slot, uint32_t drawn) {
    position[slot] = drawn;
    full[slot].arrive();
    for (int rank = 1; rank < kBlocks; ++rank) {
      const uint32_t barrier = remote_address(full[slot].address(), rank);
      mbarrier_arrive_expect_tx_remote(barrier, sizeof(drawn));
      store_remote(remote_address(shared_address(&position[slot]), rank), drawn, barrier);
    }
  }
};

// A reading warp's place in the box.
template <int kBlocks>
class TicketReader {
  static constexpr int kSlots = TicketBox<kBlocks>::kSlots;

 public:
  __device__ __forceinline__ uint32_t next(TicketBox<kBlocks>& box) {
    const uint32_t slot = count_ % kSlots;
    box.full[slot].wait(count_ / kSlots % 2);
    const uint32_t position = box.position[slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if constexpr (kBlocks == 1) {
        box.empty[slot].arrive();
      } else {
        box.empty[slot].arrive_remote(0);
      }
    }
    ++count_;
    return __shfl_sync(~0u, position, 0);
  }

  // Of the barriers that complete once a tile, for the tile of the last ticket.
  __device__ __forceinline__ uint32_t parity() const { return (count_ - 1) % 2; }

 protected:
  uint32_t count_ = 0;
};

// The loader's. It draws no earlier than it needs a tile: a ticket that waits in a block that is
// still busy unbalances the blocks, and stalls those that wait for its adds (24 ms instead of 5 for
// ordered adds at S = 16384). The loader is as many steps ahead as there are buffers, which hides
// the way to the counter. A block only ever waits for tiles of earlier tickets, and those belong to
// blocks that have already started. Without a counter the positions are dealt out in rounds.
template <int kBlocks>
class TicketDrawer : TicketReader<kBlocks> {
  using Reader = TicketReader<kBlocks>;  // where another block draws
  using Reader::count_;
  static constexpr int kSlots = TicketBox<kBlocks>::kSlots;

 public:
  // All lanes of the warp.
  __device__ __forceinline__ uint32_t next(TicketBox<kBlocks>& box, uint32_t* counter) {
    if (kBlocks > 1 && cluster_rank() != 0) return Reader::next(box);
    const uint32_t slot = count_ % kSlots;
    box.empty[slot].wait(count_ / kSlots % 2 ^ 1);
    uint32_t position = blockIdx.x / kBlocks + count_ * (gridDim.x / kBlocks);
    if (counter != nullptr) {
      if (threadIdx.x % 32 == 0) position = atomicAdd(counter, 1u);
      position = __shfl_sync(~0u, position, 0);
    }
    if (threadIdx.x % 32 == 0) box.fill(slot, position);
    __syncwarp();
    ++count_;
    return position;
  }
};

}  // namespace jaxflash::sm90
