// Geometry of the portable tangent kernel, for host and device.
#pragma once

#include "problem.h"
#include "sm80/tile_config.h"

namespace jaxflash::sm80 {

template <Math kMath_, int kHeadDim_, class Tile_>
struct TangentTraits {
  using Tile = Tile_;
  static constexpr Math kMath = kMath_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowBytes = kHeadDim * kElementBytes<kMath>;

  // Q and tQ, then stages of K, tK, V and tV.
  static constexpr int kQueryBytes = Tile::kRows * kRowBytes;
  static constexpr int kKeyBytes = Tile::kKeys * kRowBytes;
  static constexpr int kStageBytes = 4 * kKeyBytes;
  static constexpr int kSharedBytes = 2 * kQueryBytes + Tile::kStages * kStageBytes;
};

// The tiles, to be taken where a block may have their shared memory.
template <Math kMath, int kHeadDim>
struct TangentChoice {
  using Tiles = TangentTiles<kTileGroup<kMath>, kHeadDim>;
  using Large = TangentTraits<kMath, kHeadDim, typename Tiles::Large>;
  using Small = TangentTraits<kMath, kHeadDim, typename Tiles::Small>;
};

}  // namespace jaxflash::sm80
