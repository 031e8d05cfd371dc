// The 64 rows of a warpgroup between accumulator fragments, as 16-bit pairs, and swizzled panels of
// 64 columns in shared memory.
#pragma once

#include "sm90/hardware/ptx.cuh"

namespace jaxflash::sm90 {

template <int kPanelBytes>
class FragmentPanels {
 public:
  // `rows`: the warpgroup's first one, in the first panel; `thread`: of the warpgroup.
  __device__ __forceinline__ FragmentPanels(uint32_t rows, int thread) {
    const int row = thread / 32 * 16 + thread % 16;
    own_ = rows + row * 128 + ((thread % 32 / 16) ^ (row % 8)) * 16;
  }

  // Of 16 columns from a multiple of 16 on: the thread's pairs of both of its rows, then those 8
  // columns on.
  __device__ __forceinline__ void read(int column, uint32_t (&pairs)[4]) const {
    ldmatrix_x4(address(column), pairs);
  }
  __device__ __forceinline__ void write(int column, const uint32_t (&pairs)[4]) const {
    stmatrix_x4(address(column), pairs);
  }

 private:
  __device__ __forceinline__ uint32_t address(int column) const {
    return (own_ ^ (column % 64 * 2)) + column / 64 * kPanelBytes;
  }

  uint32_t own_;  // panels begin at multiples of 1024: swizzling changes bits of its own
};

}  // namespace jaxflash::sm90
