// Masks: the launches of common/dense_mask_kernel.cuh and common/mask_intervals_kernel.cuh.

#include <algorithm>

#include "attention.h"
#include "common/dense_mask_kernel.cuh"
#include "common/launch.h"
#include "common/mask_intervals_kernel.cuh"
#include "common/status.h"
#include "masks.h"

namespace jaxflash {
namespace {

constexpr int kClearThreads = 256;

template <class Params>
Status launch_work(Kernel<Params> kernel, int64_t blocks, int threads, const Params& params,
                   cudaStream_t stream) {
  if (blocks == 0) return {};
  if (blocks > kMaxGrid) return error_status("a mask of so many elements is not supported");
  return cuda_status(launch(kernel, Start::kAfter, Grid{static_cast<unsigned>(blocks)}, threads, 0,
                            stream, params),
                     "reading a mask");
}

template <class Params>
Status make_intervals(const Params& params, cudaStream_t stream) {
  constexpr int kWarps = kMaskIntervalsThreads / 32;
  const int64_t blocks = blocks_of(params.q_len) + int64_t{blocks_of(params.kv_len)};
  return launch_work(Kernel<Params>(mask_intervals_kernel<Params>),
                     (params.count * blocks + kWarps - 1) / kWarps, kMaskIntervalsThreads, params,
                     stream);
}

Status read_mask(const DenseMaskParams& params, cudaStream_t stream) {
  const int64_t row_blocks = blocks_of(params.rows), key_blocks = blocks_of(params.keys);
  const int64_t across = (key_blocks + kDenseMaskBlocks - 1) / kDenseMaskBlocks;
  const Kernel words(params.packs_keys ? mask_words_kernel<true> : mask_words_kernel<false>);
  const Status status =
      launch_work(words, params.count * row_blocks * across, kDenseMaskThreads, params, stream);
  return status.ok() ? make_intervals(params, stream) : status;
}

// Rows and keys of a predicate's masks, of which nothing has been seen yet.
__global__ void __launch_bounds__(kClearThreads)
    clear_seen_kernel(const __grid_constant__ PredicateBlocks params) {
  const int64_t rows = 2 * params.count * blocks_of(params.rows);
  const int64_t keys = 2 * params.count * blocks_of(params.keys);
  const int64_t i = int64_t{blockIdx.x} * kClearThreads + threadIdx.x;
  if (i < rows) params.row_sees[i] = 0;
  if (i < keys) params.key_is_seen[i] = 0;
}

}  // namespace

Status clear_seen(const PredicateBlocks& params, CUstream_st* stream) {
  const int64_t words = 2 * params.count * blocks_of(std::max(params.rows, params.keys));
  return launch_work(Kernel(clear_seen_kernel), (words + kClearThreads - 1) / kClearThreads,
                     kClearThreads, params, stream);
}

Status find_intervals(const PredicateBlocks& params, CUstream_st* stream) {
  return make_intervals(params, stream);
}

}  // namespace jaxflash

jaxflash::Status jaxflash_dense_mask(const jaxflash::DenseMaskParams* params, CUstream_st* stream) {
  return jaxflash::read_mask(*params, stream);
}
