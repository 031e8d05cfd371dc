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
#include "launcher.h"
#include "sm90/capture_gradient_traits.h"

namespace jaxflash {

class CaptureGradients {
 public:
  explicit CaptureGradients(const ProgramDescription& description);

  // For a GPU, the kernels that calls run on unless strides forbid it; the code stays in the
  // process. `computed`: what the backward kernel has done.
  Status compile(const GpuTraits& gpu, const GradientsBeside& computed) const;

  enum class Family { kPortable, kHopper };
  // By sizes alone.
  Family family(const GpuTraits& gpu) const;

  // A tile, by what host code needs of its traits.
  struct Geometry {
    std::string name;  // of the traits, as C++
    std::string tile;
    int rows, keys, threads, shared_bytes, blocks_per_sm;
  };
  struct LoadedLoad {
    Geometry geometry;
    const void* handle;  // nullptr: not yet
  };
  // A GPU, with the kernels that have been loaded there.
  struct Device {
    int number;
    GpuTraits gpu;
    int multiprocessors;
    std::vector<LoadedLoad> loads[2];  // by family
  };

  // The current one; `ask` is called where it is new.
  template <class AskGpu>
  Status device(int number, const AskGpu& ask, Device** result) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& known : devices_) {
      if (known->number == number) {
        *result = known.get();
        return {};
      }
    }
    GpuTraits gpu;
    if (Status status = ask(&gpu); !status.ok()) return status;
    return add_device(number, gpu, result);
  }

  // On the current device, which is that.
  Status load(Device& device, Family family, const GradientsBeside& computed) const;
  Status launch(Device& device, const BackwardParams& params, const CaptureGradientArray* arrays,
                const GradientsBeside& computed, CUstream_st* stream) const;

 private:
  Status add_device(int number, const GpuTraits& gpu, Device** result) const;
  Status geometries(const GpuTraits& gpu, Family family, const CaptureLoad& load,
                    std::vector<Geometry>* result) const;
  sm90::GradientStaging staging(const CaptureLoad& load) const;
  Status get(const GpuTraits& gpu, Family family, size_t load, Geometry* geometry,
             std::shared_ptr<RuntimeKernel>* kernel) const;

  std::string source_;
  std::vector<CaptureLoad> loads_;
  int32_t start_capture_;  // see ProgramDescription
  Problem problem_;        // sizes, math and scale
  MaskKind mask_;
  mutable std::mutex mutex_;  // of what follows: where the kernels are
  mutable std::vector<std::unique_ptr<Device>> devices_;
};

}  // namespace jaxflash
