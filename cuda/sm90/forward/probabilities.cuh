// From a tile of keys to probabilities, in the registers of a consumer warpgroup.
#pragma once

#include "common/mask.cuh"
#include "sm90/forward/key_terms.cuh"
#include "sm90/forward_traits.cuh"
#include "sm90/hardware/wgmma.cuh"
#include "sm90/scores.cuh"
#include "sm90/softmax.cuh"

namespace jaxflash::sm90 {

// The thread's two rows of a unit.
class UnitRows {
 public:
  __device__ __forceinline__ UnitRows(const ForwardArgs& args, const int& thread)
      : args_(args), thread_(thread) {}

  __device__ __forceinline__ int row(int r) const { return Fragment::row(thread_) + 8 * r; }
  // Along the sequence.
  template <class Unit>
  __device__ __forceinline__ int position(const Unit& unit, int r) const {
    return unit.position + args_.unit.position(row(r));
  }
  template <class Unit>
  __device__ __forceinline__ RowPositions positions(const Unit& unit) const {
    return {position(unit, 0), position(unit, 1)};
  }

 private:
  const ForwardArgs& args_;
  const int& thread_;
};

// s = Q K^T of a tile of keys, and what the product starts from.
template <class Traits, class Scores>
class ScoreProduct {
  using Tile = typename Traits::Tile;
  static constexpr int kKeys = Tile::kKeys;

 public:
  // Whether accumulators begin with something.
  static constexpr bool kStarts = Scores::kStarts && !Traits::kKeyTerms;

  __device__ __forceinline__ ScoreProduct(Scores& scores, float (&s)[kKeys / 2], int thread)
      : scores_(scores), s_(s), thread_(thread) {
    if constexpr (Tile::kLoadsStarts) {
      const int row = thread / 32 * 16 + thread % 16;
      const int piece = Traits::template swizzled<Traits::kStartRowBytes>(row, thread % 32 / 16);
      // Through a shuffle, or the compiler would compute it anew for each tile of keys.
      place_ = __shfl_sync(~0u, row * Traits::kStartRowBytes + piece * 16, thread % 32);
    }
  }

  // What the products of a tile start from: loaded ahead of waits, or behind them from `starts`,
  // where a producer has laid it; and computed behind them, beside P V of the tile before if ptxas
  // sees fit.
  __device__ __forceinline__ void load_start(int tile) {
    if constexpr (kStarts && !Tile::kLoadsStarts) {
      const int column = Fragment::column(thread_);
      scores_.load_start(s_, tile * kKeys, column);
      scores_.template prefetch_start<kKeys / 2>(tile * kKeys, column);
    }
  }
  __device__ __forceinline__ void start(int tile, uint32_t starts) {
    if constexpr (kStarts) {
      if constexpr (Tile::kLoadsStarts) read(starts);
      scores_.begin_keys(tile * kKeys + Fragment::column(thread_));
      scores_.start(s_);
    }
  }

  // s = Q K^T of one tile, or s += Q K^T where scores start, in flight on return.
  __device__ __forceinline__ void issue(uint64_t q, uint64_t k, uint64_t ones, uint64_t key_terms) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kHeadDim / 16; ++step) {
      const int panel = step / 4;
      const int inside = step % 4 * 32;  // bytes of 16 columns
      Wgmma<kKeys>::template ss<Traits::kMath, 0, 0>(
          s_, q + descriptor_step(panel * Traits::kQPanelBytes + inside),
          k + descriptor_step(panel * Traits::kKeyPanelBytes + inside), kStarts || step != 0);
    }
    if constexpr (Traits::kKeyTerms) {
      Wgmma<kKeys>::template ss<Traits::kMath, 0, 0>(s_, ones, key_terms, true);
    }
    wgmma_commit();
  }

  // Once it has been waited for.
  __device__ __forceinline__ void hold() { sm90::hold(s_); }

 private:
  // The thread's pairs of a unit's tile, packed. 16-byte pieces of a row are swizzled, and panels
  // aligned by more than a row.
  __device__ __forceinline__ void read(uint32_t starts) {
    const uint32_t first = starts + place_;
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 8) {
      const int panel = i / 32;
      const int piece = i % 32 / 4;
      uint32_t pairs[4];
      ldmatrix_x4((first ^ (piece * 16)) + panel * Traits::kStartPanelBytes, pairs);
#pragma unroll
      for (int j = 0; j < 4; ++j) s_[i + 2 * j] = __uint_as_float(pairs[j]);
    }
  }

  Scores& scores_;
  float (&s_)[kKeys / 2];
  int thread_;
  uint32_t place_;  // of the thread's first piece in a unit's tile of starts
};

