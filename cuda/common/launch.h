// Host code that the launchers of all families share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "attention.h"
#include "common/workspace.h"

namespace jaxflash {

// The element types by the names that CUDA's headers give them.
template <Math kMath>
using StorageType =
    std::conditional_t<kMath == Math::kFloat16, __half,
                       std::conditional_t<kMath == Math::kBFloat16, __nv_bfloat16, float>>;

// Lets a kernel use Traits::kSharedBytes on the current device, once for each device.
template <class Traits>
cudaError_t allow_shared_memory(const void* kernel, int device) {
  static std::atomic<uint64_t> allowed{0};
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  return error;
}

// When a kernel may start.
enum class Start {
  kAfter,   // once the kernel before it in the stream is done
  kBeside,  // once that kernel's blocks call launch_dependents (common/dependency.cuh); it waits
            // for their results itself
};

struct Grid {
  unsigned blocks;
  unsigned cluster_blocks = 1;  // of a cluster; divides `blocks`. Above 1 from sm_90 on
};

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), Start start, Grid grid, int threads,
                   int shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (start == Start::kBeside) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster_blocks > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {grid.cluster_blocks, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Any number of blocks of `kernel(params, workspace, first_block, more...)`.
template <class... More>
cudaError_t launch_blocks(void (*kernel)(BackwardParams, BackwardWorkspace, int64_t, More...),
                          Start start, int64_t blocks, int threads, int shared_bytes,
                          const BackwardParams& params, const BackwardWorkspace& workspace,
                          cudaStream_t stream, More... more) {
  constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
  for (int64_t first = 0; first < blocks; first += kMaxGrid) {
    const Grid grid{static_cast<unsigned>(std::min(blocks - first, kMaxGrid))};
    const cudaError_t error = launch(kernel, start, grid, threads, shared_bytes, stream, params,
                                     workspace, first, more...);
    if (error != cudaSuccess) return error;
    start = Start::kAfter;  // of several grids only the first has waited for what came before
  }
  return cudaSuccess;
}

}  // namespace jaxflash
