// The layouts of ForwardParams::workspace and BackwardParams::workspace, one formula for every GPU
// family: the size of a buffer must not depend on the GPU that the program later runs on.
#pragma once

#include "problem.h"

namespace jaxflash {

// ---- Forward ------------------------------------------------------------------------------------

// Blocks among which a call is divided at most: the multiprocessors of the largest GPU that shares
// (a full GH100).
inline constexpr int kMaxSharingBlocks = 144;
// Rows of the largest query tile whose keys are shared.
inline constexpr int64_t kMaxSharedRows = 128;

// Parts of outputs on their way to the merge, as offsets in bytes. A block has at most two: a tile
// that it ends and one that it begins.
struct ForwardWorkspace {
  int64_t rows;  // of a part
  size_t out;    // float32 (2 * kMaxSharingBlocks, rows, h)
  size_t lse;    // float32 (2 * kMaxSharingBlocks, rows); natural logarithm
  size_t bytes;
};

// ---- Backward -----------------------------------------------------------------------------------

// Row vectors are padded to a multiple of the longest row tile, so that a tile never tests its end.
inline constexpr int32_t kWorkspaceRows = 128;
// The accumulator of dq has rows and columns in multiples of these: it is the larger part, short
// sequences would be mostly padding, and heads of 32 add half of what others do.
inline constexpr int32_t kWorkspaceDqRows = 16;
inline constexpr int32_t kWorkspaceDims = 32;
// Words that the accumulator has at least: the turns of ordered gradients of captures lie there as
// well (common/capture_gradient.h), fewer than two for each block that a GPU holds.
inline constexpr int64_t kWorkspaceDqWords = 4096;
// The shortest row tile: what a turn counter stands for, at least.
inline constexpr int32_t kWorkspaceTurnRows = 16;

// Buffers over (batch, query head, row), as offsets in bytes from the workspace's base.
struct BackwardWorkspace {
  int64_t rows;     // T, padded
  int64_t dq_rows;  // T, padded less
  int64_t dims;     // H, padded
  size_t dq;  // float32 (batch, head, dq_rows, dims), unscaled, in the family's order inside a head
  size_t lse;     // float32 (batch, head, rows), base 2; +inf where the row sees no key: P is 0
  size_t delta;   // float32 (batch, head, rows)
  size_t turns;   // uint32 (batch, head, rows / kWorkspaceTurnRows): key tiles that added their dq
  size_t added;   // uint32 (batch, head): key tiles whose dq is complete, once for each adding warp
  size_t ticket;  // uint64: the next work item, where blocks draw them
  size_t bytes;

  JAXFLASH_HOST_DEVICE float* dq_of(void* base, int64_t head) const {
    return reinterpret_cast<float*>(static_cast<char*>(base) + dq) + head * dq_rows * dims;
  }
  JAXFLASH_HOST_DEVICE float* lse_of(void* base, int64_t head) const {
    return reinterpret_cast<float*>(static_cast<char*>(base) + lse) + head * rows;
  }
  JAXFLASH_HOST_DEVICE float* delta_of(void* base, int64_t head) const {
    return reinterpret_cast<float*>(static_cast<char*>(base) + delta) + head * rows;
  }
  JAXFLASH_HOST_DEVICE uint32_t* turns_of(void* base, int64_t head) const {
    return reinterpret_cast<uint32_t*>(static_cast<char*>(base) + turns) +
           head * (rows / kWorkspaceTurnRows);
  }
  JAXFLASH_HOST_DEVICE uint32_t* added_of(void* base, int64_t head) const {
    return reinterpret_cast<uint32_t*>(static_cast<char*>(base) + added) + head;
  }
  JAXFLASH_HOST_DEVICE unsigned long long* ticket_of(void* base) const {
    return reinterpret_cast<unsigned long long*>(static_cast<char*>(base) + ticket);
  }
};

JAXFLASH_HOST_DEVICE inline int64_t batch_size(const Problem& problem) {
  int64_t size = 1;
  for (int32_t axis = 0; axis < problem.num_batch_axes; ++axis) size *= problem.batch_extent[axis];
  return size;
}

// `B` problems of batch 1 need at least as many bytes as one of batch B: callers with a batch size
// that is not known yet may multiply.
inline BackwardWorkspace backward_workspace(const Problem& problem) {
  const auto round_up = [](int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; };
  BackwardWorkspace layout = {};
  const int64_t heads = batch_size(problem) * problem.q_heads;
  if (heads == 0) return layout;
  layout.rows = round_up(problem.q_len, kWorkspaceRows);
  layout.dq_rows = round_up(problem.q_len, kWorkspaceDqRows);
  layout.dims = round_up(problem.head_dim, kWorkspaceDims);
  const auto take = [&layout, round_up](int64_t count) {
    const size_t begin = layout.bytes;
    layout.bytes += static_cast<size_t>(round_up(count * 4, 256));
    return begin;
  };
  const int64_t dq_words = heads * layout.dq_rows * layout.dims;
  layout.dq = take(dq_words < kWorkspaceDqWords ? kWorkspaceDqWords : dq_words);
  layout.lse = take(heads * layout.rows);
  layout.delta = take(heads * layout.rows);
  layout.turns = take(heads * (layout.rows / kWorkspaceTurnRows));
  layout.added = take(heads);
  layout.ticket = take(2);
  return layout;
}

inline size_t backward_workspace_bytes(const Problem& problem) {
  return backward_workspace(problem).bytes;
}

// ---- Sums of d score over batch elements --------------------------------------------------------

// Keys of a tile of the kernels that store d score.
inline constexpr int32_t kSumTileKeys = 128;
// Halves of such a tile: each is stored and added by itself.
inline constexpr int32_t kSumParts = 2;

// uint32 (prod B, key heads, tiles of keys, kSumParts), behind the rest of the workspace.
inline size_t batch_sum_workspace_bytes(const Problem& problem, int32_t batch_sum) {
  if (batch_sum <= 1) return 0;
  const int64_t key_tiles = (int64_t{problem.kv_len} + kSumTileKeys - 1) / kSumTileKeys;
  return static_cast<size_t>(batch_size(problem) * problem.kv_heads * key_tiles) * kSumParts * 4;
}

}  // namespace jaxflash
