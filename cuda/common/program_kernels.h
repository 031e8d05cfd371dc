// Host side of kernels that are compiled for a score program: what to hand to the compiler for each
// tile of a list, and the way back from a tile's number to its type.
#pragma once

#include <cstdio>
#include <cstring>

#include "common/program_tiles.h"
#include "launcher.h"

// A namespace beside the library's, or compilers leave `jaxflash::` out of names.
namespace jaxflash_names {

template <class Type>
const char* signature() {
  return __PRETTY_FUNCTION__;  // "... [with Type = NAME]"
}

}  // namespace jaxflash_names

namespace jaxflash {

// A type's name as C++ source, from the compiler: a tile is written once, as a type.
struct TypeName {
  const char* begin;
  int length;
};

template <class Type>
TypeName type_name() {
  const char* const signature = jaxflash_names::signature<Type>();
  const char* const begin = std::strstr(signature, "Type = ") + std::strlen("Type = ");
  return {begin, static_cast<int>(std::strrchr(signature, ']') - begin)};
}

// The type of a mask, in a kernel's name expression.
inline const char* mask_name(MaskKind mask) {
  switch (mask) {
    case MaskKind::kBand:
      return "jaxflash::BandMask";
    case MaskKind::kRanges:
      return "jaxflash::RangeMask<false>";
    case MaskKind::kSegments:
      return "jaxflash::RangeMask<true>";
    case MaskKind::kProgramRanges:
      return "jaxflash::RangeMask<false, true>";
    case MaskKind::kProgramSegments:
      return "jaxflash::RangeMask<true, true>";
  }
  return "";
}

// Calls use(Tile{}) for the tile of that number; the last for every number beyond.
template <class First, class... Rest, class Use>
Status use_tile(ProgramTiles<First, Rest...>, int number, const Use& use) {
  if constexpr (sizeof...(Rest) > 0) {
    if (number > 0) return use_tile(ProgramTiles<Rest...>{}, number - 1, use);
  }
  return use(First{});
}

// Calls use(number, Tile{}) for each.
template <class... Tiles, class Use>
void for_each_tile(ProgramTiles<Tiles...>, const Use& use) {
  int number = 0;
  (use(number++, Tiles{}), ...);
}

// Fills the list of a launcher with the kernels whose shared memory the GPU has.
class ProgramKernelList {
 public:
  ProgramKernelList(const ProgramTraits& traits, ProgramKernel (&kernels)[kMaxProgramTiles])
      : traits_(traits), kernels_(kernels) {}

  // `format` and what follows make the kernel's name expression. nullptr: left out.
  template <class Tile, class... Parts>
  ProgramKernel* add(int number, const char* header, int shared_bytes, const char* format,
                     Parts... parts) {
    if (count_ == kMaxProgramTiles || shared_bytes > traits_.shared_bytes) return nullptr;
    ProgramKernel& kernel = kernels_[count_++];
    kernel.tile = number;
    kernel.header = header;
    kernel.shared_bytes = shared_bytes;
    kernel.harmless_spills = kHarmlessSpills + (traits_.walks ? kHarmlessWalkSpills : 0);
    const TypeName tile = type_name<Tile>();
    std::snprintf(kernel.tile_name, sizeof(kernel.tile_name), "%.*s", tile.length, tile.begin);
    std::snprintf(kernel.name, sizeof(kernel.name), format, parts...);
    return &kernel;
  }

  // The kernel that puts the parts of another one together.
  template <class... Parts>
  static void merge_with(ProgramKernel* kernel, const char* header, const char* format,
                         Parts... parts) {
    if (kernel == nullptr) return;
    kernel->merge_header = header;
    std::snprintf(kernel->merge_name, sizeof(kernel->merge_name), format, parts...);
  }

  int count() const { return count_; }

 private:
  const ProgramTraits& traits_;
  ProgramKernel (&kernels_)[kMaxProgramTiles];
  int count_ = 0;
};

}  // namespace jaxflash
