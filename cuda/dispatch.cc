// The C interface of attention.h: picks the compiled variant for a call and the GPU it runs on.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#include "attention.h"
#include "common/key_shares.h"
#include "common/status.h"
#include "common/workspace.h"
#include "variants.h"

namespace jaxflash {
namespace {

constexpr const char* kMathNames[] = {"float16", "bfloat16", "tf32", "float32"};

// 10 * major + minor of the current device. Asked once per device: a handler has microseconds.
Status current_arch(int* arch) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];  // 0: not asked yet
  constexpr char kDoing[] = "jaxflash needs an NVIDIA GPU and its driver; asking for the GPU";

  int device = 0;
  if (Status status = cuda_status(cudaGetDevice(&device), kDoing); !status.ok()) return status;
  if (device < kMaxDevices) {
    *arch = known[device].load(std::memory_order_relaxed);
    if (*arch != 0) return {};
  }
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (Status status = cuda_status(error, kDoing); !status.ok()) return status;
  *arch = 10 * major + minor;
  if (device < kMaxDevices) known[device].store(*arch, std::memory_order_relaxed);
  return {};
}

bool runs_on(Target target, int arch) {
  return target.newer ? arch >= target.arch : arch == target.arch;
}

// A list of variants.h: best family first, in a family the smallest head size first, nullptr last.
template <class Params>
using Launchers = const Launcher<Params>* const*;

// The first launcher that takes the call.
template <class Params>
Status select(Launchers<Params> launchers, const char* pass, const Params& params,
              const Launcher<Params>** selected) {
  const Problem& problem = params.problem;
  const size_t math = static_cast<size_t>(problem.math);
  if (math >= std::size(kMathNames)) {
    return error_status("unknown math %d", static_cast<int>(problem.math));
  }
  if (problem.head_dim < 1 || problem.value_dim < 1) {
    return error_status("head sizes must be at least 1, got %d for queries and keys, %d for values",
                        problem.head_dim, problem.value_dim);
  }
  int arch = 0;
  if (Status status = current_arch(&arch); !status.ok()) return status;

  bool gpu_known = false;
  int largest = 0;
  for (; *launchers != nullptr; ++launchers) {
    const Launcher<Params>& launcher = **launchers;
    if (!runs_on(launcher.target, arch)) continue;
    gpu_known = true;
    if (launcher.math != problem.math) continue;
    largest = std::max(largest, launcher.variant.head_dim);
    if (launcher.variant.head_dim < problem.head_dim) continue;
    if (launcher.variant.value_dim < problem.value_dim) continue;
    if (launcher.takes != nullptr && !launcher.takes(params)) continue;
    *selected = &launcher;
    return {};
  }

  const int major = arch / 10, minor = arch % 10;
  if (!gpu_known) {
    return error_status(
        "no %s kernel of this build runs on a GPU of compute capability %d.%d, which %s (%s)", pass,
        major, minor,
        arch < 80 ? "is older than the oldest that jaxflash supports, 8.0"
                  : "needs a build with it in JAXFLASH_CUDA_ARCHS",
        kBuildInfo);
  }
  if (largest == 0) {
    return error_status(
        "no %s kernel of this build computes in %s on a GPU of compute capability %d.%d (%s)", pass,
        kMathNames[math], major, minor, kBuildInfo);
  }
  const int head_dim = std::max(problem.head_dim, problem.value_dim);
  if (largest < head_dim) {
    return error_status(
        "head size %d is too large: the %s kernels for %s on a GPU of compute capability %d.%d "
        "take at most %d",
        head_dim, pass, kMathNames[math], major, minor, largest);
  }
  return error_status(
      "the %s kernels for %s on a GPU of compute capability %d.%d do not take this problem", pass,
      kMathNames[math], major, minor);
}

template <class Params>
Status launch(Launchers<Params> launchers, const char* pass, const Params& params,
              CUstream_st* stream) {
  const Launcher<Params>* selected = nullptr;
  if (Status status = select(launchers, pass, params, &selected); !status.ok()) return status;
  return selected->launch(params, stream);
}

template <class Params>
const Variant* variant(Launchers<Params> launchers, const char* pass, const Params& params) {
  const Launcher<Params>* selected = nullptr;
  return select(launchers, pass, params, &selected).ok() ? &selected->variant : nullptr;
}

// No query heads are as no queries of one head for each key head: dk and dv become 0.
Problem with_query_heads(Problem problem) {
  if (problem.q_heads != 0) return problem;
  problem.q_heads = problem.kv_heads;
  problem.q_len = 0;
  return problem;
}

}  // namespace
}  // namespace jaxflash

using jaxflash::BackwardParams;
using jaxflash::Device;
using jaxflash::ForwardParams;
using jaxflash::Problem;
using jaxflash::Status;
using jaxflash::Variant;

Status jaxflash_forward(const ForwardParams* params, CUstream_st* stream) {
  return jaxflash::launch(jaxflash::kForward, "forward", *params, stream);
}

Status jaxflash_backward(const BackwardParams* params, CUstream_st* stream) {
  BackwardParams with_heads = *params;
  with_heads.problem = jaxflash::with_query_heads(params->problem);
  return jaxflash::launch(jaxflash::kBackward, "backward", with_heads, stream);
}

const Variant* jaxflash_forward_variant(const ForwardParams* params) {
  return jaxflash::variant(jaxflash::kForward, "forward", *params);
}

const Variant* jaxflash_backward_variant(const BackwardParams* params) {
  return jaxflash::variant(jaxflash::kBackward, "backward", *params);
}

size_t jaxflash_forward_workspace_bytes(const Problem* problem) {
  return jaxflash::forward_workspace_bytes(*problem);
}

size_t jaxflash_backward_workspace_bytes(const Problem* problem) {
  return jaxflash::backward_workspace_bytes(jaxflash::with_query_heads(*problem));
}

int32_t jaxflash_variants(const Variant** variants) {
  *variants = jaxflash::kVariants;
  return static_cast<int32_t>(std::size(jaxflash::kVariants));
}

const char* jaxflash_build_info() { return jaxflash::kBuildInfo; }

int32_t jaxflash_devices(Device* devices, int32_t capacity) {
  int count = 0;
  if (!jaxflash::cuda_status(cudaGetDeviceCount(&count), "counting the GPUs").ok()) return 0;
  for (int i = 0; i < std::min(count, capacity); ++i) {
    Device& device = devices[i];
    device = {};
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      cudaGetLastError();
      std::strcpy(device.name, "(not accessible)");
      continue;
    }
    static_assert(sizeof(device.name) >= sizeof(properties.name), "the name fits");
    std::memcpy(device.name, properties.name, sizeof(properties.name));
    device.major = properties.major;
    device.minor = properties.minor;
    device.shared_memory_per_block = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  }
  return count;
}
