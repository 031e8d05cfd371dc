// std::conditional_t for device headers, which have no standard library.
#pragma once

namespace jaxflash {

namespace detail {

template <bool kFirst, class First, class Second>
struct Conditional {
  using Type = First;
};
template <class First, class Second>
struct Conditional<false, First, Second> {
  using Type = Second;
};

}  // namespace detail

template <bool kFirst, class First, class Second>
using Conditional = typename detail::Conditional<kFirst, First, Second>::Type;

}  // namespace jaxflash
