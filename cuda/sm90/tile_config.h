// Tiles of the kernels of all passes: a row for each pair of head sizes, with its reason.
#pragma once

#include "common/program_tiles.h"
#include "problem.h"

namespace jaxflash::sm90 {

// What a consumer warpgroup has in flight while it works on the softmax of a tile.
enum class Overlap {
  kNone,    // P V of the previous tile and Q K^T of this one are issued together and awaited;
            // the other warpgroups keep the matrix units busy during the softmax. It does without
            // the maxima (see OnlineSoftmax), because p has registers of its own
  kValues,  // P V of the previous tile runs during the softmax of this one
};

// How the output leaves a consumer warpgroup.
enum class Output {
  kStaged,  // laid where its rows of Q were, then a TMA store by a producer warp
  kDirect,  // stored from registers; a buffer of Q is empty as soon as the last scores are there
};

// kHeadDim and kValueDim are the largest sizes of query/key and value heads that the row takes;
// smaller heads are filled up with zeros by TMA.
template <int kHeadDim_, int kValueDim_, int kWarpGroups_, int kKeys_, int kStages_, int kQStages_,
          Overlap kOverlap_, Output kOutput_, bool kTurns_, bool kShares_ = false,
          bool kLoadsStarts_ = false, int kHeldTiles_ = 0, bool kKeyTerms_ = false,
          int kBatches_ = 1>
struct ForwardTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kWarpGroups = kWarpGroups_;  // consumers, 64 query rows each
  static constexpr int kKeys = kKeys_;              // keys of a tile
  static constexpr int kStages = kStages_;          // buffers of K, and of V
  static constexpr int kQStages = kQStages_;        // buffers of Q (and of the output)
  static constexpr Overlap kOverlap = kOverlap_;
  static constexpr Output kOutput = kOutput_;
  static constexpr bool kTurns = kTurns_;    // warpgroups issue their products in turn
  static constexpr bool kShares = kShares_;  // blocks share the keys of a tile, see KeyShares
  // What products start from comes beside the keys, see StartSource.
  static constexpr bool kLoadsStarts = kLoadsStarts_;
  // It stays for the next tile of query rows, of so many tiles of keys: there are no more of them.
  static constexpr int kHeldTiles = kHeldTiles_;
  // What is added for each key, or its part of it, comes as further columns of K, see KeyTerms.
  static constexpr bool kKeyTerms = kKeyTerms_;
  // Batch elements whose rows a tile has, each with keys of its own.
  static constexpr int kBatches = kBatches_;
  static constexpr int kUnits = kWarpGroups / kBatches;  // of 64 rows, of each of them
  // Operands lie in panels as wide as a swizzle.
  static constexpr int kPanelColumns = kHeadDim <= 32 && kValueDim <= 32 ? 32 : 64;
};

// Whether kernels of bounded programs (Program::kBounded) add up exponentials as they are. They
// then have the registers of programs that only add to scores.
template <class Tile, Math kMath>
inline constexpr bool needs_no_reference =
    Tile::kOverlap == Overlap::kValues && kMath == Math::kBFloat16;

template <int kHeadDim, int kValueDim, int kWarpGroups, int kKeys, int kStages, int kQStages,
          Overlap kOverlap, Output kOutput, bool kTurns>
using WithKeyTerms = ForwardTile<kHeadDim, kValueDim, kWarpGroups, kKeys, kStages, kQStages,
                                 kOverlap, kOutput, kTurns, false, false, 0, true>;

// A tile, and the calls that it is for: those of at most so many queries whose rows see at most so
// many keys on average. The first of a list that takes a call runs it; the last takes all.
template <int kMaxQueries_, int kMaxKeys_, class Tile_>
struct UpTo {
  static constexpr int kMaxQueries = kMaxQueries_;
  static constexpr int kMaxKeys = kMaxKeys_;
  using Tile = Tile_;
  static constexpr bool suits(int64_t /*units*/) { return true; }
};
template <class Tile>
using Otherwise = UpTo<kMaxLength, kMaxLength, Tile>;
template <class...>
struct Choices {};

// Whether tiles of `fewer` units of 64 rows, where a row costs `cost` percent, are faster than
// those of `more`, because the units of a kv head fill them better.
constexpr bool fill_better(int64_t units, int fewer, int cost, int more) {
  const auto filled = [&](int64_t of_tile) { return (units + of_tile - 1) / of_tile * of_tile; };
  return filled(fewer) * cost < filled(more) * 100;
}

