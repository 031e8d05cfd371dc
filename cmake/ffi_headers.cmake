# XLA's FFI headers. A runtime takes handlers compiled with headers as old as its own or older, so
# they come from the oldest jaxlib that is supported, a pinned build requirement.
set(JAXFLASH_FFI_API_VERSION 0.3)

function(find_ffi_headers include_variable)
  set(include "${${include_variable}}")
  if(NOT include)
    # find_spec locates the package without importing it.
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "\
from importlib.util import find_spec
print(find_spec('jaxlib').submodule_search_locations[0])"
      OUTPUT_VARIABLE jaxlib OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(include "${jaxlib}/include")
  endif()
  set(header "${include}/xla/ffi/api/c_api.h")
  if(NOT EXISTS "${header}")
    message(FATAL_ERROR
      "jaxflash: no XLA FFI headers at ${header}. They come with the build requirement jaxlib; "
      "a build without isolation needs it installed, or -DJAXFLASH_FFI_INCLUDE=<folder of xla/>")
  endif()
  file(STRINGS "${header}" lines REGEX "^#define XLA_FFI_API_(MAJOR|MINOR) ")
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" version "${lines}")
  if(NOT version STREQUAL JAXFLASH_FFI_API_VERSION)
    message(FATAL_ERROR
      "jaxflash: the XLA FFI headers in ${include} are of version ${version}; a build that "
      "registers with every supported jaxlib needs ${JAXFLASH_FFI_API_VERSION} (jaxlib 0.10.2)")
  endif()
  set(${include_variable} "${include}" PARENT_SCOPE)
endfunction()
