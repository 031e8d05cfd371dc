// Backward, main kernel: dk and dv of one tile of keys, and what these keys add to dq.
//
// Keys are stationary. A block owns a tile of keys of one kv head and walks the tiles of query rows
// that see it, over all query heads of the group; dk and dv stay in registers until they are
// written. Scores are computed transposed, s^T = k q^T and dp^T = v dout^T, so that p^T and ds^T
// come out of the accumulators as the A operands of dv += p^T dout and dk += ds^T q. Only ds^T has
// to pass through shared memory, for dq += ds k.
#pragma once

#include "common/dq_turn.cuh"
#include "common/mask.cuh"
#include "common/softmax.cuh"
#include "common/tensor.cuh"
#include "common/workspace.h"
#include "problem.h"
#include "sm80/dq_accumulator.cuh"
#include "sm80/scores.cuh"
#include "sm80/tile.cuh"
#include "sm80/tile_config.h"

namespace jaxflash::sm80 {

template <Math kMath_, int kHeadDim_, class Tile_>
struct BackwardTraits {
  using Tile = Tile_;
  using Element = typename MathTraits<kMath_>::Element;
  static constexpr Math kMath = kMath_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kK = MathTraits<kMath>::kK;
  static constexpr int kWarps = Tile::kKeyWarps * Tile::kColWarps;
  static constexpr int kThreads = 32 * kWarps;

  // Of a warp, in fragments: 16 keys or rows, 8 columns.
  static constexpr int kKeyTiles = Tile::kKeys / Tile::kKeyWarps / 16;
  static constexpr int kColBlocks = kHeadDim / Tile::kColWarps / 8;
  static constexpr int kScoreRows = Tile::kExchange ? Tile::kRows / Tile::kColWarps : Tile::kRows;
  static constexpr int kPassBlocks = Tile::kPassRows / 8;
  // Passes side by side hide latency; 32-bit fragments are twice as large and leave no room for it.
  static constexpr int kUnrolledPasses = sizeof(Element) == 2 ? kScoreRows / Tile::kPassRows : 1;
  static constexpr int kDqRowTiles = Tile::kRows / Tile::kDqRowWarps / 16;
  static constexpr int kDqCols = kHeadDim / (kWarps / Tile::kDqRowWarps);
  static constexpr int kDqColBlocks = kDqCols / 8;

  static_assert(kScoreRows % Tile::kPassRows == 0 && Tile::kPassRows % 16 == 0, "whole passes");
  static_assert(!Tile::kExchange || kScoreRows == Tile::kPassRows, "the exchange has one pass");
  static_assert(!Tile::kExchange || sizeof(Element) == 2,
                "32-bit fragments of stored and of computed scores order their sums differently");
  static_assert(kWorkspaceRows % Tile::kRows == 0 && Tile::kRows >= kWorkspaceTurnRows, "padding");
  static_assert(kKeyTiles * Tile::kKeyWarps * 16 == Tile::kKeys, "whole fragments");
  static_assert(kDqRowTiles * Tile::kDqRowWarps * 16 == Tile::kRows && kDqColBlocks % 2 == 0,
                "whole fragments");

  using KeyTile = SmemTile<Element, Tile::kKeys, kHeadDim>;       // k, v; later dk, dv
  using RowTile = SmemTile<Element, Tile::kRows, kHeadDim>;       // q, dout
  using ScoreTile = SmemTile<Element, Tile::kKeys, Tile::kRows>;  // p^T, ds^T

  static constexpr int kV = KeyTile::kBytes;
  static constexpr int kQ = kV + KeyTile::kBytes;
  static constexpr int kDout = kQ + Tile::kStages * RowTile::kBytes;
  static constexpr int kDs = kDout + Tile::kStages * RowTile::kBytes;
  static constexpr int kP = kDs + ScoreTile::kBytes;
  static constexpr int kLse = kP + (Tile::kExchange ? ScoreTile::kBytes : 0);
  static constexpr int kDelta = kLse + Tile::kStages * Tile::kRows * 4;
  static constexpr int kWork = kDelta + Tile::kStages * Tile::kRows * 4;
  static constexpr int kSharedBytes = kWork + 128;
};

// What a block works on. In shared memory: it is needed all along the main loop, but seldom, and
// the loop has no registers to spare. Pointers are to the first query head of the group, and to the
// kv head.
template <class Mask, class Element>
struct BlockWork {
  Mask mask;
  Interval rows;       // that see some of the block's keys
  Interval seen_keys;  // of the whole sequence
  Interval row_tiles;  // up to a gap
  int heads;           // query heads to walk: those of the group, or none
  int first_key;
  bool hides_rows;  // some of `rows` see no key
  bool hides_keys;  // no row sees some of the block's keys, which lie between others
  bool aligned;     // rows of q and dout, to 16 bytes
  const Element* q;
  const Element* dout;
  Element* dk;
  Element* dv;
  int64_t first_head;  // flat over batch and query heads
};

// The part of a block's work that a warp does: the first of its keys and columns of dk and dv, of
// the rows whose scores it computes, and of its rows and columns of dq.
template <class Traits>
struct WarpPlace {
  int key, col, row, dq_row, dq_col;

