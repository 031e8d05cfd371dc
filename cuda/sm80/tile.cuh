// Tiles in shared memory and the fragments of mma.sync, for all four kinds of products.
//
// A warp multiplies fragments of 16 x kK (A) by kK x 16 (B: two blocks of 8 columns) into
// accumulators of 16 x 8. With g = lane / 4 and t = lane % 4 a thread holds the accumulator
// elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
//
// 32-bit operands: a thread holds k = t and t + 4 of a fragment but columns 2t and 2t + 1 of an
// accumulator. So where the sum runs over the rows of a stored tile (a_from_accumulators,
// load_a_transposed, load_b_transposed) slot t stands for k = 2t and slot t + 4 for k = 2t + 1, and
// where it runs along the stored rows (load_a, load_b) the order is the natural one. Fragments of
// the two families must not be multiplied with each other.
#pragma once

#include "common/element.cuh"
#include "common/tensor.cuh"
#include "problem.h"
#include "sm80/ptx.cuh"

namespace jaxflash::sm80 {

template <class Type>
struct ElementTraits {
  using Element = Type;
  static constexpr int kChunk = 16 / sizeof(Type);  // elements of 16 bytes
  static constexpr int kK = 2 * kChunk;             // depth of one mma
};

template <Math>
struct MathTraits;
template <>
struct MathTraits<Math::kFloat16> : ElementTraits<Float16> {};
template <>
struct MathTraits<Math::kBFloat16> : ElementTraits<BFloat16> {};
template <>
struct MathTraits<Math::kTF32> : ElementTraits<float> {};
template <>
struct MathTraits<Math::kFloat32> : ElementTraits<float> {};

// ---- Shared memory ----------------------------------------------------------------------------

// Row-major, with the 16-byte chunks of every 128 bytes permuted by the row: the eight rows of an
// ldmatrix and the 4 x 8 words of a transposed 32-bit fragment fall into different banks.
template <class Type, int kRows_, int kCols_>
struct SmemTile {
  using Element = Type;
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kChunk = 16 / sizeof(Element);  // elements of 16 bytes
  static constexpr int kChunks = kCols / kChunk;       // of a row
  static constexpr int kRowBytes = kCols * sizeof(Element);
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kPeriod = kChunks < 8 ? kChunks : 8;
  static_assert(kCols % kChunk == 0 && (kChunks % 8 == 0 || 8 % kChunks == 0),
                "rows are whole 128-byte lines, or divide one");

  uint32_t base;  // shared-memory address, 128-byte aligned

  // Address of an element.
  __device__ __forceinline__ uint32_t address(uint32_t row, uint32_t col) const {
    const uint32_t permuted = col / kChunk ^ row / (8 / kPeriod) % kPeriod;
    return base + row * kRowBytes + permuted * 16 + col % kChunk * sizeof(Element);
  }

  // The address `row` rows and `col` columns away from one in the first 8 rows and 2 chunks (or 16
  // and 1, and so on: as long as neither sum carries into what the other term holds): a constant
  // apart for most constants, so that a lane computes few addresses for a whole tile.
  __device__ __forceinline__ static uint32_t move(uint32_t address, uint32_t row, uint32_t col) {
    const uint32_t chunk = col / kChunk;
    return (address ^ chunk % kPeriod * 16) + row * kRowBytes + chunk / kPeriod * kPeriod * 16;
  }

  // The tile without its first `row` rows, a multiple of 8.
  __device__ __forceinline__ SmemTile from_row(uint32_t row) const {
    return {base + row * kRowBytes};
  }
};

// ---- Fragments --------------------------------------------------------------------------------

// The operand registers of an mma. Float32 operands are split into the nearest TF32 value and what
// it leaves, which is a TF32 value to 2^-22 again.
template <Math kMath>
struct Fragment {
  uint32_t reg[4];

  __device__ __forceinline__ void set(int i, uint32_t bits) {
    reg[i] = kMath == Math::kTF32 ? cvt_rna_tf32(__uint_as_float(bits)) : bits;
  }
};
template <>
struct Fragment<Math::kFloat32> {
  uint32_t high[4];
  uint32_t low[4];

