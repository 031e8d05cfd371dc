// The custom calls: handlers for `jax.ffi.register_ffi_target`.

#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxflash {

// Of one pass, by stage of an executable's life.
struct Handlers {
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
};

#ifdef JAXFLASH_WITH_KERNELS

Handlers forward_handlers();
Handlers backward_handlers();
Handlers tangent_handlers();
Handlers paged_handlers();
Handlers predicate_handlers();
// Of calls without a program: a handler alone.
XLA_FFI_Handler* dense_mask_handler();
XLA_FFI_Handler* segment_matches_handler();
XLA_FFI_Handler* range_summary_handler();
XLA_FFI_Handler* segment_ranges_handler();

// Of the states that instantiation makes, for `jax.ffi.register_ffi_type`.
struct StateType {
  xla::ffi::TypeId* id;
  xla::ffi::TypeInfo* info;
};
StateType program_state_type();
StateType predicate_state_type();

#endif  // JAXFLASH_WITH_KERNELS

// Stands in for the kernels on platforms that have none, so that asking for them there is an error
// with a text rather than an unknown custom call.
XLA_FFI_Handler* wrong_platform_handler();

}  // namespace jaxflash
