// The output of a unit's rows in the forward kernel: its accumulators, and how it leaves them.
#pragma once

#include "sm90/forward/probabilities.cuh"
#include "sm90/store_rows.cuh"

namespace jaxflash::sm90 {

// o += P V, over the tiles of a unit's keys.
template <class Traits, class Scores>
class OutputRows {
  using Tile = typename Traits::Tile;
  using Plan = typename Traits::Plan;
  using Softmax = typename Probabilities<Traits, Scores>::Softmax;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr int kElements = Tile::kValueDim / 2;

 public:
  __device__ __forceinline__ OutputRows(float (&o)[kElements], Softmax& softmax)
      : o_(o), softmax_(softmax) {}

  __device__ __forceinline__ void clear() {
    softmax_.reset();
#pragma unroll
    for (float& value : o_) value = 0.f;
    hold();  // cleared here, not again on each way to a product
  }

  // The product of one tile, in flight on return.
  __device__ __forceinline__ void issue(const uint32_t (&p)[kKeys / 4], uint64_t v) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      Wgmma<Tile::kValueDim>::template rs<Traits::kMath, 1>(
          o_, p + 4 * step, v + descriptor_step(step * 16 * Traits::kPanelRowBytes), 1);
    }
    wgmma_commit();
  }

  // Once it has been waited for.
  __device__ __forceinline__ void hold() { sm90::hold(o_); }
  __device__ __forceinline__ Softmax& softmax() { return softmax_; }

  // After the reference of a row has moved.
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < kElements; ++i) o_[i] *= softmax_.correction(Fragment::lower(i));
  }

  // Once all probabilities are there: the sums of the rows, and what the output is multiplied with.
  // Whether a row of the warp has seen no key.
  __device__ __forceinline__ bool sum_up(float (&sum)[2], float (&inverse)[2], const Scores& scores,
                                         const UnitRows& rows, const Plan& plan, int group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = softmax_.row_sum(r);
      if (rows.position(plan.units[group], r) >= plan.batch_of(group).mask.q_len()) sum[r] = 0.f;
      inverse[r] = rcp_approx(sum[r]);
      if constexpr (Scores::kHasSink) {
        // Of a part, the merge adds it.
        bool adds = sum[r] != 0.f;
        if constexpr (Traits::kShares) adds = adds && plan.part[group] == nullptr;
        if (adds) inverse[r] = softmax_.add_sink(scores.sink(r), sum[r], r);
      }
      if constexpr (Scores::kDrops) inverse[r] *= scores.kept_scale();
    }
    return __any_sync(~0u, sum[0] == 0.f || sum[1] == 0.f);
  }

 private:
  float (&o_)[kElements];
  Softmax& softmax_;
};

// Called once, it stores the output of the thread's two rows and their lse: staged, directly, or as
// a part.
template <class Traits, class Scores>
class OutputStore {
  using Tile = typename Traits::Tile;
  using Plan = typename Traits::Plan;
  using Unit = typename Plan::Unit;
  using Softmax = typename Probabilities<Traits, Scores>::Softmax;
  static constexpr int kElements = Tile::kValueDim / 2;

 public:
  // `staged`: where output is staged, which `full` announces.
  __device__ __forceinline__ OutputStore(const ForwardArgs& args, const UnitRows& rows,
                                         const Plan& plan, const int& group, float (&o)[kElements],
                                         float (&inverse)[2], const float (&sum)[2],
                                         const Softmax& softmax, const bool& has_empty_rows,
                                         uint8_t* staged, Barrier& full, const int& thread)
      : args_(args),
        rows_(rows),
        plan_(plan),
        group_(group),
        o_(o),
        inverse_(inverse),
        sum_(sum),
        softmax_(softmax),
        has_empty_rows_(has_empty_rows),
        staged_(staged),
        full_(full),
        thread_(thread) {}

