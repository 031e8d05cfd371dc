// Gradients of captures: which tiles of the logits a block of their kernels works on.
#pragma once

#include "common/capture_gradient.h"
#include "common/mask.cuh"
#include "common/program.cuh"
#include "problem.h"

namespace jaxflash {

// A tile of one head, or the end.
struct GradientItem {
  int64_t batch;
  int64_t offset;  // with Load::kScatter: of its batch element, in elements of the capture
  int head;
  int first_row, first_key;
  bool exists;
};

// What a block owns of the gradient, or shares with others.
struct GradientPiece {
  int64_t number;
  int64_t offset;  // of its batch element and its slice, in elements of the capture
  int64_t row_stride, key_stride;
  int row_tile, key_tile;
  int part;
};

// The items of a block's part of a piece: of a range of all tiles of all heads that may read its
// piece those that do and that are not masked. In shared memory, and asked by one warp: needed once
// in a while by a loop that has no registers to spare.
template <class Mask, class Program, class Load, int kRows, int kKeys>
struct GradientWalk {
  GradientPiece piece;
  uint32_t slot;
  uint32_t found;  // of the 32 items from `group` on
  int64_t slice_offset;
  int own_head;        // with Load::kKeySum: whose sum the piece is of
  int64_t candidates;  // heads of all batch elements that the slot stands for
  int64_t key_tiles;   // of an item
  int64_t next, end, group;

  __device__ __forceinline__ void begin(const Problem& problem, const CaptureGradient& plan,
                                        int64_t block) {
    piece.part = static_cast<int>(block % plan.parts);
    piece.number = block / plan.parts;
    piece.key_tile = static_cast<int>(piece.number % plan.key_tiles);
    int64_t rest = piece.number / plan.key_tiles;
    piece.row_tile = static_cast<int>(rest % plan.row_tiles);
    rest /= plan.row_tiles;
    int64_t slice = rest % plan.slices;
    own_head = static_cast<int>(slice);
    slot = static_cast<uint32_t>(rest / plan.slices);

    piece.row_stride = piece.key_stride = slice_offset = 0;
    int64_t stride = 1;
#pragma unroll
    for (int axis = Load::kRank - 1; axis >= 0; --axis) {
      const int extent = plan.extent[axis];
      if (axis == Load::kQueryAxis) {
        piece.row_stride = stride;
      } else if (axis == Load::kKeyAxis) {
        piece.key_stride = stride;
      } else if (!Load::kScatter) {
        slice_offset += slice % extent * stride;
        slice /= extent;
      }
      stride *= extent;
    }
    piece.offset = slice_offset;
    uint32_t digits = slot, summed = 1;
#pragma unroll 1
    for (int axis = problem.num_batch_axes - 1; axis >= 0; --axis) {
      const auto extent = static_cast<uint32_t>(problem.batch_extent[axis]);
      if (owns(plan, axis)) {
        piece.offset += static_cast<int64_t>(digits % extent) * plan.batch_stride[axis];
        digits /= extent;
      } else {
        summed *= extent;
      }
    }

    candidates = int64_t{summed} * problem.q_heads;
    key_tiles = Load::kScatter || Load::kKeyAxis < 0 ? (problem.kv_len + kKeys - 1) / kKeys : 1;
    const int row_tiles =
        Load::kScatter || Load::kQueryAxis < 0 ? (problem.q_len + kRows - 1) / kRows : 1;
    const int64_t items = candidates * key_tiles * row_tiles;
    const int part = piece.part;
    next = items / plan.parts * part + min(int64_t{part}, items % plan.parts);
    end = next + items / plan.parts + (part < items % plan.parts ? 1 : 0);
    group = 0;
    found = 0;
  }

  // By a whole warp; writes the next item.
  __device__ __forceinline__ void advance(const Problem& problem, const Captures& captures,
                                          const CaptureGradient& plan, GradientItem& item) {
    uint32_t left = found;
    while (left == 0 && next < end) {
      const int64_t mine = next + threadIdx.x % 32;
      left = __ballot_sync(
          ~0u, mine < end && takes_part(problem, captures, item_of(problem, plan, mine)));
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        group = next;
        next += 32;
      }
      __syncwarp();
    }
    __syncwarp();  // all lanes have read what lane 0 writes
    if (threadIdx.x % 32 != 0) return;
    if (left != 0) item = item_of(problem, plan, group + __ffs(static_cast<int>(left)) - 1);
    item.exists = left != 0;
    found = left & (left - 1);
  }

  // Candidates of a tile are neighbours: parts are alike whichever heads read the piece.
  __device__ __forceinline__ GradientItem item_of(const Problem& problem,
                                                  const CaptureGradient& plan,
                                                  int64_t number) const {
    const int64_t tile = number / candidates;
    const auto candidate = static_cast<uint32_t>(number - tile * candidates);
    const auto heads = static_cast<uint32_t>(problem.q_heads);
    uint32_t summed = candidate / heads, owned = slot;
    GradientItem item;
    item.head = static_cast<int>(candidate - summed * heads);
    item.batch = item.offset = 0;
    int64_t stride = 1;
#pragma unroll 1
    for (int axis = problem.num_batch_axes - 1; axis >= 0; --axis) {
      const auto extent = static_cast<uint32_t>(problem.batch_extent[axis]);
      const bool own = owns(plan, axis);
      const uint32_t rest = own ? owned : summed, outer = rest / extent;
      const auto digit = static_cast<int64_t>(rest - outer * extent);
      item.batch += digit * stride;
      if (Load::kScatter) item.offset += digit * plan.batch_stride[axis];
      owned = own ? outer : owned;
      summed = own ? summed : outer;
      stride *= extent;
    }
    const auto row = static_cast<int>(tile / key_tiles);
    const auto key = static_cast<int>(tile - int64_t{row} * key_tiles);
    item.first_row = (Load::kScatter || Load::kQueryAxis < 0 ? row : piece.row_tile) * kRows;
    item.first_key = (Load::kScatter || Load::kKeyAxis < 0 ? key : piece.key_tile) * kKeys;
    item.exists = true;
    return item;
  }

  // An item takes part if it is visible and its head reads the piece.
  __device__ __forceinline__ static bool is_visible(const Problem& problem,
                                                    const GradientItem& item) {
    const Interval keys = Mask(problem, item.batch).keys({item.first_row, item.first_row + kRows});
    return max(keys.begin, item.first_key) < min(keys.end, item.first_key + kKeys);
  }
  // `program_head`: of the item.
  __device__ __forceinline__ bool reads_piece(const GradientItem& item,
                                              const typename Program::Head& program_head) const {
    if constexpr (Load::kScatter) {
      return true;
    } else if constexpr (Load::kKeySum) {
      return item.head == own_head;
    } else {
      return Load::slice(program_head) == slice_offset;
    }
  }

 private:
  __device__ __forceinline__ static bool owns(const CaptureGradient& plan, int axis) {
    return !Load::kScatter && plan.batch_stride[axis] != 0;
  }

  __device__ __forceinline__ bool takes_part(const Problem& problem, const Captures& captures,
                                             const GradientItem& item) const {
    if (!is_visible(problem, item)) return false;
    return reads_piece(item, Program::head(captures, problem, item.batch,
                                           batch_number(captures, problem, item.batch),
                                           head_number(captures, item.head)));
  }
};

}  // namespace jaxflash
