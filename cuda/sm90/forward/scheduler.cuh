// Which tiles of query rows a block works on, in which order, and what its roles learn of them. One
// warp walks the order, ahead of the others: on the way of a consumer, between two tiles, the index
// of the next took longer than the epilogue.
#pragma once

#include "common/dependency.cuh"
#include "common/divisor.h"
#include "common/integers.h"
#include "common/mask.cuh"
#include "common/walked_mask.cuh"

namespace jaxflash::sm90 {

// The 64 rows of a consumer warpgroup: `positions` of each of `heads` query heads that share a kv
// head, so that short queries of grouped heads fill them. Row r is position r % positions of head
// r / positions; rows beyond the last head go unused.
struct UnitShape {
  int32_t log2_positions;
  int32_t heads;  // a divisor of the group

  __device__ __forceinline__ int positions() const { return 1 << log2_positions; }
  __device__ __forceinline__ int rows() const { return heads << log2_positions; }
  __device__ __forceinline__ int position(int row) const { return row & (positions() - 1); }
  __device__ __forceinline__ int head(int row) const { return row >> log2_positions; }
};

struct QueryTile {
  int head;   // flat over batch and kv heads
  int index;  // among those of the head
};

// A kv head's units go by position, those of one position by head; a tile takes as many units in a
// row as a block has consumer warpgroups. They see about the same keys, and share them.
struct TileOrder {
  uint32_t head_tiles;  // tiles of one kv head
  uint32_t heads;       // kv heads of all batch elements, head fastest; heads * head_tiles < 2^30
  uint32_t blocks;      // of the grid
  // 0: all tiles cost about the same; the tiles of a head follow one another and share its keys in
  // the L2. Otherwise heads are taken in sections of this many, whose keys and values stay in the
  // L2, and the tiles of a section from the longest to the shortest.
  uint32_t section_heads;
  bool last_is_longest;
  // Of a score program whose products start from something: batch elements go fastest, not heads.
  bool batch_fastest;
  // Of the first order: by how many blocks each round is turned against the one before, or a block
  // might have tiles of the same batch elements, and so of the same lengths, in all of them.
  uint32_t turn;

  Divisor by_blocks;
  Divisor by_head_tiles;
  Divisor by_section_tiles;
  Divisor by_section_heads;
  Divisor by_last_heads;  // what is left for the last section, if it is not full

  __device__ __forceinline__ uint32_t tiles() const { return heads * head_tiles; }
  __device__ __forceinline__ QueryTile at(uint32_t position) const {
    if (section_heads == 0) return in_turn(position);
    const uint32_t first_head = by_section_tiles.quotient(position) * section_heads;
    return in_section(first_head, position - first_head * head_tiles);
  }
  // Of the first order.
  __device__ __forceinline__ QueryTile in_turn(uint32_t position) const {
    return {static_cast<int>(by_head_tiles.quotient(position)),
            static_cast<int>(by_head_tiles.remainder(position))};
  }
  // Of the other one, inside of a section.
  __device__ __forceinline__ QueryTile in_section(uint32_t first_head, uint32_t position) const {
    const bool last = heads - first_head < section_heads;
    const Divisor& by_heads = last ? by_last_heads : by_section_heads;
    const uint32_t rank = by_heads.quotient(position);
    return {static_cast<int>(first_head + by_heads.remainder(position)),
            static_cast<int>(last_is_longest ? head_tiles - 1 - rank : rank)};
  }
};

// Blocks draw tiles in their order, one after the other: of masks that are known when the kernel
// runs, nothing else says how long a tile takes. The first ones are dealt out.
class DrawnTiles {
 public:
  // All lanes of a warp. `drawn` counts those that have been drawn so far.
  __device__ __forceinline__ DrawnTiles(const TileOrder& order, uint32_t* drawn)
      : order_(order), drawn_(drawn), position_(blockIdx.x) {
    wait_for_previous_kernel();  // which clears it, and is all that has not ended before
  }

  __device__ __forceinline__ bool done() const { return position_ >= order_.tiles(); }
  __device__ __forceinline__ QueryTile tile() const { return order_.at(position_); }
  __device__ __forceinline__ void advance() {
    if (threadIdx.x % 32 == 0) position_ = order_.blocks + atomicAdd(drawn_, 1u);
    position_ = __shfl_sync(~0u, position_, 0);
  }