  __device__ __forceinline__ explicit WarpPlace(int warp) {
    using Tile = typename Traits::Tile;
    const int col_warp = warp % Tile::kColWarps;
    key = warp / Tile::kColWarps * Traits::kKeyTiles * 16;
    col = col_warp * Traits::kColBlocks * 8;
    row = Tile::kExchange ? col_warp * Traits::kScoreRows : 0;
    dq_row = warp % Tile::kDqRowWarps * Traits::kDqRowTiles * 16;
    dq_col = warp / Tile::kDqRowWarps * Traits::kDqCols;
  }
};

// From s^T and dp^T to p^T and ds^T, in place. `row` and `key` are those of the warp's first
// element; lse and delta belong to the rows of the thread's accumulators. ds lacks the scale: it is
// the same everywhere, so dk and dq get it at the end.
template <int kKeyTiles, int kBlocks, class Mask, class Scores>
__device__ __forceinline__ void differentiate(float (&s)[kKeyTiles][kBlocks][4],
                                              float (&dp)[kKeyTiles][kBlocks][4], const float* lse,
                                              const float* delta, const Mask& mask, Scores& scores,
                                              int row, int key, bool full) {
  const int first_row = row + lane_index() % 4 * 2, first_key = key + lane_index() / 4;
  scores.begin_tile(first_row, first_key);
  // Probabilities make up for the dropped ones, as in sm90/backward/scores.cuh.
  float share = 1.f, log2_share = 0.f;
  Kept<Scores::kDrops, false, 8 * kBlocks> kept[kKeyTiles];
  if constexpr (Scores::kDrops) {
    share = scores.share();
    log2_share = log2_approx(share);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) scores.draw(kept[m], 0, 16 * m);
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    float2 lse_pair = *reinterpret_cast<const float2*>(lse + 8 * n);
    float2 delta_pair = *reinterpret_cast<const float2*>(delta + 8 * n);
    if constexpr (Scores::kDrops) {
      lse_pair = {lse_pair.x + log2_share, lse_pair.y + log2_share};
      delta_pair = {delta_pair.x * share, delta_pair.y * share};
    }
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int element_row = 8 * n + i % 2, element_key = 16 * m + i / 2 * 8;
        float slope = 1.f, logit;
        if constexpr (Scores::kUnitSlope) {
          logit = scores.logit(s[m][n][i], element_row, element_key);
        } else {
          logit = scores.logit_and_slope(s[m][n][i], element_row, element_key, &slope);
        }
        const float p = exp2_approx(logit - (i % 2 == 0 ? lse_pair.x : lse_pair.y));
        const float weight = Scores::kUnitSlope ? p : p * slope;
        s[m][n][i] = kept[m].of(4 * n + i, p);
        dp[m][n][i] = weight * (kept[m].of(4 * n + i, dp[m][n][i]) -
                                (i % 2 == 0 ? delta_pair.x : delta_pair.y));
      }
    }
  }
  if (full) return;
  const Mask visibility = mask;  // in registers: no memory access, and no branch, for an element
  // Selected, not multiplied: whatever a masked element became, NaN included, is replaced.
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * n + i % 2, key = 16 * m + i / 2 * 8;
        const bool visible =
            visibility.visible(first_row + row, first_key + key) & scores.shows(row, key);
        s[m][n][i] = visible ? s[m][n][i] : 0.f;
        dp[m][n][i] = visible ? dp[m][n][i] : 0.f;
      }
    }
  }
}

// The tiles of rows that see some of `keys`: an interval and, if there is a gap, what follows it.
template <int kRows>
struct SeeingRows {
  Interval rows;
  Interval gap;  // of tiles

