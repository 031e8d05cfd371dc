// What a score program, printed from a JAX function, is written in, and what the kernels ask of it.
//
// A program is a struct of static functions:
//
//   Head head(captures, problem, batch, b, h)      what depends on batch element and head alone
//   Row row(head, q), Column column(head, kv)      ... and on the query's or the key's position
//   float logit(head, row, column, q, kv, distance, s)          of the product s = q.k, in log 2
//   float logit_and_slope(..., s, &slope)          slope: d logit / d score in natural units
//   float sink(head)                               with kHasSink: a logit without a value, in log 2
//   bool kUnitSlope                                slope is 1 everywhere, and not asked for
//   float addend(head, row, column, q, kv, distance)   with kUnitSlope: logit - scale * s, in log 2
//   bool kAdds                                     the addend is not 0 everywhere
//   bool kBounded                                  exponentials of logits need no reference
//   bool kMasks                                    something is hidden, beside what the mask hides
//   bool visible(head, row, column, q, kv, distance)   with kMasks: what is not; asked of tiles
//                                                  that are not known to be visible as a whole
//   bool kHasWords                                 a part of that, where threads have neighbouring
//                                                  keys of a row, is in words:
//   const uint32_t* words(head)                    (word_groups, word_rows, 4), of 128 keys each
//   int word_groups(head), word_rows(head)         group, and of one row those of all: number
//                                                  kv / 2 % 4 of the four has the key's bit,
//   uint32_t bit(kv)                               the same for all multiples of 128, and the sum
//                                                  of what kv % 16 and all else make of it, 4 for
//                                                  each 16 keys
//   bool kAllInWords                               there is no other part:
//   bool visible_beside(head, row, column, q, kv, distance)   which this is
//   bool kDrops                                    the weights stage: probabilities are dropped
//   bool kCapturesMove                             captures have tangents
//   float capture_tangent(head, row, column, q, kv, distance, s)   with kCapturesMove: what those
//                                                  make of the logit's tangent, in natural units
//   bool kStarts                                   products may start from what is added to them:
//   float start(head, row, column, q, kv, distance, neighbour)     that over the scale, where
//   Neighbour* neighbours(head, row)               has `neighbour` for each key, from the capture
//   int kStartCapture                              of this number,
//   int neighbours_end(head)                       as many
//   float started_logit(..., s)                    without kUnitSlope: logit and logit_and_slope of
//   float started_logit_and_slope(..., s, &slope)  products that did
//   bool kFollowsDistance                          forward: with kUnitSlope, the addend is
//   float slope_before(head)                       distance * this, where keys come before the
//   float slope_behind(head)                       query, and distance * that, where behind it
//   bool kBends                                    these are not the same
//   bool kSharesLoads                              neighbouring elements take parts of one load
//   bool kSharesDiagonals                          elements of one diagonal load the same
//   bool kHasDiagonals                             ... by the difference of q and kv, or its
//                                                  negative, as the last index of an array:
//   Diagonal diagonal(head, difference)            where that is for one difference, q - kv,
//   bool inside(head, least, most)                 whether it is in the array for all of these,
//   float addend(..., diagonal, step)              for those: a function of the same name for the
//                                                  difference `step` more than the diagonal's;
//                                                  likewise logit and logit_and_slope
//   int kKeySums                                   backward: how many sums over the queries are
//                                                  wanted of d score, one for each head and key,
//   void key_weights(head, row, column, q, kv, distance, weights)   times these factors
//   bool kStoresGradient                           backward: d score is wanted itself, as matrices
//                                                  (queries, keys) of a StoredGradient:
//   int64_t gradient_matrix(head)                  the number of the head's in a batch element
//   bool kSumsBatch                                of the sum of d score of all batch elements
//   bool kSumsDiagonals                            backward: d score is summed along diagonals, for
//   float diagonal_weight(head)                    the gradient of an array, times this factor,
//   int64_t diagonal_index(head, row, column, q, kv, distance)    of its element that a diagonal
//                                                  belongs to,
//   bool kSumsBuckets                              several of them perhaps
//   Dropout dropout(captures, problem, batch, b, h)    with kDrops: those of which bits
//
// `b` and `h` are the numbers that the program means, `batch` counts the elements of this call.
// `distance` is the query's position minus the key's. Any q and kv are safe: loads are clamped.
#pragma once

#include "common/approx.cuh"
#include "common/dropout.cuh"
#include "common/element.cuh"
#include "common/integers.h"
#include "problem.h"

