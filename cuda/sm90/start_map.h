// Host side of what products start from, where TMA loads it: a dense capture of a score program.
#pragma once

#include <algorithm>

#include "common/status.h"
#include "problem.h"
#include "sm90/hardware/tensor_map.h"

namespace jaxflash::sm90 {

// A capture as a matrix: all of its rows, which have an element of 16 bits for each key.
inline MappedTensor map_rows(const Problem& problem, const Capture& capture) {
  int64_t elements = 1;
  for (const int32_t extent : capture.extent) elements *= std::max(extent, 1);
  for (int axis = 0; axis < problem.num_batch_axes; ++axis) {
    elements = std::max(elements, capture.batch_stride[axis] * problem.batch_extent[axis]);
  }
  return {const_cast<void*>(capture.data),
          {problem.kv_len, elements / problem.kv_len, 1, 1, 1},
          {1, problem.kv_len, 0, 0, 0},
          {0, 0}};
}

inline int64_t start_bytes(const Problem& problem, const Capture& capture) {
  if (problem.kv_len == 0) return 0;
  const MappedTensor rows = map_rows(problem, capture);
  return rows.extent[0] * rows.extent[1] * 2;
}

// `start_capture`: see ProgramDescription. `unread`: what takes its place where it is empty, which
// a map cannot be.
inline Status encode_starts(TensorMap& map, const Problem& problem, const Captures& captures,
                            int start_capture, Math math, int box_rows,
                            const MappedTensor& unread) {
  const bool empty = problem.q_len == 0 || problem.kv_len == 0;
  const MappedTensor starts = empty ? unread : map_rows(problem, captures.of[start_capture]);
  if (const MapFault fault = map_fault(starts); fault.wanted != nullptr) {
    return error_status("array %d of a score program needs %s, got %lld", start_capture,
                        fault.wanted, static_cast<long long>(fault.got));
  }
  return encode(map, starts, math, box_rows);
}

}  // namespace jaxflash::sm90
