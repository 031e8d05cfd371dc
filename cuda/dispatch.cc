// The C interface of attention.h: picks the compiled variant for a call and the GPU it runs on.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "common/key_shares.h"
#include "common/status.h"
#include "common/workspace.h"
#include "host/disk_cache.h"
#include "host/nvrtc.h"
#include "host/predicate_kernel.h"
#include "host/runtime_kernel.h"
#include "host/score_kernels.h"
#include "variants.h"

namespace jaxflash {
namespace {

constexpr const char* kMathNames[] = {"float16", "bfloat16", "tf32", "float32"};

constexpr char kAskingForGpu[] = "jaxflash needs an NVIDIA GPU and its driver; asking for the GPU";

Status current_device(int* device) { return cuda_status(cudaGetDevice(device), kAskingForGpu); }

// 10 * major + minor.
Status arch_of_gpu(int device, int* arch) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  *arch = 10 * major + minor;
  return cuda_status(error, kAskingForGpu);
}

// Of the current device. Asked once per device: a handler has microseconds.
Status current_arch(int* arch) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];  // 0: not asked yet

  int device = 0;
  if (Status status = current_device(&device); !status.ok()) return status;
  if (device < kMaxDevices) {
    *arch = known[device].load(std::memory_order_relaxed);
    if (*arch != 0) return {};
  }
  if (Status status = arch_of_gpu(device, arch); !status.ok()) return status;
  if (device < kMaxDevices) known[device].store(*arch, std::memory_order_relaxed);
  return {};
}

bool runs_on(Target target, int arch) {
  return target.newer ? arch >= target.arch : arch == target.arch;
}

// Whether a variant runs on GPUs of `arch` and takes a problem as far as its head sizes say.
bool fits(const CompiledVariant& variant, int arch, const Problem& problem) {
  return runs_on(variant.target, arch) && variant.math == problem.math &&
         variant.variant.head_dim >= problem.head_dim &&
         variant.variant.value_dim >= problem.value_dim &&
         (variant.takes_sizes == nullptr || variant.takes_sizes(problem));
}

bool has_kernels(int arch) {
  for (const Launcher<ForwardParams>* const* launcher = kForward; *launcher != nullptr;
       ++launcher) {
    if (runs_on((*launcher)->target, arch)) return true;
  }
  return false;
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
    if (!fits(launcher, arch, problem)) continue;
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

// ---- Score programs -----------------------------------------------------------------------------

// The code of the portable kernels that the driver picks for a GPU: the newest of its generation
// that is no newer than it, otherwise the PTX of the first.
int portable_arch_for(int arch) {
  int best = kPortableArchs[0];
  for (const int candidate : kPortableArchs) {
    if (candidate / 10 == arch / 10 && candidate <= arch) best = candidate;
  }
  return best;
}

Status traits_of_gpu(int device, GpuTraits* gpu) {
  if (Status status = arch_of_gpu(device, &gpu->arch); !status.ok()) return status;
  gpu->portable_arch = portable_arch_for(gpu->arch);
  return cuda_status(
      cudaDeviceGetAttribute(&gpu->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
      kAskingForGpu);
}

Status load_on_current_device(const ScoreKernels& program, const CompiledVariant& variant,
                              LoadedKernel* kernel) {
  int device = 0;
  if (Status status = current_device(&device); !status.ok()) return status;
  const auto ask = [device](GpuTraits* gpu) { return traits_of_gpu(device, gpu); };
  return program.load(variant, device, ask, kernel);
}

// The variant that calls of a program run on, unless strides or lengths forbid it.
template <class Params>
Status expected_variant(Launchers<Params> launchers, int arch, const Problem& problem,
                        const CompiledVariant** variant) {
  for (; *launchers != nullptr; ++launchers) {
    *variant = *launchers;
    if (fits(**variant, arch, problem)) return {};
  }
  return error_status(
      "no kernel of this build takes head sizes %d and %d on a GPU of compute capability %d.%d",
      problem.head_dim, problem.value_dim, arch / 10, arch % 10);
}

Status expected_variant(const ScoreKernels& program, int arch, const CompiledVariant** variant) {
  switch (program.pass()) {
    case Pass::kForward:
      return expected_variant(kForward, arch, program.problem(), variant);
    case Pass::kBackward:
      return expected_variant(kBackward, arch, program.problem(), variant);
    case Pass::kTangent:
      return expected_variant(kTangent, arch, program.problem(), variant);
  }
  return error_status("unknown pass %d", static_cast<int>(program.pass()));
}

// All kernels of a program, for one kind of GPU.
Status compile_for(const ScoreKernels& program, const GpuTraits& gpu) {
  const CompiledVariant* variant = nullptr;
  Status status = expected_variant(program, gpu.arch, &variant);
  ScoreKernels::Compiled compiled, walk;
  if (status.ok()) status = program.compile_all(*variant, gpu, &compiled, &walk);
  if (!status.ok() || program.capture_gradients() == nullptr) return status;
  return program.capture_gradients()->compile(gpu, variant->gradients_beside);
}

// Calls compile(gpu) for the kinds of GPUs of this machine. Where it fails for one of several,
// calls on that one do, not those on the others.
template <class Compile>
Status compile_for_machine(const Compile& compile) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) cudaGetLastError();  // none: compiled when needed
  std::vector<std::pair<int, int>> tried;                             // kinds of GPUs
  bool any = count == 0;
  Status first_failure = {};
  for (int device = 0; device < count; ++device) {
    GpuTraits gpu = {};
    Status status = traits_of_gpu(device, &gpu);
    if (status.ok()) {
      const std::pair<int, int> kind{gpu.arch, gpu.shared_bytes};
      if (std::find(tried.begin(), tried.end(), kind) != tried.end()) continue;
      tried.push_back(kind);
      status = compile(gpu);
    }
    any |= status.ok();
    if (first_failure.ok()) first_failure = status;
  }
  return any ? Status{} : first_failure;
}

