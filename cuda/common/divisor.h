// Divisions without a loop of instructions: by a number that the host knows, or without a
// remainder.
#pragma once

#include "common/integers.h"

namespace jaxflash {

class Divisor {
 public:
  Divisor() = default;
  // 1 <= divisor < 2^31
  explicit Divisor(uint32_t divisor) : divisor_(divisor), shift_(0) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    // With 2^32 added, the smallest integer above 2^(32 + shift) / divisor.
    const uint64_t excess = (uint64_t{1} << shift_) - divisor;
    multiplier_ = static_cast<uint32_t>((excess << 32) / divisor + 1);
  }

#ifdef __CUDACC__
  // Of 0 <= n < 2^31.
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return (__umulhi(n, multiplier_) + n) >> shift_;
  }
  __device__ __forceinline__ uint32_t remainder(uint32_t n) const {
    return n - quotient(n) * divisor_;
  }
#endif

 private:
  uint32_t divisor_;
  uint32_t multiplier_;
  uint32_t shift_;
};

#ifdef __CUDACC__
// Of a multiple of a divisor > 0, where the quotient is below 2^32: modulo that, by the inverse of
// the divisor's odd part. Each step doubles the bits that are right, of which odd numbers, their
// own inverses modulo 8, have three.
__device__ __forceinline__ uint32_t exact_quotient(uint64_t multiple, uint32_t divisor) {
  const int shift = __ffs(static_cast<int>(divisor)) - 1;
  const uint32_t odd = divisor >> shift;
  uint32_t inverse = odd;
#pragma unroll
  for (int bits = 3; bits < 32; bits *= 2) inverse *= 2 - odd * inverse;
  return static_cast<uint32_t>(multiple >> shift) * inverse;
}
#endif

}  // namespace jaxflash
