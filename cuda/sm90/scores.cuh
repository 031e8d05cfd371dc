// The step from products to logits in the forward kernel, whose threads have two rows each.
//
// A policy is told what it works on (begin_rows, begin_keys). Where it rewrites, a logit is
// computed within the exponential, or ahead of it where maxima or masks need it (rewrite). What it
// hides, it hides in tiles that are not known to be visible as a whole.
//
// Where it starts products, what is added to a tile's is loaded while they are awaited or the tile
// before is worked on, into the registers of the scores, which are free then, or by a producer: the
// accumulators begin with it, over the scale, and scores are scaled products again.
#pragma once

#include "common/program.cuh"
#include "sm90/forward/key_terms.cuh"
#include "sm90/forward_traits.cuh"
#include "sm90/softmax.cuh"
#include "sm90/start_row.cuh"

namespace jaxflash::sm90 {

// What is shown of a tile of kKeys keys to the thread's two rows, inside the intervals of a mask:
// what words of a program say, and what elements are tested for.
template <bool kHasWords, int kKeys>
struct ShownWords {};
template <int kKeys>
struct ShownWords<true, kKeys> {
  static_assert(kKeys % 16 == 0);
  // Tiles that are no multiple of 128 keys may begin in the middle of a word.
  static constexpr bool kAligned = kKeys % 128 == 0;
  static constexpr int kLastBegin = kAligned ? 0 : 128 - (kKeys & -kKeys);
  static constexpr int kCount = (kLastBegin + kKeys + 127) / 128;
  uint32_t words[2][kCount];
};
// Bits become predicates seven at a time (R2P), the lower ones of a byte; alone does the first one
// of a word. So these are left out, by moving bits so far, as long as there is room: of 80 keys 6
// such instructions and 40 selections are behind the wait for products. Side by side, in the order
// of elements, bits took 14 for two each, and 20 tests.
inline constexpr int kSpreadBits = 27;
__device__ __forceinline__ constexpr int spread(int bit) { return 1 + (bit + 1) / 7; }

template <bool kHasBits, int kKeys>
struct ShownBits {};
template <int kKeys>
struct ShownBits<true, kKeys> {
  static_assert(kKeys <= 128);
  static constexpr bool kSpreads = kKeys / 4 <= kSpreadBits;
  uint32_t bits[2] = {};  // of the thread's rows

  // Of element i, among those of its row.
  __device__ __forceinline__ static constexpr uint32_t bit_of(int i) {
    const int number = i / 4 * 2 + i % 2;
    return 1u << (kSpreads ? number + spread(number) : number);
  }
};
template <bool kHasWords, bool kHasBits, int kKeys>
struct Shown : ShownWords<kHasWords, kKeys>, ShownBits<kHasBits, kKeys> {};

// A factor, which the exponential absorbs.
class ScaledScores {
 public:
  static constexpr bool kRewrites = false;
  static constexpr bool kStarts = false;
  static constexpr bool kStartsAll = false;
  static constexpr bool kHasSlope = false;
  static constexpr bool kBounded = false;
  static constexpr bool kHasDiagonals = false;
  static constexpr bool kHasSink = false;
  static constexpr bool kMasks = false;
  static constexpr bool kDrops = false;
  static constexpr bool kFollowsDistance = false;
  template <class Mask, int kKeys>
  using Shown = sm90::Shown<false, false, kKeys>;
  template <class Traits>
  using KeyTerms = sm90::KeyTerms<Traits, void>;

  __device__ __forceinline__ explicit ScaledScores(const ForwardArgs& args)
      : scale_log2_(args.scale_log2) {}

