// Geometry of the kernel for gradients of captures, for host and device.
#pragma once

#include "common/workspace.h"
#include "problem.h"
#include "sm80/tile_config.h"

namespace jaxflash::sm80 {

template <Math kMath_, int kHeadDim_, class Tile_>
struct CaptureGradientTraits {
  using Tile = Tile_;
  static constexpr Math kMath = kMath_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kElementBytes = kMath == Math::kFloat16 || kMath == Math::kBFloat16 ? 2 : 4;
  static constexpr int kWarps = Tile::kRowWarps * Tile::kKeyWarps;
  static constexpr int kThreads = 32 * kWarps;

  // Of a warp, in fragments: 16 rows, 8 columns.
  static constexpr int kRowTiles = Tile::kRows / Tile::kRowWarps / 16;
  static constexpr int kColBlocks = Tile::kKeys / Tile::kKeyWarps / 8;
  static_assert(kRowTiles * Tile::kRowWarps * 16 == Tile::kRows &&
                    kColBlocks * Tile::kKeyWarps * 8 == Tile::kKeys && kColBlocks % 2 == 0,
                "whole fragments");
  static_assert(kWorkspaceRows % Tile::kRows == 0, "padding");

  static constexpr int kRowBytes = Tile::kRows * kHeadDim * kElementBytes;  // q, dout
  static constexpr int kKeyBytes = Tile::kKeys * kHeadDim * kElementBytes;  // k, v

  // 16 rows of a warp's part of a tile, where diagonals are summed; sums of warps on their way to
  // the block's.
  static constexpr int kPitch = 8 * kColBlocks + 8;  // conflict-free for fragments and diagonals
  static constexpr int kStagingFloats = 16 * kPitch;
  static_assert(kWarps * kStagingFloats >= Tile::kRows * Tile::kKeyWarps &&
                    kWarps * kStagingFloats >= Tile::kKeys * Tile::kRowWarps,
                "sums of warps fit");

  static constexpr int kQ = 0;
  static constexpr int kKey = kQ + kRowBytes;
  static constexpr int kDout = kKey + kKeyBytes;
  static constexpr int kValue = kDout + kRowBytes;
  static constexpr int kStaging = kValue + kKeyBytes;
  static constexpr int kItems = kStaging + kWarps * kStagingFloats * 4;
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
