#include "host/runtime_kernel.h"

#include <cuda_runtime_api.h>
#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <unordered_map>

#include "common/status.h"
#include "host/disk_cache.h"
#include "host/sha256.h"

namespace jaxflash {
namespace {

// As the kernels that are compiled ahead of time; generic lambdas and constructors without an
// annotation are device code here.
const char* const kOptions[] = {"-std=c++17", "-default-device", "--ptxas-options=-v"};

struct HeaderFiles {
  Headers files;
  std::string digest;  // of names and texts
};

struct HeaderFolder {
  std::mutex mutex;
  std::string path;
  std::shared_ptr<const HeaderFiles> read;  // null before
};
HeaderFolder& header_folder() {
  static auto* folder = new HeaderFolder;  // outlives every thread
  return *folder;
}

// Adds the headers of a folder and of those in it, whose names have no dot, as those of other files
// may. Returns false, with errno, where it cannot read one.
bool collect(const std::string& folder, const std::string& prefix,
             std::vector<std::string>* names) {
  DIR* const directory = opendir(folder.c_str());
  if (directory == nullptr) return errno == ENOTDIR;
  int error = 0;
  while (error == 0) {
    errno = 0;  // the end is told from an error by it alone
    const dirent* const entry = readdir(directory);
    if (entry == nullptr) {
      error = errno;
      break;
    }
    const std::string name = entry->d_name;
    if (name[0] == '.') continue;
    const size_t dot = name.rfind('.');
    if (dot == std::string::npos) {
      if (!collect(folder + "/" + name, prefix + name + "/", names)) error = errno;
    } else if (name.substr(dot) == ".h" || name.substr(dot) == ".cuh") {
      names->push_back(prefix + name);
    }
  }
  closedir(directory);
  errno = error;
  return error == 0;
}

// Read once: what is compiled is what the key was made of.
Status read_headers(std::shared_ptr<const HeaderFiles>* headers) {
  HeaderFolder& folder = header_folder();
  const std::lock_guard<std::mutex> lock(folder.mutex);
  if (folder.read == nullptr) {
    std::vector<std::string> names;
    if (!collect(folder.path, "", &names)) {
      return error_status("cannot read the kernels' sources in %s: %s%s", folder.path.c_str(),
                          std::strerror(errno),
                          errno == ENOENT ? ", the installation is not complete" : "");
    }
    std::sort(names.begin(), names.end());
    HeaderFiles all;
    Sha256 digest;
    for (const std::string& name : names) {
      std::string text;
      if (!read_file(folder.path + "/" + name, &text)) {
        return error_status("cannot read %s/%s, a part of the kernels' sources",
                            folder.path.c_str(), name.c_str());
      }
      digest.add(name).add(text);
      all.files.emplace_back(name, std::move(text));
    }
    if (all.files.empty()) {
      return error_status("the kernels' sources are not in %s: the installation is not complete",
                          folder.path.c_str());
    }
    all.digest = digest.hex();
    folder.read = std::make_shared<const HeaderFiles>(std::move(all));
  }
  *headers = folder.read;
  return {};
}

struct Kernels {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<RuntimeKernel>> by_key;
  std::vector<KernelReport> reports;
};
Kernels& kernels() {
  static auto* all = new Kernels;  // outlives every thread
  return *all;
}

// A text that is too long ends in dots.
template <size_t kSize>
void copy_text(char (&target)[kSize], const std::string& text) {
  std::snprintf(target, kSize, "%s", text.c_str());
  if (text.size() >= kSize) std::strcpy(target + kSize - 4, "...");
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void keep_source(const std::string& folder, const KernelRequest& request,
                 const std::vector<std::string>& options, const std::string& key) {
  std::string text = "// NVRTC";
  for (const std::string& option : options) text += " " + option;
  text += "\n// " + request.kernel + "\n" + request.source;
  std::string name = request.label + " " + request.architecture + " " + key.substr(0, 16) + ".cu";
  std::replace(name.begin(), name.end(), ' ', '_');
  std::replace(name.begin(), name.end(), '/', '-');
  write_file(folder, name, text);
}

// Leaves a capture that this thread's calls would otherwise break alone.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideOfCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

void RuntimeKernel::use_headers(std::string folder) {
  HeaderFolder& current = header_folder();
  const std::lock_guard<std::mutex> lock(current.mutex);
  current.path = std::move(folder);
  current.read = nullptr;
}

Status RuntimeKernel::get(const KernelRequest& request, std::shared_ptr<RuntimeKernel>* result) {
  const Nvrtc* nvrtc = nullptr;
  if (Status status = Nvrtc::get(&nvrtc); !status.ok()) return status;
  std::shared_ptr<const HeaderFiles> headers;
  if (Status status = read_headers(&headers); !status.ok()) return status;

  std::vector<std::string> options(std::begin(kOptions), std::end(kOptions));
  options.push_back("-arch=" + request.architecture);
  options.insert(options.end(), request.options.begin(), request.options.end());
  // Empty: they are not kept.
  const std::string folder = named_folder("JAXFLASH_KEEP_SOURCES").value_or("");
  // Who keeps sources looks into kernels: tools name functions and lines then. Same instructions.
  if (!folder.empty()) options.push_back("-lineinfo");
  Sha256 hash;
  hash.add(request.source).add(request.kernel).add(headers->digest);
  hash.add(std::to_string(nvrtc->major()) + "." + std::to_string(nvrtc->minor()));
  hash.add(nvrtc->build());
  for (const std::string& option : options) hash.add(option);
  const std::string key = hash.hex();

  std::shared_ptr<RuntimeKernel> kernel;
  {
    Kernels& all = kernels();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::shared_ptr<RuntimeKernel>& entry = all.by_key[key];
    if (entry == nullptr) entry = std::make_shared<RuntimeKernel>();
    kernel = entry;
  }
  const std::lock_guard<std::mutex> lock(kernel->mutex_);
  if (!kernel->ready_) {
    if (!folder.empty()) keep_source(folder, request, options, key);
    const auto start = std::chrono::steady_clock::now();
    const bool from_disk = read_cached(key, &kernel->compilation_);
    if (!from_disk) {
      Status status = nvrtc->compile(request.source, request.kernel, headers->files, options,
                                     &kernel->compilation_);
      if (!status.ok()) return status;
    }
    KernelReport& report = kernel->report_;
    copy_text(report.label, request.label);
    copy_text(report.tile, request.tile);
    copy_text(report.architecture, request.architecture);
    report.registers = kernel->compilation_.costs.registers;
    report.spilled = kernel->compilation_.costs.spilled;
    report.serialised = kernel->compilation_.costs.serialised;
    report.seconds = seconds_since(start);
    report.from_disk = from_disk;
    kernel->ready_ = true;
    if (!from_disk) write_cached(key, kernel->compilation_);
    Kernels& all = kernels();
    const std::lock_guard<std::mutex> all_lock(all.mutex);
    all.reports.push_back(report);
  }
  *result = std::move(kernel);
  return {};
}

int32_t RuntimeKernel::reports(KernelReport* reports, int32_t capacity) {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto count = static_cast<int32_t>(all.reports.size());
  std::copy_n(all.reports.begin(), std::min(count, capacity), reports);
  return count;
}

Status RuntimeKernel::load(int device, int shared_bytes, const void** handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OutsideOfCapture outside;
  if (handle_ == nullptr) {
    cudaLibrary_t library = nullptr;
    cudaError_t error = cudaLibraryLoadData(&library, compilation_.cubin.data(), nullptr, nullptr,
                                            0, nullptr, nullptr, 0);
    cudaKernel_t kernel = nullptr;
    if (error == cudaSuccess) {
      error = cudaLibraryGetKernel(&kernel, library, compilation_.lowered_name.c_str());
    }
    if (Status status = cuda_status(error, "loading the kernel of a score function");
        !status.ok()) {
      if (library != nullptr) cudaLibraryUnload(library);
      return status;
    }
    handle_ = kernel;
  }
  auto* const kernel = static_cast<cudaKernel_t>(handle_);
  cudaError_t error = cudaKernelSetAttributeForDevice(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes, device);
  // Asking for its attributes brings the code to the device; otherwise the first launch would.
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, handle_);
  *handle = handle_;
  return cuda_status(error, "preparing the kernel of a score function");
}

}  // namespace jaxflash
