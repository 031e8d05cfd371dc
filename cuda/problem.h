// What host and device share: the problem, its arrays, and the limits that both rely on. Free of
// host headers.
//
// Letters of the shape comments: B batch (any number of axes), T query length, S key length,
// N query heads, K key/value heads (N % K == 0), H query/key head size, h value head size.
#pragma once

#include "common/integers.h"

#ifdef __CUDACC__
#define JAXFLASH_HOST_DEVICE __host__ __device__
#else
#define JAXFLASH_HOST_DEVICE
#endif

namespace jaxflash {

// How the matrix products are computed; it also fixes the element type of q, k, v, out and the
// gradients. Accumulation, softmax, lse and delta are float32 always.
enum class Math : int32_t {
  kFloat16 = 0,   // float16 operands
  kBFloat16 = 1,  // bfloat16 operands
  kTF32 = 2,      // float32 operands, rounded to TF32 for the products
  kFloat32 = 3,   // float32 operands, products accurate to float32
};

// Batch axes that broadcast alike are merged by the caller; this many remain at most.
inline constexpr int kMaxBatchAxes = 8;

// Longest sequence: row and key positions, shifted by a window side, stay within int32.
inline constexpr int32_t kMaxLength = 1 << 30;

// A window side without a limit.
inline constexpr int32_t kUnlimited = kMaxLength;

// An array (*B, length, heads, dim). Strides count elements; the last axis is contiguous. A batch
// axis that is broadcast has stride 0.
struct Tensor {
  void* data;
  int64_t batch_stride[kMaxBatchAxes];
  int64_t seq_stride;
  int64_t head_stride;
};

// Query i stands at key position p = i (+ S - T with `bottom_right`, of the sequence's own lengths
// where given) and sees the keys p - left ... p + right, both ends included.
struct Band {
  int32_t left;   // >= 0; kUnlimited without a limit
  int32_t right;  // >= 0, 0 for causal; kUnlimited without a limit
  bool bottom_right;
  const int32_t* q_lengths;   // (prod B) valid queries of a sequence, or nullptr for T
  const int32_t* kv_lengths;  // (prod B) valid keys of a sequence, or nullptr for S
};

// What hides keys from a row, beside the lengths.
enum class MaskKind : int32_t {
  kBand = 0,      // Band
  kRanges = 1,    // Band, and Ranges without ids
  kSegments = 2,  // Band, and Ranges with ids
  // The same two with a score program that hides something, which the Ranges know.
  kProgramRanges = 3,
  kProgramSegments = 4,
};

inline constexpr bool is_of_program(MaskKind kind) {
  return kind == MaskKind::kProgramRanges || kind == MaskKind::kProgramSegments;
}
inline constexpr bool has_ids(MaskKind kind) {
  return kind == MaskKind::kSegments || kind == MaskKind::kProgramSegments;
}

// Rows (keys) whose intervals are summarised together.
inline constexpr int kRangeBlock = 64;
JAXFLASH_HOST_DEVICE inline int32_t blocks_of(int32_t length) {
  return (length + kRangeBlock - 1) / kRangeBlock;
}
// Words with a bit for each block of so many rows or keys.
JAXFLASH_HOST_DEVICE inline int32_t block_words_of(int32_t length) {
  return (blocks_of(length) + 31) / 32;
}
// Pairs of Ranges::row_blocks and ::key_blocks: of a block's elements the hull of what they see,
// what all of them see, and a gap that none of them sees; and two words with a bit for each element
// that sees, or is seen by, nothing. Of such an element the hull and the gap take no notice.
enum RangeSummary : int { kHull, kCommon, kGap, kHidden, kSummaries };
// Pairs of Ranges::hulls.
enum RangeHull : int { kSeenKeys, kHiddenKeys, kHiddenRows, kWalkCounts, kHulls };
// Blocks of 64 rows and 64 keys that a sequence's rows see something of, and how many more there
// are in their intervals less one gap each.
struct WalkCounts {
  int32_t visited;
  int32_t left_out;
};
// Of all sequences: indices into their summaries stay within 32 bits.
inline constexpr int64_t kMaxRangeBlocks = int64_t{1} << 30;

// Of each row the interval of keys that it sees, and of each key that of its rows: pairs (begin,
// end), 8-byte aligned. Of each block of them a RangeSummary.
struct Ranges {
  const int32_t* keys_of_row;  // (prod B, T, 2)
  const int32_t* rows_of_key;  // (prod B, S, 2)
  const int32_t* row_blocks;   // (prod B, ceil(T / kRangeBlock), kSummaries, 2)
  const int32_t* key_blocks;   // (prod B, ceil(S / kRangeBlock), kSummaries, 2)
  // (prod B, kHulls, 2), hulls: of all rows' intervals; of the keys that no row sees, of a score
  // program's mask those among them alone; of the rows that see no key. And WalkCounts.
  const int32_t* hulls;
  // For kernels that walk, what a score program shows of blocks. Of each block of rows, for 32
  // blocks of keys at a time, two words: a bit for each block of which some row sees some key, and
  // for each that all of them see as a whole. (prod B or 1, ceil(T / kRangeBlock),
  // block_words_of(S), 2), and likewise of keys.
  const int32_t* row_visits;
  const int32_t* key_visits;
  bool shares_visits;     // those are of all sequences
  const int32_t* q_ids;   // (prod B, T), or nullptr: all see each other
  const int32_t* kv_ids;  // (prod B, S)
  bool of_program;        // is_of_program() of their kind
  bool has_walk;          // a kernel that walks runs beside the other one, see takes_call()
};

struct Problem {
  Math math;
  int32_t num_batch_axes;
  int64_t batch_extent[kMaxBatchAxes];
  int32_t q_len;      // T
  int32_t kv_len;     // S
  int32_t q_heads;    // N
  int32_t kv_heads;   // K
  int32_t head_dim;   // H
  int32_t value_dim;  // h
  float scale;        // multiplies the logits
  Band band;
  Ranges ranges;  // of a RangeMask; plain kernels do not look
};

// Arrays beside q, k and v that a score program reads, at most so many and of at most so many axes
// of their own.
inline constexpr int kMaxCaptures = 8;
inline constexpr int kMaxCaptureRank = 6;
// In place of a captured array from which products start: what they start from depends on the key
// alone, and on the head only where key heads are not shared.
inline constexpr int kKeyTerms = -2;
// The same, but what they start from is proportional to the distance between query and key.
inline constexpr int kDistanceTerms = -3;
// Sums over the queries that a program's backward pass computes at most beside dk and dv.
inline constexpr int kMaxKeySums = 2;

// A dense array (*B, *own axes).
struct Capture {
  const void* data;
  int64_t batch_stride[kMaxBatchAxes];  // in elements, 0 where it broadcasts; axes as in Problem
  int32_t extent[kMaxCaptureRank];      // of its own axes
};

// What a score program gets beside the score. Numbers say which batch element and head of the whole
// call one of this device's is.
struct Captures {
  Capture of[kMaxCaptures];
  const int32_t* batch_numbers;                 // (*B), or nullptr: 0 ... B - 1
  int64_t batch_numbers_stride[kMaxBatchAxes];  // 0 where they broadcast
  const int32_t* head_numbers;                  // (N), or nullptr: 0 ... N - 1
};

// What is known of the sizes of a score program's calls when it is compiled. Its tile is chosen by
// them: calls of other sizes are as right, but may be refused if they have more keys.
struct CallSizes {
  // 0: it varies.
  int64_t batch;
  int32_t q_len;
  int32_t kv_len;
  int32_t q_heads;
  int32_t kv_heads;
  // All batch elements start from the same rows, where products start from something.
  bool starts_shared;
  int32_t sequences;  // packed in each batch element; 0: unknown, or no packing
};

// A load of a captured array whose gradient is wanted, see common/capture_gradient.h. The kernels'
// `Load` (common/capture_gradient_sums.cuh) has the same constants.
struct CaptureLoad {
  int32_t capture;     // or -1: a key sum
  int32_t rank;        // of its own axes
  int32_t query_axis;  // whose index is the row's number, or -1
  int32_t key_axis;    // whose index is the column's number, or -1
  bool scatter;        // another index depends on the row or the column: nothing is owned
  bool narrow;         // the gradient has the capture's 16-bit dtype: every element is stored once
  bool stored;         // it is that of the score, see StoredGradient
  bool summed;         // backward kernels that can compute it themselves do; no other load of it is
  bool sums_batch;     // what is stored is the sum over the batch elements

