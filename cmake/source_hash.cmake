# JAXFLASH_SOURCE_HASH: of every source of the kernel library. The library exports the hash that it
# was built from, and the extension refuses to be imported beside a library of another one.
file(GLOB_RECURSE files RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/cuda/*.h ${PROJECT_SOURCE_DIR}/cuda/*.cuh ${PROJECT_SOURCE_DIR}/cuda/*.cc
  ${PROJECT_SOURCE_DIR}/cuda/*.cu ${PROJECT_SOURCE_DIR}/cuda/*.in)
list(FILTER files EXCLUDE REGEX "^cuda/ffi/")  # of the extension itself
list(SORT files)
set(hashes "")
foreach(file IN LISTS files)
  file(SHA256 ${PROJECT_SOURCE_DIR}/${file} hash)
  string(APPEND hashes "${hash} ${file}\n")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${file})
endforeach()
string(SHA256 JAXFLASH_SOURCE_HASH "${hashes}")
string(SUBSTRING ${JAXFLASH_SOURCE_HASH} 0 16 JAXFLASH_SOURCE_HASH)
