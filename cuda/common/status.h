// How host code makes a Status: `return {};` for success, otherwise one of these.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstdio>

#include "attention.h"

namespace jaxflash {

__attribute__((format(printf, 1, 2))) inline Status error_status(const char* format, ...) {
  Status status = {};
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.message, sizeof(status.message), format, arguments);
  va_end(arguments);
  return status;
}

// Success, or what `doing` ran into. Clears the runtime's last error, so that the next call of
// this thread does not find it.
inline Status cuda_status(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return error_status("%s failed: %s (%s)", doing, cudaGetErrorString(error),
                      cudaGetErrorName(error));
}

}  // namespace jaxflash