 private:
  const TileOrder& order_;
  uint32_t* drawn_;
  uint32_t position_;
};

// Tiles of which about that is known: they are dealt out in rounds.
class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const TileOrder& order) : order_(order) { settle(); }

  __device__ __forceinline__ bool done() const { return done_; }
  __device__ __forceinline__ const QueryTile& tile() const { return tile_; }
  __device__ __forceinline__ void advance() {
    ++round_;
    settle();
  }

 private:
  // Finds the tile of the current round, moving on to later rounds and sections as needed.
  __device__ __forceinline__ void settle() {
    if (order_.section_heads == 0) {
      const uint32_t lane = order_.by_blocks.remainder(blockIdx.x + round_ * order_.turn);
      const uint32_t position = round_ * order_.blocks + lane;
      done_ = position >= order_.tiles();
      tile_ = order_.in_turn(position);
      return;
    }
    for (;;) {
      const uint32_t first_head = section_ * order_.section_heads;
      done_ = first_head >= order_.heads;
      if (done_) return;
      const bool last = order_.heads - first_head < order_.section_heads;
      const uint32_t heads = last ? order_.heads - first_head : order_.section_heads;
      const uint32_t tiles = heads * order_.head_tiles;
      if (round_ * order_.blocks >= tiles) {
        round_ = 0;
        ++section_;
        continue;
      }
      // Every other round runs backwards, so that a block with a long tile gets a short one next;
      // in odd sections it is the even rounds. The last round of a section is not full: turning by
      // its size from section to section lets every block sit out in its turn.
      const uint32_t lane = order_.by_blocks.remainder(blockIdx.x + first_head * order_.head_tiles);
      const bool forwards = (round_ + section_) % 2 == 0;
      const uint32_t position =
          round_ * order_.blocks + (forwards ? lane : order_.blocks - 1 - lane);
      if (position < tiles) {
        tile_ = order_.in_section(first_head, position);
        return;
      }
      ++round_;
    }
  }

  const TileOrder& order_;
  uint32_t round_ = 0;
  uint32_t section_ = 0;
  bool done_;
  QueryTile tile_;
};

// The key tiles of all query tiles, shared equally among the blocks: each takes a run of them, in
// the order of the query tiles. A query tile whose run ends inside it is left in parts, which
// merge_kernel puts together; both find the boundaries here. Made by a whole warp.
//
// Query tiles come in slices: those of one batch element and index, one for each kv head, which see
// the same keys. `Slices::tiles(slice)` are their key tiles, and kKeys how many keys a tile has.
//
// `Slices::team()` neighbouring blocks are a team and take the same run, each of another head: keys
// of neighbouring heads lie side by side, and memory delivers them faster if they are read at the
// same time, by 6 % at head size 64. A run counts key tiles of one member.
template <class Slices>
class KeyShares {
 public:
  // What a query tile costs beside its keys, in key tiles; the first ones of its run.
  static constexpr int kTileCost = 1;
  // Blocks with less than this have nothing left to gain.
  static constexpr int kLeastShare = 256 / Slices::kKeys + kTileCost;

  __device__ __forceinline__ KeyShares(const Slices& slices, int max_blocks)
      : slices_(slices), tiles_of_slice_(slices.kv_heads() / slices.team()) {
    // Each lane sums up as many neighbouring slices.
    chunk_ = (slices.count() + 31) / 32;
    const int first = chunk_ * (threadIdx.x % 32);
    int64_t sum = 0;
#pragma unroll 4
    for (int i = 0; i < chunk_; ++i) {
      if (first + i < slices.count()) sum += size(slices.tiles(first + i));
    }
    const int64_t through = sum_of_lanes_to(sum);
    before_ = through - sum;
    total_ = __shfl_sync(~0u, through, 31);
    const int max_runs = max_blocks / slices.team();
    runs_ = max(static_cast<int>(min(static_cast<int64_t>(max_runs), total_ / kLeastShare)), 1);
    share_ = total_ / runs_;
    longer_ = static_cast<int>(total_ - share_ * runs_);
  }

  __device__ __forceinline__ int runs() const { return runs_; }
  // Where a run begins; begin(runs()) is the end of all.
  __device__ __forceinline__ int64_t begin(int run) const {
    return run * share_ + min(run, longer_);
  }

  // A member's query tile that a position lies in.
  struct Place {
    int slice;
    int kv_head;
    Interval tiles;      // that the query tile sees
    int64_t tile_begin;  // position of its first

