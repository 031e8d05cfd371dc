// Kernels that start while the one before them in the stream still runs; from sm_90 on. Elsewhere,
// and without Start::kBeside, both do nothing: the order of the stream holds.
#pragma once

namespace jaxflash {

// The next kernel may start as soon as every block of this one has come here.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What the kernel before this one has written can be read afterwards.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace jaxflash