  __device__ __forceinline__ void set(int i, uint32_t bits) {
    high[i] = cvt_rna_tf32(__uint_as_float(bits)) & 0xffffe000u;  // 13 bits are unspecified
    low[i] = cvt_rna_tf32(__uint_as_float(bits) - __uint_as_float(high[i]));
  }
};

template <Math kMath>
struct FragmentA : Fragment<kMath> {};  // 16 x kK
template <Math kMath>
struct FragmentB : Fragment<kMath> {};  // kK x 16; registers 0 and 1 are the left 8 columns

template <Math kMath>
__device__ __forceinline__ void mma_fragments(float (&d)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[4], int block) {
  if constexpr (kMath == Math::kFloat16) {
    mma_m16n8k16_f16(d, a, b[2 * block], b[2 * block + 1]);
  } else if constexpr (kMath == Math::kBFloat16) {
    mma_m16n8k16_bf16(d, a, b[2 * block], b[2 * block + 1]);
  } else {
    mma_m16n8k8_tf32(d, a, b[2 * block], b[2 * block + 1]);
  }
}

// left and right (8 columns each) += a * b. Float32: the small terms first, low * low is below
// float32's resolution; the tensor core truncates sums, so see gemm() before chaining calls.
template <Math kMath>
__device__ __forceinline__ void mma(float (&left)[4], float (&right)[4], const FragmentA<kMath>& a,
                                    const FragmentB<kMath>& b) {
  if constexpr (kMath == Math::kFloat32) {
    mma_fragments<kMath>(left, a.low, b.high, 0);
    mma_fragments<kMath>(right, a.low, b.high, 1);
    mma_fragments<kMath>(left, a.high, b.low, 0);
    mma_fragments<kMath>(right, a.high, b.low, 1);
    mma_fragments<kMath>(left, a.high, b.high, 0);
    mma_fragments<kMath>(right, a.high, b.high, 1);
  } else {
    mma_fragments<kMath>(left, a.reg, b.reg, 0);
    mma_fragments<kMath>(right, a.reg, b.reg, 1);
  }
}

__device__ __forceinline__ uint32_t lane_index() { return threadIdx.x % 32; }

// Loads take multiples of 16 (rows, columns of the product) and of kK (depth). Where the first row
// is not known at compile time, from_row() makes the addresses cheaper.

// From a tile stored [m][k].
template <Math kMath, class Tile>
__device__ __forceinline__ FragmentA<kMath> load_a(const Tile& tile, int m, int k) {
  const uint32_t lane = lane_index();
  uint32_t bits[4];
  ldmatrix_x4(bits, Tile::move(tile.address(lane % 16, lane / 16 * Tile::kChunk), m, k));
  FragmentA<kMath> a;
#pragma unroll
  for (int i = 0; i < 4; ++i) a.set(i, bits[i]);
  return a;
}

// From a tile stored [n][k].
template <Math kMath, class Tile>
__device__ __forceinline__ FragmentB<kMath> load_b(const Tile& tile, int n, int k) {
  const uint32_t lane = lane_index();
  uint32_t bits[4];
  const uint32_t first = tile.address(lane / 16 * 8 + lane % 8, lane / 8 % 2 * Tile::kChunk);
  ldmatrix_x4(bits, Tile::move(first, n, k));
  FragmentB<kMath> b;
#pragma unroll
  for (int i = 0; i < 4; ++i) b.set(i, bits[i]);
  return b;
}

// From a tile stored [k][m].
template <Math kMath, class Tile>
__device__ __forceinline__ FragmentA<kMath> load_a_transposed(const Tile& tile, int m, int k) {
  const uint32_t lane = lane_index();
  uint32_t bits[4];
  if constexpr (sizeof(typename Tile::Element) == 2) {
    const uint32_t first = tile.address(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
    ldmatrix_x4_trans(bits, Tile::move(first, k, m));
  } else {
    const uint32_t even = tile.address(lane % 4 * 2, lane / 4);
    const uint32_t odd = tile.address(lane % 4 * 2 + 1, lane / 4);
    bits[0] = ld_shared_32(Tile::move(even, k, m));
    bits[1] = ld_shared_32(Tile::move(even, k, m + 8));
    bits[2] = ld_shared_32(Tile::move(odd, k, m));
    bits[3] = ld_shared_32(Tile::move(odd, k, m + 8));
  }
  FragmentA<kMath> a;
#pragma unroll
  for (int i = 0; i < 4; ++i) a.set(i, bits[i]);
  return a;
}

// From a tile stored [k][n].
template <Math kMath, class Tile>
__device__ __forceinline__ FragmentB<kMath> load_b_transposed(const Tile& tile, int n, int k) {
  const uint32_t lane = lane_index();
  uint32_t bits[4];
  if constexpr (sizeof(typename Tile::Element) == 2) {
    ldmatrix_x4_trans(bits, Tile::move(tile.address(lane % 16, lane / 16 * 8), k, n));
  } else {
    const uint32_t even = tile.address(lane % 4 * 2, lane / 4);
    const uint32_t odd = tile.address(lane % 4 * 2 + 1, lane / 4);
    bits[0] = ld_shared_32(Tile::move(even, k, n));
    bits[1] = ld_shared_32(Tile::move(odd, k, n));
    bits[2] = ld_shared_32(Tile::move(even, k, n + 8));
    bits[3] = ld_shared_32(Tile::move(odd, k, n + 8));
  }
  FragmentB<kMath> b;
#pragma unroll
  for (int i = 0; i < 4; ++i) b.set(i, bits[i]);
  return b;
}

// From the accumulators of 16 x kK, kK / 8 of them.
template <Math kMath>
__device__ __forceinline__ FragmentA<kMath> a_from_accumulators(const float (*acc)[4]) {
  FragmentA<kMath> a;
  if constexpr (MathTraits<kMath>::kK == 16) {
    using Element = typename MathTraits<kMath>::Element;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.set(i, pack<Element>(acc[i / 2][i % 2 * 2], acc[i / 2][i % 2 * 2 + 1]));
    }
  } else {
    a.set(0, __float_as_uint(acc[0][0]));
    a.set(1, __float_as_uint(acc[0][2]));
    a.set(2, __float_as_uint(acc[0][1]));
    a.set(3, __float_as_uint(acc[0][3]));
  }
  return a;
}

// Stores 16 x 8 accumulator elements at (row, col) of a tile, converted to its element type.
template <class Tile>
__device__ __forceinline__ void store_accumulator(const Tile& tile, int row, int col,
                                                  const float (&acc)[4]) {
  const uint32_t lane = lane_index();
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const uint32_t first = tile.address(lane / 4, lane % 4 * 2);
    const uint32_t address = Tile::move(first, row + 8 * lower, col);
    const float x = acc[2 * lower], y = acc[2 * lower + 1];
    if constexpr (sizeof(typename Tile::Element) == 2) {
      st_shared_32(address, pack<typename Tile::Element>(x, y));
    } else {
      st_shared_64(address, __float_as_uint(x), __float_as_uint(y));
    }
  }
}

