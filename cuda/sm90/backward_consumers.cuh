// What the consumer loops of the backward kernel have in common.
#pragma once

#include "common/mask.cuh"
#include "sm90/backward_traits.cuh"
#include "sm90/softmax.cuh"
#include "sm90/wgmma.cuh"

namespace jaxflash::sm90 {

// The old values are not needed: the compiler need not keep them for a product that overwrites
// them.
template <int kElements>
__device__ __forceinline__ void discard(float (&registers)[kElements]) {
#pragma unroll
  for (float& value : registers) asm volatile("" : "=f"(value));
}

// The thread's index in its warpgroup, in a way that the compiler cannot compute ahead: what is
// derived from it outside of the main loop holds no register there.
__device__ __forceinline__ int late_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread & 127;
}

// One arrival a warp: a warp's wait covers its own part of a product only.
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  if (late_thread() % 32 == 0) barrier.arrive();
}

// The step from a product to its logit, in units of log 2.
struct ScaledLogits {
  float scale_log2;

  __device__ __forceinline__ float logit(float s, int /*row*/, int /*key*/) const {
    return s * scale_log2;
  }
};

// Writes packed accumulators (64 rows of a warpgroup x kColumns) transposed into a swizzled panel,
// whose 64 columns are those rows and whose rows start at `panel`.
template <int kColumns>
__device__ __forceinline__ void store_transposed(uint32_t panel,
                                                 const uint32_t (&packed)[kColumns / 4]) {
  const int thread = late_thread();
  const int row = thread % 32 / 16 * 8 + thread % 8;
  const int piece = thread / 32 * 2 + thread % 16 / 8;
  const uint32_t target = panel + row * 128 + (piece ^ row % 8) * 16;
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    stmatrix_x4_trans(target + step * 16 * 128, packed + 4 * step);
  }
}

// A consumer's place in the rings of q and dout, which move once a step, and how many steps of the
// tile remain: all in one word, because registers are short.
template <class Traits>
class ConsumerSteps {
  using Tile = typename Traits::Tile;
  static constexpr int kQStages = Tile::kQStages;
  static constexpr int kDoutStages = Tile::kDoutStages;
  static_assert((kQStages & (kQStages - 1)) == 0 && (kDoutStages & (kDoutStages - 1)) == 0);
  static_assert(kQStages <= 4 && kDoutStages <= 4, "twice around every ring in 8 steps");

 public:
  __device__ __forceinline__ explicit ConsumerSteps(typename Traits::SharedMemory& smem)
      : smem_(smem) {}

  __device__ __forceinline__ void begin(int steps) { place_ = step() - 8 * steps; }
  __device__ __forceinline__ bool more() const { return place_ < 0; }
  __device__ __forceinline__ bool last() const { return place_ >= -8; }
  __device__ __forceinline__ void advance() { place_ = (place_ - step() + 8) + (step() + 1) % 8; }

  __device__ __forceinline__ int q_stage() const { return step() % kQStages; }
  __device__ __forceinline__ int dout_stage() const { return step() % kDoutStages; }
  __device__ __forceinline__ int odd() const { return step() % 2; }
  __device__ __forceinline__ void wait_q() const {
    smem_.q_full[q_stage()].wait(step() / kQStages % 2);
  }
  __device__ __forceinline__ void wait_dout() const {
    smem_.dout_full[dout_stage()].wait(step() / kDoutStages % 2);
  }
  __device__ __forceinline__ void release_q() const { arrive_warp(smem_.q_empty[q_stage()]); }
  __device__ __forceinline__ void release_dout() const {
    arrive_warp(smem_.dout_empty[dout_stage()]);
  }
  __device__ __forceinline__ uint64_t q_offset() const {
    return q_stage() * descriptor_step(Traits::kQBytes);
  }
  __device__ __forceinline__ uint64_t dout_offset() const {
    return dout_stage() * descriptor_step(Traits::kDoutBytes);
  }

 private:
  __device__ __forceinline__ uint32_t step() const { return static_cast<uint32_t>(place_) % 8; }

  typename Traits::SharedMemory& smem_;
  int place_ = 0;  // 8 * (minus the remaining steps) + (steps so far) % 8
};

// x = A B^T over the columns of two operands whose panels are 64 columns wide; in flight on return.
template <Math kMath, int kColumns, int kPanelBytesA, int kPanelBytesB, int kN>
__device__ __forceinline__ void issue_scores(float (&x)[kN / 2], uint64_t a, uint64_t b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    const int inside = step % 4 * 32;  // bytes of 16 columns
    Wgmma<kN>::template ss<kMath, 0, 0>(x, a + descriptor_step(step / 4 * kPanelBytesA + inside),
                                        b + descriptor_step(step / 4 * kPanelBytesB + inside),
                                        step != 0);
  }
  wgmma_commit();
}

// dq = ds k for 64 queries and one panel of columns; in flight on return.
template <class Traits>
__device__ __forceinline__ void issue_dq(float (&dq)[32], uint64_t ds, uint64_t k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Traits::kKeys / 16; ++step) {
    Wgmma<64>::template ss<Traits::kMath, 0, 1>(
        dq, ds + descriptor_step(step / 4 * Traits::kRowPanelBytes + step % 4 * 32),
        k + descriptor_step(step * 16 * Traits::kPanelRowBytes), step != 0);
  }
  wgmma_commit();
}

}  // namespace jaxflash::sm90
