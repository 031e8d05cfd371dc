// Fixed-width integers and INFINITY for headers that device code includes: from the standard
// headers, or spelled out where the compiler at run time (NVRTC) has none.
#pragma once

#ifdef __CUDACC_RTC__

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#else

#include <cmath>
#include <cstddef>
#include <cstdint>

#endif
