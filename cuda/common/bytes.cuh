// Bytes of two words, permuted.
#pragma once

#include "common/integers.h"

namespace jaxflash {

// Four bytes, the lowest by the lowest hex digit of kSelector: byte 0 to 3 of `low`, 4 to 7 of
// `high`; with 8 added to the digit, the byte's upper bit in place of all eight.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "n"(kSelector));
  return bytes;
}

}  // namespace jaxflash
