// What the consumer loops of the backward kernel have in common.
#pragma once

#include "common/mask.cuh"
#include "sm90/backward_traits.cuh"
#include "sm90/products.cuh"
#include "sm90/softmax.cuh"

namespace jaxflash::sm90 {

// The old values are not needed: the compiler need not keep them for a product that overwrites
// them.
template <int kElements>
__device__ __forceinline__ void discard(float (&registers)[kElements]) {
#pragma unroll
  for (float& value : registers) asm volatile("" : "=f"(value));
}

// One arrival a warp: a warp's wait covers its own part of a product only.
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  if (late_thread() % 32 == 0) barrier.arrive();
}

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

// A consumer's place in the rings that move once a step (q, dout, starts), and how many steps of
// the tile remain: all in one word, because registers are short.
template <class Traits>
class ConsumerSteps {
  using Tile = typename Traits::Tile;
  static constexpr int kQStages = Tile::kQStages;
  static constexpr int kDoutStages = Tile::kDoutStages;
  static constexpr int kStartStages = Tile::kLoadsStarts ? Tile::kStartStages : 1;
  static_assert((kStartStages & (kStartStages - 1)) == 0 && kStartStages <= 4);
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
  __device__ __forceinline__ int start_stage() const { return step() % kStartStages; }
  __device__ __forceinline__ int odd() const { return step() % 2; }
  // Of barriers that complete once every two steps: for this step and for the one before.
  __device__ __forceinline__ uint32_t odd_phase() const { return step() / 2 % 2; }
  __device__ __forceinline__ uint32_t last_odd_phase() const { return (step() + 7) % 8 / 2 % 2; }
  __device__ __forceinline__ void wait_q() const {
    smem_.q_full[q_stage()].wait(step() / kQStages % 2);
  }
  __device__ __forceinline__ void wait_dout() const {
    smem_.dout_full[dout_stage()].wait(step() / kDoutStages % 2);
  }
  // Of tiles that load what products start from; of others nothing.
  __device__ __forceinline__ void wait_starts() const {
    if constexpr (Tile::kLoadsStarts) {
      smem_.starts_full[start_stage()].wait(step() / kStartStages % 2);
    }
  }
  __device__ __forceinline__ void release_starts() const {
    if constexpr (Tile::kLoadsStarts) release(smem_.starts_empty[start_stage()]);
  }
  __device__ __forceinline__ void release_q() const { release(smem_.q_empty[q_stage()]); }
  __device__ __forceinline__ void release_dout() const { release(smem_.dout_empty[dout_stage()]); }
  __device__ __forceinline__ uint64_t q_offset() const {
    return q_stage() * descriptor_step(Traits::kQBytes);
  }
  __device__ __forceinline__ uint64_t dout_offset() const {
    return dout_stage() * descriptor_step(Traits::kDoutBytes);
  }

 private:
  // Both blocks of a pair load into the buffers of both.
  __device__ __forceinline__ static void release(Barrier& empty) {
    if (late_thread() % 32 != 0) return;
    empty.arrive();
    if constexpr (Traits::kPaired) empty.arrive_remote(cluster_rank() ^ 1);
  }
  __device__ __forceinline__ uint32_t step() const { return static_cast<uint32_t>(place_) % 8; }

  typename Traits::SharedMemory& smem_;
  int place_ = 0;  // 8 * (minus the remaining steps) + (steps so far) % 8
};

// dq = ds k, or dq += ds k, for 64 queries and some columns.
template <class Traits, int kColumns>
__device__ __forceinline__ void multiply_dq(float (&dq)[kColumns / 2], uint64_t ds, uint64_t k,
                                            bool accumulate) {
#pragma unroll
  for (int step = 0; step < Traits::kKeys / 16; ++step) {
    Wgmma<kColumns>::template ss<Traits::kMath, 0, 1>(
        dq, ds + descriptor_step(step / 4 * Traits::kRowPanelBytes + step % 4 * 32),
        k + descriptor_step(step * 16 * Traits::kPanelRowBytes), accumulate || step != 0);
  }
}

// acc += a B, with a from registers and B (queries x columns) in shared memory; in flight on
// return.
template <class Traits, int kN>
__device__ __forceinline__ void issue_gradient(float (&acc)[kN / 2],
                                               const uint32_t (&a)[Traits::kRows / 4], uint64_t b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Traits::kRows / 16; ++step) {
    Wgmma<kN>::template rs<Traits::kMath, 1>(
        acc, a + 4 * step, b + descriptor_step(step * 16 * Traits::kPanelRowBytes), 1);
  }
  wgmma_commit();
}

// lse or delta of 64 queries, where queries are columns: those of the thread's. Best loaded while
// no product runs: beside one, a load from shared memory takes some 400 clocks.
struct ColumnValues {
  static constexpr int kRows = 64;
  float2 pairs[kRows / 8];

  // `values`: that of the thread's first column, in shared memory.
  __device__ __forceinline__ void load(const float* values) {
#pragma unroll
    for (int block = 0; block < kRows / 8; ++block) {
      pairs[block] = load_shared_f32x2(shared_address(values + 8 * block));
    }
  }
  // Of element i of the accumulators.
  __device__ __forceinline__ float of(int i) const {
    return i % 2 == 0 ? pairs[i / 4].x : pairs[i / 4].y;
  }
};

