// Masks: the launches of common/dense_mask_kernel.cuh and common/mask_intervals_kernel.cuh.

#include "attention.h"
#include "common/dense_mask_kernel.cuh"
#include "common/launch.h"
#include "common/mask_intervals_kernel.cuh"
#include "common/status.h"

namespace jaxflash {
namespace {

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

}  // namespace
}  // namespace jaxflash

jaxflash::Status jaxflash_dense_mask(const jaxflash::DenseMaskParams* params, CUstream_st* stream) {
  return jaxflash::read_mask(*params, stream);
}

jaxflash::Status jaxflash_mask_blocks(const jaxflash::MaskBlocksParams* params,
                                      CUstream_st* stream) {
  return jaxflash::make_intervals(*params, stream);
}
