// Compiled kernels as files, by the SHA-256 of all that went into them. The cache only saves time:
// whatever is wrong with the folder or a file, the kernel is compiled instead.
#pragma once

#include <optional>
#include <string>

#include "host/nvrtc.h"

namespace jaxflash {

// The folder that an environment variable names, if it is set. A leading ~ is the home directory,
// as in a shell, which does not see one that is quoted or comes from a container's settings; empty
// where nobody knows that directory.
std::optional<std::string> named_folder(const char* variable);

// JAXFLASH_CACHE_DIR (empty: no files), else $XDG_CACHE_HOME/jaxflash, else ~/.cache/jaxflash;
// empty where there is none of these.
std::string cache_folder();

// False where the folder has no sound file of this key.
bool read_cached(const std::string& key, Compilation* compilation);

// Complete or not at all, also beside other processes.
void write_cached(const std::string& key, const Compilation& compilation);

// Creates `folder` and what lies above it; false where that is not possible.
bool make_folders(const std::string& folder);

// A file of this text that appears complete or not at all.
bool write_file(const std::string& folder, const std::string& name, const std::string& text);

// The text of a regular file of reasonable size.
bool read_file(const std::string& path, std::string* text);

}  // namespace jaxflash
