// Gradients of what a score program captures: one load of a captured array, from what one element
// of the logits contributes to what is stored. Kernels of each family compute the former.
//
// The logits of a tile are computed anew, s = q k^T, and with them d logit = p * (dout v^T -
// delta), with dropout of what it keeps, whose product with the derivative of the logit by the
// loaded value is summed up. A block owns a piece of the gradient: a tile of it, part of a row or
// of a column, or one element, see common/capture_gradient.h. It walks the tiles of all heads and
// batch elements that read its piece, keeps the sum in registers and stores it once. Where there
// are fewer pieces than a GPU has room for, the work of a piece is divided into parts, whose blocks
// add to it: in any order, or in turns. A load whose index depends on rows and columns in another
// way is summed along the diagonals of a warp's part of a tile, if the index has one value there,
// and added to the gradient by atomics.
//
// `Load`, printed with the program:
//
//   bool kKeySum                   the gradient is a sum over the queries for each head and key
//   int kCapture, kRank            the array, or -1 for such a sum; the number of its own axes
//   int kQueryAxis, kKeyAxis       axis whose index is the row's (the column's) number, or -1
//   bool kScatter                  some other index depends on the row or the column
//   bool kDiagonal                 ... through the difference of their numbers alone
//   bool kOfStart                  it is the load that products start from, if they do
//   Result                         float, or the type of the capture: what is written
//   int64_t slice(head)            without kScatter and kKeySum: offset that the other axes give
//   int64_t index(head, row, column, q, kv, distance)        with kScatter: offset of the element
//   float partial(head, row, column, q, kv, distance, s)     d logit / d loaded value, natural
//   units
#pragma once

#include "common/capture_gradient_walk.cuh"
#include "common/diagonal_sums.cuh"
#include "common/element.cuh"
#include "common/memory_order.cuh"
#include "common/thread.cuh"

namespace jaxflash {

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

// Numbers of the row and the column of a thread's first element.
struct FirstElement {
  int row, key;
};

// Of the threads of a block that hold the tile: `Tile` is a FragmentTile, Team::sync() their
// barrier. `Elements` below is called with (m, n, i): element i of fragment n of those of 16 rows
// m.
template <class Tile, class Mask, class Program, class Load, class Team>
class CaptureSums {
 public:
  using Walk = GradientWalk<Mask, Program, Load, Tile::kRows, Tile::kKeys>;

  // `staging`: Tile::kStagingFloats of shared memory.
  __device__ __forceinline__ CaptureSums(const Problem& problem, const CaptureGradient& plan,
                                         float* staging)
      : problem_(problem), plan_(plan), staging_(staging) {}

  // Of the thread's warp in a tile.
  __device__ __forceinline__ static int warp_row(int warp) {
    return warp / Tile::kKeyWarps * Tile::kRowTiles * 16;
  }
  __device__ __forceinline__ static int warp_key(int warp) {
    return warp % Tile::kKeyWarps * Tile::kColBlocks * 8;
  }

  // Takes what the elements of an item, from `first` on, contribute, and first 0 for what is not
  // visible: selected, not multiplied, so that whatever a masked element became, NaN included, is
  // replaced. `head`: a call returns what the program knows of the item's.
  template <class Head, class Elements>
  __device__ __forceinline__ void add(const GradientItem& item, const Head& head,
                                      const FirstElement& first, int warp,
                                      const Elements& elements) {
    hide(item, head, first, warp, elements);
    if constexpr (Load::kScatter) {
      scatter(item, head(), first, warp, elements);
    } else {
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Tile::kColBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (kOwnsTiles) {
              sums_[m][n][i] += elements(m, n, i);
            } else if constexpr (kOnRows) {
              row_sums_[m][i / 2] += elements(m, n, i);
            } else if constexpr (kOnKeys) {
              key_sums_[n][i % 2] += elements(m, n, i);
            } else {
              sum_ += elements(m, n, i);
            }
          }
        }
      }
    }
  }

  // After the last item of a piece.
  __device__ __forceinline__ void store(const GradientPiece& piece, int warp) {
    if constexpr (!Load::kScatter) {
      uint32_t* const turn = plan_.turns == nullptr ? nullptr : plan_.turns + 2 + piece.number;
      if constexpr (!kOwnsTiles) {
        // Sums over the block come first: whoever waits for a turn has nothing else to do any more.
        stage(warp);
        Team::sync();
      }
      if (turn != nullptr) wait_for_turn<Team>(turn, piece.part);
      if constexpr (kOwnsTiles) {
        store_tile(piece, warp);
      } else {
        store_staged(piece);
        Team::sync();  // before the next piece is staged
      }
      if (turn != nullptr) end_turn<Team>(turn, piece.part);
      clear();
    }
  }

  // Every element of a tile of the gradient is owned.
  static constexpr bool kOwnsTiles =
      !Load::kScatter && Load::kQueryAxis >= 0 && Load::kKeyAxis >= 0;

  // Begins anew after take(sums) has stored those of such a tile, of element i of fragment n of the
  // 16 rows m, in a way of its own.
  template <class Take>
  __device__ __forceinline__ void hand_over(const Take& take) {
    static_assert(kOwnsTiles);
    take(sums_);
    clear();
  }

 private:
  static constexpr bool kOnRows = !Load::kScatter && Load::kQueryAxis >= 0;
  static constexpr bool kOnKeys = !Load::kScatter && Load::kKeyAxis >= 0;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& row : sums_) {
#pragma unroll
      for (auto& block : row) {
#pragma unroll
        for (float& x : block) x = 0.f;
      }
    }