    __device__ __forceinline__ int count() const { return tiles.end - tiles.begin; }
    __device__ __forceinline__ int length() const { return count() + kTileCost; }
  };

  // Of 0 <= position < begin(runs()), and 0 <= member < team().
  __device__ __forceinline__ Place place(int64_t position, int member) const {
    const int lane = threadIdx.x % 32;
    const int owner = 31 - __clz(__ballot_sync(~0u, before_ <= position));
    int64_t begin = __shfl_sync(~0u, before_, owner);
    for (int first = owner * chunk_;; first += 32) {
      const bool exists = first + lane < slices_.count();
      const Interval tiles = exists ? slices_.tiles(first + lane) : Interval{0, 0};
      const int64_t own = exists ? size(tiles) : 0;
      const int64_t end = begin + sum_of_lanes_to(own);
      const uint32_t beyond = __ballot_sync(~0u, position < end);
      if (beyond == 0) {
        begin = __shfl_sync(~0u, end, 31);
        continue;
      }
      const int found = __ffs(beyond) - 1;
      Place place;
      place.slice = first + found;
      place.tiles = {__shfl_sync(~0u, tiles.begin, found), __shfl_sync(~0u, tiles.end, found)};
      begin = __shfl_sync(~0u, end - own, found);
      const int tiles_before = static_cast<int>((position - begin) / place.length());
      place.kv_head = tiles_before * slices_.team() + member;
      place.tile_begin = begin + static_cast<int64_t>(tiles_before) * place.length();
      return place;
    }
  }

  // To the query tile after this one, if there is one.
  __device__ __forceinline__ void next(Place& place) const {
    place.tile_begin += place.length();
    place.kv_head += slices_.team();
    if (place.kv_head < slices_.kv_heads()) return;
    place.kv_head -= slices_.kv_heads();
    if (++place.slice < slices_.count()) place.tiles = slices_.tiles(place.slice);
  }

 private:
  __device__ __forceinline__ int64_t size(Interval tiles) const {
    return static_cast<int64_t>(max(tiles.end - tiles.begin, 0) + kTileCost) * tiles_of_slice_;
  }
  __device__ __forceinline__ static int64_t sum_of_lanes_to(int64_t value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t lower = __shfl_up_sync(~0u, value, distance);
      if (threadIdx.x % 32 >= distance) value += lower;
    }
    return value;
  }

  Slices slices_;
  int tiles_of_slice_;  // of queries, of one member
  int chunk_;           // slices of a lane
  int64_t before_;      // sizes of the slices before the lane's
  int64_t total_;
  int runs_;
  int64_t share_;
  int longer_;  // runs with one more
};

// A query tile, or a part of it.
struct SharedQueryTile : QueryTile {
  Interval tiles;  // of keys
  int slot;        // of the part in the workspace; -1 for a whole tile
};

// The run of the calling block; as TileWalk.
template <class Slices>
class ShareWalk {
 public:
  __device__ __forceinline__ ShareWalk(const Slices& slices, int max_blocks)
      : slices_(slices), shares_(slices, max_blocks) {
    position_ = end_ = 0;
    const int run = blockIdx.x / slices.team();
    if (run < shares_.runs()) {
      position_ = shares_.begin(run);
      end_ = shares_.begin(run + 1);
      place_ = shares_.place(position_, blockIdx.x % slices.team());
    }
    advance();
  }

  __device__ __forceinline__ bool done() const { return done_; }
  __device__ __forceinline__ const SharedQueryTile& tile() const { return tile_; }
  __device__ __forceinline__ void advance() {
    constexpr int kTileCost = KeyShares<Slices>::kTileCost;
    for (;;) {
      done_ = position_ >= end_;
      if (done_) return;
      const int count = place_.count();
      const int length = place_.length();
      const int first = static_cast<int>(position_ - place_.tile_begin);
      const int last =
          static_cast<int>(min(static_cast<int64_t>(length), end_ - place_.tile_begin));
      const Interval part = {max(first - kTileCost, 0), max(last - kTileCost, 0)};
      tile_.head = slices_.batch(place_.slice) * slices_.kv_heads() + place_.kv_head;
      tile_.index = slices_.index(place_.slice);
      tile_.tiles = {place_.tiles.begin + part.begin, place_.tiles.begin + part.end};
      tile_.slot = part.begin == 0 && part.end == count ? -1 : slot_of(blockIdx.x, first);
      // A tile that sees no key is written by the block that it begins in.
      const bool exists = part.begin < part.end || (count == 0 && first == 0);
      position_ = place_.tile_begin + last;
      if (last == length) shares_.next(place_);
      if (exists) return;
    }
  }

