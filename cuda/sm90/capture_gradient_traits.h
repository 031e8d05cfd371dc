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
  Divisor by_group;       // query heads of a kv head
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

template <Math kMath_, int kHeadDim_, class Tile_, bool kScatters_>
struct CaptureGradientTraits {
  using Tile = Tile_;
  static constexpr Math kMath = kMath_;
  static constexpr int kHeadDim = kHeadDim_;  // no head is larger
  static constexpr int kWarpGroups = Tile::kRows / 64;
  using Fragments = FragmentTile<Tile::kRows, Tile::kKeys, 4 * kWarpGroups, 1>;

  static constexpr int kThreads = 128 * (kWarpGroups + 1);
  static_assert(kWarpGroups == 2 && kThreads == 384, "the registers below are for these");
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kProducerRegisters = 56;

  // A stage has some columns of rows and keys: of q and k, or of dout and v.
  static constexpr int kColumns = kHeadDim < 128 ? kHeadDim : 128;
  static constexpr int kPieces = kHeadDim / kColumns;
  static_assert(kColumns % 64 == 0 && kPieces * kColumns == kHeadDim);
  static constexpr int kPanelRowBytes = 128;
  static constexpr int kPanels = kColumns / 64;
  static constexpr int kRowPanelBytes = Tile::kRows * kPanelRowBytes;
  static constexpr int kKeyPanelBytes = Tile::kKeys * kPanelRowBytes;
  static constexpr int kStageBytes = kPanels * (kRowPanelBytes + kKeyPanelBytes);

  // What products start from, where all items of a piece start from the same; or sums.
  static constexpr int kStartBytes = 2 * Tile::kRows * Tile::kKeys;
  static constexpr int kStagingBytes = 4 * Fragments::staging_floats(kScatters_);
  static constexpr int kOtherBytes =
      1024 + (kScatters_ || kStagingBytes > kStartBytes ? kStagingBytes : kStartBytes);
  static constexpr int kStages = (227 * 1024 - kOtherBytes) / kStageBytes;
  static_assert(kStages >= 2);
  static constexpr int kSharedBytes = kStages * kStageBytes + kOtherBytes;
};

}  // namespace jaxflash::sm90