// The probabilities of a unit's rows: from scores s of the present tile, which become p for the
// product with V.
template <class Traits, class Scores>
class Probabilities {
  using Tile = typename Traits::Tile;
  using Plan = typename Traits::Plan;
  using Unit = typename Plan::Unit;
  static constexpr int kKeys = Tile::kKeys;
  // Whether elements inside a mask's intervals are tested.
  static constexpr bool kLooks = Scores::kMasks || Traits::Mask::kTestsElements;
  // Whether the plan knows tiles without such elements.
  static constexpr bool kKnown = !Scores::kMasks || Traits::Mask::kKnowsProgram;
  // Whether probabilities are exponentials of logits, without a reference: bfloat16 has exponents
  // for them all. Where all products are awaited together, ptxas finds no registers without the
  // vote that goes with references.
  static constexpr bool kBounded = Scores::kBounded && needs_no_reference<Tile, Traits::kMath>;
  // Whether p of this tile has registers of its own while P V still reads that of the one before.
  // It pays where a longer function stands ahead of the exponentials: 256 with a soft cap takes
  // 0.79 ms against 0.90, but plain calls lose up to 3 %.
  static constexpr bool kWaits =
      Tile::kOverlap == Overlap::kValues && Scores::kHasSlope && !kBounded;
  // Then scores outlive their exponentials, and maxima are not needed, see OnlineSoftmax.
  static constexpr bool kSpeculates = Tile::kOverlap == Overlap::kNone || kWaits;

 public:
  using Softmax = OnlineSoftmax<kKeys / 2, Traits::kMath, kBounded>;
  using Kept = jaxflash::Kept<Scores::kDrops, true, kKeys, Scores::kStarts>;
  using Shown = typename Scores::template Shown<typename Traits::Mask, kKeys>;

  // `whole`: whether the unit's rows see all of the tile, beside what its intervals say.
  __device__ __forceinline__ Probabilities(Scores& scores, const UnitRows& rows, const Plan& plan,
                                           int group, int thread, const int& tile,
                                           const bool& whole, float (&s)[kKeys / 2],
                                           uint32_t (&p)[kKeys / 4], uint32_t (&waiting)[kKeys / 4],
                                           Kept& kept, Shown& shown)
      : scores_(scores),
        rows_(rows),
        plan_(plan),
        unit_(plan.units[group]),
        mask_(plan.batch_of(group).mask),
        thread_(thread),
        tile_(tile),
        whole_(whole),
        s_(s),
        p_(p),
        waiting_(waiting),
        kept_(kept),
        shown_(shown),
        full_(kKnown ? unit_.full : Interval{0, 0}) {}

  // Of a tile whose products are under way, what needs no scores.
  __device__ __forceinline__ void prepare() {
    const int key = tile_ * kKeys + Fragment::column(thread_);
    scores_.draw(kept_, key);
    if constexpr (kLooks) {
      if (!cut()) return;
      scores_.look(shown_, mask_, tile_ * kKeys, Fragment::column(thread_));
      const RowPositions positions = rows_.positions(unit_);
      edge_ = cuts<kKeys>(mask_, positions, key);
    }
  }

