// The forward kernel's arguments, and what it lays out in shared memory.
#pragma once

#include "common/divisor.h"
#include "common/workspace.h"
#include "problem.h"
#include "sm90/forward/scheduler.cuh"
#include "sm90/hardware/pipeline.cuh"
#include "sm90/hardware/ptx.cuh"
#include "sm90/tile_config.h"

namespace jaxflash::sm90 {

// Hardware barriers of the forward and the tangent kernel; 0 is __syncthreads.
enum ForwardBarrier : int {
  kFirstWarpGroup = 1,  // one for each consumer warpgroup: its four warps meet
  kFirstTurn = 5,       // one for each consumer warpgroup: it may issue its products
};

// What blocks that share keys are told beside the order of tiles.
struct KeySharing {
  int32_t slices;  // see KeyShares
  int32_t team;
  int32_t rows;  // of a part
  float* out;    // parts of the output (slots, rows, value head size)
  float* lse;    // (slots, rows)
};

// A pool of pages, as boxes of TMA.
struct PageBoxes {
  Pages in;
  int32_t log2_box;  // keys of a box: a page's, or as many as divide a tile
};

struct ForwardArgs {
  TensorMap q;    // boxes of a unit x 64 columns
  TensorMap k;    // boxes of kKeys x 64, or of PageBoxes
  TensorMap v;    // likewise
  TensorMap out;  // boxes of a unit x 64 columns
  // What an index along each batch axis of the maps is multiplied with: 0 broadcasts.
  int32_t q_batch_step[2];
  int32_t k_batch_step[2];
  int32_t v_batch_step[2];
  UnitShape unit;
  int32_t group;     // query heads of a kv head
  Divisor by_units;  // of one position
  Divisor by_kv_heads;
  Divisor by_inner_batch;  // extent of the fastest batch axis of the maps
  TileOrder order;
  Problem problem;
  float* lse;
  uint16_t* out_data;  // for direct stores; strides in elements, batch axes as in the maps
  int64_t out_batch_stride[2];
  int64_t out_seq_stride;
  int64_t out_head_stride;
  float scale_log2;
  uint32_t* drawn;     // where ForwardTraits::kDraws
  KeySharing sharing;  // where Tile::kShares
  Captures captures;   // of a score program; plain kernels do not look
  PageBoxes pages;     // of PagedKeys
  TensorMap starts;    // where Tile::kLoadsStarts: boxes of 64 keys x 64 rows, see StartSource
};

// The rows along the sequence that tile `index` of a kv head covers.
template <int kUnits>
__device__ __forceinline__ Interval tile_rows(const ForwardArgs& args, int index) {
  const int first_unit = index * kUnits;
  const auto position_of = [&](int unit) {
    return static_cast<int>(args.by_units.quotient(unit) << args.unit.log2_positions);
  };
  return {position_of(first_unit), position_of(first_unit + kUnits - 1) + args.unit.positions()};
}

// The query tiles of a call as KeyShares sees them.
template <class Tile, class Mask>
class QuerySlices {
 public:
  static constexpr int kKeys = Tile::kKeys;

  __device__ __forceinline__ explicit QuerySlices(const ForwardArgs& args) : args_(args) {}
  __device__ __forceinline__ int count() const { return args_.sharing.slices; }
  __device__ __forceinline__ int kv_heads() const { return args_.problem.kv_heads; }
  __device__ __forceinline__ int team() const { return args_.sharing.team; }
  __device__ __forceinline__ int batch(int slice) const {
    return args_.order.by_head_tiles.quotient(slice);
  }
  __device__ __forceinline__ int index(int slice) const {
    return args_.order.by_head_tiles.remainder(slice);
  }
  __device__ __forceinline__ Interval tiles(int slice) const {
    const Mask mask(args_.problem, batch(slice));
    return covering_tiles<kKeys>(mask.keys(tile_rows<Tile::kUnits>(args_, index(slice))));
  }

