// Host interface of the kernel library: plain structs and a stream. Knows neither JAX nor Python,
// so that C++ programs and tests can call the kernels directly.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem.h"

struct CUstream_st;

namespace jaxflash {

// The result of a call: an empty message, or what went wrong and what to do about it.
struct Status {
  char message[512];
  bool ok() const { return message[0] == '\0'; }
};

// What the library was built with, and what is compiled into it.
struct Variant {
  const char* family;  // "sm80", "sm90"
  const char* pass;    // "forward", "backward"
  const char* math;    // "float16", "bfloat16", "tf32", "float32"
  int32_t head_dim;    // largest size of a query/key head that the variant takes
  int32_t value_dim;   // and of a value head
};

// A GPU of this machine.
struct Device {
  char name[256];
  int32_t major;  // compute capability
  int32_t minor;
  int32_t shared_memory_per_block;  // bytes, opt-in maximum
};

}  // namespace jaxflash

#define JAXFLASH_API extern "C" __attribute__((visibility("default")))

// Both enqueue work on `stream` and return: no allocation, no synchronisation, safe to capture.
JAXFLASH_API jaxflash::Status jaxflash_forward(const jaxflash::ForwardParams* params,
                                               CUstream_st* stream);
JAXFLASH_API jaxflash::Status jaxflash_backward(const jaxflash::BackwardParams* params,
                                                CUstream_st* stream);

// The variant that such a call would run on the current GPU, or nullptr where it would fail.
JAXFLASH_API const jaxflash::Variant* jaxflash_forward_variant(
    const jaxflash::ForwardParams* params);
JAXFLASH_API const jaxflash::Variant* jaxflash_backward_variant(
    const jaxflash::BackwardParams* params);

// Bytes that a workspace needs on any GPU. Reads sizes and the band's sides, no pointers.
JAXFLASH_API size_t jaxflash_forward_workspace_bytes(const jaxflash::Problem* problem);
JAXFLASH_API size_t jaxflash_backward_workspace_bytes(const jaxflash::Problem* problem);

// The variants in the library; returns their number.
JAXFLASH_API int32_t jaxflash_variants(const jaxflash::Variant** variants);

// One line: versions of nvcc and ptxas and the architectures compiled for.
JAXFLASH_API const char* jaxflash_build_info();

// Fills in at most `capacity` devices; returns how many there are (0 without a driver).
JAXFLASH_API int32_t jaxflash_devices(jaxflash::Device* devices, int32_t capacity);
