// Backward, last kernel: dq = scale * accumulator, from the order of the main kernel's matrix
// fragments to rows of the output type.
#pragma once

#include "common/dependency.cuh"
#include "common/memory_order.cuh"
#include "common/tensor.cuh"
#include "common/workspace.h"
#include "problem.h"

namespace jaxflash {

inline constexpr int kConvertThreads = 256;
inline constexpr int kConvertRows = 128;  // of one head: a block's work; divides kWorkspaceRows

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

// Lane q of four neighbouring lanes has the columns 2q and 2q + 1 of a row of four pieces, one of
// the two in each call. Afterwards it has columns 0, 2, 4, 6 or 1, 3, 5, 7 of piece q.
__device__ __forceinline__ void transpose_quad(float (&values)[4]) {
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = distance == 2 ? i : 2 * i, high = low + distance;
      const float sent = upper ? values[low] : values[high];
      const float received = __shfl_xor_sync(~0u, sent, distance);
      values[low] = upper ? received : values[low];
      values[high] = upper ? values[high] : received;
    }
  }
}

// FragmentOrder says where a 16 x 8 piece of a head's accumulator keeps its elements:
// load(piece, lane, values) returns what the lane holds in a matrix fragment, two columns of row
// lane / 4 and of the row 8 below. A warp takes eight pieces at a time, and a lane has 128 bytes on
// their way.
//
// Blocks may start on the multiprocessors that the main kernel's last tiles leave idle: they take
// the heads in the order in which these become complete, and each waits until `adds` are announced
// for its head. All blocks of the main kernel have started by then (it calls launch_dependents, and
// that after the counters are cleared) and none waits for a block of this kernel, so that the wait
// ends. With adds = 0 the whole kernel before comes first, and the first blocks take the last
// heads, of which the L2 still holds the accumulators.
template <class Element, class FragmentOrder>
__global__ void __launch_bounds__(kConvertThreads)
    convert_dq_kernel(const __grid_constant__ BackwardParams params,
                      const __grid_constant__ BackwardWorkspace workspace, int64_t first_block,
                      uint32_t adds) {
  constexpr int kPieces = 8;
  static_assert(kWorkspaceDims % 32 == 0, "all of four pieces or none");
  const Problem& problem = params.problem;
  const int64_t block = first_block + (adds == 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const int64_t row_blocks = (problem.q_len + kConvertRows - 1) / kConvertRows;
  const int64_t head_index = block / row_blocks;
  const int first_row = static_cast<int>(block % row_blocks) * kConvertRows;
  const int64_t batch = head_index / problem.q_heads;
  const int head = static_cast<int>(head_index % problem.q_heads);

  const float* accumulator = workspace.dq_of(params.workspace, head_index);
  auto* dq = static_cast<Element*>(params.dq.data) + tensor_offset(params.dq, problem, batch) +
             head * params.dq.head_stride;
  const bool vectors = rows_are_aligned(dq, params.dq.seq_stride, problem.head_dim);
  const int lane = threadIdx.x % 32;
  const int row_pieces = static_cast<int>(workspace.dims) / 8;
  const int columns = (row_pieces + kPieces - 1) / kPieces;  // of eight pieces, or four at the end
  if (adds == 0) {
    wait_for_previous_kernel();
  } else {
    const uint32_t* const added = workspace.added_of(params.workspace, head_index);
    if (threadIdx.x == 0) {
      while (load_acquire(added) < adds) __nanosleep(500);
    }
    __syncthreads();
  }

  for (int i = threadIdx.x / 32; i < kConvertRows / 16 * columns; i += kConvertThreads / 32) {
    const int first_piece = i % columns * kPieces;
    const int tile_row = first_row + i / columns * 16;
    if (tile_row >= problem.q_len) break;
    float fragment[kPieces][4];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (first_piece + piece / 4 * 4 >= row_pieces) break;
      const int64_t index = tile_row / 16 * row_pieces + first_piece + piece;
      FragmentOrder::load(accumulator + index * 128, lane, fragment[piece]);
    }
#pragma unroll
    for (int quad = 0; quad < kPieces; quad += 4) {
      if (first_piece + quad >= row_pieces) break;
      const int col = (first_piece + quad + lane % 4) * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[8];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float part[4];
#pragma unroll
          for (int piece = 0; piece < 4; ++piece) {
            part[piece] = fragment[quad + piece][2 * half + odd];
          }
          transpose_quad(part);
#pragma unroll
          for (int pair = 0; pair < 4; ++pair) values[2 * pair + odd] = part[pair] * problem.scale;
        }
        const int row = tile_row + lane / 4 + 8 * half;
        if (row < problem.q_len) {
          store_eight(dq + row * params.dq.seq_stride + col, values, problem.head_dim - col,
                      vectors);
        }
      }
    }
  }
  // The main kernel also writes dk and dv: this kernel must not be done before that one is.
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

}  // namespace jaxflash