// Calls use(i, value of its column) for every element. The values of the first 64 columns have been
// loaded from `values`; those of more are, beside the use of the ones before.
template <int kElements, class Use>
__device__ __forceinline__ void for_columns(const ColumnValues& first, const float* values,
                                            const Use& use) {
  constexpr int kPart = ColumnValues::kRows / 2;
  ColumnValues present = first;
#pragma unroll
  for (int begin = 0; begin < kElements; begin += kPart) {
    ColumnValues next = present;
    if (begin + kPart < kElements) next.load(values + 2 * (begin + kPart));
#pragma unroll
    for (int i = begin; i < begin + kPart; ++i) use(i, present.of(i - begin));
    present = next;
  }
}

// The rows that see one of the thread's two keys, relative to its first column; `row` and `key` of
// its first element.
template <class Mask>
__device__ __forceinline__ Interval rows_that_see(const Mask& mask, int row, int key, int lower) {
  const Interval rows = mask.rows_of_key(key + 8 * lower);
  return {rows.begin - row, rows.end - row};
}

// Whether some row of the sequence sees the thread's two keys; `first_key`: of its warpgroup.
template <class Mask>
__device__ __forceinline__ void find_seen(bool (&seen)[2], const Mask& mask, int first_key) {
  const Interval keys = mask.seen_keys();
  const int key = first_key + Fragment::row(late_thread());
  seen[0] = key >= keys.begin && key < keys.end;
  seen[1] = key + 8 >= keys.begin && key + 8 < keys.end;
}

// Sums over the rows of one head at a time, for the thread's two keys: a program's kKeySums.
// `first_key`: of the warpgroup.
template <int kCount>
class KeySums {
 public:
  __device__ __forceinline__ KeySums() { clear(); }

  __device__ __forceinline__ void add(int sum, int lower, float ds, float weight) {
    of_[sum][lower] = fmaf(ds, weight, of_[sum][lower]);
  }

  // Stores them where another head begins. Ahead of the step's products: behind them, registers
  // would not suffice.
  template <class Block>
  __device__ __forceinline__ void begin_step(const BackwardArgs& args, const Block& block, int row,
                                             int head, int first_key) {
    if (head > 0 && row == block.first_row) store(args, block, head - 1, first_key);
  }
  // Those of the last head, or of all heads if there was no step.
  template <class Block>
  __device__ __forceinline__ void end_tile(const BackwardArgs& args, const Block& block,
                                           int first_key) {
#pragma unroll 1
    for (int head = block.steps() == 0 ? 0 : block.group - 1; head < block.group; ++head) {
      store(args, block, head, first_key);
    }
  }

 private:
  template <class Block>
  __device__ __forceinline__ void store(const BackwardArgs& args, const Block& block, int head,
                                        int first_key) {
    const int thread = late_thread();
    const int key = first_key + Fragment::row(thread);
    const int kv_len = args.problem.kv_len;
    const int64_t head_index =
        int64_t{block.batch} * args.problem.q_heads + block.first_head() + head;
    bool seen[2];  // where not, 0 whatever the key holds
    find_seen(seen, block.mask, first_key);
#pragma unroll
    for (int sum = 0; sum < kCount; ++sum) {
      float* const sums = args.key_sums[sum];
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        float total = of_[sum][lower];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (thread % 4 == 0 && key + 8 * lower < kv_len && sums != nullptr) {
          sums[head_index * kv_len + key + 8 * lower] = seen[lower] ? total : 0.f;
        }
      }
    }
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& sum : of_) sum[0] = sum[1] = 0.f;
  }

  float of_[kCount][2];
};
template <>
class KeySums<0> {
 public:
  template <class Block>
  __device__ __forceinline__ void begin_step(const BackwardArgs&, const Block&, int, int, int) {}
  template <class Block>
  __device__ __forceinline__ void end_tile(const BackwardArgs&, const Block&, int) {}
};

// Stages 64 keys of dk or dv, or 64 rows of dq, in panels of 64 columns or in one of 32; 0 for rows
// of the thread that are not `seen`.
template <class Traits, int kColumns>
__device__ __forceinline__ void stage(uint8_t* tile, const float (&acc)[kColumns / 2], float scale,
                                      const bool (&seen)[2]) {
  const int thread = late_thread();
  const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
  for (int column = 0; column < kColumns; column += 16) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int element = column / 2 + 2 * i;
      packed[i] = pack<Traits::kMath>(seen[i % 2] ? acc[element] * scale : 0.f,
                                      seen[i % 2] ? acc[element + 1] * scale : 0.f);
    }
    const int piece = column % 64 / 8 + thread % 32 / 16;
    constexpr bool kNarrow = kColumns == 32;
    constexpr int kRowBytes = kNarrow ? 64 : Traits::kPanelRowBytes;
    stmatrix_x4(shared_address(tile) + column / 64 * Traits::kStoredPanelBytes + row * kRowBytes +
                    (piece ^ (kNarrow ? row / 2 % 4 : row % 8)) * 16,
                packed);
  }
}

}  // namespace jaxflash::sm90
