// The launch of common/delta_kernel.cuh. In a source of its own, for every GPU: a kernel that files
// compile for different architectures is one symbol, and the linker chooses whose.

#include "common/delta_kernel.cuh"
#include "common/launch.h"
#include "common/status.h"
#include "delta.h"

namespace jaxflash {
namespace {

using DeltaKernel = Kernel<BackwardParams, BackwardWorkspace, int64_t>;

DeltaKernel kernel_of(Math math) {
  switch (math) {
    case Math::kFloat16:
      return delta_kernel<StorageType<Math::kFloat16>>;
    case Math::kBFloat16:
      return delta_kernel<StorageType<Math::kBFloat16>>;
    case Math::kTF32:
    case Math::kFloat32:
      break;
  }
  return delta_kernel<float>;
}

}  // namespace

Status launch_delta(const BackwardParams& params, const BackwardWorkspace& workspace,
                    cudaStream_t stream) {
  const Problem& problem = params.problem;
  const int64_t blocks = batch_size(problem) * problem.q_heads * (workspace.rows / kDeltaRows);
  return cuda_status(launch_blocks(kernel_of(problem.math), Start::kAfter, blocks, kDeltaThreads, 0,
                                   params, workspace, stream),
                     "launching the delta kernel");
}

}  // namespace jaxflash