// ---- Products of a warp -----------------------------------------------------------------------

// acc += A * B over kSteps steps of depth kK. `load_a(row_tile, step)` gives 16 rows of A,
// `load_b(block, step)` 16 columns of B; acc[row tile][8 columns].
//
// Float32: a sum inside the tensor core is truncated, not rounded, at every step. Eight steps at
// most run into a fresh accumulator, which is then added in float32; 64 columns at a time, because
// that costs registers. `load_a` is then called once for every 64 columns.
template <Math kMath, int kSteps, int kRowTiles, int kColBlocks, class LoadA, class LoadB>
__device__ __forceinline__ void gemm(float (&acc)[kRowTiles][kColBlocks][4], LoadA load_a,
                                     LoadB load_b) {
  static_assert(kColBlocks % 2 == 0, "B comes in 16 columns");
  if constexpr (kMath == Math::kFloat32) {
    constexpr int kChain = kSteps < 8 ? kSteps : 8;
    constexpr int kWidth = kColBlocks < 8 ? kColBlocks : 8;
    static_assert(kSteps % kChain == 0 && kColBlocks % kWidth == 0, "whole parts");
#pragma unroll
    for (int first_block = 0; first_block < kColBlocks; first_block += kWidth) {
#pragma unroll
      for (int first_step = 0; first_step < kSteps; first_step += kChain) {
        float part[kRowTiles][kWidth][4] = {};
#pragma unroll
        for (int step = first_step; step < first_step + kChain; ++step) {
          FragmentA<kMath> a[kRowTiles];
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) a[m] = load_a(m, step);
#pragma unroll
          for (int n = 0; n < kWidth; n += 2) {
            const FragmentB<kMath> b = load_b((first_block + n) / 2, step);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) mma<kMath>(part[m][n], part[m][n + 1], a[m], b);
          }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kWidth; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][first_block + n][i] += part[m][n][i];
          }
        }
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      FragmentA<kMath> a[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) a[m] = load_a(m, step);
#pragma unroll
      for (int n = 0; n < kColBlocks; n += 2) {
        const FragmentB<kMath> b = load_b(n / 2, step);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) mma<kMath>(acc[m][n], acc[m][n + 1], a[m], b);
      }
    }
  }
}