  template <class Mask>
  __device__ __forceinline__ SeeingRows(const Mask& mask, Interval keys) {
    const Interval unseen = mask.gap_of_rows(keys);
    rows = outside(mask.rows(keys), unseen);
    gap = {(unseen.begin + kRows - 1) / kRows, unseen.end / kRows};
  }
  // Up to the gap, or to the end.
  __device__ __forceinline__ Interval first_tiles() const {
    const Interval tiles = {rows.begin / kRows, (rows.end + kRows - 1) / kRows};
    const bool divided = gap.begin > tiles.begin && gap.begin < min(gap.end, tiles.end);
    return {tiles.begin, divided ? gap.begin : tiles.end};
  }
  __device__ __forceinline__ bool hold(int row) const {
    return rows.begin < rows.end && row + kRows > rows.begin && row < rows.end &&
           beyond(gap, row / kRows, 1) == row / kRows;
  }
};

// The turn of a key tile at the rows from `row` on. The whole block.
template <int kRows, int kKeys, class Mask>
__device__ __forceinline__ DqTurn dq_turn_of(const Mask& mask, int row, int tile) {
  const Interval keys = mask.keys({row, row + kRows});
  const int first = keys.begin / kKeys;
  if constexpr (!Mask::kFindsTurns) {
    return neighbours_turn(first, tile);
  } else {
    if (tile < first || tile * kKeys >= keys.end) return {false, 0};
    return turn_after(last_that_works(first, tile, [&](int other) {
      return SeeingRows<kRows>(mask, {other * kKeys, (other + 1) * kKeys}).hold(row);
    }));
  }
}

