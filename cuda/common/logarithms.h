// Factors between logarithms to base 2, which the hardware has, and natural ones.
#pragma once

namespace jaxflash {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

}  // namespace jaxflash
