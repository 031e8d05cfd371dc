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
  const char* pass;    // "forward", "backward", "tangent"
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
  bool has_kernels;                 // this build has kernels for it
};

enum class Pass : int32_t { kForward, kBackward, kTangent };

// A score program for one pass: what is known of a call when it is compiled.
struct ProgramDescription {
  Pass pass;
  const char* source;  // C++ that defines jaxflash::Program, see common/program.cuh
  bool unit_slope;     // Program::kUnitSlope
  bool bounded;        // Program::kBounded
  Math math;
  int32_t head_dim;
  int32_t value_dim;
  float scale;
  MaskKind mask;
  bool walks;            // calls are long enough for a kernel that walks, see Walked
  bool one_sided;        // the band limits one side of the diagonal only
  bool deterministic;    // backward: as in BackwardParams
  bool paged;            // keys and values lie in pages
  int32_t shared_units;  // forward: jaxflash_shared_units of the calls to come
  CallSizes sizes;       // forward: of the calls to come
  // Forward and backward: the capture Program::kStartCapture, if it is of 16 bits, kv_len a
  // multiple of 8, and its row of a query the one after that of the query before; forward, without
  // such a row: kKeyTerms or kDistanceTerms; -1: neither, or there is none.
  int32_t start_capture;
  // Backward: the same program with a struct Load0, Load1 ... for each of these loads of captured
  // arrays, whose gradients are wanted, key sums behind the others, in their order. nullptr without
  // any.
  const char* gradient_source;
  const CaptureLoad* gradient_loads;
  int32_t num_gradient_loads;
};

// A kernel that this process has compiled for a score program, or read from the cache.
struct KernelReport {
  char label[64];         // family, pass, math, head size
  char tile[160];         // its tile's type
  char architecture[16];  // "sm_90a"
  int32_t registers;
  int32_t spilled;  // bytes of a thread
  bool serialised;  // warpgroup instructions wait for one another
  bool from_disk;
  double seconds;
};

// Where the compiler may be.
struct CompilerLocation {
  const char* library;   // a path, or a name that the system's loader knows
  const char* builtins;  // path of the library that NVRTC opens by its bare name, or nullptr
};

}  // namespace jaxflash

#define JAXFLASH_API extern "C" __attribute__((visibility("default")))

// All enqueue work on `stream` and return: no allocation, no synchronisation, safe to capture.
JAXFLASH_API jaxflash::Status jaxflash_forward(const jaxflash::ForwardParams* params,
                                               CUstream_st* stream);
JAXFLASH_API jaxflash::Status jaxflash_backward(const jaxflash::BackwardParams* params,
                                                CUstream_st* stream);
// Its kernels are compiled at run time: a call has a program.
JAXFLASH_API jaxflash::Status jaxflash_tangent(const jaxflash::TangentParams* params,
                                               CUstream_st* stream);
// After jaxflash_backward, of the same call: gradients of captures, those that the backward kernel
// had aside, and key sums where it did not have them. `arrays` has kMaxCaptures.
JAXFLASH_API jaxflash::Status jaxflash_capture_gradients(
    const jaxflash::BackwardParams* params, const jaxflash::CaptureGradientArray* arrays,
    CUstream_st* stream);

// Before a call whose score program reads a dense mask.
JAXFLASH_API jaxflash::Status jaxflash_dense_mask(const jaxflash::DenseMaskParams* params,
                                                  CUstream_st* stream);
// Before a call whose score program hides something that is no array.
JAXFLASH_API jaxflash::Status jaxflash_predicate(const jaxflash::PredicateParams* params,
                                                 CUstream_st* stream);
// Before a call with ranges: of segments, of all, and both for segments alone.
JAXFLASH_API jaxflash::Status jaxflash_segment_matches(const jaxflash::SegmentMatchesParams* params,
                                                       CUstream_st* stream);
JAXFLASH_API jaxflash::Status jaxflash_range_summary(const jaxflash::RangeSummaryParams* params,
                                                     CUstream_st* stream);
JAXFLASH_API jaxflash::Status jaxflash_segment_ranges(const jaxflash::SegmentRangesParams* params,
                                                      CUstream_st* stream);

// The variant that such a call would run on the current GPU, or nullptr where it would fail.
JAXFLASH_API const jaxflash::Variant* jaxflash_forward_variant(
    const jaxflash::ForwardParams* params);
