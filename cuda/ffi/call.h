// A call: its attributes and operands, checked and brought into the structs of attention.h.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ffi/arrays.h"
#include "ffi/attributes.h"

namespace jaxflash {

// What kernels depend on beside the program and the problem, as far as a pass has it; see
// ProgramDescription.
struct KernelOptions {
  bool deterministic = false;
  bool paged = false;
  int64_t shared_units = 0;
  ffi::Span<const int64_t> sizes = {};
  int64_t start_capture = -1;
};

// Checks what kernels are compiled for, and fills in all but the texts and the loads.
ffi::Error describe_program(Pass pass, const PassAttributes& attributes,
                            const KernelOptions& options, ProgramDescription* description);

// The loads, key sums last.
ffi::ErrorOr<std::vector<CaptureLoad>> loads_of(const BackwardAttributes& attributes);

// The smallest and the largest mean what lies beyond them.
int32_t clamp_side(int64_t side);

// Which arrays of Ranges a call has.
struct RangeArrays {
  MaskKind mask;
  bool visits;

  RangeArrays() : mask(MaskKind::kBand), visits(false) {}
  // Whose mask is one.
  explicit RangeArrays(const ProblemAttributes& attributes)
      : mask(static_cast<MaskKind>(attributes.mask)),
        visits(is_of_program(mask) && attributes.walks) {}
  size_t count() const {
    return mask == MaskKind::kBand ? 0 : size_t{5} + 2 * visits + 2 * has_ids(mask);
  }
};

void set_sizes(int64_t q_len, int64_t kv_len, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
               int64_t value_dim, Problem* problem);

// Checks q, k, v against the output, whose batch axes are of full extent, and fills the problem.
ffi::Error describe(const ProblemAttributes& attributes, ffi::AnyBuffer q, ffi::AnyBuffer k,
                    ffi::AnyBuffer v, Shape out, ffi::RemainingArgs optional, Problem* problem);

// The same where keys and values lie in pages; fills `pages` too.
ffi::Error describe_paged(const ProblemAttributes& attributes, ffi::AnyBuffer q,
                          ffi::AnyBuffer key_pages, ffi::AnyBuffer value_pages,
                          ffi::Buffer<ffi::S32> table, Shape out, ffi::RemainingArgs optional,
                          Problem* problem, Pages* pages);

// A pool of pages as one array (keys of all pages, heads, dim).
Tensor pool_tensor(ffi::AnyBuffer pages);

// A program's operands, from the one of that index on: numbers of batch elements and heads, if it
// asks for them, then the captured arrays, whose leading axes are the batch axes or 1.
class ProgramOperands {
 public:
  // Reads the shapes, and fills in the ranges that follow.
  ffi::Error take(const PassAttributes& attributes, RangeArrays ranges, Shape full,
                  ffi::RemainingArgs optional, size_t first, Problem* problem);

  // Captured arrays alone, of these ranks beside the batch axes.
  ffi::Error take_captures(ffi::Span<const int64_t> ranks, Shape full, ffi::RemainingArgs optional,
                           size_t first);

  // For BatchAxes.
  void add_shapes(std::vector<Shape>* shapes) const;

  const ffi::AnyBuffer& capture(size_t i) const { return captures_[i]; }

  Captures describe(size_t batch_rank, const BatchAxes& axes) const;

 private:
  std::optional<ffi::Buffer<ffi::S32>> batch_numbers_, head_numbers_;
  std::vector<ffi::AnyBuffer> captures_;
};

// The results after the workspace: key sums, float32 (*B, N, S), and gradients of captures in the
// order of their loads, float32 or as narrow as the capture, whose batch axes are full or, where
// they are summed over, 1.
class CaptureGradientResults {
 public:
  ffi::Error take(const BackwardAttributes& attributes, const ProgramOperands& operands,
                  const Problem& problem, Shape full, ffi::RemainingRets results);

  bool wanted() const { return !results_.empty() || !key_sums_.empty(); }

  // For BatchAxes.
  void add_shapes(std::vector<Shape>* shapes) const;

  void describe(size_t batch_rank, const BatchAxes& axes,
                CaptureGradientArray (&arrays)[kMaxCaptures]) const;
  // What the backward kernel sums, given where gradients go.
  void describe(const CaptureGradientArray (&arrays)[kMaxCaptures], BackwardParams* params) const;
  void describe(Shape full, const BatchAxes& axes, StoredGradient* stored) const;

 private:
  struct Gradient {
    CaptureLoad load;  // the first of its capture
    ffi::AnyBuffer buffer;
  };
  std::vector<Gradient> results_;
  std::vector<ffi::AnyBuffer> key_sums_;
};

}  // namespace jaxflash
