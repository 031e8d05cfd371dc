// Storage of the 16-bit floating types, and conversions.
#pragma once

#include "common/integers.h"

namespace jaxflash {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
__device__ __forceinline__ float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

// Two values as a pair of a 16-bit type; `low` goes to the lower address.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<Float16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace jaxflash
