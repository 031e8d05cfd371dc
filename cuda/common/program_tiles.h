// A list of tile types: those that a pass tries for score programs, best first.
#pragma once

namespace jaxflash {

template <class... Tiles>
struct ProgramTiles {};

}  // namespace jaxflash