  bool is_key_sum() const { return capture < 0; }
  // By the backward kernel, if that sums.
  bool is_summed() const { return summed || is_key_sum(); }
};

// A sum over the queries for each head and key of a batch element, BackwardParams::key_sums: the
// gradient of an array (N, S) for each batch element, had one been read.
inline constexpr CaptureLoad kKeySumLoad = {-1, 2, -1, 1, false, false, false, true, false};

// Where the gradient of a capture goes: (*B, its own axes).
struct CaptureGradientArray {
  void* data;                           // nullptr: nobody wants it
  int64_t batch_stride[kMaxBatchAxes];  // in elements, 0 where the axis is summed over
};

// Every partial sum is rounded to the operands' dtype. Sums of seven were further off than the
// tests allow, by twice the error of the plain computation.
inline constexpr int32_t kMaxBatchSum = 4;

// The gradient of the score, of which every element is that of another element of a captured array:
// matrices (queries, keys) of the operands' dtype, which backward kernels may store as they go.
struct StoredGradient {
  void* data;  // nullptr: nobody wants it
  int64_t matrices;
  int64_t batch_stride[kMaxBatchAxes];  // in matrices, 0 where it has no such axis
  // Of how many batch elements, one after the other, each matrix is the sum; at most kMaxBatchSum.
  int32_t batch_sum = 1;
};

// Keys and values in a pool of pages. Those of a sequence lie in pages table[0], table[1] ... of
// its row; numbers outside of 0 ... count - 1 mean the nearest.
struct Pages {
  const int32_t* table;  // (prod B, S / size); nullptr: keys and values are contiguous
  int32_t log2_size;     // of a page, in keys: kLeastLog2Size to kMostLog2Size
  int32_t count;         // of the pool

