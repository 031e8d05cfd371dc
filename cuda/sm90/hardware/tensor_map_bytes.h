// What host and device know of a tensor map.
#pragma once

#include "common/integers.h"

namespace jaxflash::sm90 {

// A CUtensorMap, written on the host (tensor_map.h), without the driver's header.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// An operand as TMA sees it. An index along each batch axis of the map is multiplied with its
// `step`: 0 broadcasts.
struct MappedOperand {
  TensorMap map;
  int32_t batch_step[2];
};

}  // namespace jaxflash::sm90
