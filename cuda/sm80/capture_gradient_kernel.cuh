// Backward, gradients of what a score program captures: one load of a captured array.
//
// The logits of a tile are computed anew, s = q k^T, and with them d logit = p * (dout v^T -
// delta), with dropout of what it keeps, whose product with the derivative of the logit by the
// loaded value is summed up. A block owns a piece of the gradient: a tile of it, part of a row or
// of a column, or one element, see common/capture_gradient.h. It walks the tiles of all heads and
// batch elements that read its piece, keeps the sum in registers and stores it once. Where there
// are fewer pieces than a GPU has room for, the work of a piece is divided into parts, whose blocks
// add to it: in any order, or in turns. A load whose index depends on rows and columns in another
// way is summed along the diagonals, if the index has one value there, and added to the gradient by
// atomics.
//
// `Load`, printed with the program:
//
//   int kCapture, kRank            the array, and the number of its own axes
//   int kQueryAxis, kKeyAxis       axis whose index is the row's (the column's) number, or -1
//   bool kScatter                  some other index depends on the row or the column
//   bool kDiagonal                 ... through the difference of their numbers alone
//   Result                         float, or the type of the capture: what is written
//   int64_t slice(head)            without kScatter: offset that the other axes give
//   int64_t index(head, row, column, q, kv, distance)        with kScatter: offset of the element
//   float partial(head, row, column, q, kv, distance, s)     d logit / d loaded value, natural
//   units
#pragma once

#include "common/capture_gradient.h"
#include "common/mask.cuh"
#include "common/program.cuh"
#include "common/tensor.cuh"
#include "common/workspace.h"
#include "problem.h"
#include "sm80/capture_gradient_traits.h"
#include "sm80/dq_accumulator.cuh"
#include "sm80/ptx.cuh"
#include "sm80/tile.cuh"

namespace jaxflash::sm80 {

// A tile of one head, or the end.
struct GradientItem {
  int64_t batch;
  int head;
  int first_row, first_key;
  bool exists;
};

// The items of a block: of a range of all tiles of all heads that may read its piece those that do
// and that are not masked. In shared memory, and asked by one warp: needed once in a while by a
// loop that has no registers to spare.
template <class Mask, class Program, class Load, int kRows, int kKeys>
struct GradientWalk {
  // The block's piece: its part of the capture, in elements.
  int64_t piece;
  int64_t offset;  // of its batch element and its slice
  int64_t row_stride, key_stride;
  int row_tile, key_tile;
  int part;

  uint32_t slot;
  uint32_t found;  // of the 32 items from `group` on
  int64_t slice_offset;
  int64_t candidates;  // heads of all batch elements that the slot stands for
  int64_t key_tiles;   // of an item
  int64_t next, end, group;

