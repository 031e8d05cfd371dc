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
  static constexpr int kElementBytes = kMath == Math::kFloat16 || kMath == Math::kBFloat16 ? 2 : 4;
  static constexpr int kThreads = Fragments::kThreads;
  static_assert(kWorkspaceRows % Tile::kRows == 0, "padding");
  static_assert(Fragments::staging_floats(true) >= Fragments::staging_floats(false), "of any load");

  static constexpr int kRowBytes = Tile::kRows * kHeadDim * kElementBytes;  // q, dout
  static constexpr int kKeyBytes = Tile::kKeys * kHeadDim * kElementBytes;  // k, v

  static constexpr int kQ = 0;
  static constexpr int kKey = kQ + kRowBytes;
  static constexpr int kDout = kKey + kKeyBytes;
  static constexpr int kValue = kDout + kRowBytes;
  static constexpr int kStaging = kValue + kKeyBytes;
  static constexpr int kItems = kStaging + Fragments::staging_floats(true) * 4;
  static constexpr int kWalk = kItems + 96;
  static constexpr int kSharedBytes = kWalk + 128;
};

// The tile for GPUs whose blocks may have that much shared memory.
template <Math kMath, int kHeadDim>
struct CaptureGradientChoice {
  static constexpr int kGroup = kMath == Math::kFloat32 ? 0 : kMath == Math::kTF32 ? 4 : 2;
  using Large = CaptureGradientTraits<kMath, kHeadDim,
                                      typename CaptureGradientTiles<kGroup, kHeadDim>::Large>;
  using Small = CaptureGradientTraits<kMath, kHeadDim,
                                      typename CaptureGradientTiles<kGroup, kHeadDim>::Small>;
};

}  // namespace jaxflash::sm80
