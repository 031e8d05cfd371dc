// Host side of the Hopper forward pass: which calls it takes, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "attention.h"
#include "common/key_shares.h"
#include "common/launch.h"
#include "common/logarithms.h"
#include "common/program_kernels.h"
#include "common/status.h"
#include "sm90/forward/clear_kernel.cuh"
#include "sm90/forward/merge_kernel.cuh"
#include "sm90/forward_kernel.cuh"
#include "sm90/hardware/tensor_map.h"
#include "sm90/start_map.h"
#include "sm90/tile_config.h"

namespace jaxflash::sm90 {

namespace detail {

// The operands of a call as TMA sees them.
struct ForwardMaps {
  BatchAxes batch;
  MappedTensor q, k, v, out;
};

inline bool map_forward(const ForwardParams& params, ForwardMaps& maps) {
  const Problem& problem = params.problem;
  const Tensor* const tensors[4] = {&params.q, &params.k, &params.v, &params.out};
  int64_t strides[4][kBatchDims];
  if (!merge_batch_axes(problem, tensors, maps.batch, strides)) return false;
  maps.q = map_tensor(params.q, problem.head_dim, problem.q_len, problem.q_heads, maps.batch,
                      strides[0]);
  // A pool of pages is as long as all of them.
  const Pages& pages = params.pages;
  const int64_t keys =
      pages.table == nullptr ? problem.kv_len : int64_t{pages.count} << pages.log2_size;
  maps.k = map_tensor(params.k, problem.head_dim, keys, problem.kv_heads, maps.batch, strides[1]);
  maps.v = map_tensor(params.v, problem.value_dim, keys, problem.kv_heads, maps.batch, strides[2]);
  maps.out = map_tensor(params.out, problem.value_dim, problem.q_len, problem.q_heads, maps.batch,
                        strides[3]);
  return mappable(maps.q) && mappable(maps.k) && mappable(maps.v) && mappable(maps.out);
}

// Tiles of one call: their indices, and the rounds beyond the last, stay within 31 bits.
inline constexpr int64_t kMaxTiles = int64_t{1} << 30;

// What the 64 rows of a warpgroup hold. See UnitShape. A score program may want rows of one head.
inline UnitShape unit_shape(const Problem& problem, bool one_head) {
  UnitShape unit{};
  while ((1 << unit.log2_positions) < std::min(problem.q_len, 64)) ++unit.log2_positions;
  const int group = problem.q_heads / problem.kv_heads;
  unit.heads = one_head ? 1 : std::min(group, 64 >> unit.log2_positions);
  while (group % unit.heads != 0) --unit.heads;
  return unit;
}

// What products of a call start from goes by batch element, which may share it, so that a head's
// comes from memory once. So little of it stays in the L2 (50 MB) for all heads, and these go
// first where they are so small: their queries, keys and values lie side by side. Of 256 queries
// and keys, a head of 32: 0.087 ms against 0.089; of 64, 0.121 against 0.119.
inline constexpr int64_t kFewStartBytes = 8 << 20;
inline constexpr int kSmallHead = 32;

// The order of tiles, on at most `max_blocks` blocks. A mask that limits one side only makes the
// tiles of a head differ in length; the longest then go first, so that the last ones to run are
// short.
template <class Tile>
TileOrder tile_order(const Problem& problem, const UnitShape& unit, int64_t batch,
                     uint32_t max_blocks) {
  const int64_t group = problem.q_heads / problem.kv_heads;
  const int64_t positions = int64_t{1} << unit.log2_positions;
  const int64_t units = (problem.q_len + positions - 1) / positions * (group / unit.heads);
  TileOrder order{};
  order.head_tiles = static_cast<uint32_t>((units + Tile::kUnits - 1) / Tile::kUnits);
  order.heads =
      static_cast<uint32_t>((batch + Tile::kBatches - 1) / Tile::kBatches * problem.kv_heads);
  order.blocks = std::min(order.head_tiles * order.heads, max_blocks);
  order.by_blocks = Divisor(order.blocks);
  order.by_head_tiles = Divisor(order.head_tiles);
  if constexpr (Tile::kHeldTiles > 0) {
    // A block has the same tile of some batch elements after the others.
    const uint32_t tiles = order.head_tiles * problem.kv_heads;
    if (tiles <= max_blocks) order.blocks = std::min(order.blocks, max_blocks / tiles * tiles);
    return order;
  }
  order.turn = order.blocks * 3 / 8;
  const bool limited_left = problem.band.left < kUnlimited;
  const bool limited_right = problem.band.right < kUnlimited;
  // What ranges hide is not known here: most masks that are not uniform are causal.
  const bool has_ranges = problem.ranges.row_blocks != nullptr;
  const bool is_uniform = limited_left == limited_right && !has_ranges;
  if (order.head_tiles == 1 || is_uniform) return order;
  order.last_is_longest = limited_right || !limited_left;
  // Keys and values of a section fit in the L2 (50 MB, shared with everything else), or else at
  // most 16 query heads are read at a time: their blocks run in step, so each key tile still comes
  // from memory once a round.
  constexpr int64_t kSectionBytes = 32 << 20;
  const int64_t few_heads = (16 + group - 1) / group;
  const int64_t bytes = int64_t{problem.kv_len} * (problem.head_dim + problem.value_dim) * 2;
  const int64_t fitting = kSectionBytes / std::max<int64_t>(bytes, 1);
  order.section_heads =
      static_cast<uint32_t>(std::min<int64_t>(std::max(fitting, few_heads), order.heads));
  order.by_section_tiles = Divisor(order.section_heads * order.head_tiles);
  order.by_section_heads = Divisor(order.section_heads);
  // Without a rest there is no such section.
  order.by_last_heads = Divisor(std::max(order.heads % order.section_heads, 1u));
  return order;
}

}  // namespace detail

// Whether the kernel takes a call of these shapes and strides, given a head size that it has tiles
// for. The order of dimensions does not matter, but every stride must be a multiple of 16 bytes.
inline bool takes(const ForwardParams& params) {
  const Problem& problem = params.problem;
  if (!takes_sizes(problem)) return false;
  const int64_t units = (int64_t{problem.q_len} + 63) / 64;
  const int64_t heads = batch_size(problem) * problem.q_heads;
  if (heads != 0 && units >= detail::kMaxTiles / heads) return false;
  detail::ForwardMaps maps;
  return detail::map_forward(params, maps);
}

namespace detail {

// Blocks of a team that shares keys (KeyShares): a divisor of the kv heads, so that each member has
// another one, which leaves few blocks without a team.
inline int32_t team_size(int32_t kv_heads, uint32_t blocks) {
  constexpr uint32_t kMost = 16;  // measured: no faster than 8
  for (uint32_t size = std::min(kMost, blocks); size > 1; --size) {
    const uint32_t idle = blocks % size;
    if (kv_heads % size == 0 && idle * 20 <= blocks) return static_cast<int32_t>(size);
  }
  return 1;
}

// `start_capture`: see launch_forward().
template <Math kMath, class Tile>
Status forward_args(const ForwardParams& params, int start_capture, int multiprocessors,
                    ForwardArgs& args) {
  const Problem& problem = params.problem;
  ForwardMaps maps;
  if (!map_forward(params, maps)) {
    return error_status("the Hopper forward kernel does not take these strides: ask takes() first");
  }
  if (problem.kv_len == 0) maps.k = maps.v = maps.q;  // never read, but a map cannot be empty
  if constexpr (Tile::kHeldTiles > 0) {
    constexpr int kMostKeys = Tile::kHeldTiles * Tile::kKeys;
    if (problem.kv_len > kMostKeys) {
      return error_status("the score program was compiled for at most %d keys", kMostKeys);
    }
    const Capture& capture = params.captures.of[start_capture];
    for (int axis = 0; axis < problem.num_batch_axes; ++axis) {
      if (problem.batch_extent[axis] > 1 && capture.batch_stride[axis] != 0) {
        return error_status("array %d of the score program was compiled as one for the batch",
                            start_capture);
      }
    }
  }

  args.unit = unit_shape(problem, params.program != nullptr && !Tile::kShares);
  const int positions = 1 << args.unit.log2_positions;
  int box_keys = Tile::kKeys;
  if (params.pages.table != nullptr) {
    args.pages.in = params.pages;
    args.pages.log2_box = params.pages.log2_size;
    while (Tile::kKeys % (1 << args.pages.log2_box) != 0) --args.pages.log2_box;
    box_keys = 1 << args.pages.log2_box;
  }
  // Keys that blocks share are read once, at 4.5 TB/s as boxes and 4.15 with their neighbours.
  constexpr Fetch kKeyFetch = Tile::kShares ? Fetch::kBox : Fetch::kNeighbours;
  const struct {
    TensorMap& map;
    const MappedTensor& tensor;
    int box_length;
    int box_heads;
    Fetch fetch;
  } operands[4] = {{args.q, maps.q, positions, args.unit.heads, Fetch::kNeighbours},
                   {args.k, maps.k, box_keys, 1, kKeyFetch},
                   {args.v, maps.v, box_keys, 1, kKeyFetch},
                   {args.out, maps.out, positions, args.unit.heads, Fetch::kNeighbours}};
  for (const auto& [map, tensor, box_length, box_heads, fetch] : operands) {
    Status status = encode(map, tensor, kMath, box_length, box_heads, fetch, Tile::kPanelColumns);
    if (!status.ok()) return status;
  }
  if constexpr (Tile::kLoadsStarts) {
    Status status =
        encode_starts(args.starts, problem, params.captures, start_capture, kMath, 64, maps.q);
    if (!status.ok()) return status;
  }
  for (int axis = 0; axis < kBatchDims; ++axis) {
    args.q_batch_step[axis] = maps.q.batch_step[axis];
    args.k_batch_step[axis] = maps.k.batch_step[axis];
    args.v_batch_step[axis] = maps.v.batch_step[axis];
    args.out_batch_stride[axis] = maps.out.stride[3 + axis];
  }
  args.group = problem.q_heads / problem.kv_heads;
  args.by_units = Divisor(args.group / args.unit.heads);
  args.by_kv_heads = Divisor(problem.kv_heads);
  args.by_inner_batch = Divisor(static_cast<uint32_t>(maps.batch.extent[0]));
  const int64_t batch = batch_size(problem);
  args.order = tile_order<Tile>(problem, args.unit, batch, multiprocessors);
  args.order.batch_fastest =
      Tile::kHeldTiles == 0 &&
      (start_capture < 0 || problem.head_dim > kSmallHead ||
       start_bytes(problem, params.captures.of[start_capture]) > kFewStartBytes);
  args.problem = problem;
  args.lse = params.lse;
  args.out_data = static_cast<uint16_t*>(params.out.data);
  args.out_seq_stride = params.out.seq_stride;
  args.out_head_stride = params.out.head_stride;
  args.scale_log2 = problem.scale * kLog2E;
  args.captures = params.captures;
  if (problem.ranges.row_blocks != nullptr && draws_tiles<Tile>) {
    args.drawn = static_cast<uint32_t*>(params.workspace);
  }

  if constexpr (Tile::kShares) {
    const ForwardWorkspace layout = forward_workspace(problem);
    char* const workspace = static_cast<char*>(params.workspace);
    args.order.blocks = std::min(multiprocessors, kMaxSharingBlocks);
    args.sharing.slices = static_cast<int32_t>(batch * args.order.head_tiles);
    args.sharing.team = team_size(problem.kv_heads, args.order.blocks);
    args.sharing.rows = static_cast<int32_t>(layout.rows);
    args.sharing.out = reinterpret_cast<float*>(workspace + layout.out);
    args.sharing.lse = reinterpret_cast<float*>(workspace + layout.lse);
  }
  return {};
}

// The kernel's shared memory has been allowed. `merge` is for tiles that share keys,
// `start_capture` for those that load what products start from. `cleared`: a kernel launched before
// this one has cleared the counter of drawn tiles.
template <Math kMath, class Tile>
Status launch_forward(Kernel<ForwardArgs> kernel, Kernel<ForwardArgs> merge,
                      const ForwardParams& params, cudaStream_t stream, int start_capture = -1,
                      bool cleared = false) {
  using Traits = ForwardTraits<Tile, kMath, BandMask>;
  const Problem& problem = params.problem;
  if (batch_size(problem) == 0 || problem.q_heads == 0 || problem.q_len == 0) return {};

  int multiprocessors = 0;
  if (Status status = multiprocessors_of_gpu(&multiprocessors); !status.ok()) return status;
  ForwardArgs args{};
  if (Status status = forward_args<kMath, Tile>(params, start_capture, multiprocessors, args);
      !status.ok()) {
    return status;
  }
  cudaError_t error = cudaSuccess;
  Start start = Start::kAfter;
  if (args.drawn != nullptr) {
    if (!cleared) {
      error = launch(Kernel<uint32_t*>(clear_kernel), Start::kAfter, Grid{1}, 32, 0, stream,
                     args.drawn);
    }
    start = Start::kBeside;
  }
  if (error == cudaSuccess) {
    error = launch(kernel, start, {args.order.blocks}, Traits::kThreads, Traits::kSharedBytes,
                   stream, args);
  }
  if (Status status = cuda_status(error, "launching the forward kernel"); !status.ok()) {
    return status;
  }
  if constexpr (Tile::kShares) {
    const unsigned merges = (args.order.blocks - 1) * merges_of_tile(args.sharing.rows);
    if (merges > 0) {
      error = launch(merge, Start::kBeside, {merges}, kMergeThreads, 0, stream, args);
    }
  }
  return cuda_status(error, "launching the merge of the forward pass");
}

}  // namespace detail

// Runs one tile configuration; `forward` below chooses it.
template <Math kMath, class Tile>
Status forward_with(const ForwardParams& params, cudaStream_t stream) {
  using Traits = ForwardTraits<Tile, kMath, BandMask>;
  const Kernel<ForwardArgs> kernel = forward_kernel<Traits, ScaledScores>;
  Kernel<ForwardArgs> merge(static_cast<const void*>(nullptr));
  if constexpr (Tile::kShares) merge = merge_kernel<Traits, ScaledScores>;
  if (Status status = allow_shared_memory<Traits>(kernel.handle, Traits::kSharedBytes);
      !status.ok())
    return status;
  return detail::launch_forward<kMath, Tile>(kernel, merge, params, stream);
}

namespace detail {

// About how many keys a row sees.
inline int64_t mean_keys(const Problem& problem) {
  const Band& band = problem.band;
  const int64_t keys = problem.kv_len;
  const bool limited_left = band.left < kUnlimited;
  const bool limited_right = band.right < kUnlimited;
  if (limited_left != limited_right) return keys / 2;
  if (!limited_left) return keys;
  return std::min<int64_t>(keys, std::max<int64_t>(int64_t{band.left} + band.right + 1, 0));
}

template <Math kMath, class First, class... Rest>
Status forward_in(Choices<First, Rest...>, const ForwardParams& params, int64_t keys,
                  cudaStream_t stream) {
  if constexpr (sizeof...(Rest) > 0) {
    const Problem& problem = params.problem;
    if (problem.q_len > First::kMaxQueries || keys > First::kMaxKeys ||
        !First::suits(query_units(problem.q_len, problem.q_heads, problem.kv_heads))) {
      return forward_in<kMath>(Choices<Rest...>{}, params, keys, stream);
    }
  }
  return forward_with<kMath, typename First::Tile>(params, stream);
}

}  // namespace detail

// kHeadDim and kValueDim: a row of tile_config.h at least as large as the problem's head sizes.
template <Math kMath, int kHeadDim, int kValueDim = kHeadDim>
Status forward(const ForwardParams& params, cudaStream_t stream) {
  using For = ForwardTileFor<kHeadDim, kValueDim>;
  if (shares_keys(params.problem)) {
    return fits_one_unit(params.problem)
               ? forward_with<kMath, typename For::OneUnit>(params, stream)
               : forward_with<kMath, typename For::TwoUnits>(params, stream);
  }
  using Tiles = typename For::Tiles;
  return detail::forward_in<kMath>(Tiles{}, params, detail::mean_keys(params.problem), stream);
}

namespace detail {

// Of calls whose blocks share keys: their rows are of many heads, and a merge follows.
template <Math kMath, int kHeadDim, int kValueDim>
std::vector<ProgramKernel> sharing_program_kernels(const ProgramTraits& program) {
  ProgramKernelList list(program);
  const typename ForwardSharingTiles<kHeadDim, kValueDim>::Tiles tiles;
  for_each_tile(tiles, [&](int number, auto tile) {
    using Tile = decltype(tile);
    if (Tile::kWarpGroups > 1 && program.shared_units < 2) return;
    using Contiguous = ForwardTraits<Tile, kMath, BandMask>;
    using Paged = ForwardTraits<Tile, kMath, BandMask, PagedKeys<Tile::kKeys>>;
    const std::string arguments = "<" +
                                  (program.paged ? type_name<Paged>() : type_name<Contiguous>()) +
                                  ", jaxflash::sm90::ProgramScores<jaxflash::Program, true>>";
    static_assert(Contiguous::kSharedBytes == Paged::kSharedBytes, "launched alike");
    ProgramKernel* const kernel =
        list.add<Tile>(number, "sm90/forward_kernel.cuh", Contiguous::kSharedBytes,
                       "jaxflash::sm90::forward_kernel" + arguments);
    if (kernel == nullptr) return;
    kernel->merge_header = "sm90/forward/merge_kernel.cuh";
    kernel->merge_name = "jaxflash::sm90::merge_kernel" + arguments;
  });
  return list.take();
}

}  // namespace detail

namespace detail {

// Whether tiles of fewer rows are faster, because the units of a kv head fill them better. `cost`:
// of a row, in percent.
template <class Choice, class... Tiles>
bool takes_fewer_rows(ProgramTiles<Tiles...>, int64_t units, int cost) {
  return Choice::kFewerWarpGroups > 0 &&
         fill_better(units, Choice::kFewerWarpGroups, cost, std::max({Tiles::kWarpGroups...}));
}

// Whether rows see few keys, and those of some warpgroups fewer than those of others, for which
// they would wait in turns. At head size 128, without turns and in turns: 8 documents of 512,
// causal, 0.116 ms and 0.127, 2 of 2048 0.284 and 0.292, and not causal 0.467 and (two warpgroups)
// 0.493; with a soft cap, causal, 512 tokens 0.114 and 0.118, but 4096 that are not causal 1.003
// and 0.989. Nothing says how many segments there are.
inline bool see_few_keys(const ProgramTraits& program) {
  constexpr int kFewKeys = 3072;
  const CallSizes& sizes = program.sizes;
  if (program.ranges) return sizes.sequences == 0 || sizes.kv_len / sizes.sequences <= kFewKeys;
  return program.one_sided && sizes.kv_len > 128 && sizes.kv_len <= 1024;
}

}  // namespace detail

// The kernels for a score program: see Launcher.
template <Math kMath, int kHeadDim, int kValueDim = kHeadDim>
std::vector<ProgramKernel> forward_program_kernels(const ProgramTraits& program) {
  if (program.paged || program.shared_units > 0) {
    return detail::sharing_program_kernels<kMath, kHeadDim, kValueDim>(program);
  }
  ProgramKernelList list(program);
  using Choice = ForwardProgramTiles<kHeadDim, kValueDim>;
  const CallSizes& sizes = program.sizes;
  const bool of_distance = program.start_capture == kDistanceTerms;
  const int64_t units = query_units(sizes.q_len, sizes.q_heads, sizes.kv_heads);
  for_each_tile(typename Choice::Tiles{}, [&](int number, auto tile) {
    using Tile = decltype(tile);
    if constexpr (Tile::kKeyTerms && kMath != Math::kBFloat16) return;
    constexpr int kCost = Tile::kLoadsStarts ? Choice::kFewerStartsCost : Choice::kFewerCost;
    if (Tile::kUnits > Choice::kFewerWarpGroups &&
        detail::takes_fewer_rows<Choice>(typename Choice::Tiles{}, units, kCost)) {
      return;
    }
    if (program.head_dim > Tile::kHeadDim) return;
    if (!Choice::template suits<Tile>(sizes, units, program.one_sided)) return;
    // What a mask shows comes in blocks of 64 keys.
    if (program.walks && Tile::kKeys % kRangeBlock != 0) return;
    if constexpr (Tile::kLoadsStarts) {
      if (program.start_capture < 0 || (program.ranges && Tile::kHeldTiles > 0)) return;
      if (program.walks && Tile::kBatches > 1) return;
    } else if constexpr (Tile::kKeyTerms) {
      if ((program.start_capture != kKeyTerms && !of_distance) || program.ranges) return;
    } else {
      const bool is_short =
          program.unit_slope || (program.bounded && needs_no_reference<Tile, kMath>);
      if (!is_short && number < Choice::kWithSlope) return;
      if (program.ranges && number < Choice::kWithSlope) return;
      if (detail::see_few_keys(program)) {
        if (number < Choice::kWithFewKeys) return;
      } else if (number == Choice::kWithFewKeys && number > Choice::kWithSlope) {
        return;  // the one before it, without turns
      }
    }
    using Traits = ForwardTraits<Tile, kMath, BandMask>;
    const char* const scores = Tile::kKeyTerms && of_distance ? "DistanceScores" : "ProgramScores";
    list.add<Tile>(number, "sm90/forward_kernel.cuh", Traits::kSharedBytes,
                   "jaxflash::sm90::forward_kernel<" + type_name<Traits>() +
                       ", jaxflash::sm90::" + scores + "<jaxflash::Program>>");
  });
  return list.take();
}

template <Math kMath, int kHeadDim, int kValueDim = kHeadDim>
Status forward_program(const ForwardParams& params, const LoadedKernel& kernel,
                       cudaStream_t stream) {
  const auto launch_one = [&](auto tiles, const LoadedTile& of_tile, const ForwardParams& params,
                              bool cleared) {
    return use_tile(tiles, of_tile.tile, [&](auto tile) {
      return detail::launch_forward<kMath, decltype(tile)>(
          Kernel<ForwardArgs>(of_tile.handle), Kernel<ForwardArgs>(kernel.merge), params, stream,
          kernel.start_capture, cleared);
    });
  };
  if (kernel.merge != nullptr) {
    const typename ForwardSharingTiles<kHeadDim, kValueDim>::Tiles sharing;
    return launch_one(sharing, kernel, params, false);
  }
  const typename ForwardProgramTiles<kHeadDim, kValueDim>::Tiles tiles;
  if (!kernel.has_walk()) return launch_one(tiles, kernel, params, false);
  ForwardParams walked = params;
  walked.problem.ranges.has_walk = true;
  if (Status status = launch_one(tiles, kernel.walk, walked, false); !status.ok()) return status;
  // One of the two returns at once, so that one clear is enough. But each has chosen its own tile:
  // the walk's may be one that draws nothing, and so has cleared nothing.
  const bool cleared =
      use_tile(tiles, kernel.walk.tile, [](auto tile) { return draws_tiles<decltype(tile)>; });
  return launch_one(tiles, kernel, walked, cleared);
}

}  // namespace jaxflash::sm90
