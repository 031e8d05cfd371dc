// Host side of the backward's last kernel, the same for all families.
#pragma once

#include "common/convert_dq_kernel.cuh"
#include "common/launch.h"

namespace jaxflash {

inline int64_t convert_dq_blocks(const Problem& problem) {
  return batch_size(problem) * problem.q_heads *
         ((problem.q_len + kConvertRows - 1) / kConvertRows);
}

// `adds`: see convert_dq_kernel.
template <Math kMath, class FragmentOrder>
cudaError_t launch_convert_dq(Start start, const BackwardParams& params,
                              const BackwardWorkspace& workspace, uint32_t adds,
                              cudaStream_t stream) {
  return launch_blocks(Kernel(convert_dq_kernel<StorageType<kMath>, FragmentOrder>), start,
                       convert_dq_blocks(params.problem), kConvertThreads, 0, params, workspace,
                       stream, adds);
}

}  // namespace jaxflash