namespace jaxflash {

// Elements from a capture's base to its part of a batch element.
__device__ __forceinline__ int64_t capture_offset(const int64_t (&batch_stride)[kMaxBatchAxes],
                                                  const Problem& problem, int64_t batch) {
  int64_t offset = 0;
  uint32_t rest = static_cast<uint32_t>(batch);
  for (int axis = problem.num_batch_axes - 1; axis >= 0; --axis) {
    const auto extent = static_cast<uint32_t>(problem.batch_extent[axis]);
    const uint32_t outer = rest / extent;
    offset += static_cast<int64_t>(rest - outer * extent) * batch_stride[axis];
    rest = outer;
  }
  return offset;
}

template <class T>
__device__ __forceinline__ const T* capture_data(const Captures& captures, int k,
                                                 const Problem& problem, int64_t batch) {
  const Capture& capture = captures.of[k];
  return static_cast<const T*>(capture.data) + capture_offset(capture.batch_stride, problem, batch);
}

__device__ __forceinline__ int capture_extent(const Captures& captures, int k, int axis) {
  return captures.of[k].extent[axis];
}

// The numbers by which a program knows a batch element and a query head of this call.
__device__ __forceinline__ int batch_number(const Captures& captures, const Problem& problem,
                                            int64_t batch) {
  if (captures.batch_numbers == nullptr) return static_cast<int>(batch);
  return __ldg(captures.batch_numbers +
               capture_offset(captures.batch_numbers_stride, problem, batch));
}
__device__ __forceinline__ int head_number(const Captures& captures, int head) {
  return captures.head_numbers == nullptr ? head : __ldg(captures.head_numbers + head);
}

// Loads that the compiler makes once where they stand twice, as it does not with __ldg: a column's
// for all rows of a thread, a word of bits or two neighbours for all that is taken of them.
__device__ __forceinline__ uint32_t load_word(const void* address) {
  uint32_t word;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
}
__device__ __forceinline__ uint16_t load_half_word(const void* address) {
  uint16_t word;
  asm("ld.global.nc.u16 %0, [%1];" : "=h"(word) : "l"(address));
  return word;
}
// Where this stands, not behind a wait.
__device__ __forceinline__ void load_word_here(const uint32_t* address, uint32_t& word) {
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(address));
}
__device__ __forceinline__ float load_capture(const float* data, int64_t i) {
  return __uint_as_float(load_word(data + i));
}
__device__ __forceinline__ float load_capture(const BFloat16* data, int64_t i) {
  return to_float(BFloat16{load_half_word(data + i)});
}
__device__ __forceinline__ float load_capture(const Float16* data, int64_t i) {
  return to_float(Float16{load_half_word(data + i)});
}
__device__ __forceinline__ int32_t load_capture(const int32_t* data, int64_t i) {
  return static_cast<int32_t>(load_word(data + i));
}
__device__ __forceinline__ uint32_t load_capture(const uint32_t* data, int64_t i) {
  return load_word(data + i);
}
__device__ __forceinline__ bool load_capture(const bool* data, int64_t i) {
  return __ldg(reinterpret_cast<const unsigned char*>(data) + i) != 0;
}

// An element of a pair of neighbours: the second one if `odd`.
__device__ __forceinline__ float load_of_pair(const float* data, int64_t pair, int odd) {
  float first, second;
  asm("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "l"(data + 2 * pair));
  return odd != 0 ? second : first;
}
__device__ __forceinline__ float load_of_pair(const BFloat16* data, int64_t pair, int odd) {
  const uint32_t both = load_word(data + 2 * pair);
  return __uint_as_float(odd != 0 ? both & 0xffff0000u : both << 16);
}
__device__ __forceinline__ float load_of_pair(const Float16* data, int64_t pair, int odd) {
  const uint32_t both = load_word(data + 2 * pair);
  return to_float(Float16{static_cast<uint16_t>(odd != 0 ? both >> 16 : both)});
}

// A pair as it lies in memory, a narrow one in `first`. Loaded where this stands, not behind a
// wait.
__device__ __forceinline__ void load_pair(const float* pair, float& first, float& second) {
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "l"(pair));
}
template <class T>
__device__ __forceinline__ void load_pair(const T* pair, float& first, float&) {
  static_assert(sizeof(T) == 2);
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=f"(first) : "l"(pair));
}
// And the two numbers that it is of.
__device__ __forceinline__ void unpack_pair(const float*, float&, float&) {}
__device__ __forceinline__ void unpack_pair(const BFloat16*, float& first, float& second) {
  const uint32_t both = __float_as_uint(first);
  first = __uint_as_float(both << 16);
  second = __uint_as_float(both & 0xffff0000u);
}
__device__ __forceinline__ void unpack_pair(const Float16*, float& first, float& second) {
  const uint32_t both = __float_as_uint(first);
  first = to_float(Float16{static_cast<uint16_t>(both)});
  second = to_float(Float16{static_cast<uint16_t>(both >> 16)});
}

__device__ __forceinline__ int64_t clamp_index(int i, int extent) {
  return min(max(i, 0), extent - 1);
}

}  // namespace jaxflash
