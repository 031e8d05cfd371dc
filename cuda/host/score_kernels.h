// The kernels of one score program and pass: compiled for the GPUs that want them, on those that
// run them.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention.h"
#include "host/capture_gradients.h"
#include "host/gpu_traits.h"
#include "host/runtime_kernel.h"
#include "launcher.h"

namespace jaxflash {

struct ScoreKernels {
 public:
  explicit ScoreKernels(const ProgramDescription& description);

  Pass pass() const { return pass_; }
  // As the launchers' lists are searched; no lengths or strides are known.
  const Problem& problem() const { return problem_; }
  // nullptr where none is wanted.
  const CaptureGradients* capture_gradients() const { return capture_gradients_.get(); }

  struct Compiled {
    ProgramKernel tile;
    std::shared_ptr<RuntimeKernel> kernel;
    std::shared_ptr<RuntimeKernel> merge;  // of its parts; nullptr: there are none
  };
  // Whether a kernel that walks runs beside the other one.
  bool has_walk(const CompiledVariant& variant) const;
  // On the best of the variant's tiles, see choose_tile(). `walks`: the kernel that does.
  Status compile(const CompiledVariant& variant, const GpuTraits& gpu, bool walks,
                 Compiled* compiled) const;
  // Both; without one that walks, `walk` has no kernel.
  Status compile_all(const CompiledVariant& variant, const GpuTraits& gpu, Compiled* compiled,
                     Compiled* walk) const;

  // The same on the device, which must be the current one. `ask` is called where that is new.
  template <class AskGpu>
  Status load(const CompiledVariant& variant, int device, const AskGpu& ask,
              LoadedKernel* kernel) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Loaded& loaded : loaded_) {
      if (loaded.variant == &variant && loaded.device == device) {
        *kernel = loaded.kernel;
        return {};
      }
    }
    GpuTraits gpu;
    if (Status status = ask(&gpu); !status.ok()) return status;
    return load_new(variant, device, gpu, kernel);
  }

 private:
  struct Loaded {
    const CompiledVariant* variant;
    int device;
    LoadedKernel kernel;
  };

  Status load_new(const CompiledVariant& variant, int device, const GpuTraits& gpu,
                  LoadedKernel* kernel) const;

  Pass pass_;
  std::string source_;
  bool unit_slope_;
  bool bounded_;
  MaskKind mask_;
  bool walks_;
  bool one_sided_;
  bool deterministic_;
  bool paged_;
  int32_t shared_units_;
  CallSizes sizes_;
  int32_t start_capture_;
  Problem problem_;
  std::unique_ptr<CaptureGradients> capture_gradients_;
  mutable std::mutex mutex_;  // of what follows: where the kernels are
  mutable std::vector<Loaded> loaded_;
};

}  // namespace jaxflash