  __device__ __forceinline__ void operator()() const {
    // ptxas moves arithmetic up between the products, where it would hold the turn, but not across
    // a branch: this one has to come first.
    if (has_empty_rows_) clear_rows();
    if constexpr (Traits::kShares) {
      if (float* const part = plan_.part[group_]; part != nullptr) return store_part(part);
    }
    if constexpr (Traits::kDirect) {
      store_directly();
    } else {
      stage();
      full_.arrive();
    }
    store_lse();
  }

 private:
  // A row without a visible key, which has the sum 0: its output is 0, whatever V holds.
  __device__ __forceinline__ void clear_rows() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (sum_[r] == 0.f) inverse_[r] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (sum_[Fragment::lower(i)] == 0.f) o_[i] = 0.f;
    }
  }

  // A part of the output from registers to its rows in the workspace: whole sectors of 32 bytes
  // from four lanes.
  __device__ __forceinline__ void store_part(float* part) const {
    const int lane = thread_ % 32;
    const Unit& unit = plan_.units[group_];
    float* target[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rows_.row(r);
      target[r] = stored(r) ? part + row * args_.problem.value_dim : nullptr;
      if (stored(r) && lane % 4 == 0) unit.lse[row] = lse(r);
    }
    const int value_dim = args_.problem.value_dim;
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      const int r = Fragment::lower(i);
      const int column = Fragment::column_of(i) + lane % 4 * 2;
      if (target[r] == nullptr || column >= value_dim) continue;
      *reinterpret_cast<float2*>(target[r] + column) =
          make_float2(o_[i] * inverse_[r], o_[i + 1] * inverse_[r]);
    }
  }

  __device__ __forceinline__ void store_directly() const {
    const Unit& unit = plan_.units[group_];
    uint16_t* target[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      target[r] =
          stored(r) ? unit.out + offset(r, args_.out_seq_stride, args_.out_head_stride) : nullptr;
    }
    store_rows<Traits::kMath>(o_, inverse_, target, args_.problem.value_dim, thread_ % 32);
  }

  // Rows of the output to where the warpgroup's Q was, for the storing warp. All four warps are
  // through with Q.
  __device__ __forceinline__ void stage() const {
    const uint32_t staged = shared_address(staged_);
    const int lane = thread_ % 32;
    const int staged_row = thread_ / 32 * 16 + lane % 16;
#pragma unroll
    for (int column = 0; column < Tile::kValueDim; column += 16) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2;
        const int element = column / 2 + 2 * i;
        packed[i] = pack<Traits::kMath>(o_[element] * inverse_[r], o_[element + 1] * inverse_[r]);
      }
      const int piece = column % 64 / 8 + lane / 16;
      stmatrix_x4(staged + column / 64 * Traits::kQPanelBytes +
                      staged_row * Traits::kPanelRowBytes +
                      Traits::template swizzled<Traits::kPanelRowBytes>(staged_row, piece) * 16,
                  packed);
    }
    fence_proxy_async();
  }

  __device__ __forceinline__ void store_lse() const {
    if (thread_ % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!stored(r)) continue;
        plan_.units[group_].lse[offset(r, args_.problem.q_heads, 1)] = lse(r);
      }
    }
  }
  __device__ __forceinline__ float lse(int r) const {
    return sum_[r] == 0.f ? -INFINITY : softmax_.lse(sum_[r], r);
  }

  // Whether the thread's row r is one of the arrays', and where.
  __device__ __forceinline__ bool stored(int r) const {
    return args_.unit.head(rows_.row(r)) < args_.unit.heads &&
           rows_.position(plan_.units[group_], r) < args_.problem.q_len;
  }
  __device__ __forceinline__ int64_t offset(int r, int64_t position_stride,
                                            int64_t head_stride) const {
    const int row = rows_.row(r);
    return args_.unit.position(row) * position_stride + args_.unit.head(row) * head_stride;
  }

  const ForwardArgs& args_;
  const UnitRows& rows_;
  const Plan& plan_;
  const int& group_;
  float (&o_)[kElements];
  float (&inverse_)[2];
  const float (&sum_)[2];
  const Softmax& softmax_;
  const bool& has_empty_rows_;
  uint8_t* staged_;
  Barrier& full_;
  const int& thread_;
};

}  // namespace jaxflash::sm90
