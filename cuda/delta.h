// The backward's first kernel, the same for all families.
#pragma once

#include "attention.h"
#include "common/workspace.h"

namespace jaxflash {

Status launch_delta(const BackwardParams& params, const BackwardWorkspace& workspace,
                    CUstream_st* stream);

}  // namespace jaxflash
