// Arguments and geometry of the Hopper kernel for gradients of captures, for host and device.
#pragma once

#include "common/capture_gradient.h"
#include "common/divisor.h"
#include "common/integers.h"
#include "problem.h"
#include "sm90/hardware/tensor_map_bytes.h"
#include "sm90/tile_config.h"

namespace jaxflash::sm90 {

struct CaptureGradientArgs {
  MappedOperand q, dout;  // boxes of kRows x 64 columns
  MappedOperand k, v;     // boxes of kKeys x 64
  TensorMap starts;       // with kStartTiles: the rows of the capture, boxes of kRows x 64 keys
  TensorMap gradient;     // with stores_tiles: the same of each matrix of its
  bool stores_tiles;
  Divisor by_group;  // query heads of a kv head
  Divisor by_inner_batch;
  Problem problem;
  Captures captures;
  CaptureGradient plan;
  int64_t parts;  // of all pieces; a block takes some of them one after another
  // Of the backward workspace: (batch, head, rows).
  const float* lse;
  const float* delta;
  int64_t rows;
  float scale_log2;
};

// What lies in shared memory beside the operands.
enum class GradientStaging {
  kSums,        // of warps, over one axis or both
  kTiles,       // of the gradient where its result is of 16 bits, and of what products start from
  kStartTiles,  // the same, which TMA has loaded
};

template <Math kMath_, int kHeadDim_, class Tile_, GradientStaging kStaging_>
struct CaptureGradientTraits {
  using Tile = Tile_;
  static constexpr Math kMath = kMath_;
  static constexpr int kHeadDim = kHeadDim_;  // no head is larger
  static constexpr GradientStaging kStaging = kStaging_;
  static constexpr int kWarpGroups = Tile::kRows / 64;
  using Fragments = FragmentTile<Tile::kRows, Tile::kKeys, 4 * kWarpGroups, 1>;

  static constexpr int kThreads = 128 * (kWarpGroups + 1);
  static_assert(kWarpGroups == 2 && kThreads == 384, "the registers below are for these");
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kProducerRegisters = 56;

  // A stage has 64 columns, a panel, of rows and of keys: of q and k, or of dout and v.
  static constexpr int kSteps = kHeadDim / 64;  // stages of a product
  static_assert(kSteps * 64 == kHeadDim);
  static constexpr int kPanelRowBytes = 128;
  static constexpr int kRowPanelBytes = Tile::kRows * kPanelRowBytes;
  static constexpr int kKeyPanelBytes = Tile::kKeys * kPanelRowBytes;
  static constexpr int kStageBytes = kRowPanelBytes + kKeyPanelBytes;

  // A tile in panels of 64 keys: what the products of a piece start from, then its sums. Two: one
  // leaves, and the start of the next piece comes, while the other one is worked on.
  static constexpr bool kHasTiles = kStaging >= GradientStaging::kTiles;
  static constexpr int kTilePanels = Tile::kKeys / 64;
  static_assert(kTilePanels * 64 == Tile::kKeys);
  static constexpr int kTileBytes = kTilePanels * kRowPanelBytes;
  static constexpr int kTiles = 2;

  static constexpr int kStagingBytes =
      kHasTiles ? kTiles * kTileBytes : 4 * Fragments::kStagingFloats;
  static constexpr int kOtherBytes = 1024;  // barriers, and the pin
  static constexpr int kStages = (227 * 1024 - kOtherBytes - kStagingBytes) / kStageBytes;
  static_assert(kStages > 3, "three steps that are in flight, and one more");
  static constexpr int kSharedBytes = kStages * kStageBytes + kStagingBytes + kOtherBytes;
};

}  // namespace jaxflash::sm90
