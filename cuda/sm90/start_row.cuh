// Where TMA finds what products start from, see start_map.h.
#pragma once

#include "common/divisor.h"
#include "common/program.cuh"

namespace jaxflash::sm90 {

// The number of a head's row, among all rows of the capture.
template <class Program>
__device__ __forceinline__ int start_row_of(const Captures& captures,
                                            const typename Program::Head& head,
                                            const typename Program::Row& row) {
  using Neighbour = typename Program::Neighbour;
  const void* data = captures.of[Program::kStartCapture].data;
  const int64_t elements = Program::neighbours(head, row) - static_cast<const Neighbour*>(data);
  return static_cast<int>(exact_quotient(elements, Program::neighbours_end(head)));
}
// That of a head's query at `position`. Of the forward or the backward kernel.
template <class Program, class Args>
__device__ __forceinline__ int start_row_of(const Args& args, int batch, int head, int position) {
  const int b = batch_number(args.captures, args.problem, batch);
  const int h = head_number(args.captures, head);
  const auto program_head = Program::head(args.captures, args.problem, batch, b, h);
  return start_row_of<Program>(args.captures, program_head, Program::row(program_head, position));
}

}  // namespace jaxflash::sm90
