// Who the calling thread is, in a way that the compiler cannot compute ahead.
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

}  // namespace jaxflash