  // s becomes probabilities. Calls moved() where o has to be rescaled.
  template <class Moved>
  __device__ __forceinline__ void normalize(Softmax& softmax, const Moved& moved) {
    // What lambdas capture in place of `this`: see ForwardConsumers::consume.
    auto& s = s_;
    auto& p = kWaits ? waiting_ : p_;
    auto& kept = kept_;
    const int key = tile_ * kKeys + Fragment::column(thread_);
    scores_.begin_keys(key);
    if constexpr (Scores::kFollowsDistance) scores_.begin_scores(plan_, tile_ * kKeys, s_);
    // Packed at once, unless P V is still reading the p of the tile before: then s becomes p.
    const auto emit = [&](int i, float (&e)[kKeys / 2]) {
      if (!kSpeculates) {
        s[i] = e[i];
      } else if (i % 2 == 1) {
        p[i / 2] = kept.of_pair(i - 1, pack<Traits::kMath>(e[i - 1], e[i]));
      }
    };
    const auto held = [&](const auto& logits) {
      if constexpr (kBounded) {
        softmax.exponentials(s, logits, emit);
        return true;
      } else {
        return kSpeculates && softmax.settled() && softmax.exponentials_if_held(s, logits, emit);
      }
    };
    // A reference that moves only once something has outgrown it would be looked at in vain, tile
    // after tile, by rows whose many probabilities are just below that.
    constexpr float kSlack = kSpeculates ? 0.f : 8.f;
    // Where something is added, scores may rise from tile to tile, as those of ALiBi do up to the
    // query: a reference that has been outgrown moves on ahead. Sums, and operands of products,
    // have the exponents of float32, which leaves room for values down to 1e-20. ALiBi at head size
    // 128 takes 1.03 ms, 1.16 without (docs/experiments.md).
    constexpr bool kRises = Scores::kFollowsDistance || (Scores::kRewrites && !Scores::kHasSlope);
    constexpr float kRoom = kRises && Traits::kMath == Math::kBFloat16 ? 56.f : 0.f;
    const auto advance = [&](const auto& logits) {
      if constexpr (!kBounded) {
        if (softmax.advance(s, logits, kSlack, kRoom)) moved();
      }
      softmax.exponentials(s, logits, emit);
    };
    if constexpr (Scores::kRewrites && !Scores::kStartsAll) {
      // A logit of -inf would not stay so: what is masked is masked after the rewriting.
      if constexpr (Scores::kHasDiagonals) {
        // Others are rewritten: no third copy of the exponentials.
        const bool inside = scores_.template begin_diagonals<kKeys>();
        if (inside && !cut() && held(typename Scores::Inside{scores_})) return;
        if (!kSpeculates && inside) {
          scores_.template rewrite<true>(s);
        } else {
          scores_.rewrite(s);
        }
      } else {
        if (!cut() && held(scores_)) return;
        scores_.rewrite(s);
      }
      hide(key);
      advance(Logits{});
    } else {
      hide(key);
      if (held(scores_)) return;
      advance(scores_);
    }
  }

  // Those that normalize() has left in s, or waiting, become p, which has been waited for.
  __device__ __forceinline__ void pack_tile() {
    if constexpr (kWaits) sm90::hold(p_);
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      if constexpr (kWaits) {
        p_[i] = waiting_[i];
      } else {
        p_[i] = kept_.of_pair(2 * i, pack<Traits::kMath>(s_[2 * i], s_[2 * i + 1]));
      }
    }
  }
  // p, the operand of the product with V.
  __device__ __forceinline__ const uint32_t (&packed() const)[kKeys / 4] { return p_; }

 private:
  // Whether a row may not see all of the tile.
  __device__ __forceinline__ bool cut() const {
    return (tile_ < full_.begin || tile_ >= full_.end) && !(Traits::Mask::kWalks && whole_);
  }
  __device__ __forceinline__ void hide(int key) {
    if (cut()) {
      if constexpr (kLooks) scores_.hide(s_, shown_);
      if (edge_) apply_mask(s_, mask_, rows_.positions(unit_), key);
    }
  }

  Scores& scores_;
  const UnitRows& rows_;
  const Plan& plan_;
  const Unit& unit_;
  const typename Traits::Mask& mask_;
  int thread_;
  const int& tile_;
  const bool& whole_;
  float (&s_)[kKeys / 2];
  uint32_t (&p_)[kKeys / 4];
  uint32_t (&waiting_)[kKeys / 4];
  Kept& kept_;
  Shown& shown_;
  Interval full_;     // tiles of which every row sees every key
  bool edge_ = true;  // the tile is not inside the mask's intervals
};

}  // namespace jaxflash::sm90
