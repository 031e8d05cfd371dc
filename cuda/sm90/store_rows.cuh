// Output that leaves a warpgroup without shared memory.
#pragma once

#include "sm90/hardware/ptx.cuh"

namespace jaxflash::sm90 {

// Rows of the output from registers to memory, 16 bytes a lane. `inverse` is 1 / sum of a row;
// a row without a target is dropped.
template <Math kMath, int kElements>
__device__ __forceinline__ void store_rows(const float (&o)[kElements], const float (&inverse)[2],
                                           uint16_t* const (&target)[2], int value_dim, int lane) {
  const bool odd = lane & 1;
  const bool high = lane & 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int column = 0; column < 2 * kElements; column += 32) {
      // Four groups of eight columns, of each of which a lane holds two: transpose the lanes
      // that share the row, so that each holds one group.
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int element = column / 2 + 4 * i + 2 * r;
        words[i] = pack<kMath>(o[element] * inverse[r], o[element + 1] * inverse[r]);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
        (odd ? words[i] : words[i + 1]) = other;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(~0u, high ? words[i] : words[i + 2], 2);
        (high ? words[i] : words[i + 2]) = other;
      }
      const int first = column + lane % 4 * 8;
      if (target[r] != nullptr && first < value_dim) store_global(target[r] + first, words);
    }
  }
}

}  // namespace jaxflash::sm90
