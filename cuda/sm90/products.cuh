// Products of a warpgroup's 64 rows that more than one kernel needs.
#pragma once

#include "common/thread.cuh"
#include "sm90/hardware/wgmma.cuh"

namespace jaxflash::sm90 {

// The thread's index in its warpgroup, in a way that the compiler cannot compute ahead: what is
// derived from it outside of the main loop holds no register there.
__device__ __forceinline__ int late_thread() { return static_cast<int>(tid_x() & 127); }

// The last kSteps steps of 16 columns of the 64 rows that a warpgroup multiplies time and again.
// Products of 64 x 64 read 128 bytes a clock if both operands are in shared memory, which is all
// that it delivers; a held step leaves half of that.
template <int kSteps>
struct HeldOperand {
  static_assert(kSteps >= 0);
  uint32_t words[kSteps > 0 ? kSteps : 1][4];

  // `rows`: the 64 rows of kColumns columns in swizzled panels of 64.
  template <int kColumns, int kPanelBytes>
  __device__ __forceinline__ void load(uint32_t rows) {
    const int thread = late_thread();
    const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = kColumns / 16 - kSteps + i;
      const int piece = step % 4 * 2 + thread % 32 / 16;
      ldmatrix_x4(rows + step / 4 * kPanelBytes + row * 128 + (piece ^ row % 8) * 16, words[i]);
    }
  }
};

// x = A B^T over the columns of two operands whose panels are 64 columns wide; in flight on return.
// `adds`, which should be known where this is inlined: x += A B^T.
template <Math kMath, int kColumns, int kPanelBytesA, int kPanelBytesB, int kN, int kHeld = 0>
__device__ __forceinline__ void issue_scores(float (&x)[kN / 2], uint64_t a, uint64_t b,
                                             bool adds = false,
                                             const HeldOperand<kHeld>& held = {}) {
  constexpr int kFirstHeld = kColumns / 16 - kHeld;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    const int inside = step % 4 * 32;  // bytes of 16 columns
    const uint64_t b_step = b + descriptor_step(step / 4 * kPanelBytesB + inside);
    if (step < kFirstHeld) {
      Wgmma<kN>::template ss<kMath, 0, 0>(x, a + descriptor_step(step / 4 * kPanelBytesA + inside),
                                          b_step, adds || step != 0);
    } else {
      Wgmma<kN>::template rs<kMath, 0>(x, held.words[step - kFirstHeld], b_step, adds || step != 0);
    }
  }
  wgmma_commit();
}

}  // namespace jaxflash::sm90
