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
#include "common/status.h"
#include "common/workspace.h"

namespace jaxflash {

// The element types by the names that CUDA's headers give them.
template <Math kMath>
using StorageType =
    std::conditional_t<kMath == Math::kFloat16, __half,
                       std::conditional_t<kMath == Math::kBFloat16, __nv_bfloat16, float>>;

// Lets a kernel of this library have that much on the current device; asks once for each device.
// `Of` tells kernels apart.
template <class Of>
Status allow_shared_memory(const void* kernel, int bytes) {
  static std::atomic<uint64_t> allowed{0};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (error == cudaSuccess && (allowed.load(std::memory_order_acquire) & bit) == 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  }
  return cuda_status(error, "reserving shared memory");
}

// Bytes that a block may have on the current device.
inline Status shared_memory_per_block(int* bytes) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return cuda_status(error, "asking for the GPU's shared memory");
}

inline Status multiprocessors_of_gpu(int* count) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  }
  return cuda_status(error, "asking for the GPU's multiprocessors");
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

// A kernel of these parameters: one of this library, or one that was compiled at run time.
template <class... Parameters>
struct Kernel {
  const void* handle;

  explicit Kernel(const void* handle) : handle(handle) {}
  Kernel(void (*kernel)(Parameters...)) : handle(reinterpret_cast<const void*>(kernel)) {}
};

template <class... Parameters>
cudaError_t launch(Kernel<Parameters...> kernel, Start start, Grid grid, int threads,
                   int shared_bytes, cudaStream_t stream, const Parameters&... arguments) {
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
  void* pointers[] = {const_cast<Parameters*>(&arguments)...};
  return cudaLaunchKernelExC(&config, kernel.handle, pointers);
}

inline constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

// A block of `kernel(params, first_head)` for each of `tiles` tiles of any number of heads.
template <class Params>
cudaError_t launch_heads(Kernel<Params, uint64_t> kernel, int64_t heads, int64_t tiles, int threads,
                         int shared_bytes, const Params& params, cudaStream_t stream) {
  if (heads * tiles == 0) return cudaSuccess;
  const int64_t at_once = kMaxGrid / tiles;
  for (int64_t first = 0; first < heads; first += at_once) {
    const Grid grid{static_cast<unsigned>(std::min(heads - first, at_once) * tiles)};
    const cudaError_t error = launch(kernel, Start::kAfter, grid, threads, shared_bytes, stream,
                                     params, static_cast<uint64_t>(first));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Any number of blocks of `kernel(params, workspace, first_block, more...)`.
template <class... More>
cudaError_t launch_blocks(Kernel<BackwardParams, BackwardWorkspace, int64_t, More...> kernel,
                          Start start, int64_t blocks, int threads, int shared_bytes,
                          const BackwardParams& params, const BackwardWorkspace& workspace,
                          cudaStream_t stream, More... more) {
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
