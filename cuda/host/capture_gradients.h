// The kernels for gradients of what a score program captures: one for each load, compiled and
// launched after the backward kernels, in whose workspace they find lse and delta.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention.h"
#include "common/capture_gradient.h"
#include "host/gpu_traits.h"
#include "host/runtime_kernel.h"

namespace jaxflash {

class CaptureGradients {
 public:
  explicit CaptureGradients(const ProgramDescription& description);

  // For a GPU; the code stays in the process.
  Status compile(const GpuTraits& gpu) const;

  // A tile, by what host code needs of its traits.
  struct Geometry {
    std::string name;  // of the traits, as C++
    std::string tile;
    int rows, keys, threads, shared_bytes, blocks_per_sm;
  };
  struct Loaded {
    int device;
    Geometry geometry;
    int multiprocessors;
    std::vector<const void*> handles;  // of the loads
  };

  // On the device, which must be the current one; `ask` is called where that is new.
  template <class AskGpu>
  Status load(int device, const AskGpu& ask, const Loaded** result) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& loaded : loaded_) {
      if (loaded->device == device) {
        *result = loaded.get();
        return {};
      }
    }
    GpuTraits gpu;
    if (Status status = ask(&gpu); !status.ok()) return status;
    return load_new(device, gpu, result);
  }

  Status launch(const Loaded& loaded, const BackwardParams& params,
                const CaptureGradientArray* arrays, CUstream_st* stream) const;

 private:
  Status load_new(int device, const GpuTraits& gpu, const Loaded** result) const;
  Status geometry(const GpuTraits& gpu, Geometry* result) const;
  Status get(const GpuTraits& gpu, const Geometry& geometry, size_t load,
             std::shared_ptr<RuntimeKernel>* kernel) const;

  std::string source_;
  std::vector<CaptureLoad> loads_;
  Math math_;
  MaskKind mask_;
  int head_dim_;              // the larger one
  mutable std::mutex mutex_;  // of what follows: where the kernels are
  mutable std::vector<std::unique_ptr<Loaded>> loaded_;
};

}  // namespace jaxflash