// ---- Global memory ----------------------------------------------------------------------------

// Rows one after the other, at equal distances.
template <class Element>
struct DenseRows {
  const Element* base;
  int64_t stride;

  // An element of a row, and the same of rows after it.
  struct Cursor {
    const Element* source;
    int64_t stride;
    __device__ __forceinline__ const Element* get() const { return source; }
    __device__ __forceinline__ void advance(int rows) { source += rows * stride; }
  };
  __device__ __forceinline__ Cursor at(int row, int col) const {
    return {base + row * stride + col, stride};
  }
};

// Rows of a sequence whose pages lie anywhere in a pool. Those behind the end of all its pages,
// which are not read, have the address of the last one.
template <class Element>
struct PagedRows {
  const Element* base;
  int64_t stride;
  Pages pages;  // their table begins with the sequence's row
  int end;

  struct Cursor {
    const PagedRows& rows;
    int row;
    int col;
    __device__ __forceinline__ const Element* get() const {
      const int inside = min(row, rows.end - 1);
      const int page = __ldg(rows.pages.table + (inside >> rows.pages.log2_size));
      const int64_t existing = min(max(page, 0), rows.pages.count - 1);
      const int64_t of_pool =
          (existing << rows.pages.log2_size) + (inside & (rows.pages.size() - 1));
      return rows.base + of_pool * rows.stride + col;
    }
    __device__ __forceinline__ void advance(int rows) { row += rows; }
  };
  __device__ __forceinline__ Cursor at(int row, int col) const { return {*this, row, col}; }
};

// Fills the tile with rows first_row ... of `rows`, those at `end_row` and beyond and its columns
// at `cols` and beyond with zeros. Called by kThreads threads, `thread` is one's index among them.
// The copies belong to the caller's cp.async group, except for rows that are not 16-byte aligned:
// those are copied at once, by elements.
template <int kThreads, class Tile, class Rows>
__device__ __forceinline__ void load_rows_async(const Tile& tile, const Rows& rows, int first_row,
                                                int end_row, int cols, uint32_t thread,
                                                bool aligned) {
  using Element = typename Tile::Element;
  constexpr int kChunk = Tile::kChunk;
  constexpr int kChunks = Tile::kChunks;
  if (aligned) {
    constexpr int kThreadsOfRow = kThreads < kChunks ? kThreads : kChunks;
    static_assert(kThreads % kThreadsOfRow == 0 && kChunks % kThreadsOfRow == 0,
                  "a thread stays in its columns");
    constexpr int kRowsPerPass = kThreads / kThreadsOfRow;
    const int row = thread / kThreadsOfRow;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += kThreadsOfRow) {
      const int col = (chunk + static_cast<int>(thread % kThreadsOfRow)) * kChunk;
      const int valid_rows = col < cols ? end_row - first_row : 0;
      auto source = rows.at(first_row + row, col);
#pragma unroll
      for (int pass = 0; pass < Tile::kRows; pass += kRowsPerPass) {
        if (Tile::kRows % kRowsPerPass == 0 || pass + row < Tile::kRows) {
          cp_async_16(tile.address(pass + row, col), source.get(),
                      pass + row < valid_rows ? 16 : 0);
        }
        source.advance(kRowsPerPass);
      }
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < Tile::kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, col = i % kChunks * kChunk;
      const int valid_cols = first_row + row < end_row ? cols - col : 0;
      const Element* source = rows.at(first_row + row, col).get();
      uint32_t words[4] = {};
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (e >= valid_cols) continue;
        if constexpr (sizeof(Element) == 2) {
          words[e / 2] |= static_cast<uint32_t>(source[e].bits) << (e % 2 * 16);
        } else {
          words[e] = __float_as_uint(source[e]);
        }
      }
      st_shared_128(tile.address(row, col), words);
    }
  }
}

