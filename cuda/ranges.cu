// Ranges: the launches of common/segment_matches_kernel.cuh and common/range_summary_kernel.cuh.

#include "attention.h"
#include "common/launch.h"
#include "common/range_summary_kernel.cuh"
#include "common/segment_matches_kernel.cuh"
#include "common/status.h"

namespace jaxflash {
namespace {

Status match(const SegmentMatchesParams& params, cudaStream_t stream) {
  const int64_t elements = params.count * (int64_t{params.rows} + params.keys);
  const int64_t grid = (elements + kSegmentThreads - 1) / kSegmentThreads;
  if (grid == 0) return {};
  if (grid > kMaxGrid) return error_status("so many segment ids are not supported");
  cudaError_t error =
      cudaMemsetAsync(params.buckets, 0xff, 2 * elements * sizeof(SegmentBucket), stream);
  for (const Kernel kernel : {Kernel(segments_kernel<true>), Kernel(segments_kernel<false>)}) {
    if (error != cudaSuccess) break;
    error = launch(kernel, Start::kAfter, Grid{static_cast<unsigned>(grid)}, kSegmentThreads, 0,
                   stream, params);
  }
  return cuda_status(error, "matching segments");
}

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

jaxflash::Status jaxflash_segment_matches(const jaxflash::SegmentMatchesParams* params,
                                          CUstream_st* stream) {
  return jaxflash::match(*params, stream);
}

jaxflash::Status jaxflash_range_summary(const jaxflash::RangeSummaryParams* params,
                                        CUstream_st* stream) {
  return jaxflash::summarise(*params, stream);
}