  static constexpr int32_t kLeastLog2Size = 4, kMostLog2Size = 8;
  JAXFLASH_HOST_DEVICE int32_t size() const { return 1 << log2_size; }
};

// Kernels that were compiled for a score program, see attention.h.
struct ScoreKernels;

struct ForwardParams {
  Problem problem;
  Tensor q;    // (*B, T, N, H)
  Tensor k;    // (*B, S, K, H)
  Tensor v;    // (*B, S, K, h)
  Tensor out;  // (*B, T, N, h)
  float* lse;  // (*B, T, N) dense; natural logarithm, -inf for a row that sees no key
  // 256-byte aligned, any contents: forward_workspace_bytes(problem) bytes, or those of the program
  void* workspace;
  const ScoreKernels* program;  // nullptr: logits are the scaled products, `captures` is not read
  Captures captures;
  Pages pages;  // with a table, and a program for it: k and v are (count * size, K, dim), no batch
};

// The tangents of out and lse, given those of q, k and v.
struct TangentParams {
  Problem problem;
  Tensor q;                     // (*B, T, N, H)
  Tensor k;                     // (*B, S, K, H)
  Tensor v;                     // (*B, S, K, h)
  Tensor tq;                    // as q
  Tensor tk;                    // as k
  Tensor tv;                    // as v
  Tensor out;                   // (*B, T, N, h)
  const float* lse;             // (*B, T, N) dense
  Tensor tout;                  // (*B, T, N, h)
  float* tlse;                  // (*B, T, N) dense; 0 for a row that sees no key
  const ScoreKernels* program;  // as in ForwardParams, but never nullptr
  Captures captures;
};

struct BackwardParams {
  Problem problem;
  Tensor q;            // (*B, T, N, H)
  Tensor k;            // (*B, S, K, H)
  Tensor v;            // (*B, S, K, h)
  Tensor out;          // (*B, T, N, h)
  Tensor dout;         // (*B, T, N, h)
  const float* lse;    // (*B, T, N) dense
  const float* dlse;   // (*B, T, N) dense, or nullptr for zero
  Tensor dq;           // (*B, T, N, H)
  Tensor dk;           // (*B, S, K, H), every batch axis of full extent
  Tensor dv;           // (*B, S, K, h), every batch axis of full extent
  void* workspace;     // backward_workspace_bytes(problem) bytes, 256-byte aligned, any contents
  bool deterministic;  // bitwise the same gradients from run to run
  const ScoreKernels* program;  // as in ForwardParams
  Captures captures;
  // The program's sums over the queries, (*B, N, S) dense, where it has them: see program.cuh.
  float* key_sums[kMaxKeySums];
  StoredGradient stored;  // of the program's, likewise
  // Where it sums along diagonals: what these are added to, float32, and how many bytes that has.
  CaptureGradientArray diagonal_sums;
  int64_t diagonal_sum_bytes;
};

// Of kRangeBlock rows and as many keys of a dense mask: which rows see one of the keys, a bit for
// each, which keys are seen, and whether all is visible.
struct MaskBlock {
  uint32_t rows[2];
  uint32_t keys[2];
  uint32_t whole;
  uint32_t unused;
};

// Intervals made of what blocks of kRangeBlock rows and keys of masks show: (begin, end) of whole
// blocks; no rows or keys are one of (0, 0). A mask of one row is that of all rows of a call, and
// so is one of one key.
struct MaskIntervals {
  int64_t count;  // of masks
  int32_t rows;   // of a mask
  int32_t keys;
  int32_t q_len;  // of the call
  int32_t kv_len;
  int32_t* keys_of_row;  // (count, q_len, 2), the hull of what each sees
  int32_t* rows_of_key;  // (count, kv_len, 2)
  // Of blocks of rows the longest interval of keys that all of them see, and the longest gap in the
  // hull, or all where they see nothing: (count, ceil(q_len / kRangeBlock), 2, 2). Likewise of
  // keys.
  int32_t* keys_inside;
  int32_t* rows_inside;
  // As in Ranges.
  int32_t* row_visits;
  int32_t* key_visits;
};

// What is made of dense masks.
struct DenseMaskParams : MaskIntervals {
  const uint8_t* mask;  // (count, rows, keys), 0 or 1
  bool packs_keys;
  // Bits beyond the mask are 0. Of rows: (count, ceil(rows / 32), keys), the bits of 32 in the
  // order of `word_bit`. Of keys: (count, ceil(keys / 128), rows, kSharers), where word t has of
  // every 16 keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: those of thread t of the kSharers that have a
  // row of a matrix product's fragment. So a thread loads nothing that others need, and a warp, of
  // eight rows, 128 neighbouring bytes.
  uint32_t* words;
  MaskBlock* blocks;  // workspace, (count, ceil(rows / kRangeBlock), ceil(keys / kRangeBlock))

