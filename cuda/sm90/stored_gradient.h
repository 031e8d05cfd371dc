// Host side of d score, where the backward kernel stores it: the gradient of a dense capture of a
// score program.
#pragma once

#include <cuda_runtime_api.h>

#include "common/launch.h"
#include "common/status.h"
#include "common/workspace.h"
#include "problem.h"
#include "sm90/backward/clear_stored_kernel.cuh"
#include "sm90/hardware/tensor_map.h"

namespace jaxflash::sm90 {

inline bool is_empty(const Problem& problem, const StoredGradient& stored) {
  return stored.data == nullptr || stored.matrices == 0 || problem.q_len == 0 ||
         problem.kv_len == 0;
}

// Whether the kernel comes by every matrix, and by the same rows of each: there are no lengths and
// ranges, nor heads that are another device's.
inline bool stores_alike(const Problem& problem, const StoredGradient& stored) {
  return problem.band.q_lengths == nullptr && problem.band.kv_lengths == nullptr &&
         problem.ranges.keys_of_row == nullptr &&
         stored.matrices * stored.batch_sum == batch_size(problem) * problem.q_heads;
}

// Whether the L2 (50 MB) keeps the gradient beside everything else. Four batch elements that share
// one of 17 MB are 5 % faster apart, with 34 MB in step.
inline bool fits_cache(const Problem& problem, const StoredGradient& stored) {
  return stored.matrices * problem.q_len * problem.kv_len * 2 <= int64_t{24} << 20;
}

// Whether batch elements that share the gradient work on the same keys one after the other. What
// they add to then stays in the L2: 3.06 ms instead of 3.44 for (4, 4096, 16, 128). But each waits
// for the one before, 3.25 ms instead of 1.84 where one of 1000 rows comes behind one of 4096.
inline bool adds_in_step(const Problem& problem, const StoredGradient& stored) {
  return !is_empty(problem, stored) && stored.batch_sum > 1 && stores_alike(problem, stored) &&
         !fits_cache(problem, stored);
}

// Zeros in what the kernel does not store: of tiles that no row sees, it does not come by those.
inline cudaError_t clear_rest(const Problem& problem, const StoredGradient& stored,
                              cudaStream_t stream) {
  if (!stores_alike(problem, stored)) {
    const int64_t elements = stored.matrices * problem.q_len * problem.kv_len;
    return cudaMemsetAsync(stored.data, 0, 2 * elements, stream);
  }
  if (problem.band.left >= kUnlimited && problem.band.right >= kUnlimited) return cudaSuccess;
  const int64_t row_tiles = (problem.q_len + kClearRows - 1) / kClearRows;
  return launch_heads(Kernel<ClearStoredArgs, uint64_t>(clear_stored_kernel), stored.matrices,
                      row_tiles, kClearThreads, 0,
                      ClearStoredArgs{problem, static_cast<uint4*>(stored.data)}, stream);
}

// Behind the rest of the workspace, of `bytes`.
inline uint32_t* batch_sum_steps(const BackwardParams& params, size_t bytes) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(params.workspace) + bytes);
}

// Ahead of the kernel; `bytes` of the workspace without sums.
inline Status clear_stored(const BackwardParams& params, size_t bytes, cudaStream_t stream) {
  const Problem& problem = params.problem;
  const StoredGradient& stored = params.stored;
  if (is_empty(problem, stored)) return {};
  cudaError_t error = clear_rest(problem, stored, stream);
  if (error == cudaSuccess && stored.batch_sum > 1) {
    error = cudaMemsetAsync(batch_sum_steps(params, bytes), 0,
                            batch_sum_workspace_bytes(problem, stored.batch_sum), stream);
  }
  return cuda_status(error, "clearing the gradient of a capture");
}

// Not of an empty one: what the kernel stores to, by TMA. Queries are an axis by themselves: rows
// of a tile behind the last one are left out.
inline Status encode_stored(TensorMap& map, const Problem& problem, const StoredGradient& stored,
                            int box_rows) {
  const int64_t keys = problem.kv_len;
  const MappedTensor matrices = {stored.data,
                                 {keys, problem.q_len, stored.matrices, 1, 1},
                                 {1, keys, problem.q_len * keys, 0, 0},
                                 {0, 0}};
  if (const MapFault fault = map_fault(matrices); fault.wanted != nullptr) {
    return error_status("the gradient of a capture needs %s, got %lld", fault.wanted,
                        static_cast<long long>(fault.got));
  }
  return encode(map, matrices, problem.math, box_rows);
}

}  // namespace jaxflash::sm90
