// Words in global memory by which blocks, also those of different kernels, tell one another of what
// they have written, and adds to what others add to as well.
#pragma once

#include "common/integers.h"

namespace jaxflash {

// What came before the release of the value that is read can be read afterwards.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void add_release(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void red_add_f32(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

struct WholeBlock {
  __device__ __forceinline__ static void sync() { __syncthreads(); }
};

// What a block adds between wait_for_turn and end_turn follows what was added before the counter
// had the number that it waits for, and precedes what waits for the number behind its turn. Both
// are barriers of the team: threads of a block, thread 0 among them.
template <class Team = WholeBlock>
__device__ __forceinline__ void wait_for_turn(const uint32_t* counter, uint32_t turn) {
  if (threadIdx.x == 0) {
    while (load_acquire(counter) != turn) {
    }
  }
  Team::sync();
}

template <class Team = WholeBlock>
__device__ __forceinline__ void end_turn(uint32_t* counter, uint32_t turn) {
  __threadfence();  // every thread's adds are performed before thread 0 tells the next block
  Team::sync();
  if (threadIdx.x == 0) store_release(counter, turn + 1);
}

}  // namespace jaxflash