  __device__ __forceinline__ void begin(const Problem& problem, const Captures& captures,
                                        const CaptureGradient& plan, int64_t block) {
    part = static_cast<int>(block % plan.parts);
    piece = block / plan.parts;
    key_tile = static_cast<int>(piece % plan.key_tiles);
    int64_t rest = piece / plan.key_tiles;
    row_tile = static_cast<int>(rest % plan.row_tiles);
    rest /= plan.row_tiles;
    int64_t slice = rest % plan.slices;
    slot = static_cast<uint32_t>(rest / plan.slices);

    const Capture& capture = captures.of[Load::kCapture];
    row_stride = key_stride = slice_offset = 0;
    int64_t stride = 1;
#pragma unroll
    for (int axis = Load::kRank - 1; axis >= 0; --axis) {
      const int extent = capture.extent[axis];
      if (axis == Load::kQueryAxis) {
        row_stride = stride;
      } else if (axis == Load::kKeyAxis) {
        key_stride = stride;
      } else if (!Load::kScatter) {
        slice_offset += slice % extent * stride;
        slice /= extent;
      }
      stride *= extent;
    }
    offset = slice_offset;
    uint32_t digits = slot, summed = 1;
    for (int axis = problem.num_batch_axes - 1; axis >= 0; --axis) {
      const auto extent = static_cast<uint32_t>(problem.batch_extent[axis]);
      if (owns(plan, axis)) {
        offset += static_cast<int64_t>(digits % extent) * plan.batch_stride[axis];
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
      const int64_t mine = next + lane_index();
      left = __ballot_sync(
          ~0u, mine < end && takes_part(problem, captures, item_of(problem, plan, mine)));
      __syncwarp();
      if (lane_index() == 0) {
        group = next;
        next += 32;
      }
      __syncwarp();
    }
    if (lane_index() != 0) return;
    if (left != 0) item = item_of(problem, plan, group + __ffs(static_cast<int>(left)) - 1);
    item.exists = left != 0;
    found = left & (left - 1);
  }

 private:
  __device__ __forceinline__ static bool owns(const CaptureGradient& plan, int axis) {
    return !Load::kScatter && plan.batch_stride[axis] != 0;
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
    item.batch = 0;
    int64_t stride = 1;
    for (int axis = problem.num_batch_axes - 1; axis >= 0; --axis) {
      const auto extent = static_cast<uint32_t>(problem.batch_extent[axis]);
      uint32_t& rest = owns(plan, axis) ? owned : summed;
      item.batch += static_cast<int64_t>(rest % extent) * stride;
      rest /= extent;
      stride *= extent;
    }
    const auto row = static_cast<int>(tile / key_tiles);
    const auto key = static_cast<int>(tile - int64_t{row} * key_tiles);
    item.first_row = (Load::kScatter || Load::kQueryAxis < 0 ? row : row_tile) * kRows;
    item.first_key = (Load::kScatter || Load::kKeyAxis < 0 ? key : key_tile) * kKeys;
    item.exists = true;
    return item;
  }

  __device__ __forceinline__ bool takes_part(const Problem& problem, const Captures& captures,
                                             const GradientItem& item) const {
    const Interval keys = Mask(problem, item.batch).keys({item.first_row, item.first_row + kRows});
    if (max(keys.begin, item.first_key) >= min(keys.end, item.first_key + kKeys)) return false;
    if constexpr (Load::kScatter) {
      return true;
    } else {
      const auto head =
          Program::head(captures, problem, item.batch, batch_number(captures, problem, item.batch),
                        head_number(captures, item.head));
      return Load::slice(head) == slice_offset;
    }
  }
};

struct FirstElement {
  int row, key;
};

// Where results go.
template <class Result>
struct GradientOutput {
  Result* data;
  bool adds;    // to what is there
  bool atomic;  // ... while others do

  __device__ __forceinline__ void put(int64_t offset, float value) const {
    if constexpr (sizeof(Result) == 4) {
      if (atomic) {
        red_add_f32(data + offset, value);
      } else {
        data[offset] = adds ? __ldcg(data + offset) + value : value;
      }
    } else {
      data[offset].bits = static_cast<uint16_t>(pack<Result>(value, 0.f));
    }
  }

  // Of neighbours, at an even offset.
  __device__ __forceinline__ void put_pair(int64_t offset, float x, float y) const {
    if constexpr (sizeof(Result) == 4) {
      if (atomic) {
        put(offset, x);
        put(offset + 1, y);
        return;
      }
      auto* const target = reinterpret_cast<float2*>(data + offset);
      if (adds) {
        const float2 old = __ldcg(target);
        x += old.x;
        y += old.y;
      }
      *target = make_float2(x, y);
    } else {
      *reinterpret_cast<uint32_t*>(data + offset) = pack<Result>(x, y);
    }
  }
};

// Sum over the lanes whose numbers differ in the bits of `lanes`.
template <int kLanes>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    if (kLanes & distance) value += __shfl_xor_sync(~0u, value, distance);
  }
  return value;
}

