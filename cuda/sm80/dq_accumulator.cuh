// The float32 accumulator of dq in global memory.
#pragma once

#include "common/integers.h"
#include "common/memory_order.cuh"

namespace jaxflash::sm80 {

// From sm_90 on one instruction adds four floats. A kernel that is compiled at run time keeps to
// the order of the kernels that it works with, whose code may be an older architecture's:
// JAXFLASH_PORTABLE_ARCH.
#if defined(JAXFLASH_PORTABLE_ARCH)
inline constexpr bool kVectorAdds = JAXFLASH_PORTABLE_ARCH >= 90;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kVectorAdds = true;
#else
inline constexpr bool kVectorAdds = false;
#endif

// A head's accumulator is a row-major matrix of pieces of 16 x 8, and a piece keeps the elements as
// the 32 lanes of a warp hold them in an accumulator fragment: addresses need no coordinates, and
// every add covers whole lines. With vector adds a lane's four elements are neighbours, otherwise
// the 32 lanes' elements of one kind are.
struct DqFragmentOrder {
  static constexpr int kPiece = 128;

  __device__ __forceinline__ static void add(float* piece, const float (&acc)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kVectorAdds) {
      asm volatile(
          "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(piece + 4 * lane),
          "f"(acc[0]), "f"(acc[1]), "f"(acc[2]), "f"(acc[3])
          : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) red_add_f32(piece + 32 * i + lane, acc[i]);
    }
  }

  // The elements of a lane. Nobody reads them again.
  __device__ __forceinline__ static void load(const float* piece, int lane, float (&values)[4]) {
    if constexpr (kVectorAdds) {
      const float4 four = __ldcs(reinterpret_cast<const float4*>(piece + 4 * lane));
      values[0] = four.x;
      values[1] = four.y;
      values[2] = four.z;
      values[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = __ldcs(piece + 32 * i + lane);
    }
  }
};

}  // namespace jaxflash::sm80
