// Host side of the backward's first kernel, the same for all families.
#pragma once

#include "common/delta_kernel.cuh"
#include "common/launch.h"

namespace jaxflash {

inline int64_t delta_blocks(const Problem& problem, const BackwardWorkspace& workspace) {
  return batch_size(problem) * problem.q_heads * (workspace.rows / kDeltaRows);
}

template <Math kMath>
cudaError_t launch_delta(const BackwardParams& params, const BackwardWorkspace& workspace,
                         cudaStream_t stream) {
  return launch_blocks(Kernel(delta_kernel<StorageType<kMath>>), Start::kAfter,
                       delta_blocks(params.problem, workspace), kDeltaThreads, 0, params, workspace,
                       stream);
}

}  // namespace jaxflash
