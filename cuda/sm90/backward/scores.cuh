// The step from products to probabilities in the backward kernel, whose scores have keys as rows: a
// thread has two keys, and queries along the columns.
//
// A policy turns a tile of s^T into the weights of ds^T = weight * (dp^T - delta): the probability
// times the slope of its logit. With dropout probabilities, and so weights, are multiplied by what
// makes up for the dropped ones; then dv takes those that are kept, and
// ds^T = weight * (kept dp^T - share * delta).
#pragma once

#include "common/diagonal_sums.cuh"
#include "common/memory_order.cuh"
#include "common/program.cuh"
#include "sm90/backward/consumers.cuh"
#include "sm90/start_row.cuh"

namespace jaxflash::sm90 {

// Sums of ds of a step along diagonals, where a program wants them.
template <bool kWanted, int kRows>
class StepDiagonals {
 public:
  __device__ __forceinline__ void add(int i, float ds) {
    sums_.add(i / 4 + 1 - Fragment::lower(i), i % 2, ds);
  }
  // By a whole warp: use(query - key, sum), relative to the warp's first ones.
  template <class Use>
  __device__ __forceinline__ void reduce(const Use& use) const {
    sums_.reduce([&](int further, float sum) { use(further - 8, sum); });
  }

 private:
  DiagonalSums<kRows / 8 + 1> sums_;  // the upper eight keys begin eight queries further left
};
template <int kRows>
class StepDiagonals<false, kRows> {
 public:
  __device__ __forceinline__ void add(int /*i*/, float /*ds*/) {}
};

// A factor, which dq and dk get at the end: weights are probabilities.
class ScaledLogits {
 public:
  static constexpr bool kStarts = false;
  static constexpr bool kWeightsAreProbabilities = true;
  static constexpr bool kMasks = false;
  static constexpr bool kDrops = false;
  static constexpr int kKeySums = 0;
  static constexpr bool kStoresGradient = false;
  static constexpr bool kSumsBatch = false;
  template <int kRows>
  using AlongDiagonals = StepDiagonals<false, kRows>;

  __device__ __forceinline__ explicit ScaledLogits(const BackwardArgs& args)
      : scale_log2_(args.scale_log2) {}

  template <class Block>
  __device__ __forceinline__ void begin_head(const BackwardArgs&, const Block&, int /*head*/,
                                             int /*key*/) {}
  __device__ __forceinline__ void draw(KeepAll&, int /*row*/, int /*key*/) const {}
  __device__ __forceinline__ float share_of(float delta) const { return delta; }
  __device__ __forceinline__ auto adder_to(KeySums<0>&, int /*row*/, int /*key*/) const {
    return [](int /*i*/, float /*ds*/) {};
  }
  template <int kRows, class Block>
  __device__ __forceinline__ void add_up(const BackwardArgs&, const StepDiagonals<false, kRows>&,
                                         const Block&, int /*row*/, int /*key*/) const {}

  // lse as for_columns takes it; `row` and `key` of the warpgroup's first element. `common_rows`
  // see all of its keys: other tiles are masked.
  template <int kElements, class Block>
  __device__ __forceinline__ void weigh(float (&s)[kElements], const ColumnValues& first_lse,
                                        const float* lse, const Block& block, Interval common_rows,
                                        int row, int key) const {
    if (row < common_rows.begin || row + 2 * kElements > common_rows.end) {
      // Before the exponentials, where the accumulators are still in place: afterwards it takes
      // more registers than there are.
      const int thread = late_thread();
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const Interval rows = rows_that_see(block.mask, row + Fragment::column(thread),
                                            key + Fragment::row(thread), lower);
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          if (Fragment::lower(i) != lower) continue;
          const int column = Fragment::column_of(i);
          s[i] = rows.begin <= column && column < rows.end ? s[i] : -INFINITY;
        }
      }
      if constexpr (decltype(block.mask)::kTestsElements) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          if (!block.mask.same_id(row + Fragment::column(thread) + Fragment::column_of(i),
                                  key + Fragment::row(thread) + 8 * Fragment::lower(i))) {
            s[i] = -INFINITY;
          }
        }
      }
    }
    for_columns<kElements>(first_lse, lse, [&](int i, float lse_of_row) {
      s[i] = exp2_approx(s[i] * scale_log2_ - lse_of_row);
    });
  }

 private:
  float scale_log2_;
};

