// Addressing of the (*B, length, heads, dim) arrays of problem.h.
#pragma once

#include "problem.h"

namespace jaxflash {

// Elements from a tensor's base to its part of the flat batch index.
__device__ __forceinline__ int64_t tensor_offset(const Tensor& tensor, const Problem& problem,
                                                 int64_t batch) {
  int64_t offset = 0;
  for (int axis = problem.num_batch_axes - 1; axis > 0; --axis) {
    const int64_t extent = problem.batch_extent[axis];
    offset += batch % extent * tensor.batch_stride[axis];
    batch /= extent;
  }
  return problem.num_batch_axes == 0 ? 0 : offset + batch * tensor.batch_stride[0];
}

// Every row of `dim` elements can be read or written in whole 16-byte pieces.
template <class Element>
__device__ __forceinline__ bool rows_are_aligned(const Element* base, int64_t seq_stride,
                                                 int32_t dim) {
  constexpr int kVector = 16 / sizeof(Element);
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && seq_stride % kVector == 0 &&
         dim % kVector == 0;
}

}  // namespace jaxflash