  // Of the part of a block that begins `first` positions after its query tile does.
  __device__ __forceinline__ static int slot_of(int block, int64_t first) {
    return 2 * block + (first > 0 ? 0 : 1);
  }

 private:
  Slices slices_;
  KeyShares<Slices> shares_;
  int64_t position_;
  int64_t end_;
  typename KeyShares<Slices>::Place place_;
  bool done_;
  SharedQueryTile tile_;
};

// Where the units of a tile leave their part of the output.
template <bool kShares, int kWarpGroups>
struct PartTargets {};
template <int kWarpGroups>
struct PartTargets<true, kWarpGroups> {
  float* part[kWarpGroups];  // of the first row; nullptr: the tile is whole
};

__device__ __forceinline__ Interval intersection(Interval a, Interval b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}

// What covers the intervals of all lanes of a warp, some of which may be empty.
__device__ __forceinline__ Interval hull_of_lanes(Interval own) {
  const bool some = own.begin < own.end;
  const Interval hull{__reduce_min_sync(~0u, some ? own.begin : kMaxLength),
                      __reduce_max_sync(~0u, some ? own.end : 0)};
  return hull.begin < hull.end ? hull : Interval{0, 0};
}

// The tiles of kKeys keys inside an interval of keys, which begins at 0 or later.
template <int kKeys>
__device__ __forceinline__ Interval inner_tiles(Interval keys) {
  return {(keys.begin + kKeys - 1) / kKeys, keys.end / kKeys};
}

// Tiles of keys that are visited, from the last to the first, where masks tell of gaps or not.
template <bool kHasGaps>
struct Visits : Interval {
  Visits() = default;
  __device__ __forceinline__ Visits(Interval tiles, Interval /*gap*/) : Interval(tiles) {}
  __device__ __forceinline__ Interval of(Interval part) const { return part; }
  __device__ __forceinline__ int before(int tile) const { return tile - 1; }
};
template <>
struct Visits<true> : Interval {
  Interval gap;  // of tiles; may lie outside, or be empty

  Visits() = default;
  __device__ __forceinline__ Visits(Interval tiles, Interval gap)
      : Interval(outside(tiles, gap)), gap(gap) {}
  // What is left of a part, whose ends may lie in the gap.
  __device__ __forceinline__ Interval of(Interval part) const { return outside(part, gap); }
  __device__ __forceinline__ int before(int tile) const {
    --tile;
    return tile < gap.end && tile >= gap.begin ? gap.begin - 1 : tile;
  }
};

// Where a kernel walks, the first and the last tile are visited, and KeyWalk says what lies
// between.
template <class Mask>
using VisitsOf = Conditional<Mask::kWalks, Interval, Visits<Mask::kHasGaps>>;

// The last tile of kKeys keys before another one of which something is seen; -1 if there is none.
template <int kKeys>
__device__ __forceinline__ int visited_before(const SeenBlocks<1>& blocks, int tile) {
  const int end = tile * kKeys;
  const int block = end > 0 ? blocks.last_below((end + kRangeBlock - 1) / kRangeBlock) : -1;
  return block < 0 ? -1 : min(tile - 1, (block * kRangeBlock + kRangeBlock - 1) / kKeys);
}
// What is left of tiles without those at the ends of which nothing is seen.
template <int kKeys>
__device__ __forceinline__ Interval visited(const SeenBlocks<1>& blocks, Interval tiles) {
  if (tiles.begin >= tiles.end) return tiles;
  const int block = blocks.first_from(tiles.begin * kKeys / kRangeBlock);
  return {max(tiles.begin, block * kRangeBlock / kKeys),
          visited_before<kKeys>(blocks, tiles.end) + 1};
}

