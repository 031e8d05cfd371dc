# Build options: -D on CMake's command line, otherwise the environment variable of the same name
# (which is what reaches `pip install .`), otherwise the default. Only -D values enter the cache, so
# that a kept build folder follows the environment.
macro(jaxflash_option name default)
  if(NOT DEFINED CACHE{${name}})
    if(DEFINED ENV{${name}})
      set(${name} "$ENV{${name}}")
    else()
      set(${name} "${default}")
    endif()
  endif()
endmacro()

# AUTO: kernels on Linux, none where CUDA does not exist. ON: kernels. OFF: none.
jaxflash_option(JAXFLASH_CUDA AUTO)
# What the kernels are compiled for. A plain number is machine code of the portable kernels (the
# lowest one also as PTX, for newer GPUs); 90a is Hopper's own kernels.
jaxflash_option(JAXFLASH_CUDA_ARCHS "80;90;90a")
# A libjaxflash_cuda.so of this source tree that was built before: nothing is compiled for the GPU.
jaxflash_option(JAXFLASH_PREBUILT_KERNELS "")
# A folder that holds xla/ffi/api/ffi.h, instead of that of the build requirement jaxlib.
jaxflash_option(JAXFLASH_FFI_INCLUDE "")

string(TOUPPER "${JAXFLASH_CUDA}" JAXFLASH_CUDA)
string(REGEX REPLACE "[, ]+" ";" JAXFLASH_CUDA_ARCHS "${JAXFLASH_CUDA_ARCHS}")
if(NOT JAXFLASH_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "JAXFLASH_CUDA is '${JAXFLASH_CUDA}'; it must be AUTO, ON or OFF")
endif()
if(JAXFLASH_CUDA STREQUAL "AUTO" AND NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  message(STATUS "jaxflash: building without GPU kernels, as there is no CUDA on ${CMAKE_SYSTEM_NAME}")
  set(JAXFLASH_CUDA OFF)
endif()