// A tile for calls that fill it better than they do `Than`.
template <int kMaxKeys_, class Tile_, int kCost, class Than>
struct Fuller : UpTo<kMaxLength, kMaxKeys_, Tile_> {
  static constexpr bool suits(int64_t units) {
    return fill_better(units, Tile_::kWarpGroups, kCost, Than::kWarpGroups);
  }
};

// `Tiles`: the tiles for heads of at most these sizes. `OneUnit` and `TwoUnits`: where blocks share
// keys (common/key_shares.h), for as many units of 64 rows as the queries of a kv head fill. One
// unit takes what the memory delivers, 16.4 bytes a clock, from the first: 64 keys of head size 128
// are 32 KB in about 800 clocks. So all the shared memory is stages, to keep loads in flight across
// the ends of tiles. Output is direct: Q of the next tile does not wait for it. Figures are TFLOP/s
// at 16,384 tokens under sustained load, compared in one call of the sweep each; more are in
// docs/experiments.md.
template <int kHeadDim, int kValueDim>
struct ForwardTileFor;

// Four warpgroups share the K and V that they load, and with eight stages need not be in step:
// while some wait for their products, the others' exponentials, which take as long, go on. 112
// registers hold 64 keys. 503 against 467 with 3 x 128 keys and kValues at S = 2048, causal 451
// against 394; at 512 412 against 358, causal 287 against 234.
template <>
struct ForwardTileFor<64, 64> {
  using Four = ForwardTile<64, 64, 4, 64, 8, 2, Overlap::kNone, Output::kStaged, false>;
  // 128 rows fill half of that: 0.0466 ms against 0.0484.
  using Short = ForwardTile<64, 64, 2, 128, 4, 2, Overlap::kValues, Output::kStaged, false>;
  // 384 rows fill two of these and three quarters of two of those: 120 sequences of 264 take 0.167
  // ms against 0.196, 100 of 320 0.140 against 0.163, 85 of 384 causal 0.107 against 0.112, and if
  // not causal, with whole tiles of 128 keys, 0.127 against 0.168 (0.145 in tiles of 64).
  using Three = ForwardTile<64, 64, 3, 64, 8, 2, Overlap::kNone, Output::kStaged, false>;
  using Three128 = ForwardTile<64, 64, 3, 128, 3, 2, Overlap::kNone, Output::kStaged, false>;
  template <int kMaxKeys, class Tile>
  using FullerThanFour = Fuller<kMaxKeys, Tile, 115, Four>;
  using Tiles =
      Choices<UpTo<128, kMaxLength, Short>, FullerThanFour<320, Three>,
              FullerThanFour<384, Three128>, FullerThanFour<kMaxLength, Three>, Otherwise<Four>>;
  using OneUnit = ForwardTile<64, 64, 1, 128, 6, 1, Overlap::kValues, Output::kDirect, false, true>;
  using TwoUnits =
      ForwardTile<64, 64, 2, 128, 6, 1, Overlap::kValues, Output::kDirect, false, true>;
};

// 112 keys are the most that 160 registers hold beside the output. A panel of 64 columns is half
// empty: with one Q there is room for three stages. 625 at S = 8192, against 621 with two of each
// and 584 with kValues.
template <>
struct ForwardTileFor<96, 96> {
  using Long = ForwardTile<96, 96, 3, 112, 3, 1, Overlap::kNone, Output::kDirect, true>;
  // No ragged tile of keys, and less of one beyond a mask's edge: 441 against 407 at S = 512, 487
  // against 470 at 1024; 429 against 408 with a window of 1024 keys, 398 against 321 with 4096
  // queries of 256 keys.
  using Medium = ForwardTile<96, 96, 3, 64, 4, 2, Overlap::kNone, Output::kStaged, true>;
  // Nor one of rows.
  using Short = ForwardTile<96, 96, 2, 128, 2, 2, Overlap::kValues, Output::kStaged, false>;
  using Tiles =
      Choices<UpTo<256, 1024, Short>, UpTo<1024, 1024, Medium>, UpTo<kMaxLength, Long::kKeys, Long>,
              UpTo<kMaxLength, 1024, Medium>, Otherwise<Long>>;
  using OneUnit = ForwardTile<96, 96, 1, 64, 6, 1, Overlap::kValues, Output::kDirect, false, true>;
  using TwoUnits =
      ForwardTile<96, 96, 2, 128, 3, 1, Overlap::kValues, Output::kDirect, false, true>;
};

