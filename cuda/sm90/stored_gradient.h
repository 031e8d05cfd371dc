// Host side of d score, where the backward kernel stores it: the gradient of a dense capture of a
// score program.
#pragma once

#include <cuda_runtime_api.h>

#include "common/status.h"
#include "common/workspace.h"
#include "problem.h"
#include "sm90/hardware/tensor_map.h"

namespace jaxflash::sm90 {

inline bool is_empty(const Problem& problem, const StoredGradient& stored) {
  return stored.data == nullptr || stored.matrices == 0 || problem.q_len == 0 ||
         problem.kv_len == 0;
}

// Whether the kernel stores every element: those of tiles that no row sees it does not come by, nor
// matrices of heads that are another device's.
inline bool stores_all(const Problem& problem, const StoredGradient& stored) {
  const Band& band = problem.band;
  return band.left >= kUnlimited && band.right >= kUnlimited && band.q_lengths == nullptr &&
         band.kv_lengths == nullptr && problem.ranges.keys_of_row == nullptr &&
         stored.matrices == batch_size(problem) * problem.q_heads;
}

// Ahead of the kernel.
inline Status clear_stored(const Problem& problem, const StoredGradient& stored,
                           cudaStream_t stream) {
  if (is_empty(problem, stored) || stores_all(problem, stored)) return {};
  const int64_t elements = stored.matrices * problem.q_len * problem.kv_len;
  return cuda_status(cudaMemsetAsync(stored.data, 0, 2 * elements, stream),
                     "clearing the gradient of a capture");
}

// Not of an empty one. Queries are an axis by themselves: rows of a tile behind the last one are
// left out.
inline Status encode_stored(TensorMap& map, const Problem& problem, const StoredGradient& stored,
                            Math math, int box_rows) {
  const int64_t elements = int64_t{problem.q_len} * problem.kv_len;
  const MappedTensor matrices = {stored.data,
                                 {problem.kv_len, problem.q_len, stored.matrices, 1, 1},
                                 {1, problem.kv_len, elements, 0, 0},
                                 {0, 0}};
  if (!mappable(matrices)) {
    return error_status("the gradient of a capture must lie on a multiple of 16 bytes");
  }
  return encode(map, matrices, math, box_rows);
}

}  // namespace jaxflash::sm90
