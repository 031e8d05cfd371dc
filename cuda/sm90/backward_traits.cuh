// The backward kernel's arguments, what it lays out in shared memory, and the order of its adds to
// dq.
#pragma once

#include "common/conditional.h"
#include "common/divisor.h"
#include "common/dq_turn.cuh"
#include "common/workspace.h"
#include "problem.h"
#include "sm90/backward/schedule.cuh"
#include "sm90/hardware/pipeline.cuh"
#include "sm90/hardware/ptx.cuh"
#include "sm90/tile_config.h"

namespace jaxflash::sm90 {

// Hardware barriers of the backward kernel; 0 is __syncthreads.
enum BackwardBarrier : int {
  kConsumers = 1,   // both consumer warpgroups
  kPFull = 2,       // pairs: p has been handed over
  kDsStored = 3,    // pairs: the warps of a warpgroup have stored ds
  kDqComputed = 4,  // pairs: both warpgroups have computed dq
  kDqFull = 5,      // dq lies in shared memory; single blocks: 5, 6, one for each warpgroup
  kDqEmpty = 7,     // and has been read out; single blocks: 7, 8
};

// Where batch elements add up what is stored.
struct BatchSum {
  uint32_t* steps;  // of each tile, those that are complete: batch_sum_workspace_bytes()
  bool cleared;     // so is the sum: the first element adds to zeros
  bool in_cache;    // the L2 has what is added to
};

struct BackwardArgs {
  TensorMap q;     // boxes of kRows x 64 (rows x columns)
  TensorMap k;     // boxes of kKeys x 64
  TensorMap v;     // boxes of kKeys x 64
  TensorMap dout;  // boxes of kRows x 64
  TensorMap dk;    // boxes of kStoredKeys x 64
  TensorMap dv;    // boxes of kStoredKeys x 64
  TensorMap dq;    // boxes of kDqPartRows x kDqPartDims; with direct_dq
  // What an index along each batch axis of the maps is multiplied with: 0 broadcasts.
  int32_t q_batch_step[2];
  int32_t k_batch_step[2];
  int32_t v_batch_step[2];
  int32_t dout_batch_step[2];
  Divisor by_inner_batch;  // extent of the fastest batch axis of the maps
  bool deterministic;
  bool draw;       // tiles are drawn from the workspace's ticket
  bool direct_dq;  // one tile has all keys of a row: dq is complete, and stored instead of added
  KeyTileOrder order;
  Problem problem;
  float scale_log2;  // scale * log2(e)
  BackwardWorkspace workspace;
  void* workspace_data;
  Captures captures;                   // of a score program; plain kernels do not look
  float* key_sums[kMaxKeySums];        // see BackwardParams; likewise
  TensorMap starts;                    // where Tile::kLoadsStarts: boxes of kRows x 64 keys
  StoredGradient stored;               // see BackwardParams; no data: nothing is stored
  TensorMap stored_map;                // boxes of kRows x 64 keys
  BatchSum sum;                        // where stored.batch_sum is more than 1
  CaptureGradientArray diagonal_sums;  // see BackwardParams

  __device__ __forceinline__ bool ordered() const { return deterministic && !direct_dq; }

  template <class Score>
  __device__ __forceinline__ KeyTile tile(uint32_t position) const {
    return Score::kSumsBatch ? order.at_element(position) : order.at(position);
  }
};

// What the products of a step start from, loaded beside its queries: a panel of 64 keys for each
// consumer warpgroup. It has barriers of its own, because it is free as soon as products begin.
template <int kStages, int kBytes>
struct StartPanels {
  alignas(1024) uint8_t starts[kStages][2][kBytes];
};
template <int kBytes>
struct StartPanels<0, kBytes> {};
template <int kStages>
struct StartBarriers {
  Barrier starts_full[kStages];
  Barrier starts_empty[kStages];  // every consumer warp has read it

  __device__ __forceinline__ void init_start_barriers(int consumer_warps) {
    for (int stage = 0; stage < kStages; ++stage) {
      starts_full[stage].init(1);
      starts_empty[stage].init(consumer_warps);
    }
  }
};
template <>
struct StartBarriers<0> {
  __device__ __forceinline__ void init_start_barriers(int /*consumer_warps*/) {}
};

template <class Tile_, Math kMath_>
struct BackwardTraits {
  using Tile = Tile_;
  static constexpr Math kMath = kMath_;
  static constexpr int kRows = Tile::kRows;
  static constexpr int kKeys = Tile::kKeys;  // of a block
  static constexpr int kTileKeys = Tile::kTileKeys;
  static constexpr int kBlocks = Tile::kBlocks;
  static constexpr bool kPaired = kBlocks == 2;