Status create_program(const ProgramDescription& description, ScoreKernels** result) {
  auto program = std::make_unique<ScoreKernels>(description);
  const Status status =
      compile_for_machine([&](const GpuTraits& gpu) { return compile_for(*program, gpu); });
  if (status.ok()) *result = program.release();
  return status;
}

Status create_predicate(const char* source, PredicateKernel** result) {
  auto predicate = std::make_unique<PredicateKernel>(source);
  const Status status = compile_for_machine([&](const GpuTraits& gpu) {
    std::shared_ptr<RuntimeKernel> kernel;
    return predicate->compile(gpu, &kernel);
  });
  if (status.ok()) *result = predicate.release();
  return status;
}

Status load_on_current_device(const PredicateKernel& predicate, const void** handle) {
  int device = 0;
  if (Status status = current_device(&device); !status.ok()) return status;
  const auto ask = [device](GpuTraits* gpu) { return traits_of_gpu(device, gpu); };
  return predicate.load(device, ask, handle);
}

Status current_device_of(const CaptureGradients& gradients, CaptureGradients::Device** result) {
  int device = 0;
  if (Status status = current_device(&device); !status.ok()) return status;
  const auto ask = [device](GpuTraits* gpu) { return traits_of_gpu(device, gpu); };
  return gradients.device(device, ask, result);
}

// ---- Launch -------------------------------------------------------------------------------------

template <class Params>
Status launch(Launchers<Params> launchers, const char* pass, const Params& params,
              CUstream_st* stream) {
  const Launcher<Params>* selected = nullptr;
  if (Status status = select(launchers, pass, params, &selected); !status.ok()) return status;
  if (params.program == nullptr) return selected->launch(params, stream);
  LoadedKernel kernel;
  if (Status status = load_on_current_device(*params.program, *selected, &kernel); !status.ok()) {
    return status;
  }
  return selected->launch_program(params, kernel, stream);
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
BackwardParams with_query_heads(BackwardParams params) {
  if (params.problem.q_heads == 0) std::fill(params.key_sums, std::end(params.key_sums), nullptr);
  params.problem = with_query_heads(params.problem);
  return params;
}

}  // namespace
}  // namespace jaxflash

