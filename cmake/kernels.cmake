# The target jaxflash_cuda (libjaxflash_cuda.so): JAXFLASH_VARIANTS compiled for
# JAXFLASH_CUDA_ARCHS, or a library that was built before.
if(JAXFLASH_PREBUILT_KERNELS)
  if(NOT EXISTS "${JAXFLASH_PREBUILT_KERNELS}")
    message(FATAL_ERROR "JAXFLASH_PREBUILT_KERNELS: there is no ${JAXFLASH_PREBUILT_KERNELS}")
  endif()
  file(STRINGS "${JAXFLASH_PREBUILT_KERNELS}" hash REGEX "${JAXFLASH_SOURCE_HASH}" LIMIT_COUNT 1)
  if(NOT hash)
    message(FATAL_ERROR
      "JAXFLASH_PREBUILT_KERNELS: ${JAXFLASH_PREBUILT_KERNELS} was built from other sources than "
      "these (of hash ${JAXFLASH_SOURCE_HASH}); build the kernels anew")
  endif()
  add_library(jaxflash_cuda SHARED IMPORTED)
  set_target_properties(jaxflash_cuda PROPERTIES
    IMPORTED_LOCATION "${JAXFLASH_PREBUILT_KERNELS}" IMPORTED_SONAME libjaxflash_cuda.so)
  install(FILES "${JAXFLASH_PREBUILT_KERNELS}" DESTINATION jaxflash RENAME libjaxflash_cuda.so)
  return()
endif()

# ---- Compiler ------------------------------------------------------------------------------------

if(NOT CMAKE_CUDA_COMPILER)
  # The build backend asks the same script whether it has to install nvcc.
  execute_process(COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/_build_backend/find_nvcc.py
                  OUTPUT_VARIABLE CMAKE_CUDA_COMPILER OUTPUT_STRIP_TRAILING_WHITESPACE
                  RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR
      "jaxflash: no CUDA compiler. Install a CUDA toolkit (12.9 or newer) or name its nvcc in "
      "CUDACXX; an isolated `pip install` brings nvcc along by itself. JAXFLASH_CUDA=OFF builds "
      "without GPU kernels")
  endif()
endif()
get_filename_component(cuda_bin ${CMAKE_CUDA_COMPILER} DIRECTORY)
get_filename_component(cuda_root ${cuda_bin} DIRECTORY)
if(EXISTS ${cuda_root}/lib/libcudart_static.a AND NOT EXISTS ${cuda_root}/lib64)
  # nvcc looks for its libraries in lib64; its wheels have them in lib.
  string(APPEND CMAKE_CUDA_FLAGS " -L${cuda_root}/lib")
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)  # each variant has its own below
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
# Folds ptxas's report into a line per kernel and stops at serialised warpgroup instructions.
list(PREPEND CMAKE_CUDA_COMPILER_LAUNCHER
  ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/compile_kernels.py)
enable_language(CUDA)

find_program(JAXFLASH_PTXAS ptxas HINTS ${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}/bin ${cuda_bin}
             REQUIRED)
execute_process(COMMAND ${JAXFLASH_PTXAS} --version
                OUTPUT_VARIABLE ptxas_version COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE ".*V([0-9.]+).*" "\\1" ptxas_version "${ptxas_version}")

# ---- Families ------------------------------------------------------------------------------------

set(portable_archs ${JAXFLASH_CUDA_ARCHS})
list(FILTER portable_archs INCLUDE REGEX "^[0-9]+$")
list(SORT portable_archs COMPARE NATURAL)
foreach(arch IN LISTS JAXFLASH_CUDA_ARCHS)
  if(NOT arch MATCHES "^([0-9]+|90a)$" OR arch LESS 80)
    message(FATAL_ERROR
      "JAXFLASH_CUDA_ARCHS: '${arch}' is neither 90a nor a compute capability from 80 on")
  endif()
endforeach()

