// Host side of the Hopper kernel for gradients of captures, which is compiled at run time: which
// calls it takes, and its arguments.
#pragma once

#include "attention.h"
#include "common/logarithms.h"
#include "common/status.h"
#include "common/workspace.h"
#include "sm90/capture_gradient_traits.h"
#include "sm90/hardware/tensor_map.h"
#include "sm90/start_map.h"

namespace jaxflash::sm90 {

// q, dout, k, v as TMA sees them.
struct CaptureGradientMaps {
  BatchAxes batch;
  MappedTensor operands[4];
};

// False where TMA cannot read them in place.
inline bool map_capture_gradient(const BackwardParams& params, CaptureGradientMaps& maps) {
  const Operand operands[4] = {{&params.q, true, false},
                               {&params.dout, true, true},
                               {&params.k, false, false},
                               {&params.v, false, true}};
  return map_operands(params.problem, operands, maps.batch, maps.operands);
}

// Matrices of an element of 16 bits for each query and key; false where the gradient of a load is
// something else, or TMA cannot write it in place.
inline bool map_gradient(const Problem& problem, const CaptureLoad& load,
                         const CaptureGradient& plan, MappedTensor& tensor) {
  if (!load.narrow || load.query_axis != load.rank - 2 || load.key_axis != load.rank - 1) {
    return false;
  }
  const int64_t rows = plan.extent[load.query_axis], keys = plan.extent[load.key_axis];
  const int64_t all_rows = capture_gradient_elements(problem, plan, load.rank) / keys;
  tensor = {plan.data, {keys, rows, all_rows / rows, 1, 1}, {1, keys, rows * keys, 0, 0}, {0, 0}};
  return all_rows <= INT32_MAX && mappable(tensor);
}

// The maps of a plan that is not empty. `start_capture`: -1 where products do not start from what
// the load reads, or TMA does not load it.
inline Status add_gradient_maps(const BackwardParams& params, const CaptureLoad& load,
                                int start_capture, int rows, CaptureGradientArgs& args) {
  const Problem& problem = params.problem;
  if (start_capture >= 0) {
    Status status = encode_starts(args.starts, problem, params.captures, start_capture,
                                  problem.math, rows, MappedTensor{});
    if (!status.ok()) return status;
  }
  MappedTensor gradient;
  args.stores_tiles = map_gradient(problem, load, args.plan, gradient);
  return args.stores_tiles ? encode(args.gradient, gradient, problem.math, rows) : Status{};
}

// The plan, its maps and its parts are left to the caller. There are queries and keys.
inline Status capture_gradient_args(const BackwardParams& params, const CaptureGradientMaps& maps,
                                    int rows, int keys, CaptureGradientArgs& args) {
  const Problem& problem = params.problem;
  MappedOperand* const operands[4] = {&args.q, &args.dout, &args.k, &args.v};
  for (int i = 0; i < 4; ++i) {
    const int box_length = i < 2 ? rows : keys;
    if (Status status = encode(*operands[i], maps.operands[i], problem.math, box_length);
        !status.ok()) {
      return status;
    }
  }
  const BackwardWorkspace workspace = backward_workspace(problem);
  args.by_group = Divisor(problem.q_heads / problem.kv_heads);
  args.by_inner_batch = Divisor(static_cast<uint32_t>(maps.batch.extent[0]));
  args.problem = problem;
  args.captures = params.captures;
  args.lse = workspace.lse_of(params.workspace, 0);
  args.delta = workspace.delta_of(params.workspace, 0);
  args.rows = workspace.rows;
  args.scale_log2 = problem.scale * kLog2E;
  return {};
}

}  // namespace jaxflash::sm90