  template <class Mask>
  __device__ __forceinline__ void begin_rows(const ForwardArgs&, const Mask&, int /*batch*/,
                                             int /*head*/, const RowPositions&) {}
  __device__ __forceinline__ void begin_keys(int /*key*/) {}
  __device__ __forceinline__ void draw(KeepAll&, int /*key*/) const {}
  __device__ __forceinline__ float factor() const { return scale_log2_; }
  __device__ __forceinline__ float lacking(int /*r*/) const { return -0.f; }
  __device__ __forceinline__ float relative(int /*i*/, float s, float offset) const {
    return fmaf(s, scale_log2_, offset);
  }

 private:
  float scale_log2_;  // positive
};

// A program of common/program.cuh. The rows of a unit are of one head or, with kManyHeads, each of
// its own.
template <class Program, bool kManyHeads = false>
class ProgramScores {
 public:
  static constexpr bool kRewrites = Program::kAdds;  // where it does not start
  static constexpr bool kStarts = Program::kStarts && !kManyHeads;
  // Whether what products started from is all that is done with scores.
  static constexpr bool kStartsAll = kStarts && Program::kUnitSlope;
  // Whether more is done with scores than adding to them.
  static constexpr bool kHasSlope = !Program::kUnitSlope;
  // Whether logits lie so near to 0 that exponentials in float32 need no reference.
  static constexpr bool kBounded = Program::kBounded;
  static constexpr bool kHasSink = Program::kHasSink;
  static constexpr bool kMasks = Program::kMasks;
  static constexpr bool kDrops = Program::kDrops;
  static constexpr bool kFollowsDistance = false;
  static constexpr bool kTests = kMasks && !Program::kAllInWords;
  static constexpr bool kSharesDiagonals = Program::kSharesDiagonals && !kManyHeads;
  // A tile may be inside all arrays that are read along diagonals: then indices are constants.
  static constexpr bool kHasDiagonals =
      Program::kHasDiagonals && kSharesDiagonals && kRewrites && !kStarts;
  // Tangents of products are those of logits.
  static constexpr bool kKeepsTangents = Program::kUnitSlope && !Program::kCapturesMove;
  template <class Mask, int kKeys>
  using Shown = sm90::Shown<Program::kHasWords, kTests || Mask::kTestsElements, kKeys>;
  template <class Traits>
  using KeyTerms = sm90::KeyTerms<Traits, Program>;

  // Of the forward or the tangent kernel.
  template <class Args>
  __device__ __forceinline__ explicit ProgramScores(const Args& args)
      : scale_log2_(args.scale_log2) {}

  template <class Args, class Mask>
  __device__ __forceinline__ void begin_rows(const Args& args, const Mask& mask, int batch,
                                             int head, const RowPositions& rows) {
    const int last_head = args.problem.q_heads - 1;  // units behind the last one compute nothing
    const int b = batch_number(args.captures, args.problem, batch);
    for (int i = 0; i < kHeads; ++i) {
      int own = head;
      if constexpr (kManyHeads) own += args.unit.head(Fragment::row(threadIdx.x % 128) + 8 * i);
      const int h = head_number(args.captures, min(own, last_head));
      heads_[i] = Program::head(args.captures, args.problem, batch, b, h);
      if constexpr (kDrops) {
        dropout_[i] = Program::dropout(args.captures, args.problem, batch, b, h);
      }
    }
    begin_rows(args.problem, mask, rows);
  }
  // The same, of a head and what it drops.
  template <class Mask>
  __device__ __forceinline__ void begin_rows(const Problem& problem, const Mask& mask,
                                             const typename Program::Head& head,
                                             const Dropout& dropout, const RowPositions& rows) {
    heads_[0] = head;
    if constexpr (kDrops) dropout_[0] = dropout;
    begin_rows(problem, mask, rows);
  }

  // `key`: of the thread's first element.
  __device__ __forceinline__ void begin_keys(int key) {
    key_ = key;
    for (int r = 0; r < 2; ++r) distance_[r] = static_cast<float>(row_[r] + diagonal_ - key);
  }