// Three warpgroups leave 160 registers a thread: 80 keys need 158, 96 do not fit. In turns, or else
// all wait for their products together: 603 against 584 at S = 2048.
template <>
struct ForwardTileFor<128, 128> {
  using Long = ForwardTile<128, 128, 3, 80, 3, 2, Overlap::kNone, Output::kStaged, true>;
  // No ragged tile of keys, and less of one beyond a mask's edge: 507 against 479 at S = 512, 575
  // against 572 at 1024; 508 against 491 with a window of 1024 keys, 466 against 400 with 4096
  // queries of 256 keys. But where Long has all keys in one tile: 229 against 208 with 77.
  using Medium = ForwardTile<128, 128, 3, 64, 4, 2, Overlap::kNone, Output::kStaged, true>;
  // In turns, warpgroups wait for those that see more keys: 331 against 319 at S = 512 causal.
  using Diagonal = ForwardTile<128, 128, 3, 64, 4, 2, Overlap::kNone, Output::kStaged, false>;
  // Nor a ragged tile of rows: 380 against 290 at S = 256, causal 200 against 187.
  using Short = ForwardTile<128, 128, 2, 128, 2, 2, Overlap::kValues, Output::kStaged, false>;
  using Tiles =
      Choices<UpTo<256, 1024, Short>, UpTo<1024, 511, Diagonal>,
              UpTo<kMaxLength, Long::kKeys, Long>, UpTo<kMaxLength, 1024, Medium>, Otherwise<Long>>;
  // 16 x 8192 keys take 0.1277 ms in boxes of 128, 0.1286 and 0.1305 in boxes of 64.
  using OneUnit =
      ForwardTile<128, 128, 1, 128, 3, 1, Overlap::kValues, Output::kDirect, false, true>;
  using TwoUnits =
      ForwardTile<128, 128, 2, 128, 3, 1, Overlap::kValues, Output::kDirect, false, true>;
};

// As at 128, whose output it has; the larger Q leaves room for one buffer of it. 639 against 633
// with 80 keys at S = 2048, 694 against 687 at 8192.
template <>
struct ForwardTileFor<192, 128> {
  using Long = ForwardTile<192, 128, 3, 64, 3, 1, Overlap::kNone, Output::kDirect, true>;
  using Short = ForwardTile<192, 128, 2, 128, 2, 1, Overlap::kValues, Output::kDirect, true>;
  using Tiles = Choices<UpTo<kMaxLength, 512, Short>, Otherwise<Long>>;
  using OneUnit =
      ForwardTile<192, 128, 1, 64, 5, 1, Overlap::kValues, Output::kDirect, false, true>;
  using TwoUnits =
      ForwardTile<192, 128, 2, 128, 2, 1, Overlap::kValues, Output::kDirect, true, true>;
};

// As at 256; 112 keys fill the shared memory (216 KB): 776 against 765 with 96 at S = 8192.
template <>
struct ForwardTileFor<192, 192> {
  using Long = ForwardTile<192, 192, 2, 112, 2, 1, Overlap::kValues, Output::kDirect, true>;
  using Tiles = Choices<Otherwise<Long>>;
  using OneUnit =
      ForwardTile<192, 192, 1, 64, 4, 1, Overlap::kValues, Output::kDirect, false, true>;
  using TwoUnits =
      ForwardTile<192, 192, 2, 112, 2, 1, Overlap::kValues, Output::kDirect, true, true>;
};

// The output accumulator takes 128 registers, so two warpgroups: each has to hide its exponentials
// under a product of its own. 80 keys would fill the shared memory too; 64 waste less on diagonals:
// 822 against 779 at S = 8192, causal 760 against 723. Stored directly, because there is one Q: 740
// against 701 at S = 16384, 487 against 474 at 512.
template <>
struct ForwardTileFor<256, 256> {
  using Long = ForwardTile<256, 256, 2, 64, 2, 1, Overlap::kValues, Output::kDirect, true>;
  using Tiles = Choices<Otherwise<Long>>;
  using OneUnit =
      ForwardTile<256, 256, 1, 64, 3, 1, Overlap::kValues, Output::kDirect, false, true>;
  using TwoUnits =
      ForwardTile<256, 256, 2, 64, 2, 1, Overlap::kValues, Output::kDirect, true, true>;
};

// Tiles for score programs of calls whose blocks share keys, to be tried in this order: one unit
// after two, for programs that take too many registers beside those.
template <int kHeadDim, int kValueDim>
struct ForwardSharingTiles {
  using Tiles = ProgramTiles<typename ForwardTileFor<kHeadDim, kValueDim>::TwoUnits,
                             typename ForwardTileFor<kHeadDim, kValueDim>::OneUnit>;
};

// Boxes of 64 keys leave 48 registers more: a program that keeps 56 values a row spills 5.9 KB with
// boxes of 128, and nothing with these.
template <>
struct ForwardSharingTiles<128, 128> {
  using Tiles = ProgramTiles<
      ForwardTileFor<128, 128>::TwoUnits, ForwardTileFor<128, 128>::OneUnit,
      ForwardTile<128, 128, 1, 64, 6, 1, Overlap::kValues, Output::kDirect, false, true>>;
};