template <class Traits, class AnyMask, class Program, class Load>
__global__ void __launch_bounds__(Traits::kThreads, Traits::Tile::kBlocksPerSM)
    capture_gradient_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ BackwardWorkspace workspace,
                            const __grid_constant__ CaptureGradient plan, int64_t first_block) {
  using Mask = MaskBeside<AnyMask, Program>;
  using Tile = typename Traits::Tile;
  using Element = typename MathTraits<Traits::kMath>::Element;
  using RowTile = SmemTile<Element, Tile::kRows, Traits::kHeadDim>;  // q, dout
  using KeyTile = SmemTile<Element, Tile::kKeys, Traits::kHeadDim>;  // k, v
  static_assert(RowTile::kBytes == Traits::kRowBytes && KeyTile::kBytes == Traits::kKeyBytes, "");
  using Result = typename Load::Result;
  constexpr Math kMath = Traits::kMath;
  constexpr int kK = MathTraits<kMath>::kK;
  constexpr int kThreads = Traits::kThreads;
  constexpr int kRowTiles = Traits::kRowTiles, kColBlocks = Traits::kColBlocks;
  constexpr bool kOnRows = !Load::kScatter && Load::kQueryAxis >= 0;
  constexpr bool kOnKeys = !Load::kScatter && Load::kKeyAxis >= 0;

  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t smem_base = smem_address(smem);
  float* const staging = reinterpret_cast<float*>(smem + Traits::kStaging);
  const Problem& problem = params.problem;
  const Captures& captures = params.captures;

  int64_t block = first_block + blockIdx.x;
  if (plan.turns != nullptr) {
    // Turns are waited for: a block must only wait for blocks that have already started.
    auto* ticket = reinterpret_cast<unsigned long long*>(smem);
    if (threadIdx.x == 0) *ticket = atomicAdd(reinterpret_cast<unsigned long long*>(plan.turns), 1);
    __syncthreads();
    block = static_cast<int64_t>(*ticket);
    __syncthreads();  // the word is part of q's tile
  }
  using Walk = GradientWalk<Mask, Program, Load, Tile::kRows, Tile::kKeys>;
  static_assert(sizeof(Walk) <= Traits::kSharedBytes - Traits::kWalk &&
                    3 * sizeof(GradientItem) <= Traits::kWalk - Traits::kItems,
                "fits");
  Walk& walk = *reinterpret_cast<Walk*>(smem + Traits::kWalk);
  GradientItem* const items = reinterpret_cast<GradientItem*>(smem + Traits::kItems);
  if (threadIdx.x == 0) walk.begin(problem, captures, plan, block);
  __syncwarp();
  if (threadIdx.x < 32) walk.advance(problem, captures, plan, items[0]);
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = static_cast<int>(lane_index());
  const int warp_row = warp / Tile::kKeyWarps * kRowTiles * 16;
  const int warp_key = warp % Tile::kKeyWarps * kColBlocks * 8;

  // ---- Loads ------------------------------------------------------------------------------------

  const RowTile q{smem_base + Traits::kQ}, dout{smem_base + Traits::kDout};
  const KeyTile k{smem_base + Traits::kKey}, v{smem_base + Traits::kValue};
  const auto load = [&](const auto& tile, const Tensor& tensor, int64_t batch, int head, int first,
                        int end, int dim) {
    load_tile_async<kThreads>(tile,
                              static_cast<const Element*>(tensor.data) +
                                  tensor_offset(tensor, problem, batch) + head * tensor.head_stride,
                              tensor.seq_stride, first, end, dim, threadIdx.x);
  };
  const int group = problem.q_heads / problem.kv_heads;
  // Beyond the sequence's own lengths arrays may hold anything: zeros are taken instead.
  const auto load_pair = [&](const RowTile& rows, const Tensor& row_tensor, const KeyTile& keys,
                             const Tensor& key_tensor, const GradientItem& item, int dim) {
    const Mask mask(problem, item.batch);
    load(rows, row_tensor, item.batch, item.head, item.first_row, mask.q_len(), dim);
    load(keys, key_tensor, item.batch, item.head / group, item.first_key, mask.kv_len(), dim);
  };

  // ---- Main loop --------------------------------------------------------------------------------

  // Both axes owned: every element. One: its sums over the other. None: the sum of all.
  float sums[kOnRows || kOnKeys ? kRowTiles : 1][kOnRows || kOnKeys ? kColBlocks : 1][4] = {};
  float row_sums[kRowTiles][2] = {};
  float key_sums[kColBlocks][2] = {};
  float sum = 0.f;
  const auto output = [&] {
    return GradientOutput<Result>{static_cast<Result*>(plan.data) + walk.offset,
                                  plan.adds || (plan.turns != nullptr && walk.part > 0),
                                  Load::kScatter || (plan.turns == nullptr && plan.parts > 1)};
  };

  // Row and column number of the thread's first element. Through another instruction each time, so
  // that the compiler does not keep them.
  const auto first_element = [&](const GradientItem& item) {
    const auto lane = static_cast<int>(laneid());
    return FirstElement{item.first_row + warp_row + lane / 4,
                        item.first_key + warp_key + lane % 4 * 2};
  };
  const auto program_head = [&](const GradientItem& item) {
    return Program::head(captures, problem, item.batch, batch_number(captures, problem, item.batch),
                         head_number(captures, item.head));
  };
  // From a row's number to its position among the keys.
  const auto diagonal_of = [&](const GradientItem& item) {
    const Mask mask(problem, item.batch);
    return problem.band.bottom_right ? mask.kv_len() - mask.q_len() : 0;
  };

  if (items[0].exists) {
    load_pair(q, params.q, k, params.k, items[0], problem.head_dim);
    cp_async_commit_group();
    load_pair(dout, params.dout, v, params.v, items[0], problem.value_dim);
    cp_async_commit_group();
  }
#pragma unroll 1
  for (int turn = 0; items[turn].exists;) {
    const GradientItem& item = items[turn];
    turn = turn == 2 ? 0 : turn + 1;
    GradientItem& next_item = items[turn];
    // Three of them: another warp may still work on the one before.
    if (warp == 0) walk.advance(problem, captures, plan, next_item);
    cp_async_wait_group<1>();
    __syncthreads();  // q and k are there
    float s[kRowTiles][kColBlocks][4] = {};
    gemm<kMath, Traits::kHeadDim / kK>(
        s, [&](int m, int step) { return load_a<kMath>(q, warp_row + 16 * m, step * kK); },
        [&](int n, int step) { return load_b<kMath>(k, warp_key + 16 * n, step * kK); });
    __syncthreads();  // everybody is done with them
    if (next_item.exists) load_pair(q, params.q, k, params.k, next_item, problem.head_dim);
    cp_async_commit_group();

    {
      // Computed here, and anew after the next products: these need the registers.
      const auto [first_row, first_key] = first_element(item);
      const int64_t head_index = item.batch * problem.q_heads + item.head;
      const float* const lse = workspace.lse_of(params.workspace, head_index) + first_row;
      const auto first_distance = static_cast<float>(first_row + diagonal_of(item) - first_key);
      const auto head = program_head(item);

#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        // Always so. The compiler's schedule ends at the branch: it would keep what the program
        // loads until after the next products, which need the registers.
        if (!item.exists) continue;
#pragma unroll
        for (int n = 0; n < kColBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = 16 * m + i / 2 * 8, key = 8 * n + i % 2;
            const int query_number = first_row + row, key_number = first_key + key;
            const auto on_row = Program::row(head, query_number);
            const auto on_column = Program::column(head, key_number);
            const float distance = first_distance + (row - key);
            const float logit = Program::logit(head, on_row, on_column, query_number, key_number,
                                               distance, s[m][n][i]);
            const float partial = Load::partial(head, on_row, on_column, query_number, key_number,
                                                distance, s[m][n][i]);
            s[m][n][i] = exp2_approx(logit - __ldg(lse + row)) * partial;
          }
        }
      }
    }

    cp_async_wait_group<1>();
    __syncthreads();  // dout and v are there
    float dp[kRowTiles][kColBlocks][4] = {};
    gemm<kMath, Traits::kHeadDim / kK>(
        dp, [&](int m, int step) { return load_a<kMath>(dout, warp_row + 16 * m, step * kK); },
        [&](int n, int step) { return load_b<kMath>(v, warp_key + 16 * n, step * kK); });
    __syncthreads();
    if (next_item.exists) load_pair(dout, params.dout, v, params.v, next_item, problem.value_dim);
    cp_async_commit_group();

    // Not a structured binding, which lambdas of C++17 cannot capture.
    const FirstElement first = first_element(item);
    const int first_row = first.row, first_key = first.key;
    const int64_t head_index = item.batch * problem.q_heads + item.head;
    const float* const delta = workspace.delta_of(params.workspace, head_index) + first_row;
    Dropout dropout;
    float per_share = 1.f;  // probabilities that are kept make up for the dropped ones
    if constexpr (Program::kDrops) {
      dropout = Program::dropout(captures, problem, item.batch,
                                 batch_number(captures, problem, item.batch),
                                 head_number(captures, item.head));
      per_share = 1.f / dropout.share();
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      Kept<Program::kDrops, true, 8 * kColBlocks> kept;
      dropout.draw(kept, first_row + 16 * m, first_key);
#pragma unroll
      for (int n = 0; n < kColBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float kept_dp = kept.of(4 * n + i, dp[m][n][i]) * per_share;
          s[m][n][i] *= kept_dp - __ldg(delta + 16 * m + i / 2 * 8);
        }
      }
    }
    const Mask mask(problem, item.batch);
    const int row_begin = item.first_row + warp_row, key_begin = item.first_key + warp_key;
    if (!mask.full({row_begin, row_begin + 16 * kRowTiles},
                   {key_begin, key_begin + 8 * kColBlocks})) {
      const auto head = program_head(item);
      const int diagonal = diagonal_of(item);
      const auto shows = [&](int row, int key) {
        if constexpr (Program::kMasks) {
          const auto distance = static_cast<float>(row + diagonal - key);
          return Program::visible(head, Program::row(head, row), Program::column(head, key), row,
                                  key, distance);
        } else {
          return true;
        }
      };
      // Selected, not multiplied: whatever a masked element became, NaN included, is replaced.
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = first_row + 16 * m + 8 * r;
          const Interval keys = mask.keys_of_row(row);
#pragma unroll
          for (int n = 0; n < kColBlocks; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int key = first_key + 8 * n + i;
              bool visible = key >= keys.begin && key < keys.end;
              if constexpr (Mask::kTestsElements) visible = visible && mask.same_id(row, key);
              visible &= shows(row, key);
              s[m][n][2 * r + i] = visible ? s[m][n][2 * r + i] : 0.f;
            }
          }
        }
      }
    }

    if constexpr (Load::kScatter) {
      const auto head = program_head(item);
      const int diagonal = diagonal_of(item);
      const auto add = [&](int row, int key, float value) {
        if (value == 0.f) return;  // most of them masked; NaN is not
        const float distance = static_cast<float>(row + diagonal - key);
        const int64_t batch_offset = capture_offset(plan.batch_stride, problem, item.batch);
        output().put(batch_offset + Load::index(head, Program::row(head, row),
                                                Program::column(head, key), row, key, distance),
                     value);
      };
      if constexpr (Load::kDiagonal) {
        constexpr int kWidth = 8 * kColBlocks, kPitch = Traits::kPitch;
        float* const part = staging + warp * Traits::kStagingFloats;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kColBlocks; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              *reinterpret_cast<float2*>(part + (lane / 4 + 8 * r) * kPitch + 8 * n +
                                         lane % 4 * 2) =
                  make_float2(s[m][n][2 * r], s[m][n][2 * r + 1]);
            }
          }
          __syncwarp();