  // With kHasDiagonals: whether the warp's part of a tile of kKeys is inside, see Inside.
  template <int kKeys>
  __device__ __forceinline__ bool begin_diagonals() {
    const int difference = row_[0] - key_;
    diagonal_loads_ = Program::diagonal(head_of(0), difference);
    return __all_sync(~0u, Program::inside(head_of(0), difference - (kKeys - 7), difference + 8));
  }

  // Which of a tile's elements are kept; begin_keys() need not have come. Belongs beside products.
  // Out of a branch ptxas moves no arithmetic: neither up between the products, where it would hold
  // the warpgroup's turn, nor below their wait.
  template <class Bits>
  __device__ __forceinline__ void draw(Bits& kept, int key) const {
    if constexpr (kDrops) {
      if (!dropout_[0].drops()) return kept.keep_all();
      if constexpr (kManyHeads) {
        // Also where both rows are of one head, from 16 positions on: a branch takes registers.
        Bits others;
        dropout_[0].draw(kept, row_[0] & ~8, key);
        dropout_[1].draw(others, row_[1] & ~8, key);
        kept.take_rows((row_[0] & 8) != 0, others, (row_[1] & 8) != 0);
      } else {
        dropout_[0].draw(kept, row_[0], key);
      }
    }
  }
  // What the output is multiplied with for what is dropped.
  __device__ __forceinline__ float kept_scale() const { return rcp_approx(dropout_[0].share()); }

