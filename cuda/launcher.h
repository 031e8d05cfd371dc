// What dispatch knows of a compiled variant. Every translation unit configured from instance.cu.in
// defines one; the generated variants.h lists them.
#pragma once

#include <cstdint>

#include "attention.h"

namespace jaxflash {

// The GPUs that the variant's machine code runs on: those of compute capability
// 10 * major + minor == arch, and with `newer` those of every later one too.
struct Target {
  int arch;
  bool newer;
};

template <class Params>
struct Launcher {
  Variant variant;
  Math math;
  Target target;
  Status (*launch)(const Params&, CUstream_st*);
  bool (*takes)(const Params&);  // nullptr: takes every problem of its math and head sizes
};

}  // namespace jaxflash
