// Which forward calls share the keys of a query tile among blocks, and the workspace that they pass
// their parts of the output through. One rule, of sizes alone: Python plans the workspace before it
// is known which GPU the program will run on.
#pragma once

#include <algorithm>

#include "common/workspace.h"
#include "problem.h"

namespace jaxflash {

namespace detail {

// A tile holds 2^n positions of a head; more than 128 fill the largest one.
inline int64_t padded_positions(int32_t q_len) {
  int64_t positions = 1;
  while (positions < std::min(q_len, 128)) positions *= 2;
  return positions;
}

// The most keys that a row can see.
inline int64_t most_keys(const Problem& problem) {
  const Band& band = problem.band;
  const int64_t keys = problem.kv_len;
  if (band.left >= kUnlimited || band.right >= kUnlimited) return keys;
  return std::min<int64_t>(keys, std::max<int64_t>(int64_t{band.left} + band.right + 1, 0));
}

}  // namespace detail

// The queries of all heads that share a kv head fit into the 64 rows of one product.
inline bool fits_one_unit(const Problem& problem) {
  const int64_t group = problem.q_heads / std::max(problem.kv_heads, 1);
  return detail::padded_positions(problem.q_len) * group <= 64;
}

inline bool shares_keys(const Problem& problem) {
  if (problem.math != Math::kFloat16 && problem.math != Math::kBFloat16) return false;
  const int64_t heads = batch_size(problem) * problem.kv_heads;
  if (heads == 0 || problem.q_heads == 0 || problem.q_len == 0) return false;
  // A block takes about 0.4 us for 64 keys, the merge 3 us.
  constexpr int64_t kFewKeys = 1024;
  if (detail::most_keys(problem) <= kFewKeys) return false;
  const int64_t group = problem.q_heads / problem.kv_heads;
  const int64_t units = (int64_t{problem.q_len} * group + 63) / 64;  // of a kv head
  // Every block looks at the length of every sequence; beyond this many, tiles balance themselves.
  constexpr int64_t kManySlices = 16384;
  if (units * batch_size(problem) > kManySlices) return false;
  // Few queries: the call takes as long as its keys take to arrive, whatever their share of the
  // allocated length. More: only where tiles of 192 rows leave multiprocessors idle.
  constexpr int kFewQueries = 64;
  constexpr int64_t kFewTiles = 100;
  return problem.q_len <= kFewQueries || (units + 2) / 3 * heads <= kFewTiles;
}

// The layout, also for a call that need not share.
inline ForwardWorkspace forward_workspace(const Problem& problem) {
  const int64_t group = problem.q_heads / std::max(problem.kv_heads, 1);
  ForwardWorkspace layout = {};
  layout.rows = std::min(detail::padded_positions(problem.q_len) * group, kMaxSharedRows);
  const int64_t rows = 2 * kMaxSharingBlocks * layout.rows;
  layout.lse = static_cast<size_t>(rows * problem.value_dim) * 4;
  layout.bytes = layout.lse + static_cast<size_t>(rows) * 4;
  return layout;
}

// Falls with the batch: what is enough for one sequence is enough for any number.
inline size_t forward_workspace_bytes(const Problem& problem) {
  return shares_keys(problem) ? forward_workspace(problem).bytes : 0;
}

// Of keys in pages, which the kernels that share always share.
inline size_t paged_workspace_bytes(const Problem& problem) {
  const bool shares = problem.math == Math::kFloat16 || problem.math == Math::kBFloat16;
  return shares ? forward_workspace(problem).bytes : 0;
}

}  // namespace jaxflash
