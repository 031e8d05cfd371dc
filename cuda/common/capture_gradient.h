// How the gradient of a captured array is divided among the blocks of its kernel.
//
// A captured array is read by loads, capture[i0, i1, ...]. The gradient of one load is a sum over
// all elements of the logits: d logit times the derivative of the logit by the loaded value goes to
// the element that was loaded. Axes whose index is the row's number, the column's number, or
// depends on batch element and head alone are told apart: an element of the gradient then has all
// its terms in one column of tiles, one row of tiles, one tile of some heads, and is owned by one
// block.
#pragma once

#include "common/workspace.h"
#include "problem.h"

namespace jaxflash {

// A tile of logits in accumulator fragments of 16 rows x 8 columns: kRowWarps x kKeyWarps warps,
// each with its part.
template <int kRows_, int kKeys_, int kRowWarps_, int kKeyWarps_>
struct FragmentTile {
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kKeyWarps = kKeyWarps_;
  static constexpr int kThreads = 32 * kRowWarps * kKeyWarps;
  // Of a warp, in fragments.
  static constexpr int kRowTiles = kRows / kRowWarps / 16;
  static constexpr int kColBlocks = kKeys / kKeyWarps / 8;
  static_assert(kRowTiles * kRowWarps * 16 == kRows && kColBlocks * kKeyWarps * 8 == kKeys &&
                    kColBlocks % 2 == 0,
                "whole fragments");

  // Of sums of warps on their way to the block's.
  static constexpr int kStagingFloats =
      kRows * kKeyWarps > kKeys* kRowWarps ? kRows * kKeyWarps : kKeys * kRowWarps;
};

// What the kernel is told.
struct CaptureGradient {
  void* data;                           // (*B, *own axes of the capture), each batch axis full or 1
  int64_t batch_stride[kMaxBatchAxes];  // in elements, 0 where the axis is summed over
  int32_t extent[kMaxCaptureRank];      // of its own axes
  uint32_t* turns;  // a ticket (2 words), then whose turn it is for each owned piece; nullptr where
                    // the parts of a piece add in any order
  int64_t slots;    // of the batch axes that `data` has
  int64_t slices;   // of its own axes but query_axis and key_axis
  int32_t row_tiles;  // of a slice
  int32_t key_tiles;
  int32_t parts;  // blocks that share the work of an owned piece
  bool adds;      // to what `data` holds
  bool zeros;     // `data` must be 0 before
  bool ordered;   // the parts of a piece add in turns

  JAXFLASH_HOST_DEVICE int64_t pieces() const { return slots * slices * row_tiles * key_tiles; }
};

// Words of CaptureGradient::turns. They lie in the accumulator of dq, which nobody reads any more.
inline int64_t capture_gradient_turns(const CaptureGradient& plan) { return 2 + plan.pieces(); }

inline int64_t capture_gradient_elements(const Problem& problem, const CaptureGradient& plan,
                                         int32_t rank) {
  int64_t elements = 1;
  for (int axis = 0; axis < problem.num_batch_axes; ++axis) {
    if (plan.batch_stride[axis] != 0) elements *= problem.batch_extent[axis];
  }
  for (int axis = 0; axis < rank; ++axis) elements *= plan.extent[axis];
  return elements;
}

// That of a key sum: dense.
inline CaptureGradientArray key_sum_array(const Problem& problem, float* data) {
  CaptureGradientArray array = {data, {}};
  int64_t stride = int64_t{problem.q_heads} * problem.kv_len;
  for (int axis = problem.num_batch_axes - 1; axis >= 0; --axis) {
    array.batch_stride[axis] = stride;
    stride *= problem.batch_extent[axis];
  }
  return array;
}

// `concurrent`: blocks that run at once. `adds`: an earlier load has written to the array.
inline CaptureGradient plan_capture_gradient(const Problem& problem, const Captures& captures,
                                             const CaptureLoad& load,
                                             const CaptureGradientArray& array, int rows, int keys,
                                             int64_t concurrent, bool adds, bool deterministic) {
  const auto tiles = [](int64_t length, int64_t tile) { return (length + tile - 1) / tile; };
  const int64_t all_row_tiles = tiles(problem.q_len, rows);
  const int64_t all_key_tiles = tiles(problem.kv_len, keys);
  CaptureGradient plan = {};
  plan.data = array.data;
  for (int axis = 0; axis < load.rank; ++axis) {
    plan.extent[axis] = !load.is_key_sum() ? captures.of[load.capture].extent[axis]
                        : axis == 0        ? problem.q_heads
                                           : problem.kv_len;
  }
  for (int axis = 0; axis < kMaxBatchAxes; ++axis)
    plan.batch_stride[axis] = array.batch_stride[axis];
  plan.slots = plan.slices = 1;
  plan.row_tiles = plan.key_tiles = 1;
  plan.adds = adds;
  int64_t items = batch_size(problem) * problem.q_heads;
  if (load.scatter) {
    items *= all_row_tiles * all_key_tiles;
  } else {
    for (int axis = 0; axis < problem.num_batch_axes; ++axis) {
      if (array.batch_stride[axis] != 0) plan.slots *= problem.batch_extent[axis];
    }
    for (int axis = 0; axis < load.rank; ++axis) {
      if (axis == load.query_axis) {
        plan.row_tiles = static_cast<int32_t>(tiles(plan.extent[axis], rows));
      } else if (axis == load.key_axis) {
        plan.key_tiles = static_cast<int32_t>(tiles(plan.extent[axis], keys));
      } else {
        plan.slices *= plan.extent[axis];
      }
    }
    // The tiles of one piece, of all its heads.
    if (load.query_axis < 0) items *= all_row_tiles;
    if (load.key_axis < 0) items *= all_key_tiles;
    items /= plan.slots * plan.slices > 0 ? plan.slots * plan.slices : 1;
  }
  // Several waves of blocks even out; a part has enough to do to be worth its beginning and end.
  constexpr int64_t kWaves = 4, kItems = 4;
  const int64_t pieces = plan.pieces() > 0 ? plan.pieces() : 1;
  int64_t parts = 1;
  if (!load.narrow && pieces < 2 * concurrent) {
    parts = tiles(kWaves * concurrent, pieces);
    parts = parts < items / kItems ? parts : items / kItems;
    parts = parts > 1 ? parts : 1;
  }
  plan.parts = static_cast<int32_t>(parts);
  plan.ordered = deterministic && !load.scatter && parts > 1;
  plan.zeros = !adds && (load.scatter || (parts > 1 && !plan.ordered));
  return plan;
}

}  // namespace jaxflash