// Of a unit's rows, which lie in one block where masks walk, the tiles that they visit of those of
// their tile of query rows.
template <int kKeys, class Mask>
__device__ __forceinline__ Interval part_of(const VisitsOf<Mask>& tiles, const Mask& mask,
                                            Interval rows) {
  if constexpr (Mask::kWalks) {
    if (rows.begin >= mask.q_len()) return {0, 0};
    return visited<kKeys>(mask.template seen_by<1>(rows.begin / kRangeBlock),
                          intersection(covering_tiles<kKeys>(mask.keys(rows)), tiles));
  } else {
    return tiles.of(covering_tiles<kKeys>(mask.keys(rows)));
  }
}
// Of keys that cover `tiles` the ones that `rows` visit. Where masks walk, what some units visit
// instead: for a whole warp, each lane with the first row of one, or with kMaxLength.
template <int kKeys, class Mask>
__device__ __forceinline__ VisitsOf<Mask> visits_of(const Mask& mask, Interval rows, Interval tiles,
                                                    int position) {
  if constexpr (Mask::kWalks) {
    return hull_of_lanes(part_of<kKeys>({0, kMaxLength}, mask, {position, position + kRangeBlock}));
  } else {
    return {tiles, inner_tiles<kKeys>(mask.gap_of_keys(rows))};
  }
}

// Of a tile of keys, by units of the rows that visit it.
struct TileSights {
  uint16_t some;  // a bit for each unit that sees some of its keys,
  uint16_t all;   // and for each that sees all of them

  __device__ __forceinline__ Sight of(int unit) const {
    return {(some >> unit & 1) != 0, (all >> unit & 1) != 0};
  }
};

// The way of a whole warp over the tiles of keys that units of rows visit, from the last to the
// first: each lane looks for another unit.
template <class Mask, int kKeys>
class KeyWalk : public Interval {
 public:
  // `position`: of the first row of the lane's unit; kMaxLength: it has none.
  __device__ __forceinline__ KeyWalk(const Mask& mask, Interval tiles, int position)
      : Interval(tiles),
        has_rows_(position < mask.q_len()),
        open_(inner_tiles<kKeys>(mask.open_keys({position, position + kRangeBlock}))),
        blocks_(mask.template seen_by<1>(position / kRangeBlock)) {}

  // The next tile after this one; below the first of them if there is none.
  __device__ __forceinline__ int before(int tile) const {
    return __reduce_max_sync(~0u, has_rows_ ? visited_before<kKeys>(blocks_, tile) : -1);
  }
  __device__ __forceinline__ TileSights sights(int tile) const {
    const Interval keys{tile * kKeys, tile * kKeys + kKeys};
    Sight sight{false, false};
    if (has_rows_) sight = blocks_.sight(covering_tiles<kRangeBlock>(keys));
    sight.all = sight.all && tile >= open_.begin && tile < open_.end;
    return {static_cast<uint16_t>(__ballot_sync(~0u, sight.some)),
            static_cast<uint16_t>(__ballot_sync(~0u, sight.all))};
  }

 private:
  bool has_rows_;
  Interval open_;  // tiles of which all of them see all but for what is in gaps
  SeenBlocks<1> blocks_;
};

// What leads from one tile to the next. Where masks walk, for a whole warp and what its lanes'
// units visit, as in visits_of().
template <int kKeys, class Mask>
__device__ __forceinline__ auto way_over(const VisitsOf<Mask>& tiles, const Mask& mask,
                                         int position) {
  if constexpr (Mask::kWalks) {
    return KeyWalk<Mask, kKeys>(mask, tiles, position);
  } else {
    return tiles;
  }
}

// The order in which a kernel that walks takes blocks of rows. A tile loads the keys that any of
// its kUnits units visits, and blocks some way apart may see more of the same ones than neighbours
// do (checkerboards, strides). Then they go together: a call has one stride, a power of two.
inline constexpr int kRowStrides = 5;  // 1, 2, 4, 8 and 16

template <int kUnits>
class RowOrder {
  static constexpr int kTiles = 1 << (kRowStrides - 1);
  static constexpr int kWindow = kUnits * kTiles;
  // Of what a stride saves, or else neighbours go together: beside a band they see about as much.
  static constexpr float kLeastGain = 0.05f;