#pragma unroll 1
          for (int d = lane - 15; d < kWidth; d += 32) {  // column - row
            float total = 0.f;
#pragma unroll
            for (int r = 0; r < 16; ++r) {
              if (r + d >= 0 && r + d < kWidth) total += part[r * kPitch + r + d];
            }
            const int r = max(0, -d);
            add(row_begin + 16 * m + r, key_begin + r + d, total);
          }
          __syncwarp();
        }
      } else {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kColBlocks; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              add(first_row + 16 * m + i / 2 * 8, first_key + 8 * n + i % 2, s[m][n][i]);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kColBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (kOnRows && kOnKeys) {
              sums[m][n][i] += s[m][n][i];
            } else if constexpr (kOnRows) {
              row_sums[m][i / 2] += s[m][n][i];
            } else if constexpr (kOnKeys) {
              key_sums[n][i % 2] += s[m][n][i];
            } else {
              sum += s[m][n][i];
            }
          }
        }
      }
    }
  }
  if constexpr (Load::kScatter) return;

  // ---- Results ----------------------------------------------------------------------------------

  // Sums over the block first: whoever waits for a turn has nothing else to do any more.
  if constexpr (kOnRows && !kOnKeys) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float total = lane_sum<3>(row_sums[m][r]);
        const int row = warp_row + 16 * m + 8 * r + lane / 4;
        if (lane % 4 == 0) staging[warp % Tile::kKeyWarps * Tile::kRows + row] = total;
      }
    }
  } else if constexpr (kOnKeys && !kOnRows) {
#pragma unroll
    for (int n = 0; n < kColBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float total = lane_sum<28>(key_sums[n][i]);
        const int key = warp_key + 8 * n + lane % 4 * 2 + i;
        if (lane / 4 == 0) staging[warp / Tile::kKeyWarps * Tile::kKeys + key] = total;
      }
    }
  } else if constexpr (!kOnRows && !kOnKeys) {
    const float total = lane_sum<31>(sum);
    if (lane == 0) staging[warp] = total;
  }
  __syncthreads();
  uint32_t* const turn = plan.turns == nullptr ? nullptr : plan.turns + 2 + walk.piece;
  if (turn != nullptr) wait_for_turn(turn, walk.part);

  const GradientOutput<Result> result = output();
  const Capture& capture = captures.of[Load::kCapture];
  if constexpr (kOnRows && kOnKeys) {
    const int rows = capture.extent[Load::kQueryAxis], keys = capture.extent[Load::kKeyAxis];
    const int first_row = walk.row_tile * Tile::kRows + warp_row + lane / 4;
    const int first_key = walk.key_tile * Tile::kKeys + warp_key + lane % 4 * 2;
    const bool pairs = walk.key_stride == 1 && walk.row_stride % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(result.data) % (2 * sizeof(Result)) == 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 16 * m + 8 * r;
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < kColBlocks; ++n) {
          const int key = first_key + 8 * n;
          const int64_t offset = row * walk.row_stride + key * walk.key_stride;
          const float x = sums[m][n][2 * r], y = sums[m][n][2 * r + 1];
          if (pairs && key + 1 < keys) {
            result.put_pair(offset, x, y);
          } else {
            if (key < keys) result.put(offset, x);
            if (key + 1 < keys) result.put(offset + walk.key_stride, y);
          }
        }
      }
    }
  } else {
    constexpr int kLength = kOnRows ? Tile::kRows : kOnKeys ? Tile::kKeys : 1;
    constexpr int kAddends = kOnRows ? Tile::kKeyWarps : kOnKeys ? Tile::kRowWarps : Traits::kWarps;
    const int first = kOnRows   ? walk.row_tile * Tile::kRows
                      : kOnKeys ? walk.key_tile * Tile::kKeys
                                : 0;
    const int length = kOnRows   ? capture.extent[max(Load::kQueryAxis, 0)]
                       : kOnKeys ? capture.extent[max(Load::kKeyAxis, 0)]
                                 : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < kLength; i += kThreads) {
      if (first + i >= length) continue;
      float total = 0.f;
#pragma unroll
      for (int part = 0; part < kAddends; ++part) total += staging[part * kLength + i];
      result.put((first + i) * (kOnRows ? walk.row_stride : walk.key_stride), total);
    }
  }
  if (turn != nullptr) end_turn(turn, walk.part);
}

}  // namespace jaxflash::sm80
