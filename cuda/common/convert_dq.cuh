// Backward, last kernel: dq = scale * accumulator, from the order of the main kernel's matrix
// fragments to rows of the output type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention.h"
#include "common/tensor.cuh"
#include "common/workspace.h"

namespace jaxflash {

inline constexpr int kConvertThreads = 256;
inline constexpr int kConvertRows = 64;  // of one head: a block's work; divides kWorkspaceRows

inline int64_t convert_dq_blocks(const Problem& problem) {
  return batch_size(problem) * problem.q_heads *
         ((problem.q_len + kConvertRows - 1) / kConvertRows);
}

// Eight neighbouring columns of a row, in 16-byte stores where `vectors` says that they fit.
template <class Element>
__device__ __forceinline__ void store_eight(Element* row, const float (&values)[8], int valid,
                                            bool vectors) {
  alignas(16) Element converted[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) converted[i] = static_cast<Element>(values[i]);
  constexpr int kVector = 16 / sizeof(Element);
#pragma unroll
  for (int i = 0; i < 8; i += kVector) {
    if (vectors) {
      if (i < valid) *reinterpret_cast<uint4*>(row + i) = *reinterpret_cast<uint4*>(converted + i);
    } else {
#pragma unroll
      for (int e = i; e < i + kVector; ++e) {
        if (e < valid) row[e] = converted[e];
      }
    }
  }
}

// FragmentOrder says where a 16 x 8 piece of a head's accumulator keeps its elements:
// load(piece, group, values) returns row `group` in values[0] and row `group + 8` in values[1].
template <class Element, class FragmentOrder>
__global__ void __launch_bounds__(kConvertThreads)
    convert_dq_kernel(const __grid_constant__ BackwardParams params,
                      const __grid_constant__ BackwardWorkspace workspace, int64_t first_block) {
  const Problem& problem = params.problem;
  const int64_t block = first_block + blockIdx.x;
  const int64_t row_blocks = (problem.q_len + kConvertRows - 1) / kConvertRows;
  const int64_t head_index = block / row_blocks;
  const int first_row = static_cast<int>(block % row_blocks) * kConvertRows;
  const int64_t batch = head_index / problem.q_heads;
  const int head = static_cast<int>(head_index % problem.q_heads);

  const float* accumulator = workspace.dq_of(params.workspace, head_index);
  auto* dq = static_cast<Element*>(params.dq.data) + tensor_offset(params.dq, problem, batch) +
             head * params.dq.head_stride;
  const bool vectors = rows_are_aligned(dq, params.dq.seq_stride, problem.head_dim);

  const int pieces = (problem.head_dim + 7) / 8;  // of a row
  for (int i = threadIdx.x; i < kConvertRows / 2 * pieces; i += kConvertThreads) {
    const int col = i % pieces * 8;
    const int group = i / pieces % 8;
    const int row = first_row + i / pieces / 8 * 16 + group;
    if (row >= problem.q_len) continue;
    float values[2][8];
    const int64_t piece = (row / 16) * (workspace.dims / 8) + col / 8;
    FragmentOrder::load(accumulator + piece * 128, group, values);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 8; ++e) values[half][e] *= problem.scale;
      if (row + 8 * half < problem.q_len) {
        store_eight(dq + (row + 8 * half) * params.dq.seq_stride + col, values[half],
                    problem.head_dim - col, vectors);
      }
    }
  }
}

}  // namespace jaxflash
