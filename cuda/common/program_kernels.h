// Host side of kernels that are compiled for a score program: what to hand to the compiler for each
// tile of a list, and the way back from a tile's number to its type.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

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
template <class Type>
std::string type_name() {
  const char* const signature = jaxflash_names::signature<Type>();
  const char* const begin = std::strstr(signature, "Type = ") + std::strlen("Type = ");
  const char* const end = std::strrchr(signature, ']');
  return {begin, end};
}

// In a kernel's name expression.
inline std::string math_name(Math math) {
  return "static_cast<jaxflash::Math>(" + std::to_string(static_cast<int>(math)) + ")";
}

// The type of a mask, likewise.
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
auto use_tile(ProgramTiles<First, Rest...>, int number, const Use& use) {
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

// The list of a launcher: the kernels whose shared memory the GPU has.
class ProgramKernelList {
 public:
  explicit ProgramKernelList(const ProgramTraits& traits) : traits_(traits) {}

  // `name`: the kernel's name expression. The kernel, until there is another one, or nullptr: it is
  // left out.
  template <class Tile>
  ProgramKernel* add(int number, const char* header, int shared_bytes, std::string name) {
    if (shared_bytes > traits_.shared_bytes) return nullptr;
    ProgramKernel& kernel = kernels_.emplace_back();
    kernel.tile = number;
    kernel.header = header;
    kernel.name = std::move(name);
    kernel.tile_name = type_name<Tile>();
    kernel.shared_bytes = shared_bytes;
    kernel.harmless_spills = kHarmlessSpills + (traits_.walks ? kHarmlessWalkSpills : 0);
    return &kernel;
  }

  bool empty() const { return kernels_.empty(); }
  std::vector<ProgramKernel> take() { return std::move(kernels_); }

 private:
  const ProgramTraits& traits_;
  std::vector<ProgramKernel> kernels_;
};

}  // namespace jaxflash