JAXFLASH_API const jaxflash::Variant* jaxflash_backward_variant(
    const jaxflash::BackwardParams* params);
JAXFLASH_API const jaxflash::Variant* jaxflash_tangent_variant(
    const jaxflash::TangentParams* params);

// Where to look for NVRTC, best first, and the folder of the headers that kernels are compiled with
// (this one). Before the first program.
JAXFLASH_API void jaxflash_set_compiler(const jaxflash::CompilerLocation* locations, int32_t count,
                                        const char* headers);

// Version and path of the compiler, loaded for the purpose; or what is wrong and what to do.
JAXFLASH_API jaxflash::Status jaxflash_compiler(int32_t* major, int32_t* minor,
                                                const char** library);

// Kernels for a score program, compiled for every GPU of this machine: `program` of a pass's
// parameters. Compiles nothing that this process or the cache on disk has already.
JAXFLASH_API jaxflash::Status jaxflash_create_program(
    const jaxflash::ProgramDescription* description, jaxflash::ScoreKernels** program);
JAXFLASH_API void jaxflash_delete_program(jaxflash::ScoreKernels* program);

// Brings the kernels to the current GPU, so that no launch has to, least of all a captured one.
JAXFLASH_API jaxflash::Status jaxflash_load_program(const jaxflash::ScoreKernels* program);

// The same for a predicate: C++ that defines a jaxflash::Program which hides something.
JAXFLASH_API jaxflash::Status jaxflash_create_predicate(const char* source,
                                                        jaxflash::PredicateKernel** predicate);
JAXFLASH_API void jaxflash_delete_predicate(jaxflash::PredicateKernel* predicate);
JAXFLASH_API jaxflash::Status jaxflash_load_predicate(const jaxflash::PredicateKernel* predicate);

// What a score program compiles to on a GPU of `arch` = 10 * major + minor whose blocks may have
// `shared_bytes`; needs no GPU.
JAXFLASH_API jaxflash::Status jaxflash_compile_program(
    const jaxflash::ProgramDescription* description, int32_t arch, int32_t shared_bytes,
    jaxflash::KernelReport* report);

// Any kernel: `source` may include this library's headers, `kernel` is its name expression.
JAXFLASH_API jaxflash::Status jaxflash_compile_kernel(const char* source, const char* kernel,
                                                      const char* architecture,
                                                      jaxflash::KernelReport* report);

// The kernels compiled so far, those that a later tile replaced included; fills in at
// most `capacity` and returns their number.
JAXFLASH_API int32_t jaxflash_kernel_reports(jaxflash::KernelReport* reports, int32_t capacity);

// The folder of the cache on disk, or an empty text; returns the length of the whole path.
JAXFLASH_API int32_t jaxflash_cache_folder(char* path, int32_t capacity);

// How many units of 64 rows, 1 or 2, a score program's forward kernels should take at a time while
// blocks share their keys, in calls of such sizes; 0: blocks should share nothing. Either number,
// and 0 without pages, is right for any call.
JAXFLASH_API int32_t jaxflash_shared_units(const jaxflash::Problem* problem, bool paged);

// Bytes that a workspace needs on any GPU: of plain calls, of calls of a score program with those
// shared units, and of gradients. Reads sizes and the band's sides, no pointers.
JAXFLASH_API size_t jaxflash_forward_workspace_bytes(const jaxflash::Problem* problem);
JAXFLASH_API size_t jaxflash_program_workspace_bytes(const jaxflash::Problem* problem,
                                                     int32_t shared_units);
JAXFLASH_API size_t jaxflash_backward_workspace_bytes(const jaxflash::Problem* problem);

// What the latter has beside where a gradient is stored as the sum of that many batch elements.
JAXFLASH_API size_t jaxflash_batch_sum_workspace_bytes(const jaxflash::Problem* problem,
                                                       int32_t batch_sum);

// The variants in the library; returns their number.
JAXFLASH_API int32_t jaxflash_variants(const jaxflash::Variant** variants);

// One line: versions of nvcc and ptxas and the architectures compiled for.
JAXFLASH_API const char* jaxflash_build_info();

// Of the sources that the library was built from: callers of another version must not use it.
JAXFLASH_API const char* jaxflash_source_hash();

// Fills in at most `capacity` devices; returns how many there are (0 without a driver).
JAXFLASH_API int32_t jaxflash_devices(jaxflash::Device* devices, int32_t capacity);
