// What kernels that are compiled at run time need to know of a GPU.
#pragma once

namespace jaxflash {

struct GpuTraits {
  int arch;           // 10 * major + minor
  int shared_bytes;   // that a block may have
  int portable_arch;  // what the portable kernels' code that it runs was compiled for
};

}  // namespace jaxflash