  static constexpr int kConsumerThreads = 256;
  static constexpr int kThreads = kConsumerThreads + 128;
  // A block can only redistribute the 3 x 168 registers that it is launched with.
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kProducerRegisters = 40;

  // Warps that add dq of a tile, one in each block of a pair.
  static constexpr int kAddingWarps = 2;
  // Warps that read tickets: consumers, the one that moves keys, and those that add dq.
  static constexpr int kTicketReaders = kConsumerThreads / 32 + 1 + kAddingWarps / kBlocks;

  // Of a block's own keys.
  template <class Block>
  __device__ __forceinline__ static int first_key(const Block& tile) {
    return tile.first_key + (kPaired ? cluster_rank() * kKeys : 0);
  }

  // An operand lies in panels 64 elements (128 bytes) wide, each swizzled. TMA fills with zeros
  // what the last one has behind the head size.
  static constexpr int kPanelColumns = 64;
  static constexpr int kPanelRowBytes = 128;
  static constexpr int kPanels = (Tile::kHeadDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kValuePanels = (Tile::kValueDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kRowPanelBytes = kRows * kPanelRowBytes;  // of q, dout, p and ds
  static constexpr int kKeyPanelBytes = kKeys * kPanelRowBytes;  // of k, v
  static constexpr int kQBytes = kPanels * kRowPanelBytes;
  static constexpr int kDoutBytes = kValuePanels * kRowPanelBytes;
  static constexpr int kKBytes = kPanels * kKeyPanelBytes;
  static constexpr int kVBytes = kValuePanels * kKeyPanelBytes;
  static constexpr int kScoreBytes = kKeys / 64 * kRowPanelBytes;

  // What a consumer warpgroup computes of dq at once: of a pair's block a panel (see DqPart), of a
  // single one half of a step's. A warp has 16 rows, 4 KB or 2.
  static constexpr int kDqPartRows = 64;
  static constexpr int kDqPartDims =
      kPaired ? kPanelColumns : kRows * kPanels * kPanelColumns / 2 / kDqPartRows;
  static constexpr int kDqWarpBytes = 16 * kDqPartDims * 4;
  // Panels of columns that a block computes dq for, in part or in full. Of a pair the second block
  // has the last ones.
  static constexpr int kDqPanels = (kPanels + kBlocks - 1) / kBlocks;
  static constexpr int kDqPanelsBefore = kPanels - kDqPanels;
  static_assert(!kPaired || kPanels == 3 || kPanels == 4);
  // What a consumer warpgroup of a pair's block computes of dq, given the block's rank: a panel. Of
  // three panels the first warpgroups have the outer ones, and the second ones half of the middle
  // one each, because blocks walk in step, at the pace of the one with more to multiply and to add.
  template <int kGroup>
  struct DqPart {
    static constexpr bool kThree = kPanels == 3;
    static constexpr bool kHalf = kThree && kGroup == 1;
    static constexpr int kColumns = kHalf ? kPanelColumns / 2 : kPanelColumns;

    __device__ __forceinline__ static int panel(int rank) {
      return kThree ? (kHalf ? 1 : rank * 2) : rank * 2 + kGroup;
    }
    // Among those that begin at kDqPanelsBefore * rank.
    __device__ __forceinline__ static int own_panel(int rank) {
      return kThree ? (kHalf ? 1 - rank : rank) : kGroup;
    }
    // Of the panel the first one.
    __device__ __forceinline__ static int column_in_panel(int rank) {
      return kHalf ? rank * kColumns : 0;
    }
    __device__ __forceinline__ static int column(int rank) {
      return panel(rank) * kPanelColumns + column_in_panel(rank);
    }
  };

  // dk and dv leave in parts of 64 keys.
  static constexpr int kStoredKeys = 64;
  static constexpr int kStoredPanelBytes = kStoredKeys * kPanelRowBytes;

  static_assert(Tile::kHeadDim % 32 == 0 && Tile::kValueDim % 32 == 0);
  static_assert(kKeys % 64 == 0 && kRows % 64 == 0 && kWorkspaceRows % kRows == 0);

  // Of a warpgroup's keys and the rows of a step.
  static constexpr int kStartBytes = kRowPanelBytes;
  static_assert(!(Tile::kLoadsStarts && kPaired), "a panel for each consumer warpgroup");

  struct Operands : StartPanels<Tile::kStartStages, kStartBytes> {
    alignas(1024) uint8_t k[Tile::kKeyStages][kKBytes];
    alignas(1024) uint8_t v[Tile::kKeyStages][kVBytes];
    alignas(1024) uint8_t q[Tile::kQStages][kQBytes];
    alignas(1024) uint8_t dout[Tile::kDoutStages][kDoutBytes];
  };

  // dk and dv of a tile go where ds and dq went to, so that k and v can make room for the next tile
  // before dk and dv have left.
  struct SingleBuffers : Operands {
    alignas(1024) uint8_t ds[2][kScoreBytes];       // of even and of odd steps; later dv
    alignas(1024) uint8_t dq[2][4 * kDqWarpBytes];  // of each consumer warpgroup; later dk
    Barrier k_empty[Tile::kKeyStages];              // every consumer warp is through with it
    Barrier v_empty[Tile::kKeyStages];
    Barrier dkv_full;   // dk and dv are staged
    Barrier dkv_empty;  // and have been read out

    __device__ __forceinline__ void init_barriers() {
      for (int stage = 0; stage < Tile::kKeyStages; ++stage) {
        k_empty[stage].init(kConsumerThreads / 32);
        v_empty[stage].init(kConsumerThreads / 32);
      }
      dkv_full.init(kConsumerThreads);
      dkv_empty.init(1);
    }
  };
  static_assert(kPaired || (kKeys == kSumTileKeys && (kDqPartDims == 64 || kDqPartDims == 32)),
                "64 keys and one part of dq, in one panel, for each consumer warpgroup");
  static_assert(kPaired || (kValuePanels * kStoredPanelBytes <= kScoreBytes &&
                            kPanels * kStoredPanelBytes <= 4 * kDqWarpBytes));

  // dk and dv of a tile replace k and v.
  struct PairBuffers : Operands {
    alignas(1024) float p[kRows * kKeys];      // from one consumer warpgroup to the other
    alignas(1024) uint8_t ds[2][kScoreBytes];  // of even and of odd steps
    // From the other block: its ds, and of its k the columns that this one computes dq for.
    alignas(1024) uint8_t peer_ds[2][kScoreBytes];
    alignas(1024) uint8_t peer_k[kDqPanels * kKeyPanelBytes];
    Barrier peer_k_full;
    Barrier dk_full;  // dk is staged
    Barrier dv_full;
    Barrier peer_ds_full[2];
    Barrier ds_taken[2];  // the other block has this block's ds
    Barrier ds_empty[2];  // both blocks are through with this block's ds, and with what replaced it

    __device__ __forceinline__ void init_barriers() {
      peer_k_full.init(1);
      dk_full.init(kConsumerThreads / 2);
      dv_full.init(kConsumerThreads / 2);
      for (int odd = 0; odd < 2; ++odd) {
        peer_ds_full[odd].init(1);
        ds_taken[odd].init(1);
        ds_empty[odd].init(kBlocks);
      }
    }

    // What a consumer warp computed of dq, on its way out: one warpgroup's part lies where p was
    // handed over, the other's where both ds lay that it was computed from.
    __device__ __forceinline__ uint32_t staged_dq(int warp, int odd) const {
      constexpr int kWarps = kScoreBytes / kDqWarpBytes;  // in a buffer of ds
      if (warp < 4) return shared_address(p) + warp * kDqWarpBytes;
      return shared_address(warp < 4 + kWarps ? ds[odd] : peer_ds[odd]) +
             warp % kWarps * kDqWarpBytes;
    }
  };
  static_assert(!kPaired ||
                    (kRows == 64 && kKeys == 64 && Tile::kKeyStages == 1 && Tile::kHeldSteps == 0 &&
                     Tile::kHeadDim <= 256 && Tile::kValueDim <= 256),
                "all columns of dk or dv and one panel of dq for each consumer warpgroup");
  static_assert(!kPaired || (sizeof(float) * kRows * kKeys == 4 * kDqWarpBytes &&
                             2 * kScoreBytes == 4 * kDqWarpBytes),
                "dq fits where p and ds were");

  struct SharedMemory : Conditional<kPaired, PairBuffers, SingleBuffers>,
                        StartBarriers<Tile::kStartStages> {
    alignas(128) float lse[Tile::kQStages][kRows];  // base 2
    alignas(128) float delta[Tile::kDoutStages][kRows];
    Barrier k_full[Tile::kKeyStages];
    Barrier v_full[Tile::kKeyStages];
    Barrier q_full[Tile::kQStages];
    Barrier q_empty[Tile::kQStages];  // every consumer warp of the cluster is through with it
    Barrier dout_full[Tile::kDoutStages];
    Barrier dout_empty[Tile::kDoutStages];
    Barrier rows_landed;  // a tile that a loader edits before it announces it
    Barrier keys_landed;
    TicketBox<kBlocks> tickets;
    uint16_t pin[kConsumerThreads];  // written, never read; one each, or they would race
    StagedRows staged[Tile::kQStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedMemory);
  static_assert(kSharedBytes <= 227 * 1024);
};

// The order of the float32 accumulator of dq: that of the accumulator fragments of a warp. A head
// is a row-major matrix of pieces of 16 x 8, and lane i has the four elements 4 i of a piece.
struct DqOrder {
  static constexpr int kPiece = 128;

  // The rows from `row` and the columns from `col` of a head; multiples of 16 and 8.
  __device__ __forceinline__ static int64_t offset(const BackwardWorkspace& workspace, int row,
                                                   int col) {
    return (row / 16 * (workspace.dims / 8) + col / 8) * kPiece;
  }

  // What the 16 rows from `row` on have of the columns from `col` on, at most `columns` of them, in
  // bytes: none behind the rows and the head size that the workspace was made for.
  __device__ __forceinline__ static int row_bytes(const BackwardWorkspace& workspace, int row,
                                                  int col, int columns) {
    if (row >= workspace.dq_rows) return 0;
    return min(max(static_cast<int>(workspace.dims) - col, 0), columns) * 16 * 4;
  }

  // The elements of a lane. Nobody reads them again.
  __device__ __forceinline__ static void load(const float* piece, int lane, float (&values)[4]) {
    const float4 four = __ldcs(reinterpret_cast<const float4*>(piece + 4 * lane));
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
  }
};

// The turns of a block to add to dq. Rows are walked upwards; where the mask lets rows see the keys
// up to a limit, the order is descending, so that a block's first rows are those that no earlier
// block has to visit for long. The whole warp.
template <int kRows, int kKeys, class Mask>
class DqTurns {
  using Block = KeyBlock<kRows, kKeys, Mask>;

 public:
  __device__ __forceinline__ DqTurns(const KeyTileOrder& order, const Block& block) {
    if constexpr (Mask::kFindsTurns) {
      const int tile = order.rank(block.index) - 1 - static_cast<int>(threadIdx.x % 32);
      if (tile >= 0) near_ = block.visited_by(order.rank(tile));
    }
  }

  // At the rows from `row` on.
  __device__ __forceinline__ DqTurn at(const KeyTileOrder& order, const Block& block,
                                       int row) const {
    const Interval keys = block.mask.keys({row, row + kRows});
    const int first = order.rank((order.descending ? keys.end - 1 : keys.begin) / kKeys);
    const int last = order.rank((order.descending ? keys.begin : keys.end - 1) / kKeys);
    const int tile = order.rank(block.index);
    if constexpr (!Mask::kFindsTurns) {
      return neighbours_turn(first, tile);
    } else {
      if (tile < first || tile > last) return {false, 0};
      const int lane = threadIdx.x % 32;
      const uint32_t near =
          __ballot_sync(~0u, tile - 1 - lane >= first && near_.holds(block.mask, row));
      if (near != 0) return turn_after(tile - __ffs(near));
      return turn_after(last_that_works(first, tile - 32, [&](int other) {
        return block.visited_by(order.rank(other)).holds(block.mask, row);
      }));
    }
  }

 private:
  // With kFindsTurns: where a lane's of the 32 tiles before this one works. Looked up at every
  // step, the backward pass of a causal mask array took a quarter longer.
  typename Block::Visited near_ = {};
};

// The counter of turns of a tile of rows. Those of the parts of dq that have their own follow.
template <int kRows, int kKeys, class Mask>
__device__ __forceinline__ uint32_t* dq_counter(const BackwardArgs& args,
                                                const KeyBlock<kRows, kKeys, Mask>& block, int row,
                                                int head) {
  const int64_t head_index = int64_t{block.batch} * args.problem.q_heads + head;
  return args.workspace.turns_of(args.workspace_data, head_index) + row / kWorkspaceTurnRows;
}

}  // namespace jaxflash::sm90