using jaxflash::BackwardParams;
using jaxflash::Device;
using jaxflash::ForwardParams;
using jaxflash::Problem;
using jaxflash::Status;
using jaxflash::TangentParams;
using jaxflash::Variant;

Status jaxflash_forward(const ForwardParams* params, CUstream_st* stream) {
  if (params->pages.table != nullptr && params->program == nullptr) {
    return jaxflash::error_status("keys in pages need kernels that were compiled for them");
  }
  return jaxflash::launch(jaxflash::kForward, "forward", *params, stream);
}

Status jaxflash_backward(const BackwardParams* params, CUstream_st* stream) {
  if (params->diagonal_sum_bytes > 0) {
    const auto bytes = static_cast<size_t>(params->diagonal_sum_bytes);
    const Status status = jaxflash::cuda_status(
        cudaMemsetAsync(params->diagonal_sums.data, 0, bytes, stream), "clearing sums");
    if (!status.ok()) return status;
  }
  return jaxflash::launch(jaxflash::kBackward, "backward", jaxflash::with_query_heads(*params),
                          stream);
}

Status jaxflash_tangent(const TangentParams* params, CUstream_st* stream) {
  return jaxflash::launch(jaxflash::kTangent, "tangent", *params, stream);
}

Status jaxflash_capture_gradients(const BackwardParams* params,
                                  const jaxflash::CaptureGradientArray* arrays,
                                  CUstream_st* stream) {
  if (params->program == nullptr || params->program->capture_gradients() == nullptr) return {};
  const jaxflash::CaptureGradients& gradients = *params->program->capture_gradients();
  const jaxflash::Launcher<BackwardParams>* ran = nullptr;
  jaxflash::CaptureGradients::Device* device = nullptr;
  Status status =
      jaxflash::select(jaxflash::kBackward, "backward", jaxflash::with_query_heads(*params), &ran);
  if (status.ok()) status = jaxflash::current_device_of(gradients, &device);
  return status.ok() ? gradients.launch(*device, *params, arrays, ran->gradients_beside, stream)
                     : status;
}

const Variant* jaxflash_forward_variant(const ForwardParams* params) {
  return jaxflash::variant(jaxflash::kForward, "forward", *params);
}

const Variant* jaxflash_backward_variant(const BackwardParams* params) {
  return jaxflash::variant(jaxflash::kBackward, "backward", *params);
}

const Variant* jaxflash_tangent_variant(const TangentParams* params) {
  return jaxflash::variant(jaxflash::kTangent, "tangent", *params);
}

void jaxflash_set_compiler(const jaxflash::CompilerLocation* locations, int32_t count,
                           const char* headers) {
  std::vector<jaxflash::Nvrtc::Candidate> candidates;
  for (int32_t i = 0; i < count; ++i) {
    const char* const builtins = locations[i].builtins;
    candidates.push_back({locations[i].library, builtins == nullptr ? "" : builtins});
  }
  jaxflash::Nvrtc::look_for(std::move(candidates));
  jaxflash::RuntimeKernel::use_headers(headers);
}

Status jaxflash_compiler(int32_t* major, int32_t* minor, const char** library) {
  const jaxflash::Nvrtc* nvrtc = nullptr;
  if (Status status = jaxflash::Nvrtc::get(&nvrtc); !status.ok()) return status;
  *major = nvrtc->major();
  *minor = nvrtc->minor();
  *library = nvrtc->library().c_str();
  return {};
}

Status jaxflash_create_program(const jaxflash::ProgramDescription* description,
                               jaxflash::ScoreKernels** program) {
  return jaxflash::create_program(*description, program);
}

void jaxflash_delete_program(jaxflash::ScoreKernels* program) { delete program; }

Status jaxflash_load_program(const jaxflash::ScoreKernels* program) {
  int arch = 0;
  if (Status status = jaxflash::current_arch(&arch); !status.ok()) return status;
  const jaxflash::CompiledVariant* variant = nullptr;
  if (Status status = jaxflash::expected_variant(*program, arch, &variant); !status.ok()) {
    return status;
  }
  jaxflash::LoadedKernel kernel;
  Status status = jaxflash::load_on_current_device(*program, *variant, &kernel);
  if (!status.ok() || program->capture_gradients() == nullptr) return status;
  const jaxflash::CaptureGradients& gradients = *program->capture_gradients();
  jaxflash::CaptureGradients::Device* device = nullptr;
  status = jaxflash::current_device_of(gradients, &device);
  return status.ok()
             ? gradients.load(*device, gradients.family(device->gpu), variant->gradients_beside)
             : status;
}