# sm80: for every GPU from Ampere on. The oldest architecture carries PTX, for GPUs to come.
set(sm80_archs ${portable_archs})
set(sm80_gencode "")
set(sm80_takes nullptr)
set(sm80_takes_sizes nullptr)
set(sm80_walks false)
foreach(arch IN LISTS portable_archs)
  if(NOT sm80_gencode)
    set(sm80_target "{${arch}, true}")
    list(APPEND sm80_gencode "-gencode=arch=compute_${arch},code=[sm_${arch},compute_${arch}]")
  else()
    list(APPEND sm80_gencode "-gencode=arch=compute_${arch},code=sm_${arch}")
  endif()
endforeach()

# sm90: Hopper alone. `takes` says which calls it leaves to the next family.
set(sm90_archs 90a)
set(sm90_gencode "")
set(sm90_takes sm90::takes)
set(sm90_takes_sizes sm90::takes_sizes)
set(sm90_walks true)
set(sm90_target "{90, false}")
if(90a IN_LIST JAXFLASH_CUDA_ARCHS)
  set(sm90_gencode -gencode=arch=compute_90a,code=sm_90a)
endif()

# ---- Variants ------------------------------------------------------------------------------------

set(math_float16 kFloat16)
set(math_bfloat16 kBFloat16)
set(math_tf32 kTF32)
set(math_float32 kFloat32)
set(params_forward ForwardParams)
set(params_backward BackwardParams)
set(params_tangent TangentParams)
# Passes whose kernels are compiled at run time alone: host code, which needs no nvcc.
set(run_time_passes tangent)
set(tuned_maths float16 bfloat16)
# The release of nvcc that tiles were chosen with. What spills there fails the build; another one's
# spills (12.9: 4 bytes in the portable backward kernel of head size 64) are reported.
set(tuned_release 13.0)

set(generated ${PROJECT_BINARY_DIR}/generated)
set(sources "")
set(compiled_archs "")
set(JF_DECLARATIONS "")
set(JF_FORWARD_ROWS "")
set(JF_BACKWARD_ROWS "")
set(JF_TANGENT_ROWS "")
set(JF_VARIANT_ROWS "")
foreach(row IN LISTS JAXFLASH_VARIANTS)
  string(REGEX MATCHALL "[^ ]+" sizes "${row}")
  list(POP_FRONT sizes JF_FAMILY JF_PASS JF_MATH)
  set(JF_MATH_ENUM ${math_${JF_MATH}})
  set(JF_PARAMS ${params_${JF_PASS}})
  if(NOT JF_MATH_ENUM OR NOT JF_PARAMS OR NOT DEFINED ${JF_FAMILY}_gencode)
    message(FATAL_ERROR "JAXFLASH_VARIANTS: cannot read '${row}'")
  endif()
  if(NOT ${JF_FAMILY}_gencode)
    continue()  # JAXFLASH_CUDA_ARCHS leaves it out
  endif()
  list(APPEND compiled_archs ${${JF_FAMILY}_archs})
  set(JF_TARGET ${${JF_FAMILY}_target})
  set(JF_TAKES ${${JF_FAMILY}_takes})
  set(JF_TAKES_SIZES ${${JF_FAMILY}_takes_sizes})
  set(options ${${JF_FAMILY}_gencode})
  if(JF_MATH IN_LIST tuned_maths AND CMAKE_CUDA_COMPILER_VERSION MATCHES "^${tuned_release}[.]")
    list(APPEND options -Xptxas=-warn-spills,-Werror)
  endif()

  foreach(size IN LISTS sizes)  # "128", or "192/128" where values have another head size
    string(REPLACE "/" ", " JF_HEAD_DIMS ${size})
    string(REGEX REPLACE "/.*" "" head_dim ${size})
    string(REGEX REPLACE ".*/" "" value_dim ${size})
    string(REPLACE "/" "_" JF_NAME ${JF_FAMILY}_${JF_PASS}_${JF_MATH}_${size})
    set(JF_WALKS ${${JF_FAMILY}_walks})
    set(JF_GRADIENTS_BESIDE "{}")
    if(JF_PASS STREQUAL "backward")
      set(JF_GRADIENTS_BESIDE "${JF_FAMILY}::kGradientsBeside<${JF_HEAD_DIMS}>")
    endif()
    set(JF_VARIANT "{\"${JF_FAMILY}\", \"${JF_PASS}\", \"${JF_MATH}\", ${head_dim}, ${value_dim}}")
    string(APPEND JF_DECLARATIONS "extern const Launcher<${JF_PARAMS}> ${JF_NAME};\n")
    string(TOUPPER JF_${JF_PASS}_ROWS rows)
    string(APPEND ${rows} "    &${JF_NAME},\n")
    string(APPEND JF_VARIANT_ROWS "    ${JF_VARIANT},\n")

    if(JF_PASS IN_LIST run_time_passes)
      set(JF_HEADER ${JF_FAMILY}/${JF_PASS}.h)
      set(source ${generated}/${JF_NAME}.cc)
    else()
      set(JF_HEADER ${JF_FAMILY}/${JF_PASS}.cuh)
      set(source ${generated}/${JF_NAME}.cu)
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${options}")
    endif()
    configure_file(${PROJECT_SOURCE_DIR}/cuda/instance.cu.in ${source} @ONLY)
    list(APPEND sources ${source})
  endforeach()
