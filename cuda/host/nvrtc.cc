#include "host/nvrtc.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "common/status.h"

namespace jaxflash {
namespace {

// Older ones know neither the warpgroup instructions as these kernels use them nor sm_100.
constexpr int kOldestMajor = 12, kOldestMinor = 9;
constexpr char kInstall[] =
    "install it with `pip install \"jax[cuda13]\"` (or nvidia-cuda-nvrtc), or set CUDA_HOME to a "
    "CUDA toolkit";

using Program = struct _nvrtcProgram*;

struct Search {
  std::mutex mutex;  // of what follows
  std::vector<Nvrtc::Candidate> candidates;
};

// Never destroyed: a thread may still compile when the process ends.
Search& search() {
  static Search& search = *new Search;
  return search;
}

// The build ID among the notes of a segment, or nothing.
std::string build_id(const char* notes, size_t size, size_t alignment) {
  const auto aligned = [&](size_t n) { return (n + alignment - 1) / alignment * alignment; };
  size_t next = 0;
  while (size - next >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes + next, sizeof(note));
    const size_t name = next + sizeof(note);
    const size_t contents = name + aligned(note.n_namesz);
    next = contents + aligned(note.n_descsz);
    if (next > size) break;
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == sizeof(ELF_NOTE_GNU) &&
        std::memcmp(notes + name, ELF_NOTE_GNU, sizeof(ELF_NOTE_GNU)) == 0) {
      return {notes + contents, note.n_descsz};
    }
  }
  return {};
}

// That of a loaded library.
std::string build_id(void* library) {
  struct Found {
    ElfW(Addr) base;
    std::string id;
  };
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return {};
  Found found{map->l_addr, {}};
  const auto look_at = [](dl_phdr_info* info, size_t, void* data) {
    auto& found = *static_cast<Found*>(data);
    if (info->dlpi_addr != found.base) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const ElfW(Phdr) & segment = info->dlpi_phdr[i];
      if (segment.p_type != PT_NOTE || !found.id.empty()) continue;
      const auto* notes = reinterpret_cast<const char*>(found.base + segment.p_vaddr);
      found.id = build_id(notes, segment.p_memsz, segment.p_align == 8 ? 8 : 4);
    }
    return 1;
  };
  dl_iterate_phdr(look_at, &found);
  return found.id;
}

}  // namespace

// nvrtc.h's functions. Its result type is an int, 0 for success.
struct Nvrtc::Functions {
  int (*version)(int* major, int* minor);
  const char* (*error_string)(int result);
  int (*create)(Program*, const char* source, const char* name, int headers,
                const char* const* header_texts, const char* const* header_names);
  int (*destroy)(Program*);
  int (*add_name)(Program, const char* expression);
  int (*compile)(Program, int options, const char* const* texts);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*lowered_name)(Program, const char* expression, const char** lowered);
};

void Nvrtc::look_for(std::vector<Candidate> found) {
  const std::lock_guard<std::mutex> lock(search().mutex);
  search().candidates = std::move(found);
}

Status Nvrtc::get(const Nvrtc** nvrtc) {
  static Nvrtc* loaded = nullptr;  // never unloaded
  const std::lock_guard<std::mutex> lock(search().mutex);
  if (loaded == nullptr) {
    std::string problems;
    for (const Candidate& candidate : search().candidates) {
      auto* attempt = new Nvrtc;
      std::string problem;
      if (attempt->load(candidate, &problem)) {
        loaded = attempt;
        break;
      }
      delete attempt;
      if (!problem.empty()) problems += (problems.empty() ? "" : "; ") + problem;
    }
    if (loaded == nullptr) {
      // Cut, so that a Status has room for the advice.
      return error_status("score functions are compiled by NVRTC %d.%d or newer, and %.300s: %s",
                          kOldestMajor, kOldestMinor,
                          problems.empty() ? "none was found" : problems.c_str(), kInstall);
    }
  }
  *nvrtc = loaded;
  return {};
}

