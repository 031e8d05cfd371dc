// Dense masks: the launch of common/dense_mask_kernel.cuh.

#include "attention.h"
#include "common/dense_mask_kernel.cuh"
#include "common/launch.h"
#include "common/status.h"

namespace jaxflash {
namespace {

Status launch_work(Kernel<DenseMaskParams> kernel, int64_t blocks, const DenseMaskParams& params,
                   cudaStream_t stream) {
  if (blocks > kMaxGrid) return error_status("a mask of so many elements is not supported");
  return cuda_status(launch(kernel, Start::kAfter, Grid{static_cast<unsigned>(blocks)},
                            kDenseMaskThreads, 0, stream, params),
                     "reading a mask");
}

Status read_mask(const DenseMaskParams& params, cudaStream_t stream) {
  if (params.count == 0 || params.rows == 0 || params.keys == 0) return {};
  const int64_t row_blocks = blocks_of(params.rows), key_blocks = blocks_of(params.keys);
  const int64_t across = (key_blocks + kDenseMaskBlocks - 1) / kDenseMaskBlocks;
  const Kernel words(params.packs_keys ? mask_words_kernel<true> : mask_words_kernel<false>);
  const Status status = launch_work(words, params.count * row_blocks * across, params, stream);
  if (!status.ok()) return status;
  constexpr int kWarps = kDenseMaskThreads / 32;
  const int64_t warps = params.count * (row_blocks + key_blocks);
  return launch_work(Kernel(mask_intervals_kernel), (warps + kWarps - 1) / kWarps, params, stream);
}

}  // namespace
}  // namespace jaxflash

jaxflash::Status jaxflash_dense_mask(const jaxflash::DenseMaskParams* params, CUstream_st* stream) {
  return jaxflash::read_mask(*params, stream);
}
