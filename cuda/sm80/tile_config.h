// Tiles of all passes: a row for each size of the elements and of the heads, with its reason.
#pragma once

#include "problem.h"

namespace jaxflash::sm80 {

// Of an element of q, k, v and the gradients.
template <Math kMath>
inline constexpr int kElementBytes = kMath == Math::kFloat16 || kMath == Math::kBFloat16 ? 2 : 4;

// The kGroup of the tables below: the size of the elements, and 0 for kFloat32, whose split
// operands need twice the registers.
template <Math kMath>
inline constexpr int kTileGroup = kMath == Math::kFloat32 ? 0 : kElementBytes<kMath>;

// --- forward ------------------------------------------------------------------------------------

// What a block works on. A warp takes rows / warps query rows, 16 or 32: with 32 every fragment of
// K and V is used twice, which is what shared-memory bandwidth asks for wherever registers allow
// it.
template <int kRows_, int kKeys_, int kWarps_, int kStages_, int kBlocksPerSm_>
struct ForwardTile {
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kStages = kStages_;            // 2: the next K and V load beside this step
  static constexpr int kBlocksPerSm = kBlocksPerSm_;  // what the registers are limited for
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTiles = kRows / (16 * kWarps);  // of 16 rows, in a warp
};

// `Large` where a block may have its shared memory, otherwise `Small`, which fits the 99 KB of GPUs
// of compute capability 8.6, 8.9 and 12.0.
template <int kGroup, int kHeadDim>
struct ForwardTiles;

template <>
struct ForwardTiles<2, 64> {
  using Large = ForwardTile<128, 96, 4, 2, 2>;  // 64 KB; 322 TFLOP/s at S = 8192, 64 keys 309
  using Small = Large;
};
template <>
struct ForwardTiles<2, 128> {
  using Large = ForwardTile<128, 64, 4, 2, 2>;  // 96 KB; 357 TFLOP/s, 32 keys 344
  using Small = Large;
};
template <>
struct ForwardTiles<2, 256> {
  using Large = ForwardTile<128, 64, 8, 2, 1>;  // 192 KB; reads K and V half as often as 64 rows
  using Small = ForwardTile<64, 64, 4, 1, 2>;   // 96 KB; as fast where K and V stay in the L2
};
template <>
struct ForwardTiles<4, 64> {
  using Large = ForwardTile<128, 64, 4, 2, 2>;  // 96 KB
  using Small = Large;
};
template <>
struct ForwardTiles<4, 128> {
  using Large = ForwardTile<128, 32, 4, 1, 2>;  // 96 KB; 153 TFLOP/s, 64 rows 113
  using Small = Large;
};
template <>
struct ForwardTiles<4, 256> {
  using Large = ForwardTile<128, 32, 8, 1, 1>;  // 192 KB
  using Small = ForwardTile<64, 16, 4, 1, 1>;   // 96 KB
};
template <>
struct ForwardTiles<0, 64> {
  using Large = ForwardTile<64, 64, 4, 2, 2>;  // 80 KB
  using Small = Large;
};
template <>
struct ForwardTiles<0, 128> {
  using Large = ForwardTile<64, 32, 4, 2, 2>;  // 96 KB
  using Small = Large;
};
template <>
struct ForwardTiles<0, 256> {
  using Large = ForwardTile<128, 16, 8, 1, 1>;  // 160 KB
  using Small = ForwardTile<64, 16, 4, 1, 1>;   // 96 KB
};

// --- tangent ------------------------------------------------------------------------------------

// As for the forward pass; a block has twice its operands in shared memory, and a warp 16 rows.
template <int kGroup, int kHeadDim>
struct TangentTiles;

template <>
struct TangentTiles<2, 64> {
  using Large = ForwardTile<64, 64, 4, 2, 2>;  // 80 KB
  using Small = Large;
};
template <>
struct TangentTiles<2, 128> {
  using Large = ForwardTile<64, 32, 4, 2, 2>;  // 96 KB
  using Small = Large;
};
template <>
struct TangentTiles<2, 256> {
  using Large = ForwardTile<64, 32, 4, 2, 1>;  // 192 KB
  using Small = ForwardTile<64, 16, 4, 1, 1>;  // 96 KB
};
template <>
struct TangentTiles<4, 64> {
  using Large = ForwardTile<64, 32, 4, 2, 2>;  // 96 KB
  using Small = Large;
};
template <>
struct TangentTiles<4, 128> {
  using Large = ForwardTile<64, 32, 4, 2, 1>;  // 192 KB
  using Small = ForwardTile<64, 16, 4, 1, 1>;  // 96 KB
};
template <>
struct TangentTiles<4, 256> {
  using Large = ForwardTile<64, 16, 4, 1, 1>;  // 192 KB
  using Small = ForwardTile<16, 16, 1, 1, 1>;  // 96 KB
};
template <int kHeadDim>
struct TangentTiles<0, kHeadDim> : TangentTiles<4, kHeadDim> {};

// --- backward -----------------------------------------------------------------------------------

// How a block divides its work. kKeyWarps x kColWarps warps: a warp owns kKeys / kKeyWarps keys and
// kHeadDim / kColWarps columns of dk and dv.
template <int kRows_, int kKeys_, int kKeyWarps_, int kColWarps_, bool kExchange_, int kPassRows_,
          int kStages_, int kDqRowWarps_, int kBlocksPerSm_>
struct BackwardTile {
  static constexpr int kRows = kRows_;  // queries of a step
  static constexpr int kKeys = kKeys_;
  static constexpr int kKeyWarps = kKeyWarps_;
  static constexpr int kColWarps = kColWarps_;
  // The warps that share keys: each computes the scores of its part of the rows, and they exchange
  // p and ds through shared memory (true), or each computes the scores of all rows (false).
  static constexpr bool kExchange = kExchange_;
  static constexpr int kPassRows = kPassRows_;  // rows whose scores a warp has in registers
  static constexpr int kStages = kStages_;      // buffers of q and dout
  // dq's rows are divided by these, its columns by the other warps.
  static constexpr int kDqRowWarps = kDqRowWarps_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;  // what the registers are limited for
};

// Columns: rows, keys, key warps, column warps, exchange, rows of a pass, stages, dq row warps,
// blocks per SM. Large, Small and kGroup as in ForwardTiles.
template <int kGroup, int kHeadDim>
struct BackwardTiles;

// 80 KB: two blocks per SM, so that one computes while the other waits at a barrier. 32 keys for a
// warp, because every warp reads all of q and dout.
template <>
struct BackwardTiles<2, 64> {
  using Large = BackwardTile<64, 128, 4, 1, false, 16, 2, 2, 2>;
  using Small = Large;
};

template <>
struct BackwardTiles<2, 128> {
  using Large = BackwardTile<64, 128, 4, 2, true, 32, 2, 2, 1>;
  using Small = BackwardTile<32, 64, 4, 1, false, 32, 2, 2, 1>;
};

// dk and dv of 64 keys are half of the register file; the columns are divided between four warps.
template <>
struct BackwardTiles<2, 256> {
  using Large = BackwardTile<64, 64, 2, 4, true, 16, 2, 1, 1>;
  using Small = BackwardTile<32, 32, 2, 2, true, 16, 1, 1, 1>;
};

template <>
struct BackwardTiles<4, 64> {
  using Large = BackwardTile<32, 128, 4, 1, false, 32, 2, 1, 2>;  // 119 TFLOP/s; 64 keys 95
  using Small = BackwardTile<32, 64, 4, 1, false, 32, 2, 1, 2>;
};

template <>
struct BackwardTiles<4, 128> {
  using Large = BackwardTile<32, 64, 4, 1, false, 16, 2, 1, 1>;
  using Small = BackwardTile<16, 64, 4, 1, false, 16, 1, 1, 1>;
};

// Scores are computed twice, by the warps that share keys: see the assertion on the exchange.
template <>
struct BackwardTiles<4, 256> {
  using Large = BackwardTile<32, 32, 2, 2, false, 16, 1, 2, 1>;
  using Small = BackwardTile<16, 32, 2, 2, false, 16, 1, 1, 1>;
};

// Split operands need more registers.
template <>
struct BackwardTiles<0, 64> {
  using Large = BackwardTile<32, 64, 4, 1, false, 32, 2, 1, 2>;
  using Small = Large;
};

template <>
struct BackwardTiles<0, 128> : BackwardTiles<4, 128> {};

template <>
struct BackwardTiles<0, 256> : BackwardTiles<4, 256> {};

// --- gradients of captures -----------------------------------------------------------------------

// kRowWarps x kKeyWarps warps, each with its part of both products and of the sum in registers.
template <int kRows_, int kKeys_, int kRowWarps_, int kKeyWarps_, int kBlocksPerSm_>
struct CaptureGradientTile {
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kKeyWarps = kKeyWarps_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;  // what the registers are limited for
};

// Large and Small as for the forward pass. Every step reads all four operands: the larger a tile,
// the less comes from the L2.
template <int kGroup, int kHeadDim>
struct CaptureGradientTiles;

template <>
struct CaptureGradientTiles<2, 64> {
  using Large = CaptureGradientTile<128, 128, 4, 2, 1>;  // 66 KB
  using Small = CaptureGradientTile<64, 64, 2, 2, 2>;
};
template <>
struct CaptureGradientTiles<2, 128> {
  using Large = CaptureGradientTile<128, 128, 4, 2, 1>;  // 130 KB
  using Small = CaptureGradientTile<64, 64, 2, 2, 1>;    // 65 KB
};
template <>
struct CaptureGradientTiles<2, 256> {
  using Large = CaptureGradientTile<64, 128, 2, 4, 1>;  // 193 KB
  using Small = CaptureGradientTile<32, 32, 2, 2, 1>;   // 65 KB
};
template <>
struct CaptureGradientTiles<4, 64> {
  using Large = CaptureGradientTile<64, 64, 2, 2, 2>;  // 65 KB
  using Small = Large;
};
template <>
struct CaptureGradientTiles<4, 128> {
  using Large = CaptureGradientTile<64, 64, 2, 2, 1>;  // 129 KB
  using Small = CaptureGradientTile<32, 32, 2, 2, 1>;  // 65 KB
};
template <>
struct CaptureGradientTiles<4, 256> {
  using Large = CaptureGradientTile<32, 64, 2, 2, 1>;  // 193 KB
  using Small = CaptureGradientTile<16, 32, 1, 2, 1>;  // 97 KB
};
template <int kHeadDim>
struct CaptureGradientTiles<0, kHeadDim> : CaptureGradientTiles<4, kHeadDim> {};

}  // namespace jaxflash::sm80
