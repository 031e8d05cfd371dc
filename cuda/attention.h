// Host interface of the kernel library: plain structs and a stream. Knows neither JAX nor Python,
// so that C++ programs and tests can call the kernels directly.
//
// Letters of the shape comments: B batch (any number of axes), T query length, S key length,
// N query heads, K key/value heads (N % K == 0), H query/key head size, h value head size.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace jaxflash {

// How the matrix products are computed; it also fixes the element type of q, k, v, out and the
// gradients. Accumulation, softmax, lse and delta are float32 always.
enum class Math : int32_t {
  kFloat16 = 0,   // float16 operands
  kBFloat16 = 1,  // bfloat16 operands
  kTF32 = 2,      // float32 operands, rounded to TF32 for the products
  kFloat32 = 3,   // float32 operands, products accurate to float32
};

// Batch axes that broadcast alike are merged by the caller; this many remain at most.
inline constexpr int kMaxBatchAxes = 8;

// Longest sequence: row and key positions, shifted by a window side, stay within int32.
inline constexpr int32_t kMaxLength = 1 << 30;

// A window side without a limit.
inline constexpr int32_t kUnlimited = kMaxLength;

// An array (*B, length, heads, dim). Strides count elements; the last axis is contiguous. A batch
// axis that is broadcast has stride 0.
struct Tensor {
  void* data;
  int64_t batch_stride[kMaxBatchAxes];
  int64_t seq_stride;
  int64_t head_stride;
};

// Query i stands at key position p = i (+ S - T with `bottom_right`, of the sequence's own lengths
// where given) and sees the keys p - left ... p + right, both ends included.
struct Band {
  int32_t left;   // >= 0; kUnlimited without a limit
  int32_t right;  // 0 for causal; may be negative; kUnlimited without a limit
  bool bottom_right;
  const int32_t* q_lengths;   // (prod B) valid queries of a sequence, or nullptr for T
  const int32_t* kv_lengths;  // (prod B) valid keys of a sequence, or nullptr for S
};

struct Problem {
  Math math;
  int32_t num_batch_axes;
  int64_t batch_extent[kMaxBatchAxes];
  int32_t q_len;      // T
  int32_t kv_len;     // S
  int32_t q_heads;    // N
  int32_t kv_heads;   // K
  int32_t head_dim;   // H
  int32_t value_dim;  // h
  float scale;        // multiplies the logits
  Band band;
};

struct ForwardParams {
  Problem problem;
  Tensor q;    // (*B, T, N, H)
  Tensor k;    // (*B, S, K, H)
  Tensor v;    // (*B, S, K, h)
  Tensor out;  // (*B, T, N, h)
  float* lse;  // (*B, T, N) dense; natural logarithm, -inf for a row that sees no key
};

struct BackwardParams {
  Problem problem;
  Tensor q;            // (*B, T, N, H)
  Tensor k;            // (*B, S, K, H)
  Tensor v;            // (*B, S, K, h)
  Tensor out;          // (*B, T, N, h)
  Tensor dout;         // (*B, T, N, h)
  const float* lse;    // (*B, T, N) dense
  const float* dlse;   // (*B, T, N) dense, or nullptr for zero
  Tensor dq;           // (*B, T, N, H)
  Tensor dk;           // (*B, S, K, H), every batch axis of full extent
  Tensor dv;           // (*B, S, K, h), every batch axis of full extent
  void* workspace;     // backward_workspace_bytes(problem) bytes, 256-byte aligned, any contents
  bool deterministic;  // bitwise the same gradients from run to run
};

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

// Bytes that BackwardParams::workspace needs on any GPU. Reads sizes only, no pointers.
JAXFLASH_API size_t jaxflash_backward_workspace_bytes(const jaxflash::Problem* problem);

// The variants in the library; returns their number.
JAXFLASH_API int32_t jaxflash_variants(const jaxflash::Variant** variants);

// One line: versions of nvcc and ptxas and the architectures compiled for.
JAXFLASH_API const char* jaxflash_build_info();

// Of the sources that the library was built from: callers of another version must not use it.
JAXFLASH_API const char* jaxflash_source_hash();

// Fills in at most `capacity` devices; returns how many there are (0 without a driver).
JAXFLASH_API int32_t jaxflash_devices(jaxflash::Device* devices, int32_t capacity);
