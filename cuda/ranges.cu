// Ranges: the launches of common/segment_matches_kernel.cuh, common/range_summary_kernel.cuh and
// common/segment_ranges_kernel.cuh.

#include "attention.h"
#include "common/launch.h"
#include "common/range_summary_kernel.cuh"
#include "common/segment_matches_kernel.cuh"
#include "common/segment_ranges_kernel.cuh"
#include "common/status.h"

namespace jaxflash {
namespace {

Status match(const SegmentMatchesParams& params, cudaStream_t stream) {
  const int64_t elements = params.count * (int64_t{params.rows} + params.keys);
  const int64_t grid = (elements + kSegmentThreads - 1) / kSegmentThreads;
  if (grid == 0) return {};
  if (grid > kMaxGrid) return error_status("so many segment ids are not supported");
  cudaError_t error = cudaMemsetAsync(params.buckets, 0xff,
                                      segment_buckets(elements) * sizeof(SegmentBucket), stream);
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

// Blocks of a cluster for so many elements: a thread each, and at most as many as every GPU with
// clusters has. 4096 elements take 4.9 us with eight blocks, 9.5 with one.
int cluster_blocks(int64_t elements) {
  constexpr int kMost = 8;
  int blocks = 1;
  while (blocks < kMost && blocks * int64_t{kSegmentRangesThreads} < elements) blocks *= 2;
  return blocks;
}

Status segment_ranges(const SegmentRangesParams& params, cudaStream_t stream) {
  const SegmentMatchesParams& matches = params.matches;
  const int64_t longest = std::max(matches.rows, matches.keys);
  const Kernel kernel(segment_ranges_kernel);
  cudaFuncAttributes attributes = {};
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel.handle);
  if (error != cudaSuccess) return cuda_status(error, "asking for the kernel of segments");
  int shared_bytes = 0;
  if (Status status = shared_memory_per_block(&shared_bytes); !status.ok()) return status;
  shared_bytes -= static_cast<int>(attributes.sharedSizeBytes);
  // What was compiled for older GPUs knows of no clusters on newer ones either.
  const int cluster = attributes.ptxVersion >= 90 ? cluster_blocks(longest) : 1;
  const int64_t bytes =
      (segment_buckets(longest) + cluster - 1) / cluster * int64_t{sizeof(SegmentBucket)};
  const int64_t grid = 2 * matches.count * cluster;
  if (bytes > shared_bytes || grid > kMaxGrid) {
    Status status = match(matches, stream);
    return status.ok() ? summarise(params.summary, stream) : status;
  }
  if (grid == 0) return {};
  if (Status status = allow_shared_memory<SegmentRangesParams>(kernel.handle, shared_bytes);
      !status.ok()) {
    return status;
  }
  error = launch(kernel, Start::kAfter,
                 Grid{static_cast<unsigned>(grid), static_cast<unsigned>(cluster)},
                 kSegmentRangesThreads, static_cast<int>(bytes), stream, params);
  return cuda_status(error, "matching segments");
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

jaxflash::Status jaxflash_segment_ranges(const jaxflash::SegmentRangesParams* params,
                                         CUstream_st* stream) {
  return jaxflash::segment_ranges(*params, stream);
}