  // What products start from. Loads, for the tile from `tile_key` on; `column`: of the thread.
  template <int kElements>
  __device__ __forceinline__ void load_start(float (&s)[kElements], int tile_key,
                                             int column) const {
    const int key = tile_key + column;
    const int end = Program::neighbours_end(head_of(0));
    const auto load = [&](const auto& offset_of) {
#pragma unroll
      for (int i = 0; i < kElements; i += 2) {
        const int r = Fragment::lower(i);
        const auto* data = Program::neighbours(head_of(r), rows_[r]) + key;
        load_pair(data + offset_of(Fragment::column_of(i)), s[i], s[i + 1]);
      }
    };
    if (tile_key + 2 * kElements <= end) {
      load([](int offset) { return offset; });
    } else {
      load([last = end - 2 - key](int offset) { return min(offset, last); });
    }
  }
  // Those of the next tile, which lies before this one, come to the L2 meanwhile: of each row a
  // quarter for each of its four threads.
  template <int kElements>
  __device__ __forceinline__ void prefetch_start(int tile_key, int column) const {
    constexpr int kBytes = 2 * kElements * sizeof(typename Program::Neighbour);
    constexpr int kSteps = (kBytes + 255) / 256;  // of four sectors' pairs
    constexpr int kPart = 2 * kElements / (4 * kSteps);
    if (tile_key == 0) return;
    const int next = tile_key - 2 * kElements + column / 2 * kPart;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        prefetch_l2(Program::neighbours(head_of(r), rows_[r]) + next + 4 * kPart * step);
      }
    }
  }
  // See start_row_of().
  __device__ __forceinline__ static int start_row(const ForwardArgs& args, int batch, int head,
                                                  int position) {
    return start_row_of<Program>(args, batch, head, position);
  }
  // Makes it of what has been loaded.
  template <int kElements>
  __device__ __forceinline__ void start(float (&s)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i % 2 == 0) {
        unpack_pair(static_cast<const typename Program::Neighbour*>(nullptr), s[i], s[i + 1]);
      }
      s[i] = element(i, [&](const auto& head, const auto& row, const auto& column, int q, int kv,
                            float distance) {
        return Program::start(head, row, column, q, kv, distance, s[i]);
      });
    }
  }

  // Where nothing is added.
  __device__ __forceinline__ float factor() const { return scale_log2_; }
  __device__ __forceinline__ float lacking(int /*r*/) const { return -0.f; }

  // What does not depend on the score is added up before it is there.
  template <bool kInside = false>
  __device__ __forceinline__ float relative(int i, float s, float offset) const {
    if constexpr (!Program::kAdds || kStartsAll) {
      return fmaf(s, scale_log2_, offset);
    } else if constexpr (Program::kUnitSlope) {
      return fmaf(s, scale_log2_, addend<kInside>(i) + offset);
    } else {
      return logit<kInside>(i, s) + offset;
    }
  }
  template <bool kInside = false, int kElements>
  __device__ __forceinline__ void rewrite(float (&s)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if constexpr (Program::kUnitSlope) {
        s[i] = fmaf(s[i], scale_log2_, addend<kInside>(i));
      } else {
        s[i] = logit<kInside>(i, s[i]);
      }
    }
  }
  // The scores of a part of a tile that is inside.
  struct Inside {
    const ProgramScores& scores;

    __device__ __forceinline__ float relative(int i, float s, float offset) const {
      return scores.template relative<true>(i, s, offset);
    }
  };
  // What is shown of the tile from `tile_key` on: belongs beside products, like draw(), because
  // words take as long to come. Nothing waits for them here.
  template <bool kHasBits, int kKeys, class Mask>
  __device__ __forceinline__ void look(sm90::Shown<Program::kHasWords, kHasBits, kKeys>& shown,
                                       const Mask& mask, int tile_key, int column) {
    if constexpr (Program::kHasWords) {
      const uint32_t group = tile_key >> 7, rows = Program::word_rows(head_of(0));
      const int end = min(tile_key + kKeys, 128 * Program::word_groups(head_of(0)));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        using OfRow = uint32_t[4];
        const auto* first = reinterpret_cast<const OfRow*>(Program::words(head_of(r)) + column / 2);
        const OfRow* own =
            first + uint64_t{group} * rows + min(static_cast<uint32_t>(row_[r]), rows - 1);
#pragma unroll
        for (int i = 0; i < shown.kCount; ++i, own += rows) {
          if (i != 0 && (tile_key & -128) + 128 * i >= end) break;  // of the tile or the mask
          load_word_here(*own, shown.words[r][i]);
        }
      }
    }
    if constexpr (kHasBits) {
      begin_keys(tile_key + column);
      shown.bits[0] = shown.bits[1] = 0;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const bool visible = element(i, [&](const auto& head, const auto& row, const auto& column,
                                            int q, int kv, float distance) {
          bool visible = true;
          if constexpr (Mask::kTestsElements) visible = mask.same_id(q, kv);
          if constexpr (kTests && Program::kHasWords) {
            visible &= Program::visible_beside(head, row, column, q, kv, distance);
          } else if constexpr (kTests) {
            visible &= Program::visible(head, row, column, q, kv, distance);
          }
          return visible;
        });
        if (visible) shown.bits[Fragment::lower(i)] |= shown.bit_of(i);
      }
    }
  }
  // What it does not show becomes -inf. Row by row: neighbouring bits are tested together.
  template <int kElements, bool kHasBits>
  __device__ __forceinline__ void hide(
      float (&s)[kElements],
      const sm90::Shown<Program::kHasWords, kHasBits, 2 * kElements>& shown) const {
    if constexpr (Program::kHasWords) {
      // The thread's bits to places that the compiler knows.
      using Words = ShownWords<true, 2 * kElements>;
      constexpr bool kAligned = Words::kAligned;
      const uint32_t shift = Program::bit(kAligned ? 0 : key_ & 112);
      constexpr int kUsed = (2 * kElements + 127) / 128, kMoves = spread(kSpreadBits - 1);
      uint32_t own[2][kUsed][kMoves + 1];  // moved so far
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < kUsed; ++i) {
          const bool alone = kAligned || i + 1 == Words::kCount;
          const uint32_t next = alone ? 0 : shown.words[r][i + 1];
          own[r][i][0] = __funnelshift_r(shown.words[r][i], next, shift);
#pragma unroll
          for (int move = 1; move <= kMoves; ++move) {
            own[r][i][move] = move_here(own[r][i][0], move);
          }
        }
      }
      for_each_of_rows<kElements>([&](int r, int i) {
        const int column = Fragment::column_of(i);
        const int bit = Program::bit(column % 128);
        const int move = bit < kSpreadBits ? spread(bit) : 0;
        s[i] = (own[r][column / 128][move] & 1u << (bit + move)) != 0 ? s[i] : -INFINITY;
      });
    }
    if constexpr (kHasBits) {
      for_each_of_rows<kElements>(
          [&](int r, int i) { s[i] = (shown.bits[r] & shown.bit_of(i)) != 0 ? s[i] : -INFINITY; });
    }
  }
  // As rewrite(), and the tangents t of products become those of logits, over tangent_scale().
  template <int kElements>
  __device__ __forceinline__ void rewrite(float (&s)[kElements], float (&t)[kElements],
                                          float scale) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      float slope = 1.f, moved = 0.f;
      const float logit = element(i, [&](const auto& head, const auto& row, const auto& column,
                                         int q, int kv, float distance) {
        if constexpr (Program::kCapturesMove) {
          moved = Program::capture_tangent(head, row, column, q, kv, distance, s[i]);
        }
        if constexpr (Program::kUnitSlope) {
          return fmaf(s[i], scale_log2_, Program::addend(head, row, column, q, kv, distance));
        } else {
          return Program::logit_and_slope(head, row, column, q, kv, distance, s[i], &slope);
        }
      });
      s[i] = logit;
      t[i] = Program::kCapturesMove ? fmaf(t[i], slope * scale, moved) : t[i] * slope;
    }
  }
  // What rewritten tangents, or those of products where nothing is rewritten, are multiplied with.
  __device__ __forceinline__ float tangent_scale(float scale) const {
    return Program::kCapturesMove ? 1.f : scale;
  }
  __device__ __forceinline__ float sink(int r) const { return Program::sink(head_of(r)); }

  // Calls of(head, row, column, q, kv, distance) for element i.
  template <class Of>
  __device__ __forceinline__ auto element(int i, const Of& of) const {
    const int r = Fragment::lower(i);
    const auto& head = head_of(r);
    const int column = Fragment::column_of(i);
    int key = key_ + column;
    if constexpr (Program::kSharesLoads) {
      // The same by "or", which the compiler sees through: tiles are multiples of 16 keys.
      key = ((key_ & -16) + column / 16 * 16) | (key_ & 6) | column % 16;
    }
    int q = row_[r];
    float distance = distance_[r] - column;
    if constexpr (kSharesDiagonals) {
      // The same, so that the compiler sees which elements of the two rows are on one diagonal.
      q = row_[0] + 8 * r;
      distance = distance_[0] + static_cast<float>(8 * r - column);
    }
    return of(head, rows_[r], Program::column(head, key), q, key, distance);
  }
  // The same of any row, where nothing has begun.
  __device__ __forceinline__ static float sink_of(const ForwardArgs& args, int batch, int head) {
    const int b = batch_number(args.captures, args.problem, batch);
    const int h = head_number(args.captures, head);
    return Program::sink(Program::head(args.captures, args.problem, batch, b, h));
  }

 private:
  template <class Mask>
  __device__ __forceinline__ void begin_rows(const Problem& problem, const Mask& mask,
                                             const RowPositions& rows) {
    for (int r = 0; r < 2; ++r) {
      rows_[r] = Program::row(head_of(r), rows.of[r]);
      row_[r] = rows.of[r];
    }
    diagonal_ = diagonal_of(problem, mask);
  }

  static constexpr int kHeads = kManyHeads ? 2 : 1;

 protected:
  __device__ __forceinline__ const typename Program::Head& head_of(int r) const {
    return heads_[kManyHeads ? r : 0];
  }
  // From a key to the thread's row r.
  __device__ __forceinline__ float distance(int r, int key) const {
    return distance_[r] + static_cast<float>(key_ - key);
  }
  __device__ __forceinline__ int diagonal() const { return diagonal_; }
  template <bool kInside>
  __device__ __forceinline__ float addend(int i) const {
    return element(i, [&](const auto& head, const auto& row, const auto& column, int q, int kv,
                          float distance) {
      if constexpr (kInside) {
        return Program::addend(head, row, column, q, kv, distance, diagonal_loads_, step_of(i));
      } else {
        return Program::addend(head, row, column, q, kv, distance);
      }
    });
  }

 private:
  // Bits to higher places, where the compiler would move the test of a bit to lower ones.
  __device__ __forceinline__ static uint32_t move_here(uint32_t bits, int count) {
    asm("shl.b32 %0, %0, %1;" : "+r"(bits) : "r"(count));
    return bits;
  }
  // All elements i of one row after those of the other.
  template <int kElements, class Of>
  __device__ __forceinline__ static void for_each_of_rows(const Of& of) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (Fragment::lower(i) == r) of(r, i);
      }
    }
  }
  // From the diagonal of the thread's first element.
  __device__ __forceinline__ static constexpr int step_of(int i) {
    return 8 * Fragment::lower(i) - Fragment::column_of(i);
  }
  template <bool kInside>
  __device__ __forceinline__ float logit(int i, float s) const {
    return element(i, [&](const auto& head, const auto& row, const auto& column, int q, int kv,
                          float distance) {
      if constexpr (kInside) {
        return Program::logit(head, row, column, q, kv, distance, s, diagonal_loads_, step_of(i));
      } else if constexpr (kStarts) {
        return Program::started_logit(head, row, column, q, kv, distance, s);
      } else {
        return Program::logit(head, row, column, q, kv, distance, s);
      }
    });
  }

  float scale_log2_;
  typename Program::Head heads_[kHeads];
  typename Program::Row rows_[2];
  int row_[2];
  int diagonal_;  // from a row number to its position among the keys
  int key_;
  float distance_[2];                          // of a row's position from the first key
  Dropout dropout_[kHeads];                    // with kDrops
  typename Program::Diagonal diagonal_loads_;  // with kHasDiagonals: of the thread's first element
};