// Tiles for score programs, to be tried in this order: a program takes registers, and the next tile
// leaves more of them. The first ones are for programs that say which capture they shall load
// (kLoadsStarts): its tiles of starts take the shared memory of a second Q, or of stages; those
// that follow for programs that add to scores what depends on the key (kKeyTerms), or on its
// distance from the query. kWithSlope: the number of the first of the others for programs that do
// more with a score than adding to it, but for those that need no reference: their softmax is
// longer. kWithFewKeys: of the first of the others for calls of which see_few_keys() holds.
// kFewerWarpGroups: of the tiles for heads whose rows fill them better, and kFewerCost what a row
// then costs, in percent of what it costs with the others (kFewerStartsCost: where tiles of starts
// are loaded); 0: there are none. suits(): whether a tile is for calls of such sizes, whose queries
// of a kv head fill so many units, and whose band may limit one side alone. Tiles for smaller heads
// than the list's are for those alone.
template <int kHeadDim, int kValueDim>
struct ForwardProgramTiles;

struct NoFewerWarpGroups {
  static constexpr int kFewerWarpGroups = 0;
  static constexpr int kFewerCost = 100;
  static constexpr int kFewerStartsCost = 100;
};

struct TilesForAllSizes {
  template <class Tile>
  static constexpr bool suits(const CallSizes&, int64_t /*units*/, bool /*one_sided*/) {
    return true;
  }
};
// Where there are few keys, more of a longer last tile would be ragged.
template <int kLongKeys>
struct LongTilesForLongRows {
  template <class Tile>
  static constexpr bool suits(const CallSizes& sizes, int64_t /*units*/, bool /*one_sided*/) {
    return Tile::kKeys != kLongKeys || sizes.kv_len > 1024;
  }
};

// How many tiles a block has where there is one for each of the query tiles of kBatches batch
// elements, as many times as multiprocessors allow: it takes that tile for some elements after the
// others, and loads what its products start from once. 0: that is not faster than blocks that take
// whatever tile is next. `cost`: of a tile, in percent.
template <class Tile>
constexpr int64_t held_rounds(const CallSizes& sizes, int64_t units, int cost) {
  constexpr int64_t kMultiprocessors = 132;
  constexpr int64_t kLeastRounds = 2;
  const int64_t tiles = (units + Tile::kUnits - 1) / Tile::kUnits * sizes.kv_heads;
  if (!sizes.starts_shared || tiles == 0 || tiles > kMultiprocessors) return 0;
  const int64_t at_a_time = kMultiprocessors / tiles * Tile::kBatches;
  const int64_t rounds = (sizes.batch + at_a_time - 1) / at_a_time;
  constexpr int64_t kUnitsAtOnce = kMultiprocessors * Tile::kWarpGroups;
  const int64_t next = (sizes.batch * sizes.kv_heads * units + kUnitsAtOnce - 1) / kUnitsAtOnce;
  return rounds >= kLeastRounds && rounds * cost < next * 100 ? rounds : 0;
}

