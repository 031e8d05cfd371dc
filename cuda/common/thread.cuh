// Who the calling thread is, in a way that the compiler cannot compute ahead, and what lanes find
// together.
#pragma once

#include "common/integers.h"

namespace jaxflash {

// Volatile: what is computed from these after or inside a loop is computed there, and not kept in
// registers that the loop's products need.
__device__ __forceinline__ uint32_t laneid() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ uint32_t tid_x() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ uint32_t ctaid_x() {
  uint32_t block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// Makes the compiler forget what it knows about a value. Addresses of fragments depend on the lane
// and on such a coordinate; left alone, the compiler computes the addresses of all products before
// the main loop and then has no registers left for the products.
__device__ __forceinline__ int forget(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Sum over the lanes whose numbers differ in the bits of kLanes.
template <int kLanes>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    if (kLanes & distance) value += __shfl_xor_sync(~0u, value, distance);
  }
  return value;
}
// Over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float sum_of_row(float value) { return lane_sum<3>(value); }

}  // namespace jaxflash
