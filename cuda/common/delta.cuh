// Backward, first kernel: per query row delta = sum(dout * out) - dlse and lse in base 2, both laid
// out (batch, head, row) as the main kernel reads them; clears what the main kernel adds to.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention.h"
#include "common/dependency.cuh"
#include "common/mask.cuh"
#include "common/softmax.cuh"
#include "common/tensor.cuh"
#include "common/workspace.h"

namespace jaxflash {

inline constexpr int kDeltaThreads = 256;
inline constexpr int kDeltaRows = 64;  // of one head: a block's work; divides kWorkspaceRows

inline int64_t delta_blocks(const Problem& problem, const BackwardWorkspace& workspace) {
  return batch_size(problem) * problem.q_heads * (workspace.rows / kDeltaRows);
}

template <class Element>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ BackwardWorkspace workspace, int64_t first_block) {
  constexpr int kLanes = 8;  // of a row: 8 x 16 bytes is a full line
  constexpr int kRowsAtOnce = kDeltaThreads / kLanes;
  constexpr int kVector = 16 / sizeof(Element);
  const Problem& problem = params.problem;

  const int64_t block = first_block + blockIdx.x;
  const int64_t row_blocks = workspace.rows / kDeltaRows;
  const int64_t head_index = block / row_blocks;  // over batch and head
  const int first_row = static_cast<int>(block % row_blocks) * kDeltaRows;
  const int64_t batch = head_index / problem.q_heads;
  const int head = static_cast<int>(head_index % problem.q_heads);

  launch_dependents();
  float4* dq = reinterpret_cast<float4*>(workspace.dq_of(params.workspace, head_index) +
                                         first_row * workspace.dims);
  for (int i = threadIdx.x; i < kDeltaRows * workspace.dims / 4; i += kDeltaThreads) {
    dq[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  constexpr int kTurns = kDeltaRows / kWorkspaceTurnRows;
  if (threadIdx.x < kTurns) {
    workspace.turns_of(params.workspace, head_index)[first_row / kWorkspaceTurnRows + threadIdx.x] =
        0;
  }
  if (block == 0 && threadIdx.x == 0) *workspace.ticket_of(params.workspace) = 0;

  const BandMask mask(problem, batch);
  const auto* out = static_cast<const Element*>(params.out.data) +
                    tensor_offset(params.out, problem, batch) + head * params.out.head_stride;
  const auto* dout = static_cast<const Element*>(params.dout.data) +
                     tensor_offset(params.dout, problem, batch) + head * params.dout.head_stride;
  const bool vectors = rows_are_aligned(out, params.out.seq_stride, problem.value_dim) &&
                       rows_are_aligned(dout, params.dout.seq_stride, problem.value_dim);
  const int lane = threadIdx.x % kLanes;

#pragma unroll
  for (int pass = 0; pass < kDeltaRows / kRowsAtOnce; ++pass) {
    const int row = first_row + pass * kRowsAtOnce + threadIdx.x / kLanes;
    const bool valid = row < mask.q_len();
    float sum = 0.f;
    if (valid && vectors) {
      const auto* out_row = reinterpret_cast<const uint4*>(out + row * params.out.seq_stride);
      const auto* dout_row = reinterpret_cast<const uint4*>(dout + row * params.dout.seq_stride);
      for (int i = lane; i < problem.value_dim / kVector; i += kLanes) {
        const uint4 a = __ldcs(out_row + i), b = __ldg(dout_row + i);  // nobody reads out again
        const auto* a_element = reinterpret_cast<const Element*>(&a);
        const auto* b_element = reinterpret_cast<const Element*>(&b);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          sum += static_cast<float>(a_element[e]) * static_cast<float>(b_element[e]);
        }
      }
    } else if (valid) {
#pragma unroll 1
      for (int i = lane; i < problem.value_dim; i += kLanes) {
        sum += static_cast<float>(out[row * params.out.seq_stride + i]) *
               static_cast<float>(dout[row * params.dout.seq_stride + i]);
      }
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    if (lane != 0) continue;

    // A row that sees no key, padding included: P = exp2(s - inf) = 0, whatever dout holds there.
    float lse = INFINITY, delta = 0.f;
    if (valid) {
      const int64_t index = (batch * problem.q_len + row) * problem.q_heads + head;
      const float lse_row = params.lse[index];
      if (lse_row != -INFINITY) {
        lse = lse_row * kLog2E;
        delta = sum - (params.dlse == nullptr ? 0.f : params.dlse[index]);
      }
    }
    workspace.lse_of(params.workspace, head_index)[row] = lse;
    workspace.delta_of(params.workspace, head_index)[row] = delta;
  }
}

}  // namespace jaxflash