// Of 384 rows two tiles of three warpgroups are full: 85 sequences take 0.178 ms with a soft cap
// against 0.217, 0.179 with a bias against 0.210. Of 2048 rows those of four are full, too: 0.43
// against 0.39 with a bias. The first two hold what products start from, the second also where the
// first would spill, beside a mask: 384 sequences of 384 take 0.137 ms against 0.153 in tiles of
// three warpgroups and 128 keys of one batch element. At head size 64, where there is room for one
// Q, holding was slower: 85 sequences took 0.186 against 0.179.
template <>
struct ForwardProgramTiles<64, 64> {
  template <int kBatches>
  using Held = ForwardTile<32, 32, 4, 64, 4, 2, Overlap::kNone, Output::kStaged, false, false, true,
                           6, false, kBatches>;
  using Tiles = ProgramTiles<
      Held<4>, Held<2>,
      ForwardTile<64, 64, 4, 64, 3, 2, Overlap::kNone, Output::kStaged, false, false, true>,
      ForwardTile<64, 64, 3, 128, 2, 2, Overlap::kValues, Output::kStaged, false, false, true>,
      ForwardTile<64, 64, 3, 64, 4, 2, Overlap::kNone, Output::kStaged, false, false, true>,
      WithKeyTerms<64, 64, 4, 64, 8, 2, Overlap::kNone, Output::kStaged, false>,
      WithKeyTerms<64, 64, 3, 64, 8, 2, Overlap::kNone, Output::kStaged, false>,
      ForwardTile<64, 64, 4, 64, 8, 2, Overlap::kNone, Output::kStaged, false>,
      ForwardTile<64, 64, 3, 64, 8, 2, Overlap::kNone, Output::kStaged, false>>;
  static constexpr int kWithSlope = 7;
  static constexpr int kWithFewKeys = 7;
  static constexpr int kFewerWarpGroups = 3;
  static constexpr int kFewerCost = 115;
  static constexpr int kFewerStartsCost = 115;
  template <class Tile>
  static constexpr bool suits(const CallSizes& sizes, int64_t units, bool one_sided) {
    const int keys = sizes.kv_len;
    const bool fill_128 = (keys + 127) / 128 * 2 == (keys + 63) / 64;
    // Causal, 85 sequences of 384 take 0.144 ms in tiles of 128 keys, 0.128 in tiles of 64.
    if (Tile::kKeys == 128 && (one_sided || !fill_128)) return false;
    // Not under a band that limits one side, where a block's tiles would all be long, or all short.
    if constexpr (Tile::kHeldTiles > 0) {
      if (one_sided || keys <= 192 || keys > Tile::kHeldTiles * Tile::kKeys) return false;
      // A round of 256 rows takes 85 % of one of tiles that hold nothing, of 192 rows 82 %. Of 320,
      // where they need 15 rounds, 18 with two elements take 0.119 ms, and tiles of one took 0.154.
      constexpr int kCost = 80;
      const int64_t rounds = held_rounds<Tile>(sizes, units, kCost);
      const int64_t with_two = held_rounds<Held<2>>(sizes, units, kCost);
      return rounds > 0 && (Tile::kBatches == 2 || with_two == 0 || rounds < with_two);
    }
    // With a bias 85 sequences of 384 take 0.169 ms in tiles of 128 keys against 0.178.
    return Tile::kKeys == 64 || (keys > 320 && keys <= 384);
  }
};

// Tiles of 96 keys take what three warpgroups have in registers beside the output: 0.92 ms against
// 1.04 with a table read at q - kv, 0.895 against 0.975 with a mask array, 0.95 against 0.92 with
// dropout but 0.55 against 0.57 where that is causal, and 0.93 against 0.90 with a soft cap, which
// has tiles of 64 (4096 tokens). The others as at 128: 0.175 ms against 0.213 for 128 sequences of
// 256 with a soft cap.
template <>
struct ForwardProgramTiles<96, 96> : LongTilesForLongRows<96> {
  using Tiles = ProgramTiles<
      ForwardTile<96, 96, 3, 64, 3, 1, Overlap::kNone, Output::kDirect, true, false, true>,
      ForwardTile<96, 96, 2, 128, 2, 1, Overlap::kValues, Output::kDirect, false, false, true>,
      WithKeyTerms<96, 96, 3, 96, 3, 1, Overlap::kNone, Output::kDirect, true>,
      WithKeyTerms<96, 96, 3, 64, 3, 2, Overlap::kNone, Output::kStaged, true>,
      WithKeyTerms<96, 96, 2, 128, 2, 2, Overlap::kValues, Output::kStaged, false>,
      ForwardTile<96, 96, 3, 96, 3, 1, Overlap::kNone, Output::kDirect, true>,
      ForwardTile<96, 96, 3, 64, 4, 2, Overlap::kNone, Output::kStaged, true>,
      ForwardTile<96, 96, 3, 64, 4, 2, Overlap::kNone, Output::kStaged, false>,
      ForwardTile<96, 96, 2, 128, 2, 2, Overlap::kValues, Output::kStaged, false>>;
  static constexpr int kWithSlope = 6;
  static constexpr int kWithFewKeys = 7;
  static constexpr int kFewerWarpGroups = 2;
  static constexpr int kFewerCost = 108;
  static constexpr int kFewerStartsCost = 108;
};

