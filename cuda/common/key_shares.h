// Which forward calls share the keys of a query tile among blocks, and the workspace that they pass
// their parts of the output through. One rule, of sizes alone, whatever the mask: Python plans the
// workspace, and chooses the kernels of score programs, before it is known which GPU the program
// will run on.
#pragma once

#include <algorithm>
#include <cstdint>

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

namespace detail {

// Whether kernels that share keys exist.
inline bool may_share(const Problem& problem) {
  return problem.math == Math::kFloat16 || problem.math == Math::kBFloat16;
}

inline bool shares_keys(const Problem& problem, bool has_program) {
  if (!may_share(problem)) return false;
  const int64_t heads = batch_size(problem) * problem.kv_heads;
  if (heads == 0 || problem.q_heads == 0 || problem.q_len == 0) return false;
  // A block takes about 0.4 us for 64 keys, the merge 3 us.
  constexpr int64_t kFewKeys = 1024;
  if (most_keys(problem) <= kFewKeys) return false;
  const int64_t group = problem.q_heads / problem.kv_heads;
  const int64_t units = (int64_t{problem.q_len} * group + 63) / 64;  // of a kv head
  // Every block looks at the length of every sequence; beyond this many, tiles balance themselves.
  constexpr int64_t kManySlices = 16384;
  if (units * batch_size(problem) > kManySlices) return false;
  // Few queries: the call takes as long as its keys take to arrive, whatever their share of the
  // allocated length. More: only where tiles of 192 rows leave multiprocessors idle. With a score
  // program fewer of both: the kernels that share have smaller tiles, and add a bias element by
  // element, where products of the others start from it.
  const bool few_queries = has_program ? units <= 2 : problem.q_len <= 64;
  const int64_t few_tiles = has_program ? 64 : 100;
  return few_queries || (units + 2) / 3 * heads <= few_tiles;
}

}  // namespace detail

// Of a plain call.
inline bool shares_keys(const Problem& problem) { return detail::shares_keys(problem, false); }

// How many units of 64 rows have the tiles whose keys blocks share, in kernels that are compiled
// for a score program and such sizes; 0: they do not share. With keys in pages they always do.
inline int32_t shared_units(const Problem& problem, bool paged) {
  if (!paged && !detail::shares_keys(problem, true)) return 0;
  return fits_one_unit(problem) ? 1 : 2;
}

// Units of 64 rows that the queries of a kv head fill where blocks do not share keys and each
// unit's rows are of one head: in kernels for a score program, and of 64 queries and more.
inline int64_t query_units(int64_t q_len, int32_t q_heads, int32_t kv_heads) {
  return (q_len + 63) / 64 * (q_heads / std::max(kv_heads, 1));
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

// Of a plain call. Falls with the batch: what is enough for one sequence is enough for any number.
inline size_t forward_workspace_bytes(const Problem& problem) {
  return shares_keys(problem) ? forward_workspace(problem).bytes : 0;
}

// Of a score program's kernels: those that do not share may count the tiles that blocks have drawn.
inline size_t program_workspace_bytes(const Problem& problem, int32_t shared_units) {
  const bool shares = shared_units > 0 && detail::may_share(problem);
  return shares ? forward_workspace(problem).bytes : sizeof(uint32_t);
}

}  // namespace jaxflash