 private:
  const ForwardArgs& args_;
};

// Where a tile's K and V come from, see key_source.cuh.
template <int kKeys, int kBatches = 1>
class ContiguousKeys;
template <int kKeys>
class PagedKeys;

// Of each unit, what the products of a tile of keys start from: in each stage, or of each tile.
template <int kStages, int kTiles, int kUnits, int kBytes>
struct StartBuffers {
  alignas(1024) uint8_t starts[kTiles][kUnits][kBytes];
  Counter starts_read;  // once for each tile of query rows and consumer warp
};
template <int kStages, int kUnits, int kBytes>
struct StartBuffers<kStages, 0, kUnits, kBytes> {
  alignas(1024) uint8_t starts[kStages][kUnits][kBytes];
};
template <int kUnits, int kBytes>
struct StartBuffers<0, 0, kUnits, kBytes> {};

// Further columns of K, of each stage, and of Q: of eight rows, since all are the same.
template <int kStages, int kBytes>
struct KeyTermBuffers {
  alignas(1024) uint8_t terms[kStages][kBytes];
  alignas(256) uint8_t ones[8 * 32];
};
template <int kBytes>
struct KeyTermBuffers<0, kBytes> {};

// Of the tile of keys in a buffer, where masks walk: which one is next, and what the rows see of
// both.
struct StagedTile {
  int next;
  TileSights next_sights;
  TileSights sights;
};

// Whether blocks may draw their tiles: those that hold something deal them out for that.
template <class Tile>
inline constexpr bool draws_tiles = !Tile::kShares && Tile::kHeldTiles == 0;

template <class Tile_, Math kMath_, class Mask_,
          class Keys_ = ContiguousKeys<Tile_::kKeys, Tile_::kBatches>>
struct ForwardTraits {
  using Tile = Tile_;
  using Mask = Mask_;
  using Keys = Keys_;
  static constexpr Math kMath = kMath_;

  static constexpr int kWarpGroups = Tile::kWarpGroups;
  static constexpr int kBatches = Tile::kBatches;
  static constexpr int kUnits = Tile::kUnits;
  static_assert(kWarpGroups == kBatches * kUnits);
  static constexpr int kThreads = 128 * (kWarpGroups + 1);
  static_assert(kWarpGroups >= 1 && kWarpGroups <= 4, "hardware barriers");
  // Registers of a thread: a block only redistributes what it is launched with, eight at a time,
  // and the producers spill below 32.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kPooledRegisters = kLaunchRegisters * (kWarpGroups + 1);
  static constexpr int kLeastProducerRegisters = Tile::kShares ? 56 : 32;
  static constexpr int kConsumerRegisters =
      (kPooledRegisters - kLeastProducerRegisters) / kWarpGroups / 8 * 8;
  static constexpr int kProducerRegisters = kPooledRegisters - kWarpGroups * kConsumerRegisters;
  static_assert(kLaunchRegisters >= kProducerRegisters && kProducerRegisters % 8 == 0);
  // One consumer warpgroup has as many as a thread can name from the start.
  static constexpr bool kRedistributes = kWarpGroups > 1;

  // An operand lies in panels 64 elements (128 bytes) wide, or 32, each swizzled.
  static constexpr int kPanelRowBytes = 2 * Tile::kPanelColumns;
  static_assert(Tile::kPanelColumns == 64 || Tile::kHeadDim <= 32, "one of the narrow panels");
  static constexpr int kPanels = (Tile::kHeadDim + 63) / 64;
  static constexpr int kValuePanels = (Tile::kValueDim + 63) / 64;
  static constexpr int kQPanelBytes = 64 * kPanelRowBytes;
  static constexpr int kKeyPanelBytes = Tile::kKeys * kPanelRowBytes;
  static constexpr int kQBytes = kPanels * kQPanelBytes;  // of one warpgroup
  static constexpr int kKBytes = kPanels * kKeyPanelBytes;
  static constexpr int kVBytes = kValuePanels * kKeyPanelBytes;
  // Where a 16-byte piece of a panel's row lies in it.
  template <int kRowBytes>
  __device__ __forceinline__ static int swizzled(int row, int piece) {
    return kRowBytes == 128 ? piece ^ row % 8 : piece ^ row / 2 % 4;
  }