// Of 256 rows two tiles of two warpgroups are full: 128 sequences take 0.181 ms with a soft cap
// against 0.244, 0.220 with dropout against 0.361, 0.201 with a bias against 0.260. Of 384 rows two
// of three, which are 5 to 10 % faster. Of 512 and 1024 rows three are faster, too, where four of
// two are full: 32 sequences of 512 take 0.144 ms with a padding mask against 0.157, 16 of 1024
// 0.184 against 0.202, 0.264 with a soft cap against 0.284; not with a bias (0.171 and 0.167), nor
// with a causal array (0.175 and 0.168), which nobody knows beforehand.
template <>
struct ForwardProgramTiles<128, 128> {
  using Tiles = ProgramTiles<
      ForwardTile<128, 128, 3, 64, 2, 2, Overlap::kNone, Output::kStaged, true, false, true>,
      ForwardTile<128, 128, 2, 128, 2, 1, Overlap::kValues, Output::kDirect, false, false, true>,
      WithKeyTerms<128, 128, 3, 80, 3, 2, Overlap::kNone, Output::kStaged, true>,
      WithKeyTerms<128, 128, 3, 64, 3, 2, Overlap::kNone, Output::kStaged, true>,
      WithKeyTerms<128, 128, 2, 128, 2, 2, Overlap::kValues, Output::kStaged, false>,
      ForwardTile<128, 128, 3, 80, 3, 2, Overlap::kNone, Output::kStaged, true>,
      ForwardTile<128, 128, 3, 64, 4, 2, Overlap::kNone, Output::kStaged, true>,
      ForwardTile<128, 128, 3, 64, 4, 2, Overlap::kNone, Output::kStaged, false>,
      ForwardTile<128, 128, 2, 128, 2, 2, Overlap::kValues, Output::kStaged, false>>;
  static constexpr int kWithSlope = 6;
  static constexpr int kWithFewKeys = 7;
  static constexpr int kFewerWarpGroups = 2;
  static constexpr int kFewerCost = 113;
  static constexpr int kFewerStartsCost = 108;
  // As without a program: no ragged tile of keys where there are few.
  template <class Tile>
  static constexpr bool suits(const CallSizes& sizes, int64_t /*units*/, bool /*one_sided*/) {
    return Tile::kKeys != 80 || sizes.kv_len <= 80 || sizes.kv_len > 1024;
  }
};

template <>
struct ForwardProgramTiles<192, 128> : NoFewerWarpGroups, TilesForAllSizes {
  using Tiles = ProgramTiles<
      ForwardTile<192, 128, 3, 64, 2, 1, Overlap::kNone, Output::kDirect, true, false, true>,
      WithKeyTerms<192, 128, 3, 64, 3, 1, Overlap::kNone, Output::kDirect, true>,
      ForwardTile<192, 128, 3, 64, 3, 1, Overlap::kNone, Output::kDirect, true>,
      ForwardTile<192, 128, 2, 128, 2, 1, Overlap::kValues, Output::kDirect, true>>;
  static constexpr int kWithSlope = 2;
  static constexpr int kWithFewKeys = 2;
};

// 112 keys: 0.716 ms against 0.741 with a table read at q - kv (4096 tokens), 0.764 against 0.792
// with a mask array.
template <>
struct ForwardProgramTiles<192, 192> : NoFewerWarpGroups, LongTilesForLongRows<112> {
  using Tiles = ProgramTiles<
      ForwardTile<192, 192, 2, 64, 2, 1, Overlap::kValues, Output::kDirect, true, false, true>,
      WithKeyTerms<192, 192, 2, 96, 2, 1, Overlap::kValues, Output::kDirect, true>,
      ForwardTile<192, 192, 2, 112, 2, 1, Overlap::kValues, Output::kDirect, true>,
      ForwardTile<192, 192, 2, 96, 2, 1, Overlap::kValues, Output::kDirect, true>,
      ForwardTile<192, 192, 2, 64, 2, 1, Overlap::kValues, Output::kDirect, true>>;
  static constexpr int kWithSlope = 3;
  static constexpr int kWithFewKeys = 3;
};

// 80 keys: 0.920 ms against 0.989 with a table read at q - kv (4096 tokens), 0.974 against 1.045
// with a mask array, but 0.474 against 0.435 with two segments. With a soft cap they fit where the
// program is bounded: Gemma's shape takes 0.94 ms against 1.01.
template <>
struct ForwardProgramTiles<256, 256> : NoFewerWarpGroups, LongTilesForLongRows<80> {
  using Tiles = ProgramTiles<
      ForwardTile<256, 256, 2, 64, 2, 1, Overlap::kValues, Output::kDirect, true, false, true>,
      WithKeyTerms<256, 256, 2, 64, 2, 1, Overlap::kValues, Output::kDirect, true>,
      ForwardTile<256, 256, 2, 80, 2, 1, Overlap::kValues, Output::kDirect, true>,
      ForwardTile<256, 256, 2, 64, 2, 1, Overlap::kValues, Output::kDirect, true>,
      ForwardTile<256, 256, 2, 48, 2, 1, Overlap::kValues, Output::kDirect, true>>;
  static constexpr int kWithSlope = 3;
  static constexpr int kWithFewKeys = 3;
};

// --- tangent ------------------------------------------------------------------------------------

