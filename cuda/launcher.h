// What dispatch knows of a compiled variant. Every translation unit configured from instance.cu.in
// defines one; the generated variants.h lists them.
#pragma once

#include <string>
#include <vector>

#include "attention.h"

namespace jaxflash {

// The GPUs that the variant's machine code runs on: those of compute capability
// 10 * major + minor == arch (code for that architecture alone, sm_90a), and with `newer` those of
// every later one too.
struct Target {
  int arch;
  bool newer;
};

// A kernel to compile for a score program.
struct ProgramKernel {
  int tile;            // its place in the variant's list of tiles
  const char* header;  // defines the kernel
  std::string name;    // name expression; the program is jaxflash::Program
  // Likewise of the kernel that puts parts of its results together; nullptr: there are no parts.
  const char* merge_header;
  std::string merge_name;
  std::string tile_name;
  int shared_bytes;
  int harmless_spills;  // bytes
};
// Another tile costs more than these spills, measured at head size 64.
inline constexpr int kHarmlessSpills = 64;
// Beside them, of producers that walk over what a mask shows: they run ahead.
inline constexpr int kHarmlessWalkSpills = 192;

// What the choice of a tile for a score program depends on.
struct ProgramTraits {
  bool unit_slope;
  bool bounded;
  bool ranges;        // the mask is one of ranges alone: segments, packed sequences
  bool walks;         // for the kernel that walks, see Walked
  bool one_sided;     // its band limits one side only
  bool paged;         // keys and values lie in pages
  int shared_units;   // see ProgramDescription
  int head_dim;       // the larger of those of queries and values
  int start_capture;  // see ProgramDescription
  int shared_bytes;   // that a block may have on the GPU
  CallSizes sizes;    // see ProgramDescription
};

// A ProgramKernel, compiled and on the GPU.
struct LoadedTile {
  int tile;
  const void* handle;  // for cudaLaunchKernelExC
};

// What a program's calls launch.
struct LoadedKernel : LoadedTile {
  const void* merge;  // nullptr: there is none
  LoadedTile walk;  // for masks that are better walked over (Walked), without handle: there is none
  int start_capture;  // see ProgramDescription

  bool has_walk() const { return walk.handle != nullptr; }
};

// Gradients of captures that a backward kernel computes beside those of q, k and v: the others take
// kernels of their own.
struct GradientsBeside {
  bool sums;    // BackwardParams::key_sums, diagonal_sums
  bool stored;  // BackwardParams::stored

  bool has(const CaptureLoad& load) const {
    return load.is_summed() ? sums : load.stored && stored;
  }
};

// What does not depend on the pass.
struct CompiledVariant {
  Variant variant;
  Math math;
  Target target;
  bool (*takes_sizes)(const Problem&);  // whether head sizes and scale are right; nullptr: any are
  // Score programs: the tiles to try, best first.
  std::vector<ProgramKernel> (*program_kernels)(const ProgramTraits&);
  bool walks;                        // score programs: whether the list has kernels that walk
  GradientsBeside gradients_beside;  // backward
};

template <class Params>
struct Launcher : CompiledVariant {
  bool (*takes)(const Params&);  // nullptr: takes every problem of its math and head sizes
  Status (*launch)(const Params&, CUstream_st*);  // without a program
  Status (*launch_program)(const Params&, const LoadedKernel&, CUstream_st*);
};

}  // namespace jaxflash
