// The tangent kernel's arguments and geometry, for host and device.
#pragma once

#include "common/divisor.h"
#include "common/integers.h"
#include "problem.h"
#include "sm90/hardware/tensor_map_bytes.h"
#include "sm90/tile_config.h"

namespace jaxflash::sm90 {

struct TangentArgs {
  // Each with its tangent.
  MappedOperand q[2];  // boxes of 64 rows x 64 columns
  MappedOperand k[2];  // of kKeys x 64
  MappedOperand v[2];  // of kPieceKeys x 64
  // Blocks go through the tiles of a head, the longest first, head by head.
  uint32_t head_tiles;
  Divisor by_head_tiles;
  Divisor by_q_heads;
  Divisor by_group;        // query heads of a kv head
  Divisor by_inner_batch;  // extent of the fastest batch axis of the maps
  bool last_is_longest;
  Problem problem;
  Tensor out;
  Tensor tout;
  const float* lse;
  float* tlse;
  float scale_log2;
  Captures captures;
};

template <class Tile_, Math kMath_>
struct TangentTraits {
  using Tile = Tile_;
  static constexpr Math kMath = kMath_;

  static constexpr int kWarpGroups = Tile::kWarpGroups;
  static constexpr int kTileRows = 64 * kWarpGroups;
  static constexpr int kThreads = 128 * (kWarpGroups + 1);
  // As in ForwardTraits.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kPooledRegisters = kLaunchRegisters * (kWarpGroups + 1);
  static constexpr int kConsumerRegisters = (kPooledRegisters - 32) / kWarpGroups / 8 * 8;
  static constexpr int kProducerRegisters = kPooledRegisters - kWarpGroups * kConsumerRegisters;
  static_assert(kConsumerRegisters <= 255 && kProducerRegisters % 8 == 0);

  static constexpr int kPanelRowBytes = 128;
  static constexpr int kPanels = (Tile::kHeadDim + 63) / 64;
  static constexpr int kValuePanels = (Tile::kValueDim + 63) / 64;
  static constexpr int kQPanelBytes = 64 * kPanelRowBytes;
  static constexpr int kQBytes = kPanels * kQPanelBytes;  // of one warpgroup

  // A piece of a tile's keys has some columns of all of them, one of its values all columns of
  // some.
  static constexpr int kPieceColumns = Tile::kHeadDim / Tile::kPieces;
  static constexpr int kPiecePanels = kPieceColumns / 64;
  static constexpr int kPieceKeys = Tile::kKeys / Tile::kPieces;
  static constexpr int kKeyPanelBytes = Tile::kKeys * kPanelRowBytes;
  static constexpr int kValuePanelBytes = kPieceKeys * kPanelRowBytes;
  static constexpr int kPieceBytes = kPiecePanels * kKeyPanelBytes;
  static_assert(kValuePanels * kValuePanelBytes == kPieceBytes);
  static_assert(kPieceColumns % 64 == 0 && kPieceKeys % 16 == 0 && Tile::kKeys <= 256);
  static_assert(Tile::kPieces == 1 || Tile::kHeldSteps == 0, "held are the columns of one piece");
  // A warpgroup waits for a piece before it releases the one before, and has its turn until the
  // values of a tile have come, which the others keep from the loaders as long.
  static_assert(Tile::kStages >= 2 && (!Tile::kTurns || Tile::kStages >= Tile::kPieces));

  static constexpr int kOperandBytes = kWarpGroups * 2 * kQBytes + Tile::kStages * 2 * kPieceBytes;
  static constexpr int kBarriers = kWarpGroups + 2 * Tile::kStages + 2;
  static constexpr int kPinBytes = 4 * 128 * kWarpGroups;
  static constexpr int kSharedBytes =
      (kOperandBytes + kPinBytes + 8 * kBarriers + 1023) / 1024 * 1024;
  static_assert(kSharedBytes <= 227 * 1024);
};

}  // namespace jaxflash::sm90