// Of a program that follows the distance, where products have added the part of the key (see
// DistanceTerms). That of the row is what scores lack.
template <class Program>
class DistanceScores : public ProgramScores<Program> {
  using Base = ProgramScores<Program>;

 public:
  static constexpr bool kRewrites = false;
  static constexpr bool kStartsAll = true;
  static constexpr bool kHasDiagonals = false;
  static constexpr bool kFollowsDistance = true;

  using Base::Base;

  // Of the tile of which begin_keys() has told, from `tile_key` on. Products have added nothing
  // where keys are on both sides of rows, or slopes are too large.
  template <class Plan, int kElements>
  __device__ __forceinline__ void begin_scores(const Plan& plan, int tile_key,
                                               float (&s)[kElements]) {
    using Terms = DistanceTerms<Program, 2 * kElements>;
    const Terms terms(plan, Base::diagonal());
    const float slope = terms.slope(Base::head_of(0), tile_key);
    if (slope != INFINITY) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lacking_[r] = slope * Base::distance(r, tile_key + Terms::kMiddle);
      }
      return;
    }
    lacking_[0] = lacking_[1] = 0.f;
    const float over_scale = rcp_approx(Base::factor());
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      s[i] = fmaf(Base::template addend<false>(i), over_scale, s[i]);
    }
  }
  __device__ __forceinline__ float lacking(int r) const { return lacking_[r]; }

  __device__ __forceinline__ float relative(int i, float s, float offset) const {
    return fmaf(s, Base::factor(), offset + lacking_[Fragment::lower(i)]);
  }

 private:
  float lacking_[2];  // of a row's scores, in log 2
};

}  // namespace jaxflash::sm90
