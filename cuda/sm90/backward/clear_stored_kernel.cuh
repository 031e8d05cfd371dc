// Ahead of a backward kernel that stores d score.
#pragma once

#include "common/mask.cuh"
#include "common/workspace.h"
#include "problem.h"

namespace jaxflash::sm90 {

inline constexpr int kClearThreads = 128;
inline constexpr int kClearRows = 64;  // of a block

// Zeros in matrices (T, S) of 16 bits, where tiles of keys see no row. Rows of 16 bytes each; a band
// without lengths. A memset of all would write those that are stored twice: causal, 4096 keys, all
// of a bias (4, 16, T, S) takes 0.5 ms, and half of it is stored.
static __global__ void __launch_bounds__(kClearThreads)
    clear_stored_kernel(Problem problem, uint4* data) {
  constexpr int kPiece = 8;  // elements of a store
  const BandMask mask(problem, 0);
  const int row_pieces = problem.kv_len / kPiece;
  const auto row_tiles = static_cast<unsigned>((problem.q_len + kClearRows - 1) / kClearRows);
  const int64_t matrix = blockIdx.x / row_tiles;
  const int first_row = static_cast<int>(blockIdx.x % row_tiles) * kClearRows;
  const int end_row = min(first_row + kClearRows, problem.q_len);
  uint4* const rows = data + (matrix * problem.q_len + first_row) * row_pieces;
  for (int piece = threadIdx.x; piece < row_pieces; piece += kClearThreads) {
    const int tile = piece * kPiece / kSumTileKeys * kSumTileKeys;
    const Interval stored = mask.rows({tile, tile + kSumTileKeys});
    for (int row = first_row; row < end_row; ++row) {
      if (row >= stored.begin && row < stored.end) continue;
      __stcs(rows + int64_t{row - first_row} * row_pieces + piece, make_uint4(0, 0, 0, 0));
    }
  }
}

}  // namespace jaxflash::sm90
