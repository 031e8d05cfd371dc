// Geometry of the kernel for gradients of captures, for host and device.
#pragma once

#include "common/capture_gradient.h"
#include "common/workspace.h"
#include "problem.h"
#include "sm80/tile_config.h"

namespace jaxflash::sm80 {

template <Math kMath_, int kHeadDim_, class Tile_>
struct CaptureGradientTraits {
  using Tile = Tile_;
  using Fragments = FragmentTile<Tile::kRows, Tile::kKeys, Tile::kRowWarps, Tile::kKeyWarps>;
  static constexpr Math kMath = kMath_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = Fragments::kThreads;
  static_assert(kWorkspaceRows % Tile::kRows == 0, "padding");

  static constexpr int kRowBytes = Tile::kRows * kHeadDim * kElementBytes<kMath>;  // q, dout
  static constexpr int kKeyBytes = Tile::kKeys * kHeadDim * kElementBytes<kMath>;  // k, v

  static constexpr int kQ = 0;
  static constexpr int kKey = kQ + kRowBytes;
  static constexpr int kDout = kKey + kKeyBytes;
  static constexpr int kValue = kDout + kRowBytes;
  static constexpr int kStaging = kValue + kKeyBytes;
  static constexpr int kItems = kStaging + Fragments::kStagingFloats * 4;
  static constexpr int kWalk = kItems + 96;
  static constexpr int kSharedBytes = kWalk + 128;
};

// The tile for GPUs whose blocks may have that much shared memory.
template <Math kMath, int kHeadDim>
struct CaptureGradientChoice {
  using Tiles = CaptureGradientTiles<kTileGroup<kMath>, kHeadDim>;
  using Large = CaptureGradientTraits<kMath, kHeadDim, typename Tiles::Large>;
  using Small = CaptureGradientTraits<kMath, kHeadDim, typename Tiles::Small>;
};

}  // namespace jaxflash::sm80
