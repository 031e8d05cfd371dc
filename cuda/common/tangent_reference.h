// What the tangent kernels of both families agree on.
#pragma once

namespace jaxflash {

// The probability from which on the mean over a tile tells where a row's tangents of logits lie.
inline constexpr float kReferenceWeight = 0.5f;

}  // namespace jaxflash