endforeach()
if(NOT sources)
  message(FATAL_ERROR
    "JAXFLASH_CUDA_ARCHS='${JAXFLASH_CUDA_ARCHS}' leaves no kernel to compile; add 80 or 90")
endif()

# ---- Library -------------------------------------------------------------------------------------

string(REPLACE ";" ", " JF_PORTABLE_ARCHS "${portable_archs}")
if(NOT portable_archs)
  set(JF_PORTABLE_ARCHS 0)  # an array has an element; no GPU is of this one
endif()
list(REMOVE_DUPLICATES compiled_archs)
list(SORT compiled_archs COMPARE NATURAL)
string(REPLACE ";" " sm_" JF_BUILD_INFO
  "nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ptxas ${ptxas_version}, for sm_${compiled_archs}")
configure_file(${PROJECT_SOURCE_DIR}/cuda/variants.h.in ${generated}/variants.h @ONLY)

# For every GPU that is compiled for.
set(common_gencode ${sm80_gencode})
if(NOT common_gencode)
  set(common_gencode ${sm90_gencode})
endif()
set(common_sources ${PROJECT_SOURCE_DIR}/cuda/delta.cu
                   ${PROJECT_SOURCE_DIR}/cuda/masks.cu
                   ${PROJECT_SOURCE_DIR}/cuda/ranges.cu)
set_source_files_properties(${common_sources} PROPERTIES COMPILE_OPTIONS "${common_gencode}")
file(GLOB host_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cuda/host/*.cc)
add_library(jaxflash_cuda SHARED ${PROJECT_SOURCE_DIR}/cuda/dispatch.cc ${host_sources}
            ${common_sources} ${sources})
target_include_directories(jaxflash_cuda PRIVATE ${PROJECT_SOURCE_DIR}/cuda ${generated})
target_include_directories(jaxflash_cuda SYSTEM PRIVATE
  ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# Machine code is compressed too: a quarter of the size. By nvcc's own choice of how, which every
# driver reads that runs its output; `--compress-mode=size` of CUDA 12 needs a newer one.
target_compile_options(jaxflash_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror>
  $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror -lineinfo
                             -Xptxas=-v -Xfatbin=-compress-all>)
# At run time the library needs the C library alone: any CUDA runtime beside it is its own.
target_link_options(jaxflash_cuda PRIVATE
  -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL -Wl,--no-undefined
  -Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/exports.map)
install(TARGETS jaxflash_cuda LIBRARY DESTINATION jaxflash)

list(LENGTH sources count)
message(STATUS "jaxflash: ${count} kernel variants; ${JF_BUILD_INFO}")