  // What products start from, likewise: 64 rows of a unit, 64 keys of 16 bits wide.
  static constexpr bool kLoadsStarts = Tile::kLoadsStarts;
  static constexpr int kStartPanels = Tile::kKeys / 64;
  static constexpr int kStartRowBytes = 128;
  static constexpr int kStartPanelBytes = 64 * kStartRowBytes;
  static constexpr int kStartBytes = kStartPanels * kStartPanelBytes;
  static_assert(!kLoadsStarts || Tile::kKeys % 64 == 0, "whole panels");
  // They stay in shared memory for as long as tiles of query rows start from the same.
  static constexpr bool kHoldsStarts = Tile::kHeldTiles > 0;
  static_assert(!kHoldsStarts || (kLoadsStarts && Tile::kHeldTiles <= 32), "a bit each");
  __device__ __forceinline__ static int start_buffer(int stage, int tile) {
    return kHoldsStarts ? tile : stage;
  }

  // What is added for each key, in a step of 16 columns: rows of 32 bytes, swizzled.
  static constexpr bool kKeyTerms = Tile::kKeyTerms;
  static constexpr int kTermRowBytes = 32;
  static constexpr int kTermBytes = Tile::kKeys * kTermRowBytes;
  static_assert(!kKeyTerms || (!kLoadsStarts && !Tile::kShares));

  static_assert(Tile::kKeys % 16 == 0 && Tile::kKeys <= 256);
  static_assert(Tile::kHeadDim % 16 == 0 && Tile::kValueDim % 16 == 0);
  static constexpr bool kDirect = Tile::kOutput == Output::kDirect;
  static_assert(kDirect || Tile::kValueDim <= Tile::kHeadDim, "staged in Q's buffer");
  static_assert(!kDirect || Tile::kValueDim % 32 == 0, "four lanes exchange 32 columns");

  static constexpr bool kShares = Tile::kShares;
  static constexpr bool kDraws = Mask::kVaries && draws_tiles<Tile>;
  static_assert(!kShares || (kDirect && kWarpGroups * 64 <= kMaxSharedRows));
  static_assert(kBatches == 1 || (kHoldsStarts && !kShares && !Mask::kWalks));
  using Slices = QuerySlices<Tile, Mask>;
  using Plan = TilePlan<Tile, Mask>;
  // A tile is planned before Q of the one before it is loaded, which may be two ahead of the
  // consumers: with four slots the planning warp never waits for one. With two, a drawn tile waits
  // for less time in a block that is still busy, but a short one for its plan: a causal mask as an
  // array takes 0.416 ms against 0.436, causal segments, whose tiles are shorter, 0.127 against
  // 0.120.
  using Plans = Mailbox<Plan, kDraws && Mask::kKnowsProgram ? 2 : 4>;
  // Warps that read plans: all but the planning one, and the storing one where it has no work.
  static constexpr int kPlanReaders = 4 * kWarpGroups + (kDirect ? 2 : 3);

  struct SharedMemory
      : StartBuffers<kLoadsStarts ? Tile::kStages : 0, Tile::kHeldTiles, kUnits, kStartBytes>,
        KeyTermBuffers<kKeyTerms ? Tile::kStages : 0, kTermBytes> {
    alignas(1024) uint8_t q[Tile::kQStages][kWarpGroups][kQBytes];
    alignas(1024) uint8_t k[Tile::kStages][kBatches * kKBytes];
    alignas(1024) uint8_t v[Tile::kStages][kBatches * kVBytes];
    Barrier q_full[Tile::kQStages][kWarpGroups];   // Q has landed
    Barrier o_full[Tile::kQStages][kWarpGroups];   // the output lies in Q's place
    Barrier q_empty[Tile::kQStages][kWarpGroups];  // and has been read out; or Q has been used up
    Barrier k_full[Tile::kStages];   // and what products start from, where it is loaded
    Barrier k_empty[Tile::kStages];  // every consumer warp is through with it
    Barrier v_full[Tile::kStages];
    Barrier v_empty[Tile::kStages];
    Barrier v_landed[Tile::kStages];  // V that the loader edits before it announces it
    Plans plans;
    float pin[kWarpGroups * 128];
    StagedTile staged[Tile::kStages];        // of K
    int32_t visits_of_strides[kRowStrides];  // see RowOrder
  };
  static constexpr int kSharedBytes = sizeof(SharedMemory);
  static_assert(kSharedBytes <= 227 * 1024);
};

}  // namespace jaxflash::sm90
