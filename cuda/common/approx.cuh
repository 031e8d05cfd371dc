// Approximations of the special-function unit.
#pragma once

#include "common/logarithms.h"

namespace jaxflash {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Relative error 2^-22. __fdividef has fewer instructions, but is 0 for divisors from 2^126 on.
__device__ __forceinline__ float divide_approx(float x, float y) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(y));
  return quotient;
}

// The same of a divisor that is not subnormal, with as few instructions as __fdividef.
__device__ __forceinline__ float divide_by_normal(float x, float y) {
  float quotient;
  asm("div.full.ftz.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(y));
  return quotient;
}

// Relative error 2^-11: for logits of products that are no more accurate. Programs beside
// float32-accurate products are compiled with JAXFLASH_PRECISE_MATH.
__device__ __forceinline__ float tanh_approx(float x) {
#ifdef JAXFLASH_PRECISE_MATH
  return tanhf(x);
#else
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// An lse, as what probabilities are computed from again. It has been rounded three times by now, by
// 2^-22 of its size in all. Where that may be 2^2 and more, it is taken away from exponents: what
// could be 2^100 instead of a probability, and infinity then, becomes 0.
__device__ __forceinline__ float lse_in_log2(float lse) {
  const float log2 = lse * kLog2E;
  const float size = fabsf(log2);
  return size < 0x1p24f ? log2 : fmaf(size, 0x1p-22f, log2);
}

// The larger and the smaller; NaN if one of them is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

}  // namespace jaxflash
