// A dense mask as score programs read it: words of bits, and what blocks of it show.
#pragma once

#include "problem.h"

namespace jaxflash {

inline constexpr int kDenseMaskThreads = 256;
inline constexpr int kDenseMaskBlocks = 4;  // of kRangeBlock keys, side by side: a block's work

// The bit of element i of a word: a thread of a matrix product's fragment holds two pairs of 16
// columns, whose bits then are neighbours. `place_of` in _dense_mask.py.
__device__ __forceinline__ int word_bit(int i) {
  return (i >> 4 & 1) * 16 + (i >> 1 & 3) * 4 + (i >> 3 & 1) * 2 + (i & 1);
}
__device__ __forceinline__ int element_of_bit(int bit) {
  return (bit >> 4 & 1) * 16 + (bit >> 2 & 3) * 2 + (bit >> 1 & 1) * 8 + (bit & 1);
}

// Of one mask, bools of a row, as many as bytes of `Vector`; false beyond the mask.
template <class Vector>
struct BoolVectors {
  const uint8_t* mask;
  int rows;
  int keys;

  // Whether a row's vectors lie on multiples of their size.
  __device__ __forceinline__ bool aligned() const {
    return (reinterpret_cast<uintptr_t>(mask) | keys) % sizeof(Vector) == 0;
  }
  __device__ __forceinline__ Vector load(int row, int key) const {
    if (row >= rows || key >= keys) return Vector{};
    return __ldcs(reinterpret_cast<const Vector*>(mask + int64_t{row} * keys + key));
  }
  __device__ __forceinline__ Vector load_bytes(int row, int key) const {
    Vector bools{};
    auto* bytes = reinterpret_cast<uint8_t*>(&bools);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Vector)); ++i) {
      if (row < rows && key + i < keys) bytes[i] = mask[int64_t{row} * keys + key + i];
    }
    return bools;
  }
  // kCount of them, all on their way at once: `at(i)` is the place of one.
  template <int kCount, class Place>
  __device__ __forceinline__ void load(Vector (&bools)[kCount], const Place& at) const {
    if (aligned()) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) bools[i] = load(at(i).row, at(i).key);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) bools[i] = load_bytes(at(i).row, at(i).key);
    }
  }
};

struct MaskElement {
  int row;
  int key;
};

// The words of 64 rows and 256 keys, in shared memory: of each row those of its keys, or of each 32
// rows those of all keys.
template <bool kPacksKeys>
class MaskWords {
 public:
  static constexpr int kRows = kRangeBlock;
  static constexpr int kKeys = kDenseMaskBlocks * kRangeBlock;
  static constexpr int kWords = kRows * kKeys / 32;
  // Of the other axis, and what they hold.
  static constexpr int kLines = kPacksKeys ? kRows : kKeys;
  static constexpr int kWordsOfLine = kWords / kLines;

  __device__ __forceinline__ uint32_t& at(int line, int word) {
    return words_[kPacksKeys ? line * kWordsOfLine + word : word * kLines + line];
  }

  // Every thread 64 bools, which give half words.
  __device__ __forceinline__ void pack(const DenseMaskParams& params, const uint8_t* mask,
                                       int first_row, int first_key) {
    if constexpr (kPacksKeys) {
      constexpr int kAcross = kKeys / 16;
      const int half = threadIdx.x % kAcross, row = threadIdx.x / kAcross;
      constexpr int kStep = kDenseMaskThreads / kAcross;
      uint4 bools[kRows / kStep];
      const BoolVectors<uint4> vectors{mask, params.rows, params.keys};
      vectors.load(bools, [&](int i) {
        return MaskElement{first_row + row + i * kStep, first_key + 16 * half};
      });
#pragma unroll
      for (int i = 0; i < kRows / kStep; ++i) {
        store(row + i * kStep, half,
              four(bools[i].x) | four(bools[i].y) << 8 | four(bools[i].z) << 2 |
                  four(bools[i].w) << 10);
      }
    } else {
      const int key = threadIdx.x % (kKeys / 4) * 4, half = threadIdx.x / (kKeys / 4);
      uint32_t bools[16];
      const BoolVectors<uint32_t> vectors{mask, params.rows, params.keys};
      vectors.load(bools,
                   [&](int i) { return MaskElement{first_row + 16 * half + i, first_key + key}; });
      uint32_t low = 0, high = 0;  // a byte for each key
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int bit = word_bit(i);
        (bit < 8 ? low : high) |= bools[i] << bit % 8;
      }
      const uint32_t pairs[2] = {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
#pragma unroll
      for (int i = 0; i < 4; ++i) store(key + i, half, pairs[i / 2] >> i % 2 * 16);
    }
  }