Status jaxflash_create_predicate(const char* source, jaxflash::PredicateKernel** predicate) {
  return jaxflash::create_predicate(source, predicate);
}

void jaxflash_delete_predicate(jaxflash::PredicateKernel* predicate) { delete predicate; }

Status jaxflash_load_predicate(const jaxflash::PredicateKernel* predicate) {
  const void* handle = nullptr;
  return jaxflash::load_on_current_device(*predicate, &handle);
}

Status jaxflash_predicate(const jaxflash::PredicateParams* params, CUstream_st* stream) {
  const void* handle = nullptr;
  Status status = jaxflash::load_on_current_device(*params->predicate, &handle);
  return status.ok() ? jaxflash::PredicateKernel::launch(handle, *params, stream) : status;
}

Status jaxflash_compile_program(const jaxflash::ProgramDescription* description, int32_t arch,
                                int32_t shared_bytes, jaxflash::KernelReport* report) {
  const jaxflash::ScoreKernels program(*description);
  const jaxflash::CompiledVariant* variant = nullptr;
  if (Status status = jaxflash::expected_variant(program, arch, &variant); !status.ok()) {
    return status;
  }
  jaxflash::ScoreKernels::Compiled compiled;
  if (description->walks && !program.has_walk(*variant)) {
    return jaxflash::error_status("no kernel of this program walks");
  }
  Status status = program.compile(*variant, {arch, shared_bytes, jaxflash::portable_arch_for(arch)},
                                  description->walks, &compiled);
  if (status.ok()) *report = compiled.kernel->report();
  return status;
}

Status jaxflash_compile_kernel(const char* source, const char* kernel, const char* architecture,
                               jaxflash::KernelReport* report) {
  jaxflash::KernelRequest request;
  request.label = kernel;
  request.source = source;
  request.kernel = kernel;
  request.architecture = architecture;
  std::shared_ptr<jaxflash::RuntimeKernel> compiled;
  Status status = jaxflash::RuntimeKernel::get(request, &compiled);
  if (status.ok()) *report = compiled->report();
  return status;
}

int32_t jaxflash_kernel_reports(jaxflash::KernelReport* reports, int32_t capacity) {
  return jaxflash::RuntimeKernel::reports(reports, capacity);
}

int32_t jaxflash_cache_folder(char* path, int32_t capacity) {
  return std::snprintf(path, static_cast<size_t>(capacity), "%s", jaxflash::cache_folder().c_str());
}

size_t jaxflash_forward_workspace_bytes(const Problem* problem) {
  return jaxflash::forward_workspace_bytes(*problem);
}

size_t jaxflash_program_workspace_bytes(const Problem* problem, int32_t shared_units) {
  return jaxflash::program_workspace_bytes(*problem, shared_units);
}

int32_t jaxflash_shared_units(const Problem* problem, bool paged) {
  return jaxflash::shared_units(*problem, paged);
}

size_t jaxflash_backward_workspace_bytes(const Problem* problem) {
  return jaxflash::backward_workspace_bytes(jaxflash::with_query_heads(*problem));
}

size_t jaxflash_batch_sum_workspace_bytes(const Problem* problem, int32_t batch_sum) {
  return jaxflash::batch_sum_workspace_bytes(*problem, batch_sum);
}

int32_t jaxflash_variants(const Variant** variants) {
  *variants = jaxflash::kVariants;
  return static_cast<int32_t>(std::size(jaxflash::kVariants));
}

const char* jaxflash_build_info() { return jaxflash::kBuildInfo; }

const char* jaxflash_source_hash() { return jaxflash::kSourceHash; }

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
    device.has_kernels = jaxflash::has_kernels(10 * device.major + device.minor);
  }
  return count;
}