template <class Program>
constexpr bool starts_from_pairs() {
  if constexpr (Program::kStarts) {
    return sizeof(typename Program::Neighbour) == 2;
  } else {
    return false;
  }
}

// A program of common/program.cuh. Where it starts products, see sm90/scores.cuh, neighbours of
// a row are loaded together, a step ahead by the thread or beside the queries by a producer, and
// transposed.
template <class Program>
class ProgramLogits {
 public:
  static constexpr bool kStarts = starts_from_pairs<Program>();
  static constexpr bool kWeightsAreProbabilities = Program::kUnitSlope;
  static constexpr bool kMasks = Program::kMasks;
  static constexpr bool kDrops = Program::kDrops;
  static constexpr int kKeySums = Program::kKeySums;
  static constexpr bool kStoresGradient = Program::kStoresGradient;
  static constexpr bool kSumsBatch = Program::kSumsBatch;
  template <int kRows>
  using AlongDiagonals = StepDiagonals<Program::kSumsDiagonals, kRows>;

  __device__ __forceinline__ explicit ProgramLogits(const BackwardArgs& args)
      : scale_log2_(args.scale_log2) {}

  // See start_row_of().
  __device__ __forceinline__ static int start_row(const BackwardArgs& args, int batch, int head,
                                                  int position) {
    return start_row_of<Program>(args, batch, head, position);
  }

  // Where d score of a head goes, among all matrices.
  __device__ __forceinline__ static int gradient_matrix(const BackwardArgs& args, int batch,
                                                        int head) {
    const int b = batch_number(args.captures, args.problem, batch);
    const int h = head_number(args.captures, head);
    const auto program_head = Program::head(args.captures, args.problem, batch, b, h);
    return static_cast<int>(capture_offset(args.stored.batch_stride, args.problem, batch) +
                            Program::gradient_matrix(program_head));
  }

  // `head`: of the group; `key`: of the warpgroup's first row.
  template <class Block>
  __device__ __forceinline__ void begin_head(const BackwardArgs& args, const Block& block, int head,
                                             int key) {
    const int b = batch_number(args.captures, args.problem, block.batch);
    const int h = head_number(args.captures, block.first_head() + head);
    head_ = Program::head(args.captures, args.problem, block.batch, b, h);
    if constexpr (kDrops) {
      dropout_ = Program::dropout(args.captures, args.problem, block.batch, b, h);
      share_ = dropout_.share();
      log2_share_ = log2_approx(share_);
    }
    const int own_key = key + Fragment::row(late_thread());
    for (int lower = 0; lower < 2; ++lower) {
      columns_[lower] = Program::column(head_, own_key + 8 * lower);
    }
    diagonal_ = diagonal_of(args.problem, block.mask);
  }

