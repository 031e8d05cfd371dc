// The step from products to logits, in units of log 2. A policy is told what it works on
// (begin_head, begin_tile); elements are then named by their distance from the tile's first one.
#pragma once

#include "common/approx.cuh"
#include "common/program.cuh"

namespace jaxflash::sm80 {

// A factor.
class ScaledScores {
 public:
  static constexpr bool kUnitSlope = true;
  static constexpr bool kMasks = false;
  static constexpr bool kHasSink = false;
  static constexpr bool kDrops = false;

  __device__ __forceinline__ explicit ScaledScores(const Problem& problem)
      : scale_log2_(problem.scale * kLog2E) {}

  template <class Mask>
  __device__ __forceinline__ void begin_head(const Captures&, const Problem&, const Mask&,
                                             int64_t /*batch*/, int /*head*/) {}
  __device__ __forceinline__ void begin_tile(int /*row*/, int /*key*/) {}
  __device__ __forceinline__ void draw(KeepAll&, int /*row*/, int /*key*/) const {}

  // A positive factor is left to the exponential, and the products need no rewriting: otherwise 0.
  __device__ __forceinline__ float factor() const { return scale_log2_ > 0.f ? scale_log2_ : 0.f; }
  __device__ __forceinline__ float logit(float s, int /*row*/, int /*key*/) const {
    return s * scale_log2_;
  }
  __device__ __forceinline__ bool shows(int /*row*/, int /*key*/) const { return true; }

 private:
  float scale_log2_;
};

// A program of common/program.cuh.
template <class Program>
class ProgramScores {
 public:
  static constexpr bool kUnitSlope = Program::kUnitSlope;
  static constexpr bool kMasks = Program::kMasks;
  static constexpr bool kHasSink = Program::kHasSink;
  static constexpr bool kDrops = Program::kDrops;

  __device__ __forceinline__ explicit ProgramScores(const Problem&) {}

  template <class Mask>
  __device__ __forceinline__ void begin_head(const Captures& captures, const Problem& problem,
                                             const Mask& mask, int64_t batch, int head) {
    const int b = batch_number(captures, problem, batch), h = head_number(captures, head);
    head_ = Program::head(captures, problem, batch, b, h);
    if constexpr (kDrops) dropout_ = Program::dropout(captures, problem, batch, b, h);
    diagonal_ = problem.band.bottom_right ? mask.kv_len() - mask.q_len() : 0;
  }
  __device__ __forceinline__ void begin_tile(int row, int key) {
    row_ = row;
    key_ = key;
    distance_ = static_cast<float>(row + diagonal_ - key);
  }

  __device__ __forceinline__ float factor() const { return 0.f; }
  __device__ __forceinline__ float logit(float s, int row, int key) const {
    const int q = row_ + row, kv = key_ + key;
    return Program::logit(head_, Program::row(head_, q), Program::column(head_, kv), q, kv,
                          distance_ + (row - key), s);
  }
  __device__ __forceinline__ float logit_and_slope(float s, int row, int key, float* slope) const {
    const int q = row_ + row, kv = key_ + key;
    return Program::logit_and_slope(head_, Program::row(head_, q), Program::column(head_, kv), q,
                                    kv, distance_ + (row - key), s, slope);
  }
  // Of tiles that are not known to be visible as a whole.
  __device__ __forceinline__ bool shows(int row, int key) const {
    if constexpr (!kMasks) {
      return true;
    } else {
      const int q = row_ + row, kv = key_ + key;
      return Program::visible(head_, Program::row(head_, q), Program::column(head_, kv), q, kv,
                              distance_ + (row - key));
    }
  }
  // The tangent of a logit, given that of its product times the slope.
  __device__ __forceinline__ float tangent(float t, float s, int row, int key) const {
    if constexpr (Program::kCapturesMove) {
      const int q = row_ + row, kv = key_ + key;
      t += Program::capture_tangent(head_, Program::row(head_, q), Program::column(head_, kv), q,
                                    kv, distance_ + (row - key), s);
    }
    return t;
  }
  __device__ __forceinline__ float sink() const { return Program::sink(head_); }

  // Which elements of a fragment are kept. Tiles start at multiples of 16.
  template <class Bits>
  __device__ __forceinline__ void draw(Bits& kept, int row, int key) const {
    if constexpr (kDrops) {
      const int q = row_ + row, kv = key_ + key;
      dropout_.draw(kept, Bits::kRowsAreQueries ? q : kv, Bits::kRowsAreQueries ? kv : q);
    }
  }
  // The share that is kept.
  __device__ __forceinline__ float share() const { return dropout_.share(); }

 private:
  typename Program::Head head_;
  int diagonal_;  // from a row number to its position among the keys
  int row_, key_;
  float distance_;   // between the positions of these two
  Dropout dropout_;  // with kDrops
};

}  // namespace jaxflash::sm80
