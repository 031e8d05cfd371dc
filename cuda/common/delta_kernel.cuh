// Backward, first kernel: per query row delta = sum(dout * out) - dlse and lse in base 2, both laid
// out (batch, head, row) as the main kernel reads them; clears what the main kernel adds to.
#pragma once

#include "common/approx.cuh"
#include "common/dependency.cuh"
#include "common/mask.cuh"
#include "common/softmax.cuh"
#include "common/tensor.cuh"
#include "common/workspace.h"
#include "problem.h"

namespace jaxflash {

inline constexpr int kDeltaThreads = 256;
inline constexpr int kDeltaRows = 128;  // of one head: a block's work; divides kWorkspaceRows

// A thread has 128 bytes on their way. Without the bound ptxas saves registers and loads one row
// after the other.
template <class Element>
__global__ void __launch_bounds__(kDeltaThreads, 3)
    delta_kernel(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ BackwardWorkspace workspace, int64_t first_block) {
  constexpr int kLanes = 8;  // of a row: 8 x 16 bytes is a full line
  constexpr int kRowsAtOnce = kDeltaThreads / kLanes;
  constexpr int kPasses = kDeltaRows / kRowsAtOnce;
  static_assert(kPasses <= kLanes, "a lane writes the results of a pass");
  constexpr int kVector = 16 / sizeof(Element);
  const Problem& problem = params.problem;

  const int64_t block = first_block + blockIdx.x;
  const int64_t row_blocks = workspace.rows / kDeltaRows;
  const int64_t head_index = block / row_blocks;  // over batch and head
  const int first_row = static_cast<int>(block % row_blocks) * kDeltaRows;
  const int64_t batch = head_index / problem.q_heads;
  const int head = static_cast<int>(head_index % problem.q_heads);
  const BandMask mask(problem, batch);
  const int lane = threadIdx.x % kLanes;
  const auto row_of_pass = [&](int pass) {
    return first_row + pass * kRowsAtOnce + static_cast<int>(threadIdx.x) / kLanes;
  };

  launch_dependents();
  // The row whose results this thread writes. Its lse is on its way while the rows are.
  const int own_row = row_of_pass(lane);
  const bool own_row_valid = lane < kPasses && own_row < mask.q_len();
  const int64_t own_index = (batch * problem.q_len + own_row) * problem.q_heads + head;
  float own_lse = -INFINITY, own_dlse = 0.f;
  if (own_row_valid) {
    own_lse = params.lse[own_index];
    if (params.dlse != nullptr) own_dlse = params.dlse[own_index];
  }

  const auto* out = static_cast<const Element*>(params.out.data) +
                    tensor_offset(params.out, problem, batch) + head * params.out.head_stride;
  const auto* dout = static_cast<const Element*>(params.dout.data) +
                     tensor_offset(params.dout, problem, batch) + head * params.dout.head_stride;
  const bool vectors = rows_are_aligned(out, params.out.seq_stride, problem.value_dim) &&
                       rows_are_aligned(dout, params.dout.seq_stride, problem.value_dim);
  float sum[kPasses] = {};
  if (vectors) {
    // Rows that take no part read the last one that does: loads without branches.
    const int last_row = max(mask.q_len() - 1, 0);
    for (int i = lane; i < problem.value_dim / kVector; i += kLanes) {
      uint4 a[kPasses], b[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int64_t row = min(row_of_pass(pass), last_row);
        // Nobody reads out again.
        a[pass] = __ldcs(reinterpret_cast<const uint4*>(out + row * params.out.seq_stride) + i);
        b[pass] = __ldg(reinterpret_cast<const uint4*>(dout + row * params.dout.seq_stride) + i);
      }
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const auto* a_element = reinterpret_cast<const Element*>(&a[pass]);
        const auto* b_element = reinterpret_cast<const Element*>(&b[pass]);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          sum[pass] += static_cast<float>(a_element[e]) * static_cast<float>(b_element[e]);
        }
      }
    }
  } else {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int64_t row = row_of_pass(pass);
      if (row >= mask.q_len()) continue;
#pragma unroll 1
      for (int i = lane; i < problem.value_dim; i += kLanes) {
        sum[pass] += static_cast<float>(out[row * params.out.seq_stride + i]) *
                     static_cast<float>(dout[row * params.dout.seq_stride + i]);
      }
    }
  }
  float own_sum = 0.f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      sum[pass] += __shfl_xor_sync(~0u, sum[pass], distance);
    }
    own_sum = lane == pass ? sum[pass] : own_sum;
  }
  if (lane < kPasses) {
    // A row that sees no key, padding included: P = exp2(s - inf) = 0, whatever dout holds there.
    const bool sees_keys = own_lse != -INFINITY;
    workspace.lse_of(params.workspace, head_index)[own_row] =
        sees_keys ? lse_in_log2(own_lse) : INFINITY;
    workspace.delta_of(params.workspace, head_index)[own_row] =
        sees_keys ? own_sum - own_dlse : 0.f;
  }

  float4* dq = reinterpret_cast<float4*>(workspace.dq_of(params.workspace, head_index) +
                                         first_row * workspace.dims);
  const int64_t dq_rows = min(int64_t{kDeltaRows}, workspace.dq_rows - first_row);
  const int vectors_of_dq = static_cast<int>(dq_rows * workspace.dims / 4);
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors_of_dq; i += kDeltaThreads) {
    dq[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  constexpr int kTurns = kDeltaRows / kWorkspaceTurnRows;
  if (threadIdx.x < kTurns) {
    workspace.turns_of(params.workspace, head_index)[first_row / kWorkspaceTurnRows + threadIdx.x] =
        0;
  }
  if (first_row == 0 && threadIdx.x == 0) *workspace.added_of(params.workspace, head_index) = 0;
  if (block == 0 && threadIdx.x == 0) *workspace.ticket_of(params.workspace) = 0;
}

}  // namespace jaxflash
