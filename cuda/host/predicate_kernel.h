// The kernel of one predicate: compiled for the GPUs that want it, on those that run it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention.h"
#include "host/gpu_traits.h"
#include "host/runtime_kernel.h"

namespace jaxflash {

struct PredicateKernel {
 public:
  explicit PredicateKernel(const char* source) : source_(source) {}

  Status compile(const GpuTraits& gpu, std::shared_ptr<RuntimeKernel>* kernel) const;

  // The same on the device, which must be the current one. `ask` is called where that is new.
  template <class AskGpu>
  Status load(int device, const AskGpu& ask, const void** handle) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Loaded& loaded : loaded_) {
      if (loaded.device == device) {
        *handle = loaded.handle;
        return {};
      }
    }
    GpuTraits gpu;
    if (Status status = ask(&gpu); !status.ok()) return status;
    return load_new(device, gpu, handle);
  }

  // All steps.
  static Status launch(const void* handle, const PredicateParams& params, CUstream_st* stream);

 private:
  struct Loaded {
    int device;
    const void* handle;
  };

  Status load_new(int device, const GpuTraits& gpu, const void** handle) const;

  std::string source_;
  mutable std::mutex mutex_;  // of what follows: where the kernel is
  mutable std::vector<Loaded> loaded_;
};

}  // namespace jaxflash
