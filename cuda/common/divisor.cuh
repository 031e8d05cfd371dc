// Division by a number that the host knows: a multiplication and a shift on the device, where a
// division takes about a hundred clocks.
#pragma once

#include <cstdint>

namespace jaxflash {

class Divisor {
 public:
  Divisor() = default;
  // Dividends must stay below 2^31.
  explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }

  __device__ __forceinline__ friend uint32_t operator/(uint32_t n, const Divisor& d) {
    // multiplier = 2^(31 + shift) / divisor, rounded up by less than 1; 2^shift >= divisor.
    return __umulhi(2 * n, d.multiplier_) >> d.shift_;
  }
  __device__ __forceinline__ friend uint32_t operator%(uint32_t n, const Divisor& d) {
    return n - n / d * d.divisor_;
  }

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = uint32_t{1} << 31;
  uint32_t shift_ = 0;
};

}  // namespace jaxflash