  static constexpr int kSharers = 4;
};

// What is known of blocks and of rows and keys, of masks of which no array holds the elements.
struct PredicateBlocks : MaskIntervals {
  // Workspace. Of a block kShown if something of it is visible, and kWhole if all is: (count,
  // ceil(rows / kRangeBlock), ceil(keys / kRangeBlock)).
  uint8_t* blocks;
  // Of rows that see a key, and keys that are seen, a bit each; a block has two words.
  uint32_t* row_sees;     // (count, ceil(rows / kRangeBlock), 2)
  uint32_t* key_is_seen;  // (count, ceil(keys / kRangeBlock), 2)

  static constexpr uint8_t kShown = 1, kWhole = 2;
};

// A predicate that was compiled, see attention.h.
struct PredicateKernel;

// What is made of a predicate, a program that hides something (common/program.cuh), beside a band.
struct PredicateParams : PredicateBlocks {
  const PredicateKernel* predicate;
  // Lengths and band, which has no lengths of its own. Heads are one of the batch axes, and all of
  // these are those of `count`.
  Problem problem;
  Captures captures;  // numbers of heads aside:
  const int32_t* head_numbers;
  int64_t head_numbers_stride[kMaxBatchAxes];  // 0 where they broadcast
};

// Elements of a segment that have some remainder, see SegmentMatchesParams. All start at their
// largest value.
struct SegmentBucket {
  uint32_t first;  // of the elements
  uint32_t inverted_last;
  uint32_t low;  // of the ids, which count from the smallest one
  uint32_t inverted_high;
  uint32_t less_than_number;  // one less than there are elements
};

JAXFLASH_HOST_DEVICE inline int64_t segment_buckets(int64_t elements) { return 2 * elements; }

// Intervals of equal ids: of each row one of keys that holds all of its segment, and of each key
// one of rows. It is the smallest one if no two ids are a multiple of the number of buckets for
// keys (rows) apart. (0, 0) where there are none.
struct SegmentMatchesParams {
  int64_t count;  // of sequences
  int32_t rows;
  int32_t keys;
  const int32_t* q_ids;   // (count, rows)
  const int32_t* kv_ids;  // (count, keys)
  int32_t* keys_of_row;   // (count, rows, 2)
  int32_t* rows_of_key;   // (count, keys, 2)
  uint8_t* keys_solid;    // (count, rows), whether all that lies in an interval is of the segment
  uint8_t* rows_solid;    // (count, keys)
  // Workspace, by the remainder of the ids: (count, segment_buckets(keys), then of rows).
  SegmentBucket* buckets;
};

// What Ranges say of blocks and of sequences, made of the intervals. (0, 0) is an empty one.
struct RangeSummaryParams {
  int64_t count;  // of sequences
  int32_t rows;
  int32_t keys;
  const int32_t* keys_of_row;  // (count, rows, 2)
  const int32_t* rows_of_key;  // (count, keys, 2)
  // Whether all that lies in an interval is seen, (count, rows) and (count, keys); or nullptr: yes.
  const uint8_t* keys_solid;
  const uint8_t* rows_solid;
  // Of masks, as in MaskIntervals; or nullptr: they hide nothing.
  const int32_t* keys_inside;
  const int32_t* rows_inside;
  const int32_t* row_visits;  // as in Ranges; or nullptr: no kernel walks
  bool shares_visits;
  int32_t* row_blocks;  // as in Ranges
  int32_t* key_blocks;
  int32_t* hulls;
  WalkCounts* walks;  // workspace, with visits: (count, blocks of rows)
};

// All of these for calls with segments alone: the summary is of the matches.
struct SegmentRangesParams {
  SegmentMatchesParams matches;
  RangeSummaryParams summary;
};

}  // namespace jaxflash