bool Nvrtc::load(const Candidate& candidate, std::string* problem) {
  // NVRTC opens its builtins by their bare name, and does not know where they are.
  void* const builtins = candidate.builtins.empty()
                             ? nullptr
                             : dlopen(candidate.builtins.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const library = dlopen(candidate.library.c_str(), RTLD_NOW | RTLD_LOCAL);
  // A bare name that the system does not know is nothing to talk about.
  const bool is_path = candidate.library.find('/') != std::string::npos;
  if (library == nullptr) {
    if (is_path) *problem = dlerror();
    if (builtins != nullptr) dlclose(builtins);
    return false;
  }
  auto functions = new Functions;
  bool complete = true;
  const auto find = [&](auto& function, const char* name) {
    void* const address = dlsym(library, name);
    complete &= address != nullptr;
    std::memcpy(&function, &address, sizeof(function));
  };
  find(functions->version, "nvrtcVersion");
  find(functions->error_string, "nvrtcGetErrorString");
  find(functions->create, "nvrtcCreateProgram");
  find(functions->destroy, "nvrtcDestroyProgram");
  find(functions->add_name, "nvrtcAddNameExpression");
  find(functions->compile, "nvrtcCompileProgram");
  find(functions->log_size, "nvrtcGetProgramLogSize");
  find(functions->log, "nvrtcGetProgramLog");
  find(functions->cubin_size, "nvrtcGetCUBINSize");
  find(functions->cubin, "nvrtcGetCUBIN");
  find(functions->lowered_name, "nvrtcGetLoweredName");
  if (!complete || functions->version(&major_, &minor_) != 0) {
    *problem = candidate.library + " is not a usable NVRTC";
  } else if (major_ < kOldestMajor || (major_ == kOldestMajor && minor_ < kOldestMinor)) {
    *problem =
        candidate.library + " is NVRTC " + std::to_string(major_) + "." + std::to_string(minor_);
  } else {
    functions_ = functions;
    build_ = build_id(library);
    library_ = candidate.library;
    return true;
  }
  delete functions;
  dlclose(library);
  if (builtins != nullptr) dlclose(builtins);
  return false;
}

Status Nvrtc::compile(const std::string& source, const std::string& kernel, const Headers& headers,
                      const std::vector<std::string>& options, Compilation* compilation) const {
  const Functions& nvrtc = *functions_;
  std::vector<const char*> header_names, header_texts, option_texts;
  for (const auto& [name, text] : headers) {
    header_names.push_back(name.c_str());
    header_texts.push_back(text.c_str());
  }
  for (const std::string& option : options) option_texts.push_back(option.c_str());

  struct Owner {
    const Functions& nvrtc;
    Program program = nullptr;
    ~Owner() {
      if (program != nullptr) nvrtc.destroy(&program);
    }
  } owner{nvrtc};
  const auto failed = [&](const char* doing, int result) {
    return error_status("NVRTC %d.%d (%s) failed at %s: %s", major_, minor_, library_.c_str(),
                        doing, nvrtc.error_string(result));
  };
  int result =
      nvrtc.create(&owner.program, source.c_str(), "jaxflash_program.cu",
                   static_cast<int>(headers.size()), header_texts.data(), header_names.data());
  if (result != 0) return failed("creating a program", result);
  result = nvrtc.add_name(owner.program, kernel.c_str());
  if (result != 0) return failed("naming the kernel", result);
  const int compiled =
      nvrtc.compile(owner.program, static_cast<int>(options.size()), option_texts.data());

  size_t size = 0;
  std::string log;
  if (nvrtc.log_size(owner.program, &size) == 0 && size > 1) {
    log.resize(size);
    nvrtc.log(owner.program, log.data());
    log.resize(std::strlen(log.c_str()));
  }
  if (compiled != 0) {
    // The log's first lines say it; a file with the source says the rest.
    return error_status(
        "NVRTC %d.%d could not compile a score function (%s); JAXFLASH_KEEP_SOURCES=<folder> keeps "
        "the source. %.260s",
        major_, minor_, nvrtc.error_string(compiled), log.c_str());
  }

  const char* lowered = nullptr;
  result = nvrtc.lowered_name(owner.program, kernel.c_str(), &lowered);
  if (result != 0) return failed("finding the kernel", result);
  compilation->lowered_name = lowered;
  result = nvrtc.cubin_size(owner.program, &size);
  if (result != 0) return failed("asking for the machine code", result);
  compilation->cubin.resize(size);
  result = nvrtc.cubin(owner.program, compilation->cubin.data());
  if (result != 0) return failed("asking for the machine code", result);
  compilation->costs = costs_of(log);
  return {};
}

KernelCosts costs_of(const std::string& log) {
  KernelCosts costs;
  size_t begin = 0;
  while (begin < log.size()) {
    const size_t end = std::min(log.find('\n', begin), log.size());
    const std::string line = log.substr(begin, end - begin);
    begin = end + 1;
    if (line.find("(C75") != std::string::npos) costs.serialised = true;
    if (const size_t used = line.find("Used "); used != std::string::npos) {
      std::sscanf(line.c_str() + used, "Used %d registers", &costs.registers);
    }
    const size_t digits = line.find_first_of("0123456789");
    int stack = 0, stores = 0, loads = 0;
    if (digits != std::string::npos &&
        std::sscanf(line.c_str() + digits,
                    "%d bytes stack frame, %d bytes spill stores, %d bytes spill loads", &stack,
                    &stores, &loads) == 3) {
      costs.spilled += std::max(stores, loads);
    }
  }
  return costs;
}

}  // namespace jaxflash