// The head sizes as in ForwardTile. Keys and values take turns in one ring of stages, in pieces: of
// a tile's keys some of the columns, of its values some of the rows.
template <int kHeadDim_, int kValueDim_, int kWarpGroups_, int kKeys_, int kPieces_, int kStages_,
          int kHeldSteps_, bool kTurns_>
struct TangentTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kWarpGroups = kWarpGroups_;  // consumers, 64 query rows each
  static constexpr int kKeys = kKeys_;              // keys of a tile
  static constexpr int kPieces = kPieces_;          // of a tile's keys, and of its values
  static constexpr int kStages = kStages_;          // buffers of a piece and its tangent
  // Steps of 16 columns of q that stay in registers, as in BackwardTile: q is read twice.
  static constexpr int kHeldSteps = kHeldSteps_;
  static constexpr bool kTurns = kTurns_;  // warpgroups begin their products in turn
};

template <int kHeadDim, int kValueDim>
struct TangentTiles;

// 624 TFLOP/s at S = 4096; two warpgroups of 96 keys 580, of 128 keys 496.
template <>
struct TangentTiles<64, 64> {
  using Tiles = ProgramTiles<TangentTile<64, 64, 3, 64, 1, 8, 0, false>,
                             TangentTile<64, 64, 2, 64, 1, 8, 0, false>>;
};
// 707 TFLOP/s; without q in registers 700, 80 keys 638.
template <>
struct TangentTiles<128, 128> {
  using Tiles = ProgramTiles<TangentTile<128, 128, 2, 64, 1, 4, 8, false>,
                             TangentTile<128, 128, 2, 64, 1, 4, 0, false>>;
};
// q and its tangent take 128 KB, which leaves room for three quarters of a tile of 64 keys; one of
// 32 keys reads more than shared memory delivers: 447. Sixteen rows of the values are the smallest
// piece: the next ones are on their way while a warpgroup is still at the last. Weights lie where
// scores do, or the registers would not do; in turns, because else both warpgroups would work on
// weights at the same time. 715.
template <>
struct TangentTiles<256, 256> {
  using Tiles = ProgramTiles<TangentTile<256, 256, 2, 64, 4, 6, 0, true>>;
};

// --- gradients of captures ----------------------------------------------------------------------

// Two warpgroups of 64 rows, 128 x kKeys elements of the logits. Both products of a tile read all
// four operands: the larger it is, the less comes from the L2. 128 keys take 192 registers for
// accumulators; programs with no room for them have 64.
template <int kKeys_>
struct CaptureGradientTile {
  static constexpr int kRows = 128;
  static constexpr int kKeys = kKeys_;
};
using CaptureGradientTiles = ProgramTiles<CaptureGradientTile<128>, CaptureGradientTile<64>>;

// --- backward -----------------------------------------------------------------------------------

// Who works on a tile of keys. Scores have keys as rows either way (s^T = K Q^T), so that p^T and
// ds^T feed dv and dk out of registers.
enum class KeyOwners {
  kBlock,  // one block, half of the keys for each of its two consumer warpgroups
  kPair,   // a cluster of two blocks, half of the keys for each; one consumer warpgroup of a block
           // computes p and dv, the other ds and dk
};

// The head sizes as in ForwardTile. Two consumer warpgroups in every row.
template <int kHeadDim_, int kValueDim_, int kRows_, int kKeys_, int kQStages_, int kDoutStages_,
          KeyOwners kOwners_, int kKeyStages_ = 1, int kHeldSteps_ = 0, int kStartStages_ = 0>
struct BackwardTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kRows = kRows_;              // queries of a step
  static constexpr int kKeys = kKeys_;              // keys of a block
  static constexpr int kQStages = kQStages_;        // buffers of q and lse
  static constexpr int kDoutStages = kDoutStages_;  // buffers of dout and delta
  static constexpr int kKeyStages = kKeyStages_;    // buffers of k and v
  // Buffers of what products start from; 0: it is not loaded by TMA, as kLoadsStarts above.
  static constexpr int kStartStages = kStartStages_;
  static constexpr bool kLoadsStarts = kStartStages > 0;
  // Blocks that share a tile, as a cluster.
  static constexpr int kBlocks = kOwners_ == KeyOwners::kPair ? 2 : 1;
  static constexpr int kTileKeys = kBlocks * kKeys;
  // Steps of 16 columns of k, as rows of the scores, that stay in registers for a whole tile: 4
  // registers each, and 2 KB less to read from shared memory for each product of a warpgroup.
  static constexpr int kHeldSteps = kHeldSteps_;
};

template <int kHeadDim, int kValueDim>
struct BackwardTileFor;

