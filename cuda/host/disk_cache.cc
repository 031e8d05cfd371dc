#include "host/disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "host/sha256.h"

namespace jaxflash {
namespace {

// Changes with the layout of a file.
constexpr char kMagic[] = "jaxflash kernel 3\n";
constexpr size_t kLargestFile = size_t{1} << 28;

std::string checksum_of(const std::string& text) {
  const auto digest = Sha256().add(text.data(), text.size()).digest();
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

template <class T>
void append(std::string* text, const T& value) {
  static_assert(std::has_unique_object_representations_v<T>, "no bytes between its members");
  text->append(reinterpret_cast<const char*>(&value), sizeof(value));
}
void append(std::string* text, const std::string& value) {
  append(text, static_cast<uint64_t>(value.size()));
  *text += value;
}

// Empty where nobody knows the home directory.
std::string in_home(const std::string& path) {
  const char* const home = std::getenv("HOME");
  return home != nullptr && home[0] == '/' ? home + path : "";
}

// Takes values off the front of a text.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  template <class T>
  bool take(T* value) {
    if (text_.size() - next_ < sizeof(T)) return false;
    std::memcpy(value, text_.data() + next_, sizeof(T));
    next_ += sizeof(T);
    return true;
  }
  bool take(std::string* value) {
    uint64_t size = 0;
    if (!take(&size) || text_.size() - next_ < size) return false;
    *value = text_.substr(next_, size);
    next_ += size;
    return true;
  }
  bool done() const { return next_ == text_.size(); }

 private:
  const std::string& text_;
  size_t next_ = 0;
};

class File {
 public:
  File() = default;
  File(const File&) = delete;
  ~File() { close(); }
  bool open(const std::string& path, int flags) {
    descriptor_ = ::open(path.c_str(), flags, 0666);
    return is_open();
  }
  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  bool close() {
    const int descriptor = descriptor_;
    descriptor_ = -1;
    return descriptor < 0 || ::close(descriptor) == 0;
  }

 private:
  int descriptor_ = -1;
};

}  // namespace

std::optional<std::string> named_folder(const char* variable) {
  const char* const value = std::getenv(variable);
  if (value == nullptr) return std::nullopt;
  const std::string folder = value;
  return folder == "~" || folder.compare(0, 2, "~/") == 0 ? in_home(folder.substr(1)) : folder;
}

std::string cache_folder() {
  if (const std::optional<std::string> folder = named_folder("JAXFLASH_CACHE_DIR")) return *folder;
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && cache[0] == '/') return std::string(cache) + "/jaxflash";
  return in_home("/.cache/jaxflash");
}

bool make_folders(const std::string& folder) {
  for (size_t end = 0; end != std::string::npos;) {
    end = folder.find('/', end + 1);
    const std::string part = folder.substr(0, end);
    if (mkdir(part.c_str(), 0777) != 0 && errno != EEXIST) {
      // What is above may belong to others, as long as the folder itself is there.
      struct stat found;
      if (stat(part.c_str(), &found) != 0) return false;
    }
  }
  return true;
}

bool write_file(const std::string& folder, const std::string& name, const std::string& text) {
  if (!make_folders(folder)) return false;
  static std::atomic<unsigned> serial{0};
  const std::string path = folder + "/" + name;
  std::string temporary;
  File file;
  do {  // another container's process of the same number may be at it, or may have been killed
    char unique[64];
    std::snprintf(unique, sizeof(unique), ".%ld.%u.tmp", static_cast<long>(getpid()), serial++);
    temporary = folder + "/." + name + unique;
  } while (!file.open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC) && errno == EEXIST);
  if (!file.is_open()) return false;
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = ::write(file.descriptor(), text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    written += static_cast<size_t>(count);
  }
  const bool closed = file.close();  // a full disk may show only here
  if (closed && written == text.size() && std::rename(temporary.c_str(), path.c_str()) == 0) {
    return true;
  }
  unlink(temporary.c_str());
  return false;
}

bool read_file(const std::string& path, std::string* text) {
  // A pipe of that name must not hold us up.
  File file;
  struct stat found;
  if (!file.open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) ||
      fstat(file.descriptor(), &found) != 0 || !S_ISREG(found.st_mode) || found.st_size < 0 ||
      static_cast<size_t>(found.st_size) > kLargestFile) {
    return false;
  }
  text->resize(static_cast<size_t>(found.st_size));
  size_t taken = 0;
  while (taken < text->size()) {
    const ssize_t count = ::read(file.descriptor(), text->data() + taken, text->size() - taken);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    taken += static_cast<size_t>(count);
  }
  return true;
}

bool read_cached(const std::string& key, Compilation* compilation) {
  const std::string folder = cache_folder();
  std::string file;
  if (folder.empty() || !read_file(folder + "/" + key, &file)) return false;
  constexpr size_t kHeader = sizeof(kMagic) - 1 + 32;
  if (file.size() < kHeader || file.compare(0, sizeof(kMagic) - 1, kMagic) != 0) return false;
  const std::string payload = file.substr(kHeader);
  if (file.compare(sizeof(kMagic) - 1, 32, checksum_of(payload)) != 0) return false;

  Reader reader(payload);
  std::string written_for;
  Compilation read;
  uint8_t serialised = 0;
  if (!reader.take(&written_for) || written_for != key || !reader.take(&read.lowered_name) ||
      !reader.take(&read.costs.registers) || !reader.take(&read.costs.spilled) ||
      !reader.take(&serialised) || !reader.take(&read.cubin) || !reader.done()) {
    return false;
  }
  read.costs.serialised = serialised != 0;
  *compilation = std::move(read);
  return true;
}

void write_cached(const std::string& key, const Compilation& compilation) {
  const std::string folder = cache_folder();
  if (folder.empty()) return;
  std::string payload;
  append(&payload, key);
  append(&payload, compilation.lowered_name);
  append(&payload, compilation.costs.registers);
  append(&payload, compilation.costs.spilled);
  append(&payload, static_cast<uint8_t>(compilation.costs.serialised));
  append(&payload, compilation.cubin);
  write_file(folder, key, kMagic + checksum_of(payload) + payload);
}

}  // namespace jaxflash
