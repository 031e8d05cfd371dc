// How the kernel of common/predicate_kernel.cuh divides its work; for its launch, too.
#pragma once

namespace jaxflash {

inline constexpr int kPredicateThreads = 256;
inline constexpr int kPredicateBlocks = 2;  // of kRangeBlock keys, side by side: a warp's work

}  // namespace jaxflash
