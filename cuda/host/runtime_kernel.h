// Kernels that are compiled while the program runs: once in a process, or taken from a file.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention.h"
#include "host/nvrtc.h"

namespace jaxflash {

struct KernelRequest {
  std::string label;         // of the report: family, pass, math, head size
  std::string tile;          // likewise
  std::string source;        // a translation unit that includes the library's headers
  std::string kernel;        // name expression of the kernel
  std::string architecture;  // "sm_90a"
  std::vector<std::string> options;
};

class RuntimeKernel {
 public:
  // The folder of the headers that sources include.
  static void use_headers(std::string folder);

  // Of two threads that ask for the same kernel one compiles it and the other waits.
  static Status get(const KernelRequest& request, std::shared_ptr<RuntimeKernel>* kernel);

  // What this process has asked for so far; returns how many there are.
  static int32_t reports(KernelReport* reports, int32_t capacity);

  const KernelCosts& costs() const { return compilation_.costs; }
  const KernelReport& report() const { return report_; }

  // What cudaLaunchKernelExC takes, with its shared memory allowed on the current device and its
  // code there already: a launch allocates nothing and can be captured.
  Status load(int device, int shared_bytes, const void** handle);

 private:
  std::mutex mutex_;
  bool ready_ = false;
  Compilation compilation_;
  KernelReport report_ = {};
  void* handle_ = nullptr;  // cudaKernel_t; never unloaded
};

}  // namespace jaxflash