  // What the products of a step start from, as it lies in memory: pairs of neighbouring keys, in
  // the even ones of as many registers as there are elements.
  template <int kElements>
  __device__ __forceinline__ void load_start(float (&pairs)[kElements], int row, int key) const {
    const int thread = late_thread();
    const int first_row = row + thread % 32 / 4;
    const int first_key = key + thread / 32 * 16 + thread % 4 * 2;
    const int last = Program::neighbours_end(head_) - 2;
#pragma unroll
    for (int i = 0; i < kElements; i += 4) {
      const auto* data = Program::neighbours(head_, Program::row(head_, first_row + 2 * i));
      load_pair(data + min(first_key, last), pairs[i], pairs[i + 1]);
      load_pair(data + min(first_key + 8, last), pairs[i + 2], pairs[i + 3]);
    }
  }
  // Pairs of neighbouring rows of what has been loaded; s may be `pairs`.
  template <int kElements>
  __device__ __forceinline__ static void transpose_start(float (&s)[kElements],
                                                         const float (&pairs)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; i += 2) s[i] = transpose_pairs(pairs[i]);
  }
  // The same of the warpgroup's panel in shared memory, where a producer has laid it: a row for
  // each query, whose 16-byte pieces are swizzled.
  template <int kElements>
  __device__ __forceinline__ static void read_start(float (&s)[kElements], uint32_t panel) {
    const int lane = late_thread() % 32;
    const int piece = late_thread() / 32 * 2 + lane / 8 % 2;
    const uint32_t source = panel + (lane / 16 * 8 + lane % 8) * 128 + ((piece ^ lane % 8) * 16);
#pragma unroll
    for (int i = 0; i < kElements; i += 8) {
      uint32_t pairs[4];
      ldmatrix_x4_trans(source + i / 8 * 16 * 128, pairs);
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i + 2 * j] = __uint_as_float(pairs[j]);
    }
  }
  // Makes of such pairs what the products start from.
  template <int kElements>
  __device__ __forceinline__ void start(float (&s)[kElements], int row, int key) const {
    const int thread = late_thread();
    const int first_row = row + Fragment::column(thread);
    const int first_key = key + Fragment::row(thread);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i % 2 == 0) {
        unpack_pair(static_cast<const typename Program::Neighbour*>(nullptr), s[i], s[i + 1]);
      }
      const int lower = Fragment::lower(i);
      const int q = first_row + Fragment::column_of(i), kv = first_key + 8 * lower;
      const auto distance = static_cast<float>(q + diagonal_ - kv);
      s[i] = Program::start(head_, Program::row(head_, q), columns_[lower], q, kv, distance, s[i]);
    }
  }

  // Which of a tile's elements are kept. Beside products, as in the forward kernel.
  template <class Bits>
  __device__ __forceinline__ void draw(Bits& kept, int row, int key) const {
    const int thread = late_thread();
    if constexpr (kDrops) {
      if (!dropout_.drops()) return kept.keep_all();
      dropout_.draw(kept, key + Fragment::row(thread), row + Fragment::column(thread));
    }
  }
  __device__ __forceinline__ float share_of(float delta) const {
    return kDrops ? delta * share_ : delta;
  }

  // What takes element i of ds; `row` and `key` as of weigh().
  __device__ __forceinline__ auto adder_to(KeySums<kKeySums>& sums, int row, int key) const {
    if constexpr (kKeySums == 0) {
      return [](int /*i*/, float /*ds*/) {};
    } else {
      const int thread = late_thread();
      const int first_row = row + Fragment::column(thread);
      const int first_key = key + Fragment::row(thread);
      return [this, &sums, first_row, first_key](int i, float ds) {
        const int lower = Fragment::lower(i);
        const int q = first_row + Fragment::column_of(i), kv = first_key + 8 * lower;
        const auto distance = static_cast<float>(first_row + diagonal_ - first_key - 8 * lower);
        float weights[kKeySums];
        Program::key_weights(head_, Program::row(head_, q), columns_[lower], q, kv,
                             distance + Fragment::column_of(i), weights);
#pragma unroll
        for (int sum = 0; sum < kKeySums; ++sum) sums.add(sum, lower, ds, weights[sum]);
      };
    }
  }

  // Adds a step's sums along diagonals to a gradient. Belongs beside products.
  template <int kRows, class Block>
  __device__ __forceinline__ void add_up(const BackwardArgs& args,
                                         const AlongDiagonals<kRows>& along, const Block& block,
                                         int row, int key) const {
    if constexpr (Program::kSumsDiagonals) {
      const CaptureGradientArray& array = args.diagonal_sums;
      // In every step: a division takes some 100 clocks.
      const int64_t offset = args.problem.num_batch_axes == 1
                                 ? int64_t{block.batch} * array.batch_stride[0]
                                 : capture_offset(array.batch_stride, args.problem, block.batch);
      float* const data = static_cast<float*>(array.data) + offset;
      const float weight = Program::diagonal_weight(head_);
      const int first_key = key + late_thread() / 32 * 16;
      along.reduce([&](int further, float sum) {
        const int q = row + max(0, further), kv = first_key + max(0, -further);
        const auto distance = static_cast<float>(q + diagonal_ - kv);
        const int64_t index = Program::diagonal_index(head_, Program::row(head_, q),
                                                      Program::column(head_, kv), q, kv, distance);
        if constexpr (Program::kSumsBuckets) {
          // Neighbours may be one element, to which a thread adds for the warp.
          int same = 0;
          __match_all_sync(~0u, static_cast<long long>(index), &same);
          if (same != 0) {
#pragma unroll
            for (int lane = 1; lane < 32; lane *= 2) sum += __shfl_xor_sync(~0u, sum, lane);
            if (late_thread() % 32 != 0) sum = 0.f;
          }
        }
        if (sum != 0.f) red_add_f32(data + index, sum * weight);  // NaN is not 0
      });
    }
  }

  // As of ScaledLogits, where weights are probabilities.
  template <int kElements, class Block>
  __device__ __forceinline__ void weigh(float (&s)[kElements], const ColumnValues& first_lse,
                                        const float* lse, const Block& block, Interval common_rows,
                                        int row, int key) const {
    static_assert(kWeightsAreProbabilities);
    evaluate(first_lse, lse, s, block, common_rows, row, key,
             [&](int i, float p, float) { s[i] = p; });
  }

  // Otherwise probabilities are packed, those that are kept, beside the weights in place of s.
  template <Math kMath, int kElements, class Bits, class Block>
  __device__ __forceinline__ void weigh(float (&s)[kElements], uint32_t (&packed)[kElements / 2],
                                        const Bits& kept, const ColumnValues& first_lse,
                                        const float* lse, const Block& block, Interval common_rows,
                                        int row, int key) const {
    float even = 0.f;
    evaluate(first_lse, lse, s, block, common_rows, row, key, [&](int i, float p, float slope) {
      s[i] = p * slope;
      if (i % 2 == 0) {
        even = p;
      } else {
        packed[i / 2] = kept.of_pair(i - 1, pack<kMath>(even, p));
      }
    });
  }

 private:
  // use(i, probability, slope) for every element.
  template <int kElements, class Block, class Use>
  __device__ __forceinline__ void evaluate(const ColumnValues& first_lse, const float* lse,
                                           const float (&s)[kElements], const Block& block,
                                           Interval common_rows, int row, int key,
                                           const Use& use) const {
    const int thread = late_thread();
    const int first_row = row + Fragment::column(thread);
    const int first_key = key + Fragment::row(thread);
    const float distance[2] = {static_cast<float>(first_row + diagonal_ - first_key),
                               static_cast<float>(first_row + diagonal_ - first_key - 8)};
    const auto row_of = [&](int i) {
      const int column = Fragment::column_of(i);
      if constexpr (Program::kSharesLoads) {
        // The same by "or", which the compiler sees through: tiles are multiples of 32 rows.
        return ((row & -32) + column / 32 * 32) | Fragment::column(thread) | column % 32;
      } else {
        return first_row + column;
      }
    };
    const auto distance_of = [&](int i) {
      const int lower = Fragment::lower(i), column = Fragment::column_of(i);
      // One expression for the elements of a diagonal, which the compiler then computes once.
      if constexpr (Program::kSharesDiagonals) {
        return distance[0] + static_cast<float>(column - 8 * lower);
      } else {
        return distance[lower] + column;
      }
    };
    const auto shows = [&](int i) {
      if constexpr (!kMasks) {
        return true;
      } else {
        const int q = row_of(i), lower = Fragment::lower(i);
        return Program::visible(head_, Program::row(head_, q), columns_[lower], q,
                                first_key + 8 * lower, distance_of(i));
      }
    };
    // What exp2 takes. What does not depend on the score is added up before it is there. `on...`:
    // of a part of a tile that is inside all arrays that are read along diagonals.
    const auto relative = [&](int i, float lse_of_row, float& slope, const auto&... on) {
      if constexpr (kDrops) lse_of_row += log2_share_;
      const int lower = Fragment::lower(i);
      const int q = row_of(i), kv = first_key + 8 * lower;
      const float at = distance_of(i);
      if constexpr (!Program::kAdds || (kStarts && Program::kUnitSlope)) {
        return fmaf(s[i], scale_log2_, -lse_of_row);
      } else if constexpr (Program::kUnitSlope) {
        const float addend =
            Program::addend(head_, Program::row(head_, q), columns_[lower], q, kv, at, on...);
        return fmaf(s[i], scale_log2_, addend - lse_of_row);
      } else if constexpr (kStarts) {
        return Program::started_logit_and_slope(head_, Program::row(head_, q), columns_[lower], q,
                                                kv, at, s[i], &slope) -
               lse_of_row;
      } else {
        return Program::logit_and_slope(head_, Program::row(head_, q), columns_[lower], q, kv, at,
                                        s[i], &slope, on...) -
               lse_of_row;
      }
    };
    // Steps of 128 rows would spill, as would the ids of segments.
    constexpr bool kHasDiagonals = Program::kHasDiagonals && Program::kAdds && !kStarts &&
                                   kElements <= 32 && !decltype(block.mask)::kTestsElements;
    bool inside = true;
    if constexpr (kHasDiagonals) {
      const int difference = first_row - first_key;
      inside =
          __all_sync(~0u, Program::inside(head_, difference - 8, difference + 2 * kElements - 7));
    }
    // Selected, not multiplied: what is masked may have any logit and any slope.
    if (!inside || row < common_rows.begin || row + 2 * kElements > common_rows.end) {
      const Interval visible[2] = {rows_that_see(block.mask, first_row, first_key, 0),
                                   rows_that_see(block.mask, first_row, first_key, 1)};
      for_columns<kElements>(first_lse, lse, [&](int i, float lse_of_row) {
        float slope = 1.f;
        const float logit = relative(i, lse_of_row, slope);
        const Interval& rows = visible[Fragment::lower(i)];
        const int column = Fragment::column_of(i);
        bool shown = rows.begin <= column && column < rows.end;
        if constexpr (decltype(block.mask)::kTestsElements) {
          shown &= block.mask.same_id(first_row + column, first_key + 8 * Fragment::lower(i));
        }
        shown &= shows(i);  // without a branch
        use(i, exp2_approx(shown ? logit : -INFINITY), shown ? slope : 0.f);
      });
    } else {
      for_columns<kElements>(first_lse, lse, [&](int i, float lse_of_row) {
        float slope = 1.f;
        if constexpr (kHasDiagonals) {
          const auto diagonal = Program::diagonal(head_, first_row - first_key);
          const int step = Fragment::column_of(i) - 8 * Fragment::lower(i);
          use(i, exp2_approx(relative(i, lse_of_row, slope, diagonal, step)), slope);
        } else {
          const float logit = relative(i, lse_of_row, slope);
          use(i, exp2_approx(logit), slope);
        }
      });
    }
  }

  float scale_log2_;
  typename Program::Head head_;
  typename Program::Column columns_[2];
  int diagonal_;  // from a row number to its position among the keys
  // With kDrops:
  Dropout dropout_;
  float share_;  // that is kept
  float log2_share_;
};

// Scores s become the weights of dp. The probabilities p for dv are packed here, or where kEarly is
// false left to the caller, in s. Returns what depends on all of them.
template <Math kMath, bool kEarly, class Score, int kElements, class Kept, class Block>
__device__ __forceinline__ uint32_t weigh_and_pack(const Score& score, float (&s)[kElements],
                                                   uint32_t (&p)[kElements / 2], const Kept& kept,
                                                   const ColumnValues& first_lse, const float* lse,
                                                   const Block& block, const Interval& common_rows,
                                                   int row, int key) {
  uint32_t all = 0;
  if constexpr (Score::kWeightsAreProbabilities) {
    score.weigh(s, first_lse, lse, block, common_rows, row, key);
  } else {
    static_assert(kEarly, "p is packed before s becomes its weights");
    score.template weigh<kMath>(s, p, kept, first_lse, lse, block, common_rows, row, key);
  }
  if (kEarly) {
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      if (Score::kWeightsAreProbabilities) {
        p[i] = kept.of_pair(2 * i, pack<kMath>(s[2 * i], s[2 * i + 1]));
      }
      all ^= p[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) all ^= __float_as_uint(s[i]);
  }
  return all;
}

}  // namespace jaxflash::sm90