// A step of 128 x 128 writes 32 KB of dq for 10.5 MFLOP: at 3.85 TB/s adds allow 1232 TFLOP/s. Two
// buffers of k and v: 198 TFLOP/s against 193 at S = 512 causal, the same at 16384. Two steps of k
// in registers: 519 against 514 at S = 8192, causal 491 against 484. A third spills.
template <>
struct BackwardTileFor<64, 64> {
  using Type = BackwardTile<64, 64, 128, 128, 2, 2, KeyOwners::kBlock, 2, 2>;
};

// dk and dv take 32 registers less than at 128, which hold all of k: 525 TFLOP/s at S = 8192,
// causal 496, against 516 and 482 without. The second panel of 64 columns is half empty, yet dq is
// computed in both halves. The tile of 128 takes 1.08 to 1.13 times as long.
template <>
struct BackwardTileFor<96, 96> {
  using Type = BackwardTile<96, 96, 64, 128, 2, 2, KeyOwners::kBlock, 1, 6>;
};

// dk and dv take 128 registers a thread, which leaves room for the scores of 64 rows, and for two
// steps of k: 594 TFLOP/s against 587 without at S = 8192, causal 571 against 562. A third spills.
template <>
struct BackwardTileFor<128, 128> {
  using Type = BackwardTile<128, 128, 64, 128, 2, 2, KeyOwners::kBlock, 1, 2>;
};

// As at 256, with room for a second dout: 486 against 437 at S = 8192, causal 471 against 435. The
// tile of 256 takes 1.14 to 1.17 times as long.
template <>
struct BackwardTileFor<192, 192> {
  using Type = BackwardTile<192, 192, 64, 64, 2, 2, KeyOwners::kPair>;
};

// Here a second dout makes no difference. The tile of 256 takes 1.12 to 1.15 times as long.
template <>
struct BackwardTileFor<192, 128> {
  using Type = BackwardTile<192, 128, 64, 64, 2, 1, KeyOwners::kPair>;
};

// Adds to dq bind at this head size: 64 keys by themselves allow 616 TFLOP/s, 80 (the most whose dk
// and dv fit into the registers) 770. A pair has 128 keys and allows 1232; 64 keys of each block
// fill the shared memory. 506 against 453 with 80 keys of single blocks at S = 16384, causal 533
// against 446; 305 against 286 at 512.
template <>
struct BackwardTileFor<256, 256> {
  using Type = BackwardTile<256, 256, 64, 64, 2, 1, KeyOwners::kPair>;
};

// As ForwardProgramTiles.
template <int kHeadDim, int kValueDim>
struct BackwardProgramTiles;

// Scores of 128 rows leave no registers for slopes, nor for a mask beside what they start from.
template <>
struct BackwardProgramTiles<64, 64> {
  using Tiles = ProgramTiles<BackwardTile<64, 64, 128, 128, 2, 2, KeyOwners::kBlock, 1, 0, 1>,
                             BackwardTile<64, 64, 64, 128, 2, 2, KeyOwners::kBlock, 2, 0, 2>,
                             BackwardTile<64, 64, 128, 128, 2, 2, KeyOwners::kBlock, 2>,
                             BackwardTile<64, 64, 64, 128, 2, 2, KeyOwners::kBlock, 2>>;
  static constexpr int kWithSlope = 3;
};

template <>
struct BackwardProgramTiles<96, 96> {
  using Tiles = ProgramTiles<BackwardTile<96, 96, 64, 128, 2, 2, KeyOwners::kBlock, 1, 0, 2>,
                             BackwardTile<96, 96, 64, 128, 2, 2, KeyOwners::kBlock>>;
  static constexpr int kWithSlope = 1;
};

template <>
struct BackwardProgramTiles<128, 128> {
  using Tiles = ProgramTiles<BackwardTile<128, 128, 64, 128, 2, 2, KeyOwners::kBlock, 1, 0, 2>,
                             BackwardTile<128, 128, 64, 128, 2, 2, KeyOwners::kBlock>>;
  static constexpr int kWithSlope = 1;
};

template <>
struct BackwardProgramTiles<192, 192> {
  using Tiles = ProgramTiles<BackwardTile<192, 192, 64, 64, 2, 2, KeyOwners::kPair>>;
  static constexpr int kWithSlope = 0;
};
template <>
struct BackwardProgramTiles<192, 128> {
  using Tiles = ProgramTiles<BackwardTile<192, 128, 64, 64, 2, 1, KeyOwners::kPair>>;
  static constexpr int kWithSlope = 0;
};

template <>
struct BackwardProgramTiles<256, 256> {
  using Tiles = ProgramTiles<BackwardTile<256, 256, 64, 64, 2, 1, KeyOwners::kPair>>;
  static constexpr int kWithSlope = 0;
};

}  // namespace jaxflash::sm90
