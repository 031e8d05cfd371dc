// The attributes of the custom calls, a struct for each list, decoded by name.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxflash {

namespace ffi = xla::ffi;

// Each has a function each(use), which calls use(name, member) for every attribute there is.

// Of all passes, in a dictionary of its own.
struct ProblemAttributes {
  float scale;
  int64_t left;   // kUnlimited and above: no limit
  int64_t right;  // likewise
  bool bottom_right;
  bool highest_precision;
  bool has_q_lengths;  // the optional operands follow in this order
  bool has_kv_lengths;
  int64_t mask;  // MaskKind
  bool walks;    // see ProgramDescription: there are Ranges::row_visits

  template <class Use>
  void each(const Use& use) {
    use("scale", scale);
    use("left", left);
    use("right", right);
    use("bottom_right", bottom_right);
    use("highest_precision", highest_precision);
    use("has_q_lengths", has_q_lengths);
    use("has_kv_lengths", has_kv_lengths);
    use("mask", mask);
    use("walks", walks);
  }
};

// Of all passes: those of the tangent pass.
struct PassAttributes {
  ProblemAttributes problem;
  std::string_view program;  // source; empty: a plain call, and the others are not looked at
  bool unit_slope;
  bool bounded;
  int64_t head_dim;
  int64_t value_dim;
  std::string_view dtype;
  ffi::Span<const int64_t> capture_ranks;  // axes of each captured array beside the batch axes

  template <class Use>
  void each(const Use& use) {
    use("problem", problem);
    use("program", program);
    use("unit_slope", unit_slope);
    use("bounded", bounded);
    use("head_dim", head_dim);
    use("value_dim", value_dim);
    use("dtype", dtype);
    use("capture_ranks", capture_ranks);
  }
};

// Of the forward pass, also of one whose keys lie in pages. See ProgramDescription.
struct ForwardAttributes : PassAttributes {
  int64_t shared_units;
  ffi::Span<const int64_t> sizes;  // the numbers of a CallSizes, or none: they vary
  int64_t start_capture;

  template <class Use>
  void each(const Use& use) {
    PassAttributes::each(use);
    use("shared_units", shared_units);
    use("sizes", sizes);
    use("start_capture", start_capture);
  }
};

struct BackwardAttributes : PassAttributes {
  int64_t start_capture;  // see ProgramDescription
  bool has_dlse;
  bool deterministic;
  std::string_view gradient_program;  // with a struct for each load and each key sum
  // Eight numbers for each load: capture, query axis, key axis, whether it scatters, is narrow, is
  // stored, is summed, sums the batch, see CaptureLoad. Loads of one capture are neighbours; at
  // most one is stored.
  ffi::Span<const int64_t> gradient_loads;
  int64_t key_sums;  // how many sums over the queries are wanted, see BackwardParams

  template <class Use>
  void each(const Use& use) {
    PassAttributes::each(use);
    use("start_capture", start_capture);
    use("has_dlse", has_dlse);
    use("deterministic", deterministic);
    use("gradient_program", gradient_program);
    use("gradient_loads", gradient_loads);
    use("key_sums", key_sums);
  }
};

struct PredicateAttributes {
  std::string_view program;  // source
  int64_t left;              // sides of the band, as above
  int64_t right;
  bool bottom_right;
  ffi::Span<const int64_t> capture_ranks;

  template <class Use>
  void each(const Use& use) {
    use("program", program);
    use("left", left);
    use("right", right);
    use("bottom_right", bottom_right);
    use("capture_ranks", capture_ranks);
  }
};

// The names of a struct's attributes, and the place of each among those that XLA hands over, which
// come in the order of their names.
struct AttributeNames {
  std::vector<std::string_view> names;
  std::vector<size_t> places;

  template <class Attributes>
  static AttributeNames of() {
    AttributeNames result;
    Attributes attributes = {};
    attributes.each([&](std::string_view name, const auto&) { result.names.push_back(name); });
    for (const std::string_view name : result.names) {
      result.places.push_back(std::count_if(result.names.begin(), result.names.end(),
                                            [&](std::string_view other) { return other < name; }));
    }
    return result;
  }
};

// How XLA decodes such a struct. One that is missing, unknown or of another type is an error.
template <class Attributes>
struct ByName {
  using Type = Attributes;

  static std::optional<Attributes> Decode(XLA_FFI_AttrType type, void* attr,
                                          ffi::DiagnosticEngine& diagnostic) {
    if (type != XLA_FFI_AttrType_DICTIONARY) {
      return diagnostic.Emit("Attributes are a dictionary, but got: ") << type;
    }
    // Once: a handler has microseconds.
    static const AttributeNames wanted = AttributeNames::of<Attributes>();
    const auto& given = *static_cast<const XLA_FFI_Attrs*>(attr);
    const auto name_at = [&](size_t place) {
      return std::string_view(given.names[place]->ptr, given.names[place]->len);
    };
    bool same_names = static_cast<size_t>(given.size) == wanted.names.size();
    for (size_t i = 0; same_names && i < wanted.names.size(); ++i) {
      same_names = name_at(wanted.places[i]) == wanted.names[i];
    }
    if (!same_names) {
      auto text = diagnostic.Emit("Wrong attributes: expected");
      for (const std::string_view name : wanted.names) text << " " << name;
      text << ", but got";
      for (int64_t place = 0; place < given.size; ++place) text << " " << name_at(place);
      return text;
    }
    Attributes attributes = {};
    size_t next = 0;
    bool decoded = true;
    attributes.each([&](std::string_view name, auto& member) {
      using Member = std::remove_reference_t<decltype(member)>;
      const size_t place = wanted.places[next++];
      auto value =
          ffi::AttrDecoding<Member>::Decode(given.types[place], given.attrs[place], diagnostic);
      if (value.has_value()) {
        member = *value;
      } else {
        diagnostic.Emit(" (attribute ") << name << ")";
        decoded = false;
      }
    });
    if (!decoded) return std::nullopt;
    return attributes;
  }
};

}  // namespace jaxflash

namespace xla::ffi {

template <>
struct AttrDecoding<jaxflash::ProblemAttributes> : jaxflash::ByName<jaxflash::ProblemAttributes> {};
template <>
struct AttrDecoding<jaxflash::PassAttributes> : jaxflash::ByName<jaxflash::PassAttributes> {};
template <>
struct AttrDecoding<jaxflash::ForwardAttributes> : jaxflash::ByName<jaxflash::ForwardAttributes> {};
template <>
struct AttrDecoding<jaxflash::BackwardAttributes> : jaxflash::ByName<jaxflash::BackwardAttributes> {
};
template <>
struct AttrDecoding<jaxflash::PredicateAttributes>
    : jaxflash::ByName<jaxflash::PredicateAttributes> {};

}  // namespace xla::ffi
