// Ahead of a backward kernel that stores d score.
#pragma once

#include "common/mask.cuh"
#include "common/workspace.h"
#include "problem.h"

namespace jaxflash::sm90 {

inline constexpr int kClearThreads = 128;
inline constexpr int kClearRows = 64;  // of a block

struct ClearStoredArgs {
  Problem problem;
  uint4* matrices;  // (T, S) of 16 bits, S a multiple of 8
};

// Zeros where tiles of keys see no row, under a band without lengths. A memset would also write
// what is stored afterwards: 0.5 ms of all of a bias (4, 16, 4096, 4096), of which a causal pass
// stores half.
static __global__ void __launch_bounds__(kClearThreads)
    clear_stored_kernel(ClearStoredArgs args, uint64_t first_matrix) {
  constexpr int kPiece = 8;  // elements of 16 bytes
  const Problem& problem = args.problem;
  const BandMask mask(problem, 0);
  const int row_pieces = problem.kv_len / kPiece;
  const auto row_tiles = static_cast<unsigned>((problem.q_len + kClearRows - 1) / kClearRows);
  const uint64_t matrix = first_matrix + blockIdx.x / row_tiles;
  const int first_row = static_cast<int>(blockIdx.x % row_tiles) * kClearRows;
  const int end_row = min(first_row + kClearRows, problem.q_len);
  uint4* const matrix_rows = args.matrices + matrix * problem.q_len * row_pieces;
  for (int piece = threadIdx.x; piece < row_pieces; piece += kClearThreads) {
    const int tile = piece * kPiece / kSumTileKeys * kSumTileKeys;
    const Interval stored = mask.rows({tile, tile + kSumTileKeys});
    for (int row = first_row; row < end_row; ++row) {
      if (row >= stored.begin && row < stored.end) continue;
      __stcs(matrix_rows + int64_t{row} * row_pieces + piece, make_uint4(0, 0, 0, 0));
    }
  }
}

}  // namespace jaxflash::sm90