template <class Traits, class AnyMask, class Scores>
__global__ void __launch_bounds__(Traits::kThreads, Traits::Tile::kBlocksPerSm)
    backward_kernel(const __grid_constant__ BackwardParams params,
                    const __grid_constant__ BackwardWorkspace workspace, int64_t first_block) {
  using Mask = MaskBeside<AnyMask, Scores>;
  using Tile = typename Traits::Tile;
  using Element = typename Traits::Element;
  constexpr Math kMath = Traits::kMath;
  constexpr int kK = Traits::kK;
  constexpr int kThreads = Traits::kThreads;
  constexpr int kRows = Tile::kRows;
  constexpr int kPassRows = Tile::kPassRows;

  using KeyTile = typename Traits::KeyTile;
  using RowTile = typename Traits::RowTile;
  using ScoreTile = typename Traits::ScoreTile;

  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t smem_base = smem_address(smem);
  float* const lse_smem = reinterpret_cast<float*>(smem + Traits::kLse);
  float* const delta_smem = reinterpret_cast<float*>(smem + Traits::kDelta);

  // ---- Which keys -------------------------------------------------------------------------------

  const Problem& problem = params.problem;
  int64_t block = first_block + blockIdx.x;
  if (params.deterministic) {
    // Turns are waited for: a block must only wait for blocks that have already started.
    auto* ticket = reinterpret_cast<unsigned long long*>(smem);
    if (threadIdx.x == 0) *ticket = atomicAdd(workspace.ticket_of(params.workspace), 1ull);
    __syncthreads();
    block = static_cast<int64_t>(*ticket);
    __syncthreads();  // the word is part of k's tile
  }
  const int key_tiles = (problem.kv_len + Tile::kKeys - 1) / Tile::kKeys;
  const int64_t kv_head_index = block / key_tiles;
  const int kv_head = static_cast<int>(kv_head_index % problem.kv_heads);
  const int64_t batch = kv_head_index / problem.kv_heads;

  using Work = BlockWork<Mask, Element>;
  const Work& work = *reinterpret_cast<const Work*>(smem + Traits::kWork);
  static_assert(sizeof(Work) <= Traits::kSharedBytes - Traits::kWork, "fits");
  if (threadIdx.x == 0) {
    const int group = problem.q_heads / problem.kv_heads;
    const int first_key = static_cast<int>(block % key_tiles) * Tile::kKeys;
    const auto start = [&](const Tensor& tensor, int head) {
      return static_cast<Element*>(tensor.data) + tensor_offset(tensor, problem, batch) +
             head * tensor.head_stride;
    };
    Work& mine = *reinterpret_cast<Work*>(smem + Traits::kWork);
    mine.mask = Mask(problem, batch);
    const SeeingRows<kRows> seeing(mine.mask, {first_key, first_key + Tile::kKeys});
    mine.rows = seeing.rows;
    mine.seen_keys = mine.mask.seen_keys();
    mine.hides_rows = mine.mask.hides_rows(mine.rows);
    mine.hides_keys = mine.mask.hides_keys({first_key, first_key + Tile::kKeys});
    mine.row_tiles = seeing.first_tiles();
    mine.heads = mine.rows.begin < mine.rows.end ? group : 0;
    mine.first_key = first_key;
    mine.q = start(params.q, kv_head * group);
    mine.dout = start(params.dout, kv_head * group);
    mine.dk = start(params.dk, kv_head);
    mine.dv = start(params.dv, kv_head);
    mine.aligned = rows_are_aligned(mine.q, params.q.seq_stride, problem.head_dim) &&
                   rows_are_aligned(mine.dout, params.dout.seq_stride, problem.value_dim) &&
                   (params.q.head_stride | params.dout.head_stride) % RowTile::kChunk == 0;
    mine.first_head = batch * problem.q_heads + kv_head * group;
  }
  __syncthreads();
  Scores scores(problem);
  const int first_q_head = kv_head * (problem.q_heads / problem.kv_heads);

  // ---- Loads ------------------------------------------------------------------------------------

  const KeyTile k{smem_base}, v{smem_base + Traits::kV};
  const ScoreTile ds_smem{smem_base + Traits::kDs}, p_smem{smem_base + Traits::kP};
  const auto q_tile = [&](int stage) {
    return RowTile{smem_base + Traits::kQ + stage * RowTile::kBytes};
  };
  const auto dout_tile = [&](int stage) {
    return RowTile{smem_base + Traits::kDout + stage * RowTile::kBytes};
  };

  const auto load_rows = [&](int head, int row_tile, int stage) {
    const int thread = forget(threadIdx.x), row = row_tile * kRows;
    load_tile_async<kThreads>(q_tile(stage), work.q + head * params.q.head_stride,
                              params.q.seq_stride, row, work.rows.end, problem.head_dim, thread,
                              work.aligned);
    load_tile_async<kThreads>(dout_tile(stage), work.dout + head * params.dout.head_stride,
                              params.dout.seq_stride, row, work.rows.end, problem.value_dim, thread,
                              work.aligned);
    constexpr int kChunks = kRows / 4;
    static_assert(2 * kChunks <= kThreads, "one chunk a thread");
    if (thread < 2 * kChunks) {
      const bool is_lse = thread < kChunks;
      const int offset = thread % kChunks * 4;
      const int64_t head_index = work.first_head + head;
      const float* source = is_lse ? workspace.lse_of(params.workspace, head_index)
                                   : workspace.delta_of(params.workspace, head_index);
      cp_async_16(
          smem_base + (is_lse ? Traits::kLse : Traits::kDelta) + (stage * kRows + offset) * 4,
          source + row + offset, 16);
    }
    cp_async_commit_group();
  };

  if (work.heads > 0) {
    const auto load_keys = [&](const KeyTile& tile, const Tensor& tensor, int cols) {
      load_tile_async<kThreads>(
          tile,
          static_cast<const Element*>(tensor.data) + tensor_offset(tensor, problem, batch) +
              kv_head * tensor.head_stride,
          tensor.seq_stride, work.first_key, work.seen_keys.end, cols, threadIdx.x);
    };
    load_keys(k, params.k, problem.head_dim);
    load_keys(v, params.v, problem.value_dim);
    load_rows(0, work.row_tiles.begin, 0);
  }

  // ---- Main loop --------------------------------------------------------------------------------

  // Through a shuffle, so that the compiler knows that a warp's place is uniform.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const auto place = [&] { return WarpPlace<Traits>(forget(warp)); };

  float dk[Traits::kKeyTiles][Traits::kColBlocks][4] = {};
  float dv[Traits::kKeyTiles][Traits::kColBlocks][4] = {};

  // All tiles of rows that see the keys, head after head of the group.
  int head = 0, row_tile = work.row_tiles.begin;
  const auto advance = [&](int& head, int& row_tile) {
    if (++row_tile < work.row_tiles.end) return true;
    if constexpr (Mask::kHasGaps) {
      if (row_tile == work.row_tiles.end) {
        const Interval keys = {work.first_key, work.first_key + Tile::kKeys};
        row_tile = beyond(SeeingRows<kRows>(work.mask, keys).gap, row_tile, 1);
      }
      if (row_tile * kRows < work.rows.end) return true;
    }
    row_tile = work.row_tiles.begin;
    return ++head < work.heads;
  };
  const auto load_next_rows = [&](int head, int row_tile, int stage) {
    if (advance(head, row_tile)) load_rows(head, row_tile, stage);
  };
#pragma unroll 1
  for (int stage = 0; head < work.heads; stage ^= Tile::kStages - 1) {
    const RowTile q = q_tile(stage), dout = dout_tile(stage);
    const int first_row = row_tile * kRows;
    if (row_tile == work.row_tiles.begin) {
      scores.begin_head(params.captures, problem, work.mask, batch, first_q_head + head);
    }

    cp_async_wait_group<0>();
    // Everybody's part of the loads has arrived, and everybody is done with the last step: with ds,
    // and with the other stage of q and dout.
    __syncthreads();
    // Rows and keys that share a tile with visible ones but see, or are seen by, nothing here.
    const int blind_rows = work.rows.begin - first_row;
    const int blind_keys = work.seen_keys.begin - work.first_key;
    if (blind_rows > 0 || blind_keys > 0) {
      clear_rows<kThreads>(q, blind_rows, threadIdx.x);
      clear_rows<kThreads>(dout, blind_rows, threadIdx.x);
      clear_rows<kThreads>(k, blind_keys, threadIdx.x);
      clear_rows<kThreads>(v, blind_keys, threadIdx.x);
      __syncthreads();
    }
    const auto hidden_rows = work.mask.hidden_rows(work.hides_rows);
    const auto hidden_keys = work.mask.hidden_keys(work.hides_keys);
    const Interval tile_rows = {first_row, first_row + kRows};
    const Interval tile_keys = {work.first_key, work.first_key + Tile::kKeys};
    if (hidden_rows.meet(tile_rows) || hidden_keys.meet(tile_keys)) {
      clear_hidden_rows<kThreads>(q, hidden_rows, tile_rows, threadIdx.x);
      clear_hidden_rows<kThreads>(dout, hidden_rows, tile_rows, threadIdx.x);
      clear_hidden_rows<kThreads>(k, hidden_keys, tile_keys, threadIdx.x);
      clear_hidden_rows<kThreads>(v, hidden_keys, tile_keys, threadIdx.x);
      __syncthreads();
    }
    if (Tile::kStages == 2) load_next_rows(head, row_tile, stage ^ 1);

    const bool full = work.mask.full({first_row, first_row + kRows},
                                     {work.first_key, work.first_key + Tile::kKeys});
#pragma unroll(Traits::kUnrolledPasses)
    for (int pass = 0; pass < Traits::kScoreRows; pass += kPassRows) {
      const WarpPlace<Traits> at = place();
      const int row = at.row + pass;
      float s[Traits::kKeyTiles][Traits::kPassBlocks][4] = {};
      float dp[Traits::kKeyTiles][Traits::kPassBlocks][4] = {};
      gemm<kMath, Traits::kHeadDim / kK>(
          s, [&](int m, int step) { return load_a<kMath>(k, at.key + 16 * m, step * kK); },
          [&](int n, int step) { return load_b<kMath>(q, row + 16 * n, step * kK); });
      gemm<kMath, Traits::kHeadDim / kK>(
          dp, [&](int m, int step) { return load_a<kMath>(v, at.key + 16 * m, step * kK); },
          [&](int n, int step) { return load_b<kMath>(dout, row + 16 * n, step * kK); });
      const int thread_row = stage * kRows + row + lane_index() % 4 * 2;
      differentiate(s, dp, lse_smem + thread_row, delta_smem + thread_row, work.mask, scores,
                    first_row + row, work.first_key + at.key, full);

      if (Tile::kExchange || at.col == 0) {
#pragma unroll
        for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
          for (int n = 0; n < Traits::kPassBlocks; ++n) {
            if constexpr (Tile::kExchange) {
              store_accumulator(p_smem, at.key + 16 * m, row + 8 * n, s[m][n]);
            }
            store_accumulator(ds_smem, at.key + 16 * m, row + 8 * n, dp[m][n]);
          }
        }
      }
      if constexpr (!Tile::kExchange) {
        gemm<kMath, kPassRows / kK>(
            dv, [&](int m, int step) { return a_from_accumulators<kMath>(&s[m][step * kK / 8]); },
            [&](int n, int step) {
              return load_b_transposed<kMath>(dout, at.col + 16 * n, row + step * kK);
            });
        gemm<kMath, kPassRows / kK>(
            dk, [&](int m, int step) { return a_from_accumulators<kMath>(&dp[m][step * kK / 8]); },
            [&](int n, int step) {
              return load_b_transposed<kMath>(q, at.col + 16 * n, row + step * kK);
            });
      }
    }
    __syncthreads();  // ds, and p where exchanged, is complete

    if constexpr (Tile::kExchange) {
      const WarpPlace<Traits> at = place();
      gemm<kMath, kRows / kK>(
          dv, [&](int m, int step) { return load_a<kMath>(p_smem, at.key + 16 * m, step * kK); },
          [&](int n, int step) {
            return load_b_transposed<kMath>(dout, at.col + 16 * n, step * kK);
          });
      gemm<kMath, kRows / kK>(
          dk, [&](int m, int step) { return load_a<kMath>(ds_smem, at.key + 16 * m, step * kK); },
          [&](int n, int step) { return load_b_transposed<kMath>(q, at.col + 16 * n, step * kK); });
    }
    if (Tile::kStages == 1) {
      if constexpr (Tile::kExchange) __syncthreads();  // everybody is done with q and dout
      load_next_rows(head, row_tile, 0);
    }

    const WarpPlace<Traits> at = place();
    float dq[Traits::kDqRowTiles][Traits::kDqColBlocks][4] = {};
    gemm<kMath, Tile::kKeys / kK>(
        dq,
        [&](int m, int step) {
          return load_a_transposed<kMath>(ds_smem, at.dq_row + 16 * m, step * kK);
        },
        [&](int n, int step) {
          return load_b_transposed<kMath>(k, at.dq_col + 16 * n, step * kK);
        });

    const int64_t head_index = work.first_head + head;
    uint32_t* counter = nullptr;  // of turns, where this one has one
    if (params.deterministic) {
      const DqTurn turn =
          dq_turn_of<kRows, Tile::kKeys>(work.mask, first_row, work.first_key / Tile::kKeys);
      if (turn.exists) {
        counter = workspace.turns_of(params.workspace, head_index) + row_tile;
        wait_for_turn(counter, turn.after);
      }
    }
    const int row_pieces = static_cast<int>(workspace.dims) / 8;
    float* const dq_gmem = workspace.dq_of(params.workspace, head_index) +
                           (int64_t{first_row + at.dq_row} / 16 * row_pieces + at.dq_col / 8) *
                               DqFragmentOrder::kPiece;
#pragma unroll
    for (int m = 0; m < Traits::kDqRowTiles; ++m) {
      if (first_row + at.dq_row + 16 * m >= workspace.dq_rows) break;
#pragma unroll
      for (int n = 0; n < Traits::kDqColBlocks; ++n) {
        if (at.dq_col + 8 * n >= problem.head_dim) continue;
        DqFragmentOrder::add(dq_gmem + (m * row_pieces + n) * DqFragmentOrder::kPiece, dq[m][n]);
      }
    }
    if (counter != nullptr) end_turn(counter, work.first_key / Tile::kKeys);
    advance(head, row_tile);
  }

  // ---- dk and dv --------------------------------------------------------------------------------

  __syncthreads();  // k and v have been read: their tiles take the results to whole lines
  const WarpPlace<Traits> at = place();
#pragma unroll
  for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kColBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = work.first_key + at.key + 16 * m + i / 2 * 8 + lane_index() / 4;
        const bool seen = key >= work.seen_keys.begin && key < work.seen_keys.end;
        dk[m][n][i] = seen ? dk[m][n][i] * problem.scale : 0.f;
        dv[m][n][i] = seen ? dv[m][n][i] : 0.f;
      }
      store_accumulator(k, at.key + 16 * m, at.col + 8 * n, dk[m][n]);
      store_accumulator(v, at.key + 16 * m, at.col + 8 * n, dv[m][n]);
    }
  }
  __syncthreads();
  store_tile<kThreads, Tile::kKeys>(k, work.dk, params.dk.seq_stride, work.first_key,
                                    problem.kv_len, problem.head_dim, threadIdx.x);
  store_tile<kThreads, Tile::kKeys>(v, work.dv, params.dv.seq_stride, work.first_key,
                                    problem.kv_len, problem.value_dim, threadIdx.x);
}

}  // namespace jaxflash::sm80
