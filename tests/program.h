// What a printed score program is compiled with in the tests: the helpers of the kernels' own
// cuda/common/program.cuh in plain C++, exact where those are approximations.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline

inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline float __int_as_float(int x) {
  float y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline int __float2int_rz(float x) {
  return x >= 2147483648.0f ? INT32_MAX : x >= -2147483648.0f ? int(x) : x < 0.0f ? INT32_MIN : 0;
}
inline uint32_t __float2uint_rz(float x) {
  return x >= 4294967296.0f ? UINT32_MAX : x > 0.0f ? uint32_t(x) : 0u;
}
namespace jaxflash {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  _Float16 value;
};

struct Problem {
  float scale;
};

struct Capture {
  const void* data;
  int64_t batch_stride;
  int32_t extent[6];
};
struct Captures {
  Capture of[8];
};

template <class T>
inline const T* capture_data(const Captures& captures, int k, const Problem&, int64_t batch) {
  return static_cast<const T*>(captures.of[k].data) + batch * captures.of[k].batch_stride;
}
inline int capture_extent(const Captures& captures, int k, int axis) {
  return captures.of[k].extent[axis];
}
inline int64_t clamp_index(int64_t i, int extent) {
  return i < 0 ? 0 : i < extent ? i : extent - 1;
}
inline float load_capture(const float* data, int64_t i) { return data[i]; }
inline int load_capture(const int32_t* data, int64_t i) { return data[i]; }
inline uint32_t load_capture(const uint32_t* data, int64_t i) { return data[i]; }
inline bool load_capture(const bool* data, int64_t i) { return data[i]; }
inline float load_capture(const BFloat16* data, int64_t i) {
  return __int_as_float(int(uint32_t(data[i].bits) << 16));
}
inline float load_capture(const Float16* data, int64_t i) { return float(data[i].value); }
template <class T>
float load_of_pair(const T* data, int64_t pair, int odd) {
  return load_capture(data, 2 * pair + odd);
}

inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float tanh_approx(float x) { return tanhf(x); }
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
inline float divide_approx(float x, float y) { return x / y; }
inline float divide_by_normal(float x, float y) { return flushed(flushed(x) / flushed(y)); }
inline float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }
inline float max_nan(float x, float y) { return x != x || x > y ? x : y; }
inline float min_nan(float x, float y) { return x != x || x < y ? x : y; }

}  // namespace jaxflash
