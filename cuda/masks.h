// Steps around the kernel of a predicate, which is compiled at run time.
#pragma once

#include "attention.h"

namespace jaxflash {

// Ahead of that kernel: nothing of its masks has been seen.
Status clear_seen(const PredicateBlocks& params, CUstream_st* stream);

// Behind it: MaskIntervals.
Status find_intervals(const PredicateBlocks& params, CUstream_st* stream);

}  // namespace jaxflash
