// Ranges: the launch of common/range_summary_kernel.cuh.

#include "attention.h"
#include "common/launch.h"
#include "common/range_summary_kernel.cuh"
#include "common/status.h"

namespace jaxflash {
namespace {

Status summarise(const RangeSummaryParams& params, cudaStream_t stream) {
  const int64_t blocks = blocks_of(params.rows) + int64_t{blocks_of(params.keys)};
  constexpr int kWarps = kRangeSummaryThreads / 32;
  const int64_t grid = (params.count * blocks + kWarps - 1) / kWarps;
  if (params.count == 0) return {};
  if (std::max(grid, params.count) > kMaxGrid) {
    return error_status("ranges of so many sequences are not supported");
  }
  cudaError_t error = cudaSuccess;
  if (grid > 0) {
    error = launch(Kernel(range_blocks_kernel), Start::kAfter, Grid{static_cast<unsigned>(grid)},
                   kRangeSummaryThreads, 0, stream, params);
  }
  if (error == cudaSuccess) {
    error =
        launch(Kernel(range_hulls_kernel), Start::kAfter, Grid{static_cast<unsigned>(params.count)},
               kRangeSummaryThreads, 0, stream, params);
  }
  return cuda_status(error, "summarising ranges");
}

}  // namespace
}  // namespace jaxflash

jaxflash::Status jaxflash_range_summary(const jaxflash::RangeSummaryParams* params,
                                        CUstream_st* stream) {
  return jaxflash::summarise(*params, stream);
}