  // To the words of a mask, see DenseMaskParams.
  __device__ __forceinline__ void write(const DenseMaskParams& params, int64_t number,
                                        int first_row, int first_key) {
    constexpr int kSharers = DenseMaskParams::kSharers;
    const int num_words = kPacksKeys ? (params.keys + 127) / 128 : (params.rows + 31) / 32;
    const int64_t num_lines = kPacksKeys ? int64_t{params.rows} * kSharers : params.keys;
    uint32_t* target = params.words + number * num_words * num_lines;
#pragma unroll
    for (int i = threadIdx.x; i < kWords; i += kDenseMaskThreads) {
      constexpr int kAcross = kPacksKeys ? kRows * kSharers : kKeys;
      const int line = i % kAcross, word = i / kAcross;
      const int64_t at_line = line + (kPacksKeys ? int64_t{first_row} * kSharers : first_key);
      const int at_word = word + (kPacksKeys ? first_key / 128 : first_row / 32);
      if (at_line < num_lines && at_word < num_words) {
        target[at_word * num_lines + at_line] =
            kPacksKeys ? of_thread(line / kSharers, word, line % kSharers) : words_[i];
      }
    }
  }

 private:
  // What one of the four threads that have a row needs of 128 keys: of half words four bits each.
  __device__ __forceinline__ uint32_t of_thread(int row, int group, int thread) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t halves = at(row, 4 * group + i) >> 4 * thread;
      bits |= ((halves & 0xf) | (halves >> 12 & 0xf0)) << 8 * i;
    }
    return bits;
  }
  // The bits of four neighbours.
  __device__ __forceinline__ static uint32_t four(uint32_t bools) {
    // Bytes 0 to 3 to bits 24, 25, 28 and 29, and no two parts to one bit.
    return bools * (1u << 24 | 1u << 17 | 1u << 12 | 1u << 5) >> 24 & 0x33;
  }
  __device__ __forceinline__ void store(int line, int half, uint32_t bits) {
    reinterpret_cast<uint16_t*>(&at(line, half / 2))[half % 2] = static_cast<uint16_t>(bits);
  }

  alignas(16) uint32_t words_[kWords];  // of_thread() loads four
};

// What there is in a block of 64 rows and 64 keys, by a warp.
template <bool kPacksKeys>
__device__ __forceinline__ MaskBlock summary_of(MaskWords<kPacksKeys>& words, int number,
                                                int num_lines, int num_packed) {
  const int lane = threadIdx.x % 32;
  const int first_line = kPacksKeys ? 0 : number * kRangeBlock;
  const int first_word = kPacksKeys ? number * 2 : 0;
  uint32_t lines[2], packed[2] = {0, 0};
  bool whole = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int line = 32 * i + lane;
    bool seen = false;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t word = words.at(first_line + line, first_word + k);
      seen |= word != 0;
      packed[k] |= word;
      const uint32_t elements = __ballot_sync(~0u, 32 * k + element_of_bit(lane) < num_packed);
      whole &= line >= num_lines || (~word & elements) == 0;
    }
    lines[i] = __ballot_sync(~0u, seen);
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    packed[k] = __reduce_or_sync(~0u, packed[k]);
    packed[k] = __ballot_sync(~0u, packed[k] >> word_bit(lane) & 1);
  }
  MaskBlock block = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    block.rows[i] = kPacksKeys ? lines[i] : packed[i];
    block.keys[i] = kPacksKeys ? packed[i] : lines[i];
  }
  block.whole = __all_sync(~0u, whole);
  return block;
}

// Reads 64 rows and 256 keys.
template <bool kPacksKeys>
__global__ void __launch_bounds__(kDenseMaskThreads)
    mask_words_kernel(const __grid_constant__ DenseMaskParams params) {
  using Words = MaskWords<kPacksKeys>;
  __shared__ Words words;
  const int row_blocks = blocks_of(params.rows), key_blocks = blocks_of(params.keys);
  const uint32_t across = (key_blocks + kDenseMaskBlocks - 1) / kDenseMaskBlocks;
  const int key_block = static_cast<int>(blockIdx.x % across) * kDenseMaskBlocks;
  const int row_block = static_cast<int>(blockIdx.x / across % row_blocks);
  const int64_t number = blockIdx.x / across / row_blocks;
  const int first_row = row_block * kRangeBlock, first_key = key_block * kRangeBlock;

  words.pack(params, params.mask + number * params.rows * params.keys, first_row, first_key);
  __syncthreads();

  words.write(params, number, first_row, first_key);

  const int of_warp = threadIdx.x / 32;
  if (of_warp >= kDenseMaskBlocks || key_block + of_warp >= key_blocks) return;
  const int rows_left = params.rows - first_row;
  const int keys_left = params.keys - first_key - of_warp * kRangeBlock;
  const MaskBlock block = summary_of<kPacksKeys>(words, of_warp, kPacksKeys ? rows_left : keys_left,
                                                 kPacksKeys ? keys_left : rows_left);
  if (threadIdx.x % 32 == 0) {
    params.blocks[(number * row_blocks + row_block) * key_blocks + key_block + of_warp] = block;
  }
}

}  // namespace jaxflash
