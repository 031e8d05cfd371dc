// NVRTC, NVIDIA's compiler at run time: found and loaded when it is first needed, so that neither
// the library nor an ordinary call depends on it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "attention.h"

namespace jaxflash {

// What ptxas says of a kernel.
struct KernelCosts {
  int registers = 0;  // that a thread is launched with
  int spilled = 0;    // bytes of a thread: of stores or of loads, whichever are more
  // Warpgroup instructions wait for one another, or setmaxnreg is ignored: slow on Hopper.
  bool serialised = false;

  bool harmless(int harmless_spills) const { return !serialised && spilled <= harmless_spills; }
  bool better_than(const KernelCosts& other) const {
    return serialised != other.serialised ? other.serialised : spilled < other.spilled;
  }
};

struct Compilation {
  std::string cubin;
  std::string lowered_name;  // of the kernel in the cubin
  KernelCosts costs;
};

// Name, as in #include "...", and text.
using Headers = std::vector<std::pair<std::string, std::string>>;

class Nvrtc {
 public:
  // Where to look, best first; builtins may be empty. Before the first use.
  struct Candidate {
    std::string library, builtins;
  };
  static void look_for(std::vector<Candidate> candidates);

  // The compiler, loaded once; or why there is none, and what to do about it.
  static Status get(const Nvrtc** nvrtc);

  int major() const { return major_; }
  int minor() const { return minor_; }
  // What tells this build of the library from others of its version, such as patch releases: the
  // linker's hash of its contents (ELF build ID), which is in memory already and the same wherever
  // that file is installed. Empty where a distributor has removed it.
  const std::string& build() const { return build_; }
  const std::string& library() const { return library_; }

  // `kernel`: the name expression of one kernel of `source`.
  Status compile(const std::string& source, const std::string& kernel, const Headers& headers,
                 const std::vector<std::string>& options, Compilation* compilation) const;

 private:
  bool load(const Candidate& candidate, std::string* problem);

  struct Functions;
  const Functions* functions_ = nullptr;
  int major_ = 0, minor_ = 0;
  std::string build_;
  std::string library_;
};

// Of the lines of a log with ptxas's -v.
KernelCosts costs_of(const std::string& log);

}  // namespace jaxflash