#pragma unroll
    for (auto& row : row_sums_) row[0] = row[1] = 0.f;
#pragma unroll
    for (auto& key : key_sums_) key[0] = key[1] = 0.f;
    sum_ = 0.f;
  }

  __device__ __forceinline__ GradientOutput<typename Load::Result> output(
      const GradientPiece& piece) const {
    return {static_cast<typename Load::Result*>(plan_.data) + piece.offset,
            plan_.adds || (plan_.turns != nullptr && piece.part > 0),
            plan_.turns == nullptr && plan_.parts > 1};
  }

  template <class Head, class Elements>
  __device__ __forceinline__ void hide(const GradientItem& item, const Head& head_of,
                                       const FirstElement& first, int warp,
                                       const Elements& elements) const {
    const Mask mask(problem_, item.batch);
    const int row_begin = item.first_row + warp_row(warp);
    const int key_begin = item.first_key + warp_key(warp);
    if (mask.full({row_begin, row_begin + 16 * Tile::kRowTiles},
                  {key_begin, key_begin + 8 * Tile::kColBlocks})) {
      return;
    }
    const auto& head = head_of();
    const int diagonal = diagonal_of(item);
    const auto shows = [&](int row, int key) {
      if constexpr (Program::kMasks) {
        const auto distance = static_cast<float>(row + diagonal - key);
        return Program::visible(head, Program::row(head, row), Program::column(head, key), row, key,
                                distance);
      } else {
        return true;
      }
    };
    Interval keys_of_row[Tile::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) keys_of_row[m][r] = mask.keys_of_row(first.row + 16 * m + 8 * r);
    }
    // Key by key: there are more of them than rows, and their ids need registers.
