// From products to probabilities, on accumulator fragments whose rows are spread over four
// neighbouring lanes: a thread holds two columns of row g = lane / 4 (elements 0, 1) and two of row
// g + 8 (elements 2, 3) of every 8 columns.
#pragma once

#include "common/approx.cuh"
#include "common/logarithms.h"
#include "problem.h"

namespace jaxflash {

// Minus the reference of a row that has none yet: so far down that the first visible key moves it,
// yet finite, because (-inf) - (-inf) is NaN. And no further: the exponents of a row's largest
// logits are off by up to half of the last digit of these. From here on that is 128, in float16 8,
// and 2^128 is no float32. Rows all of whose logits lie below see no key.
template <Math kMath>
inline constexpr float kNoReference = kMath == Math::kFloat16 ? 0x1p27f : 0x1p31f;

// Running reference and sum of the rows of kRowTiles fragments of 16 rows. The reference is the row
// maximum, but lazily: it moves only when a row has outgrown it by 2^8, because moving it means
// rescaling the output, and 2^8 is harmless in every element type. Sums stay per thread until the
// end. Logits are factor * s, in units of log 2.
template <int kRowTiles, Math kMath>
class OnlineSoftmax {
 public:
  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        offset_[m][r] = kNoReference<kMath>;
        sum_[m][r] = 0.f;
      }
    }
  }

  // Looks at a new tile; multiplies the output so far if a reference moves.
  template <int kBlocks, int kOutBlocks>
  __device__ __forceinline__ void advance(const float (&s)[kRowTiles][kBlocks][4],
                                          float (&o)[kRowTiles][kOutBlocks][4], float factor) {
    float top[kRowTiles][2];
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float even = s[m][0][2 * r], odd = s[m][0][2 * r + 1];  // two chains halve the latency
#pragma unroll
        for (int n = 1; n < kBlocks; ++n) {
          even = fmaxf(even, s[m][n][2 * r]);
          odd = fmaxf(odd, s[m][n][2 * r + 1]);
        }
        float row_top = fmaxf(even, odd);
        row_top = fmaxf(row_top, __shfl_xor_sync(~0u, row_top, 1));
        row_top = fmaxf(row_top, __shfl_xor_sync(~0u, row_top, 2));
        constexpr float kSlack = 8.f;
        outgrown |= fmaf(row_top, factor, offset_[m][r]) > kSlack;
        top[m][r] = row_top;
      }
    }
    // One vote for the warp: the branch does not diverge.
    if (!__any_sync(~0u, outgrown)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // From the rounded offsets, as the exponentials use them: large logits stay consistent.
        const float offset = fminf(offset_[m][r], -top[m][r] * factor);
        const float correction = exp2_approx(offset - offset_[m][r]);
        offset_[m][r] = offset;
        sum_[m][r] *= correction;
#pragma unroll
        for (int n = 0; n < kOutBlocks; ++n) {
          o[m][n][2 * r] *= correction;
          o[m][n][2 * r + 1] *= correction;
        }
      }
    }
  }

  // Turns one accumulator of products into probabilities relative to the reference.
  __device__ __forceinline__ void exponentials(float (&s)[4], int m, float factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = exp2_approx(fmaf(s[i], factor, offset_[m][i / 2]));
      sum_[m][i / 2] += s[i];
    }
  }

  // A sink joins a row: a logit, in units of log 2, without a value. Updates the row's sum, and
  // returns what the output is multiplied with. The reference may lie far below the sink, as it is
  // that of the keys: then the sink becomes the reference.
  __device__ __forceinline__ float add_sink(float sink, float& row_sum, int m, int r) {
    const float above = sink + offset_[m][r];
    const float smaller = exp2_approx(-fabsf(above));
    if (above <= 0.f) {
      row_sum += smaller;
      return 1.f / row_sum;
    }
    offset_[m][r] = -sink;
    row_sum = fmaf(row_sum, smaller, 1.f);
    return smaller / row_sum;
  }

  // Over the whole row; the same in the four lanes that share it.
  __device__ __forceinline__ float row_sum(int m, int r) const {
    float sum = sum_[m][r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum;
  }

  // Natural logarithm of the row's sum of exponentials; -inf if it is 0.
  __device__ __forceinline__ float lse(float row_sum, int m, int r) const {
    return (log2f(row_sum) - offset_[m][r]) * kLn2;
  }

 private:
  float offset_[kRowTiles][2];  // minus the reference, in units of log 2
  float sum_[kRowTiles][2];
};

}  // namespace jaxflash