// The same of the dense array at `gmem`.
template <int kThreads, class Tile>
__device__ __forceinline__ void load_tile_async(const Tile& tile,
                                                const typename Tile::Element* gmem,
                                                int64_t row_stride, int first_row, int end_row,
                                                int cols, uint32_t thread, bool aligned) {
  load_rows_async<kThreads>(tile, DenseRows<typename Tile::Element>{gmem, row_stride}, first_row,
                            end_row, cols, thread, aligned);
}

template <int kThreads, class Tile>
__device__ __forceinline__ void load_tile_async(const Tile& tile,
                                                const typename Tile::Element* gmem,
                                                int64_t row_stride, int first_row, int end_row,
                                                int cols, uint32_t thread) {
  load_tile_async<kThreads>(tile, gmem, row_stride, first_row, end_row, cols, thread,
                            rows_are_aligned(gmem, row_stride, cols));
}

// Zeros for the first `count` rows of a tile, by kThreads threads.
template <int kThreads, class Tile>
__device__ __forceinline__ void clear_rows(const Tile& tile, int count, int thread) {
  const uint32_t zeros[4] = {};
#pragma unroll 1
  for (int i = thread; i < min(count, Tile::kRows) * Tile::kChunks; i += kThreads) {
    st_shared_128(tile.address(i / Tile::kChunks, i % Tile::kChunks * Tile::kChunk), zeros);
  }
}

// Zeros for those rows of a tile, `elements` of an array, that are hidden, by kThreads threads.
template <int kThreads, class Tile, class Hidden>
__device__ __forceinline__ void clear_hidden_rows(const Tile& tile, const Hidden& hidden,
                                                  Interval elements, uint32_t thread) {
  const uint32_t zeros[4] = {};
#pragma unroll 1
  for (uint32_t i = thread; i < Tile::kRows * Tile::kChunks; i += kThreads) {
    const int row = i / Tile::kChunks;
    if (!hidden.hold(elements.begin + row)) continue;
    st_shared_128(tile.address(row, i % Tile::kChunks * Tile::kChunk), zeros);
  }
}

// Writes the first kRows rows of the tile to rows first_row ... of the array at `gmem`, except for
// rows at `end_row` and beyond and columns at `cols` and beyond.
template <int kThreads, int kRows, class Tile>
__device__ __forceinline__ void store_tile(const Tile& tile, typename Tile::Element* gmem,
                                           int64_t row_stride, int first_row, int end_row, int cols,
                                           int thread) {
  using Element = typename Tile::Element;
  constexpr int kChunk = Tile::kChunk;
  const bool aligned = rows_are_aligned(gmem, row_stride, cols);
#pragma unroll 4
  for (int i = thread; i < kRows * Tile::kChunks; i += kThreads) {
    const int row = i / Tile::kChunks, col = i % Tile::kChunks * kChunk;
    if (first_row + row >= end_row || col >= cols) continue;
    uint32_t words[4];
    ld_shared_128(words, tile.address(row, col));
    Element* target = gmem + (first_row + row) * row_stride + col;
    if (aligned) {
      *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (col + e >= cols) continue;
        if constexpr (sizeof(Element) == 2) {
          target[e].bits = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
        } else {
          target[e] = __uint_as_float(words[e]);
        }
      }
    }
  }
}

}  // namespace jaxflash::sm80