 public:
  // How many blocks of keys tiles visit with each stride, in some windows of rows: one for each
  // warp. All threads; `visits` are 0.
  template <class Mask>
  __device__ __forceinline__ static void count(const Problem& problem,
                                               int32_t (&visits)[kRowStrides]) {
    const int windows = (blocks_of(problem.q_len) + kWindow - 1) / kWindow;
    const int64_t all = batch_size(problem) * windows;
    const int64_t warps = min(all, int64_t{blockDim.x / 32});
    const int warp = threadIdx.x / 32;
    if (warp >= warps) return;
    const int64_t sample = all * warp / warps;
    const Mask mask(problem, sample / windows);
    const int begin = static_cast<int>(sample % windows) * kWindow;
    const int end = min(begin + kWindow, blocks_of(problem.q_len));
    const int lane = threadIdx.x % 32;
    int own[kRowStrides] = {};
    for (int word = lane / kTiles; word < block_words_of(problem.kv_len); word += 32 / kTiles) {
#pragma unroll
      for (int log2 = 0; log2 < kRowStrides; ++log2) {
        const Units units = of_tile(lane % kTiles, begin, end, log2);
        if (units.first >= end) continue;
        own[log2] += __popc(mask.template seen_by<kUnits>(units.first, units.stride).shown(word));
      }
    }
#pragma unroll
    for (int log2 = 0; log2 < kRowStrides; ++log2) {
      const int of_warp = __reduce_add_sync(~0u, own[log2]);
      if (lane == 0) atomicAdd(&visits[log2], of_warp);
    }
  }

  // Once they are counted.
  __device__ __forceinline__ RowOrder(const int32_t (&visits)[kRowStrides], int blocks)
      : blocks_(blocks) {
    float least = INFINITY;
#pragma unroll
    for (int log2 = 0; log2 < kRowStrides; ++log2) {
      const auto own = static_cast<float>(visits[log2]);
      if (own >= (1.f - kLeastGain) * least) continue;
      least = own;
      log2_ = log2;
    }
  }

  // The one that is `index`-th of all.
  __device__ __forceinline__ int block(int index) const {
    const Units units = of_tile(index / kUnits, 0, blocks_, log2_);
    return units.first + index % kUnits * units.stride;
  }

 private:
  struct Units {
    int first;
    int stride;
  };

  // kUnits blocks a stride apart, then those behind each; what is left at the end as it lies.
  __device__ __forceinline__ static Units of_tile(int tile, int begin, int end, int log2) {
    const int group = begin + (tile >> log2) * (kUnits << log2);
    if (group + (kUnits << log2) > end) return {begin + tile * kUnits, 1};
    return {group + (tile & ((1 << log2) - 1)), 1 << log2};
  }

  int blocks_;  // of a sequence
  int log2_ = 0;
};

// A tile of query rows as the roles of its block see it. Intervals of tiles count key tiles.
template <class Tile, class Mask>
struct TilePlan : PartTargets<Tile::kShares, Tile::kWarpGroups> {
  // As large as for any mask: the host knows one layout for all of them.
  static constexpr int kMaskBytes = 32;
  static_assert(sizeof(Mask) <= kMaskBytes);

  struct BatchElement {
    int number;
    int inner;  // its coordinates along the batch axes
    int outer;
    bool hides_keys;  // no row sees some keys, which lie between others
    union {
      Mask mask;
      uint8_t mask_bytes[kMaskBytes];
    };
    Interval seen;  // keys that some row of the sequence sees
  };
  struct Unit {
    int position;    // of the first row along the sequence
    int head;        // query head of the first row
    Interval tiles;  // of which some row sees a key; if none, empty at the begin of the block's
    Interval full;   // of which every row sees every key: no element needs a test
    float* lse;      // of the first row; that of a part if it is one
    uint16_t* out;   // of the first row, for direct stores
  };

  bool exists;  // false: the walk is over
  int kv_head;
  BatchElement batches[Tile::kBatches];
  union {
    VisitsOf<Mask> tiles;  // of which some row of the block sees a key
    Visits<true> largest_visits;
  };
  Unit units[Tile::kWarpGroups];

  // Of which batch element a unit is, and which of its units. The compiler does not know that there
  // are no more of them: head size 64 takes 6 % longer where it computes that one is of the first.
  __device__ __forceinline__ static int batch_index(int unit) {
    return Tile::kBatches == 1 ? 0 : unit / Tile::kUnits;
  }
  __device__ __forceinline__ static int index_in_batch(int unit) {
    return Tile::kBatches == 1 ? unit : unit % Tile::kUnits;
  }
  __device__ __forceinline__ const BatchElement& batch_of(int unit) const {
    return batches[batch_index(unit)];
  }
  // As in visits_of().
  __device__ __forceinline__ int position_of_lane() const {
    const int lane = threadIdx.x % 32;
    return lane < Tile::kWarpGroups ? units[lane].position : kMaxLength;
  }
};

}  // namespace jaxflash::sm90
