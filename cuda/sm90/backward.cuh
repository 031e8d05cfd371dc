// Host side of the Hopper backward pass: which calls it takes, and the launches. Three kernels:
// delta, the main one, and the conversion of dq.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "attention.h"
#include "common/convert_dq.cuh"
#include "common/launch.h"
#include "common/logarithms.h"
#include "common/program_kernels.h"
#include "common/status.h"
#include "common/workspace.h"
#include "delta.h"
#include "sm90/backward_kernel.cuh"
#include "sm90/hardware/tensor_map.h"
#include "sm90/start_map.h"
#include "sm90/stored_gradient.h"
#include "sm90/tile_config.h"

namespace jaxflash::sm90 {

namespace detail {

// The operands of a call as TMA sees them.
struct BackwardMaps {
  BatchAxes batch;
  MappedTensor q, k, v, dout, dk, dv;
};

inline bool map_backward(const BackwardParams& params, BackwardMaps& maps) {
  const Problem& problem = params.problem;
  const Tensor* const tensors[6] = {&params.q,    &params.k,  &params.v,
                                    &params.dout, &params.dk, &params.dv};
  int64_t strides[6][kBatchDims];
  if (!merge_batch_axes(problem, tensors, maps.batch, strides)) return false;
  const auto map = [&](int tensor, int64_t head_size, int64_t length, int64_t heads) {
    return map_tensor(*tensors[tensor], head_size, length, heads, maps.batch, strides[tensor]);
  };
  maps.q = map(0, problem.head_dim, problem.q_len, problem.q_heads);
  maps.k = map(1, problem.head_dim, problem.kv_len, problem.kv_heads);
  maps.v = map(2, problem.value_dim, problem.kv_len, problem.kv_heads);
  maps.dout = map(3, problem.value_dim, problem.q_len, problem.q_heads);
  maps.dk = map(4, problem.head_dim, problem.kv_len, problem.kv_heads);
  maps.dv = map(5, problem.value_dim, problem.kv_len, problem.kv_heads);
  return mappable(maps.q) && mappable(maps.k) && mappable(maps.v) && mappable(maps.dout) &&
         mappable(maps.dk) && mappable(maps.dv);
}

// Whether a tile of kKeys keys has all keys of every row, so that what it computes of dq is all of
// it, and where it then goes.
inline bool map_direct_dq(const BackwardParams& params, int keys, MappedTensor& dq) {
  const Problem& problem = params.problem;
  const Band& band = problem.band;
  if (problem.ranges.keys_of_row != nullptr) return false;
  if (problem.q_len == 0 || problem.kv_len == 0 || problem.kv_len > keys) return false;
  if (band.q_lengths != nullptr || band.kv_lengths != nullptr) return false;
  // Every row sees a key, or else nobody would write its dq.
  const int diagonal = band.bottom_right ? problem.kv_len - problem.q_len : 0;
  if (band.left < kUnlimited) return false;
  if (band.right < kUnlimited && band.right + diagonal < 0) return false;
  BatchAxes batch, with_dq;
  const Tensor* const tensors[6] = {&params.q,    &params.k,  &params.v,
                                    &params.dout, &params.dk, &params.dv};
  const Tensor* const all[7] = {&params.q,  &params.k,  &params.v, &params.dout,
                                &params.dk, &params.dv, &params.dq};
  int64_t strides[6][kBatchDims], all_strides[7][kBatchDims];
  if (!merge_batch_axes(problem, tensors, batch, strides)) return false;
  if (!merge_batch_axes(problem, all, with_dq, all_strides)) return false;
  if (batch.count != with_dq.count || batch.extent[0] != with_dq.extent[0]) return false;
  dq = map_tensor(params.dq, problem.head_dim, problem.q_len, problem.q_heads, batch,
                  all_strides[6]);
  for (int axis = 0; axis < batch.count; ++axis) {
    if (dq.batch_step[axis] == 0) return false;
  }
  return mappable(dq);
}

// Of one kv head.
template <class Tile>
uint32_t key_tiles_of(const Problem& problem) {
  return (problem.kv_len + Tile::kTileKeys - 1) / Tile::kTileKeys;
}

// The order of key tiles. See KeyTileOrder.
template <class Tile>
KeyTileOrder key_tile_order(const BackwardParams& params, const BackwardWorkspace& workspace) {
  const Problem& problem = params.problem;
  const uint32_t key_tiles = key_tiles_of<Tile>(problem);
  const uint32_t heads = static_cast<uint32_t>(batch_size(problem) * problem.kv_heads);
  const bool in_step = Tile::kBlocks == 1 && adds_in_step(problem, params.stored);
  const uint32_t elements = in_step ? params.stored.batch_sum : 1;
  const bool limited_left = problem.band.left < kUnlimited;
  const bool limited_right = problem.band.right < kUnlimited;
  // Rows that see keys up to a limit: the first keys are seen by most rows. Longest first, unless
  // the adds have an order: a block then starts at the rows that only later keys see, too, and
  // those have to come first. Ranges may have such a limit, of which the band does not tell.
  const bool may_end = limited_right || (problem.ranges.keys_of_row != nullptr && !limited_left);
  const bool descending = may_end ? params.deterministic : limited_left;
  const bool unequal = limited_left != limited_right;
  if ((!unequal && !params.deterministic) || key_tiles == 1) {
    return {problem, key_tiles, heads, 1, descending, elements};
  }
  // Heads in step balance tiles of unequal length, and keep blocks from queuing for the same rows
  // where adds have an order. As many heads at a time as the L2 (50 MB, shared with everything
  // else) holds the dq, q and dout of: of a group the head that blocks are at. The tiles of the
  // next section fill up the last round of this one.
  constexpr int64_t kSectionBytes = 32 << 20;
  const int64_t row_bytes = workspace.dims * 4 + (problem.head_dim + problem.value_dim) * 2;
  const int64_t fitting =
      kSectionBytes / std::max<int64_t>(workspace.rows * row_bytes * elements, 1);
  const auto section_heads =
      static_cast<uint32_t>(std::clamp<int64_t>(fitting, 1, heads / elements));
  return {problem, key_tiles, heads, section_heads, descending, elements};
}

// Of the main kernel. `direct_dq`: where dq goes if it is stored; nullptr: it is added up.
// `start_capture`: see launch_backward_kernels().
template <Math kMath, class Tile>
Status backward_args(const BackwardParams& params, const BackwardWorkspace& workspace,
                     const MappedTensor* direct_dq, int start_capture, BackwardArgs& args) {
  using Traits = BackwardTraits<Tile, kMath>;
  const Problem& problem = params.problem;
  BackwardMaps maps;
  if (!map_backward(params, maps)) {
    return error_status(
        "the Hopper backward kernel does not take these strides: ask takes() first");
  }
  if (problem.q_len == 0) {  // never read, but a map cannot be empty
    maps.q = maps.k;
    maps.dout = maps.v;
  }
  const struct {
    TensorMap& map;
    const MappedTensor& tensor;
    int box_length;
  } operands[6] = {
      {args.q, maps.q, Tile::kRows},           {args.k, maps.k, Tile::kKeys},
      {args.v, maps.v, Tile::kKeys},           {args.dout, maps.dout, Tile::kRows},
      {args.dk, maps.dk, Traits::kStoredKeys}, {args.dv, maps.dv, Traits::kStoredKeys}};
  for (const auto& [map, tensor, box_length] : operands) {
    Status status = encode(map, tensor, kMath, box_length);
    if (!status.ok()) return status;
  }
  if (direct_dq != nullptr) {
    Status status = encode(args.dq, *direct_dq, kMath, Traits::kDqPartRows, 1, Fetch::kNeighbours,
                           Traits::kDqPartDims);
    if (!status.ok()) return status;
  }
  if constexpr (Tile::kLoadsStarts) {
    Status status = encode_starts(args.starts, problem, params.captures, start_capture, kMath,
                                  Tile::kRows, maps.k);
    if (!status.ok()) return status;
  }
  if (!Traits::kPaired && !is_empty(problem, params.stored)) {
    Status status = encode_stored(args.stored_map, problem, params.stored, Tile::kRows);
    if (!status.ok()) return status;
    args.stored = params.stored;
    args.sum = {batch_sum_steps(params, workspace.bytes), !stores_alike(problem, params.stored),
                adds_in_step(problem, params.stored) || fits_cache(problem, params.stored)};
  }
  for (int axis = 0; axis < kBatchDims; ++axis) {
    args.q_batch_step[axis] = maps.q.batch_step[axis];
    args.k_batch_step[axis] = maps.k.batch_step[axis];
    args.v_batch_step[axis] = maps.v.batch_step[axis];
    args.dout_batch_step[axis] = maps.dout.batch_step[axis];
  }
  args.by_inner_batch = Divisor(static_cast<uint32_t>(maps.batch.extent[0]));
  args.deterministic = params.deterministic;
  args.direct_dq = direct_dq != nullptr;
  args.draw = problem.q_len > 0;
  args.order = key_tile_order<Tile>(params, workspace);
  args.problem = problem;
  args.scale_log2 = problem.scale * kLog2E;
  args.captures = params.captures;
  std::copy_n(params.key_sums, kMaxKeySums, args.key_sums);
  args.diagonal_sums = params.diagonal_sums;
  args.workspace = workspace;
  args.workspace_data = params.workspace;
  return {};
}

// dk and dv, and dq where it is direct. Without rows to add to, nothing has cleared the ticket, and
// dk and dv become 0.
template <Math kMath, class Tile>
Status launch_backward(Kernel<BackwardArgs> kernel, const BackwardParams& params,
                       const BackwardWorkspace& workspace, const MappedTensor* direct_dq,
                       int start_capture, cudaStream_t stream) {
  using Traits = BackwardTraits<Tile, kMath>;
  int multiprocessors = 0;
  if (Status status = multiprocessors_of_gpu(&multiprocessors); !status.ok()) return status;
  BackwardArgs args{};
  if (Status status = backward_args<kMath, Tile>(params, workspace, direct_dq, start_capture, args);
      !status.ok()) {
    return status;
  }
  const uint32_t tiles = args.order.key_tiles * args.order.heads;
  const Grid grid{std::min<uint32_t>(tiles, multiprocessors / Tile::kBlocks) * Tile::kBlocks,
                  Tile::kBlocks};
  // Without rows there was no delta kernel, and what came before may not be ours.
  const Start start = params.problem.q_len > 0 ? Start::kBeside : Start::kAfter;
  return cuda_status(
      launch(kernel, start, grid, Traits::kThreads, Traits::kSharedBytes, stream, args),
      "launching the backward kernel");
}

// All three kernels; the main one's shared memory has been allowed. `start_capture` is for tiles
// that load what products start from. `launch_walk(workspace)` launches what has to be launched
// before the main kernel.
template <Math kMath, class Tile, class LaunchWalk>
Status launch_backward_kernels(Kernel<BackwardArgs> kernel, const BackwardParams& params,
                               cudaStream_t stream, int start_capture,
                               const LaunchWalk& launch_walk) {
  const Problem& problem = params.problem;
  const BackwardWorkspace workspace = backward_workspace(problem);
  if constexpr (!BackwardTraits<Tile, kMath>::kPaired) {
    Status status = clear_stored(params, workspace.bytes, stream);
    if (!status.ok()) return status;
  }
  if (batch_size(problem) == 0 || problem.q_heads == 0) return Status{};
  MappedTensor dq;
  const bool direct =
      !BackwardTraits<Tile, kMath>::kPaired && map_direct_dq(params, Tile::kKeys, dq);
  BackwardWorkspace cleared = workspace;
  if (direct) cleared.dims = 0;  // no accumulator

  Status status = launch_delta(params, cleared, stream);
  if (status.ok() && problem.kv_len > 0) status = launch_walk(workspace);
  if (status.ok() && problem.kv_len > 0) {
    status = launch_backward<kMath, Tile>(kernel, params, workspace, direct ? &dq : nullptr,
                                          start_capture, stream);
  }
  if (!status.ok() || direct) return status;
  const uint32_t adds = key_tiles_of<Tile>(problem) * BackwardTraits<Tile, kMath>::kAddingWarps;
  return cuda_status(
      launch_convert_dq<kMath, DqOrder>(Start::kBeside, params, workspace, adds, stream),
      "launching the conversion of dq");
}

}  // namespace detail

// Whether the kernel takes a call of these shapes and strides, given a head size that it has tiles
// for. The order of dimensions does not matter, but every stride must be a multiple of 16 bytes.
inline bool takes(const BackwardParams& params) {
  const Problem& problem = params.problem;
  if (!takes_sizes(problem)) return false;
  // Positions in the order of tiles, and eight times the steps of a tile, stay within 31 bits.
  constexpr int64_t kMaxTiles = int64_t{1} << 30;
  constexpr int64_t kMaxSteps = int64_t{1} << 27;
  const int64_t tiles = (int64_t{problem.kv_len} + 63) / 64;
  const int64_t heads = batch_size(problem) * problem.kv_heads;
  if (heads != 0 && tiles >= kMaxTiles / heads) return false;
  const int64_t row_tiles = (int64_t{problem.q_len} + 63) / 64;
  if (problem.kv_heads != 0 && row_tiles * (problem.q_heads / problem.kv_heads) >= kMaxSteps) {
    return false;
  }
  detail::BackwardMaps maps;
  return detail::map_backward(params, maps);
}

// Runs one tile configuration; `backward` below chooses it.
template <Math kMath, class Tile>
Status backward_with(const BackwardParams& params, cudaStream_t stream) {
  using Traits = BackwardTraits<Tile, kMath>;
  const Kernel<BackwardArgs> kernel = backward_kernel<Traits, BandMask, ScaledLogits>;
  if (Status status = allow_shared_memory<Traits>(kernel.handle, Traits::kSharedBytes);
      !status.ok())
    return status;
  return detail::launch_backward_kernels<kMath, Tile>(
      kernel, params, stream, -1, [](const BackwardWorkspace&) { return Status{}; });
}

// kHeadDim and kValueDim: a row of tile_config.h at least as large as the problem's head sizes.
template <Math kMath, int kHeadDim, int kValueDim = kHeadDim>
Status backward(const BackwardParams& params, cudaStream_t stream) {
  return backward_with<kMath, typename BackwardTileFor<kHeadDim, kValueDim>::Type>(params, stream);
}

// A pair's ds makes room for dq before it could leave.
template <int kHeadDim, int kValueDim = kHeadDim>
inline constexpr GradientsBeside kGradientsBeside = {
    true, BackwardTileFor<kHeadDim, kValueDim>::Type::kBlocks == 1};

// The kernels for a score program: see Launcher.
template <Math kMath, int kHeadDim, int kValueDim = kHeadDim>
std::vector<ProgramKernel> backward_program_kernels(const ProgramTraits& program) {
  using Choice = BackwardProgramTiles<kHeadDim, kValueDim>;
  ProgramKernelList list(program);
  for_each_tile(typename Choice::Tiles{}, [&](int number, auto tile) {
    using Tile = decltype(tile);
    if constexpr (Tile::kLoadsStarts) {
      if (program.start_capture < 0) return;
    } else {
      if (!program.unit_slope && number < Choice::kWithSlope) return;
    }
    using Traits = BackwardTraits<Tile, kMath>;
    ProgramKernel* const kernel =
        list.add<Tile>(number, "sm90/backward_kernel.cuh", Traits::kSharedBytes,
                       "jaxflash::sm90::backward_kernel<" + type_name<Traits>() +
                           ", jaxflash::BandMask, "
                           "jaxflash::sm90::ProgramLogits<jaxflash::Program>>");
    // Beside a mask the warp that loads rows and starts spills 84 bytes, consumers none. Forward
    // and gradient with a bias and a mask array take 4.31 ms so, 5.21 with the next tile.
    if (Tile::kLoadsStarts && Tile::kRows == 64 && kernel != nullptr) kernel->harmless_spills += 64;
  });
  return list.take();
}

template <Math kMath, int kHeadDim, int kValueDim = kHeadDim>
Status backward_program(const BackwardParams& params, const LoadedKernel& kernel,
                        cudaStream_t stream) {
  const typename BackwardProgramTiles<kHeadDim, kValueDim>::Tiles tiles;
  BackwardParams own = params;
  own.problem.ranges.has_walk = kernel.has_walk();
  const auto launch_walk = [&](const BackwardWorkspace& workspace) -> Status {
    if (!kernel.has_walk()) return {};
    return use_tile(tiles, kernel.walk.tile, [&](auto tile) {
      return detail::launch_backward<kMath, decltype(tile)>(
          Kernel<BackwardArgs>(kernel.walk.handle), own, workspace, nullptr, kernel.start_capture,
          stream);
    });
  };
  return use_tile(tiles, kernel.tile, [&](auto tile) {
    return detail::launch_backward_kernels<kMath, decltype(tile)>(
        Kernel<BackwardArgs>(kernel.handle), own, stream, kernel.start_capture, launch_walk);
  });
}

}  // namespace jaxflash::sm90
