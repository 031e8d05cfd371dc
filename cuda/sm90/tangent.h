// Host side of the Hopper tangent pass, whose kernels are compiled at run time: which calls it
// takes, and the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "attention.h"
#include "common/launch.h"
#include "common/logarithms.h"
#include "common/program_kernels.h"
#include "common/status.h"
#include "common/workspace.h"
#include "sm90/hardware/tensor_map.h"
#include "sm90/tangent_traits.h"

namespace jaxflash::sm90 {

namespace detail {

// q, tq, k, tk, v, tv as TMA sees them.
struct TangentMaps {
  BatchAxes batch;
  MappedTensor operands[6];
};

inline bool map_tangent(const TangentParams& params, TangentMaps& maps) {
  const Operand operands[6] = {{&params.q, true, false},  {&params.tq, true, false},
                               {&params.k, false, false}, {&params.tk, false, false},
                               {&params.v, false, true},  {&params.tv, false, true}};
  return map_operands(params.problem, operands, maps.batch, maps.operands);
}

// Rows of out are read and those of its tangent written 16 bytes at a time.
inline bool has_aligned_rows(const Tensor& tensor, const Problem& problem) {
  if (reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0) return false;
  bool aligned = tensor.seq_stride % 8 == 0 && tensor.head_stride % 8 == 0;
  for (int axis = 0; axis < problem.num_batch_axes; ++axis) {
    aligned &= tensor.batch_stride[axis] % 8 == 0;
  }
  return aligned;
}

}  // namespace detail

inline bool takes(const TangentParams& params) {
  const Problem& problem = params.problem;
  if (!takes_sizes(problem)) return false;
  constexpr int64_t kMaxTiles = (int64_t{1} << 31) - 1;  // blocks of a grid
  const int64_t tiles = (int64_t{problem.q_len} + 63) / 64;
  const int64_t heads = batch_size(problem) * problem.q_heads;
  if (heads != 0 && tiles > kMaxTiles / heads) return false;
  if (!detail::has_aligned_rows(params.out, problem)) return false;
  if (!detail::has_aligned_rows(params.tout, problem)) return false;
  detail::TangentMaps maps;
  return detail::map_tangent(params, maps);
}

template <Math kMath, int kHeadDim, int kValueDim = kHeadDim>
Status tangent(const TangentParams&, cudaStream_t) {
  return error_status("tangents are computed by the kernels of a score program");
}

// The kernels for a score program: see Launcher.
template <Math kMath, int kHeadDim, int kValueDim = kHeadDim>
std::vector<ProgramKernel> tangent_program_kernels(const ProgramTraits& program) {
  ProgramKernelList list(program);
  for_each_tile(typename TangentTiles<kHeadDim, kValueDim>::Tiles{}, [&](int number, auto tile) {
    using Tile = decltype(tile);
    using Traits = TangentTraits<Tile, kMath>;
    list.add<Tile>(number, "sm90/tangent_kernel.cuh", Traits::kSharedBytes,
                   "jaxflash::sm90::tangent_kernel<" + type_name<Traits>() +
                       ", jaxflash::BandMask, "
                       "jaxflash::sm90::ProgramScores<jaxflash::Program>>");
  });
  return list.take();
}

template <Math kMath, int kHeadDim, int kValueDim = kHeadDim>
Status tangent_program(const TangentParams& params, const LoadedKernel& kernel,
                       cudaStream_t stream) {
  const auto run = [&](auto tile, const void* handle) -> Status {
    using Tile = decltype(tile);
    using Traits = TangentTraits<Tile, kMath>;
    const Problem& problem = params.problem;
    const int64_t heads = batch_size(problem) * problem.q_heads;
    if (heads == 0 || problem.q_len == 0) return {};
    detail::TangentMaps maps;
    if (!detail::map_tangent(params, maps)) {
      return error_status(
          "the Hopper tangent kernel does not take these strides: ask takes() first");
    }
    if (problem.kv_len == 0) {  // never read, but a map cannot be empty
      for (int i = 2; i < 6; ++i) maps.operands[i] = maps.operands[0];
    }
    TangentArgs args{};
    MappedOperand* const operands[6] = {&args.q[0], &args.q[1], &args.k[0],
                                        &args.k[1], &args.v[0], &args.v[1]};
    constexpr int kBoxLengths[3] = {64, Tile::kKeys, Traits::kPieceKeys};
    for (int i = 0; i < 6; ++i) {
      if (Status status = encode(*operands[i], maps.operands[i], kMath, kBoxLengths[i / 2]);
          !status.ok()) {
        return status;
      }
    }
    args.head_tiles = (problem.q_len + Traits::kTileRows - 1) / Traits::kTileRows;
    args.by_head_tiles = Divisor(args.head_tiles);
    args.by_q_heads = Divisor(problem.q_heads);
    args.by_group = Divisor(problem.q_heads / problem.kv_heads);
    args.by_inner_batch = Divisor(static_cast<uint32_t>(maps.batch.extent[0]));
    args.last_is_longest = problem.band.right < kUnlimited;
    args.problem = problem;
    args.problem.ranges.has_walk = kernel.has_walk();
    args.out = params.out;
    args.tout = params.tout;
    args.lse = params.lse;
    args.tlse = params.tlse;
    args.scale_log2 = problem.scale * kLog2E;
    args.captures = params.captures;
    const auto blocks = static_cast<unsigned>(heads * args.head_tiles);
    return cuda_status(launch(Kernel<TangentArgs>(handle), Start::kAfter, {blocks},
                              Traits::kThreads, Traits::kSharedBytes, stream, args),
                       "launching the tangent kernel");
  };
  const auto run_one = [&](const LoadedTile& loaded) {
    return use_tile(typename TangentTiles<kHeadDim, kValueDim>::Tiles{}, loaded.tile,
                    [&](auto tile) { return run(tile, loaded.handle); });
  };
  const Status status = kernel.has_walk() ? run_one(kernel.walk) : Status{};
  return status.ok() ? run_one(kernel) : status;
}

}  // namespace jaxflash::sm90