#pragma unroll
    for (int n = 0; n < Tile::kColBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first.key + 8 * n + i;
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int row = first.row + 16 * m + 8 * r;
            const Interval keys = keys_of_row[m][r];
            bool visible = key >= keys.begin && key < keys.end;
            if constexpr (Mask::kTestsElements) visible &= mask.same_id(row, key);
            visible &= shows(row, key);
            float& x = elements(m, n, 2 * r + i);
            x = visible ? x : 0.f;
          }
        }
      }
    }
  }

  // From a row's number to its position among the keys.
  __device__ __forceinline__ int diagonal_of(const GradientItem& item) const {
    return jaxflash::diagonal_of(problem_, Mask(problem_, item.batch));
  }

  template <class Elements>
  __device__ __forceinline__ void scatter(const GradientItem& item,
                                          const typename Program::Head& head,
                                          const FirstElement& first, int warp,
                                          const Elements& elements) const {
    const int diagonal = diagonal_of(item);
    auto* const data = static_cast<typename Load::Result*>(plan_.data) + item.offset;
    const GradientOutput<typename Load::Result> output{data, true, true};
    const auto put = [&](int row, int key, float value) {
      if (value == 0.f) return;  // most of them masked; NaN is not
      const float distance = static_cast<float>(row + diagonal - key);
      output.put(Load::index(head, Program::row(head, row), Program::column(head, key), row, key,
                             distance),
                 value);
    };
    if constexpr (Load::kDiagonal) {
      // Of the lowest eight rows; of those above, the columns begin further to the left.
      constexpr int kEarlier = 2 * Tile::kRowTiles - 1;
      DiagonalSums<Tile::kColBlocks + kEarlier> sums;
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Tile::kColBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums.add(n + kEarlier - 2 * m - i / 2, i % 2, elements(m, n, i));
          }
        }
      }
      const int first_row = item.first_row + warp_row(warp);
      const int first_key = item.first_key + warp_key(warp);
      sums.reduce([&](int step, float total) {
        const int further = step - 8 * kEarlier;  // key - row
        put(first_row + max(0, -further), first_key + max(0, further), total);
      });
    } else {
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Tile::kColBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            put(first.row + 16 * m + i / 2 * 8, first.key + 8 * n + i % 2, elements(m, n, i));
          }
        }
      }
    }
  }

  // Sums over a warp, for those over the block.
  __device__ __forceinline__ void stage(int warp) const {
    const auto lane = static_cast<int>(laneid());
    if constexpr (kOnRows && !kOnKeys) {
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float total = lane_sum<3>(row_sums_[m][r]);
          const int row = warp_row(warp) + 16 * m + 8 * r + lane / 4;
          if (lane % 4 == 0) staging_[warp % Tile::kKeyWarps * Tile::kRows + row] = total;
        }
      }
    } else if constexpr (kOnKeys && !kOnRows) {
#pragma unroll
      for (int n = 0; n < Tile::kColBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float total = lane_sum<28>(key_sums_[n][i]);
          const int key = warp_key(warp) + 8 * n + lane % 4 * 2 + i;
          if (lane / 4 == 0) staging_[warp / Tile::kKeyWarps * Tile::kKeys + key] = total;
        }
      }
    } else if constexpr (!kOnRows && !kOnKeys) {
      const float total = lane_sum<31>(sum_);
      if (lane == 0) staging_[warp] = total;
    }
  }

  __device__ __forceinline__ void store_tile(const GradientPiece& piece, int warp) const {
    const auto result = output(piece);
    const auto lane = static_cast<int>(laneid());
    const int rows = plan_.extent[Load::kQueryAxis], keys = plan_.extent[Load::kKeyAxis];
    const int first_row = piece.row_tile * Tile::kRows + warp_row(warp) + lane / 4;
    const int first_key = piece.key_tile * Tile::kKeys + warp_key(warp) + lane % 4 * 2;
    const bool pairs =
        piece.key_stride == 1 && piece.row_stride % 2 == 0 &&
        reinterpret_cast<uintptr_t>(result.data) % (2 * sizeof(typename Load::Result)) == 0;
    // Of a whole tile without tests, at constant offsets.
    if (pairs && (piece.row_tile + 1) * Tile::kRows <= rows &&
        (piece.key_tile + 1) * Tile::kKeys <= keys) {
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int64_t offset = (first_row + 16 * m + 8 * r) * piece.row_stride + first_key;
#pragma unroll
          for (int n = 0; n < Tile::kColBlocks; ++n) {
            result.put_pair(offset + 8 * n, sums_[m][n][2 * r], sums_[m][n][2 * r + 1]);
          }
        }
      }
      return;
    }
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 16 * m + 8 * r;
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < Tile::kColBlocks; ++n) {
          const int key = first_key + 8 * n;
          const int64_t offset = row * piece.row_stride + key * piece.key_stride;
          const float x = sums_[m][n][2 * r], y = sums_[m][n][2 * r + 1];
          if (pairs && key + 1 < keys) {
            result.put_pair(offset, x, y);
          } else {
            if (key < keys) result.put(offset, x);
            if (key + 1 < keys) result.put(offset + piece.key_stride, y);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store_staged(const GradientPiece& piece) const {
    const auto result = output(piece);
    constexpr int kLength = kOnRows ? Tile::kRows : kOnKeys ? Tile::kKeys : 1;
    constexpr int kAddends = kOnRows   ? Tile::kKeyWarps
                             : kOnKeys ? Tile::kRowWarps
                                       : Tile::kRowWarps * Tile::kKeyWarps;
    const int first = kOnRows   ? piece.row_tile * Tile::kRows
                      : kOnKeys ? piece.key_tile * Tile::kKeys
                                : 0;
    const int length = kOnRows   ? plan_.extent[max(Load::kQueryAxis, 0)]
                       : kOnKeys ? plan_.extent[max(Load::kKeyAxis, 0)]
                                 : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < kLength; i += Tile::kThreads) {
      if (first + i >= length) continue;
      float total = 0.f;
#pragma unroll
      for (int part = 0; part < kAddends; ++part) total += staging_[part * kLength + i];
      result.put((first + i) * (kOnRows ? piece.row_stride : piece.key_stride), total);
    }
  }

  const Problem& problem_;
  const CaptureGradient& plan_;
  float* const staging_;
  // Both axes owned: every element. One: its sums over the other. None: the sum of all.
  float sums_[kOwnsTiles ? Tile::kRowTiles : 1][kOwnsTiles ? Tile::kColBlocks : 1][4] = {};
  float row_sums_[Tile::kRowTiles][2] = {};
  float key_sums_[Tile::kColBlocks][2] = {};
  float sum_ = 0.f;
};

}  // namespace jaxflash
