// The custom calls that find what masks show: of dense ones, and of predicates.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/call.h"
#include "ffi/handlers.h"

namespace jaxflash {
namespace {

using IntervalArray = ffi::Result<ffi::Buffer<ffi::S32>>;

// Whether a mask of so many rows or keys is one of a call: it may have one for all.
bool fits(int64_t size, int64_t length) { return size == length || size == 1; }

// See MaskIntervals.
struct IntervalArrays {
  IntervalArray keys_of_row;
  IntervalArray rows_of_key;
  IntervalArray keys_inside;
  IntervalArray rows_inside;
  IntervalArray row_visits;
  IntervalArray key_visits;
};

// What both make of masks (*B, rows, keys): intervals of a call's rows and keys.
ffi::Error set_intervals(const Lead& lead, int64_t rows, int64_t keys, IntervalArrays arrays,
                         MaskIntervals* intervals) {
  const auto row_dims = arrays.keys_of_row->dimensions();
  const auto key_dims = arrays.rows_of_key->dimensions();
  if (ffi::Error error = check_intervals(row_dims, key_dims); error.failure()) return error;
  const int64_t q_len = row_dims[row_dims.size() - 2], kv_len = key_dims[key_dims.size() - 2];
  if (!fits(rows, q_len) || !fits(keys, kv_len)) {
    return invalid("a mask has the rows and keys of the call, ", q_len, " and ", kv_len,
                   ", or one for all, got ", rows, " and ", keys);
  }
  intervals->count = lead.count();
  intervals->rows = static_cast<int32_t>(rows);
  intervals->keys = static_cast<int32_t>(keys);
  intervals->q_len = static_cast<int32_t>(q_len);
  intervals->kv_len = static_cast<int32_t>(kv_len);
  const int64_t row_blocks = blocks_of(intervals->q_len), key_blocks = blocks_of(intervals->kv_len);
  const int64_t row_words = block_words_of(intervals->q_len);
  const int64_t key_words = block_words_of(intervals->kv_len);
  if (!lead.has_shape(row_dims, {q_len, 2}) || !lead.has_shape(key_dims, {kv_len, 2}) ||
      !lead.has_shape(arrays.keys_inside->dimensions(), {row_blocks, 4}) ||
      !lead.has_shape(arrays.rows_inside->dimensions(), {key_blocks, 4}) ||
      !lead.has_shape(arrays.row_visits->dimensions(), {row_blocks, key_words, 2}) ||
      !lead.has_shape(arrays.key_visits->dimensions(), {key_blocks, row_words, 2})) {
    return invalid("the intervals of a mask have its leading axes, and ", q_len, " rows, ", kv_len,
                   " keys and their blocks, got ",
                   text_of({{"keys of rows", row_dims},
                            {"rows of keys", key_dims},
                            {"keys inside", arrays.keys_inside->dimensions()},
                            {"rows inside", arrays.rows_inside->dimensions()},
                            {"visits of rows", arrays.row_visits->dimensions()},
                            {"of keys", arrays.key_visits->dimensions()}}));
  }
  intervals->keys_of_row = arrays.keys_of_row->typed_data();
  intervals->rows_of_key = arrays.rows_of_key->typed_data();
  intervals->keys_inside = arrays.keys_inside->typed_data();
  intervals->rows_inside = arrays.rows_inside->typed_data();
  intervals->row_visits = arrays.row_visits->typed_data();
  intervals->key_visits = arrays.key_visits->typed_data();
  return ffi::Error::Success();
}

int64_t number_of_blocks(const MaskIntervals& params) {
  return params.count * blocks_of(params.rows) * blocks_of(params.keys);
}

ffi::Error dense_mask(CUstream_st* stream, bool packs_keys, ffi::Buffer<ffi::PRED> mask,
                      ffi::Result<ffi::Buffer<ffi::U32>> words, IntervalArray keys_of_row,
                      IntervalArray rows_of_key, IntervalArray keys_inside,
                      IntervalArray rows_inside, IntervalArray row_visits, IntervalArray key_visits,
                      ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const auto dims = mask.dimensions();
  if (dims.size() < 2) return invalid("a mask has axes of rows and keys, got ", text_of(dims));
  const int64_t rows = dims[dims.size() - 2], keys = dims[dims.size() - 1];
  const Lead lead(dims, 2);
  DenseMaskParams params = {};
  const IntervalArrays intervals = {keys_of_row, rows_of_key, keys_inside,
                                    rows_inside, row_visits,  key_visits};
  if (auto error = set_intervals(lead, rows, keys, intervals, &params); error.failure()) {
    return error;
  }
  const std::vector<int64_t> packed =
      packs_keys ? std::vector<int64_t>{(keys + 127) / 128, rows, DenseMaskParams::kSharers}
                 : std::vector<int64_t>{(rows + 31) / 32, keys};
  if (!lead.has_shape(words->dimensions(), packed)) {
    return invalid("the words of a mask ", text_of(dims), " have its leading axes and ",
                   text_of({packed.data(), packed.size()}), ", got ", text_of(words->dimensions()));
  }
  params.mask = reinterpret_cast<const uint8_t*>(mask.typed_data());
  params.packs_keys = packs_keys;
  params.words = words->typed_data();
  params.blocks = reinterpret_cast<MaskBlock*>(workspace->untyped_data());
  if (auto error =
          check_workspace("a mask", *workspace, number_of_blocks(params) * sizeof(MaskBlock));
      error.failure()) {
    return error;
  }
  return to_error(jaxflash_dense_mask(&params, stream));
}

// What lives as long as an executable, for each of its calls.
struct PredicateState {
  static ffi::TypeId id;

  PredicateState() = default;
  PredicateState(const PredicateState&) = delete;
  ~PredicateState() {
    if (kernel != nullptr) jaxflash_delete_predicate(kernel);
  }

  PredicateKernel* kernel = nullptr;
};
ffi::TypeId PredicateState::id = {};

// While XLA compiles.
ffi::ErrorOr<std::unique_ptr<PredicateState>> instantiate_predicate(
    PredicateAttributes attributes) {
  auto state = std::make_unique<PredicateState>();
  const Status status =
      jaxflash_create_predicate(std::string(attributes.program).c_str(), &state->kernel);
  if (!status.ok()) return ffi::Unexpected(to_error(status));
  return state;
}

// Before the first execution on a device, and outside of any capture.
ffi::Error initialize_predicate(PredicateState* state) {
  return to_error(jaxflash_load_predicate(state->kernel));
}

ffi::Error predicate(CUstream_st* stream, PredicateState* state, PredicateAttributes attributes,
                     ffi::Buffer<ffi::S32> batch_numbers, ffi::Buffer<ffi::S32> head_numbers,
                     ffi::RemainingArgs captures, IntervalArray keys_of_row,
                     IntervalArray rows_of_key, IntervalArray keys_inside,
                     IntervalArray rows_inside, IntervalArray row_visits, IntervalArray key_visits,
                     ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const auto row_dims = keys_of_row->dimensions(), key_dims = rows_of_key->dimensions();
  if (ffi::Error error = check_intervals(row_dims, key_dims); error.failure()) return error;
  const Lead lead(row_dims, 2);
  const size_t rank = row_dims.size() - 2;
  PredicateParams params = {};
  const IntervalArrays intervals = {keys_of_row, rows_of_key, keys_inside,
                                    rows_inside, row_visits,  key_visits};
  if (auto error =
          set_intervals(lead, row_dims[rank], key_dims[key_dims.size() - 2], intervals, &params);
      error.failure()) {
    return error;
  }
  if (attributes.left < 0 || attributes.right < 0)
    return invalid("the sides of a band must not be negative, got ", attributes.left, " and ",
                   attributes.right);
  // Kernels number batch elements and heads in 32 bits.
  if (params.count > INT32_MAX) {
    return invalid("a mask has at most ", INT32_MAX, " heads in all, got ", params.count);
  }
  // Heads are one of the batch axes.
  std::vector<int64_t> full_dims(row_dims.begin(), row_dims.end() - 1);
  full_dims.insert(full_dims.end(), 2, 1);
  const Shape full{{full_dims.data(), full_dims.size()}};
  const Shape batch_shape{batch_numbers.dimensions()}, head_shape{head_numbers.dimensions()};
  for (const Shape& shape : {batch_shape, head_shape}) {
    if (shape.dims.size() != rank || !batch_fits(shape, full)) {
      return invalid("numbers of batch elements and heads must have the leading axes of ",
                     text_of(row_dims), " or 1, got ", text_of(shape.dims));
    }
  }
  if (captures.size() != attributes.capture_ranks.size()) {
    return invalid("there are ", attributes.capture_ranks.size(),
                   " captured arrays by their axes, got ", captures.size());
  }
  ProgramOperands captured;
  if (auto error = captured.take_captures(attributes.capture_ranks, full, captures, 0);
      error.failure()) {
    return error;
  }
  std::vector<Shape> shapes = {batch_shape, head_shape};
  captured.add_shapes(&shapes);
  const BatchAxes axes(full, shapes);
  if (auto error = axes.check(); error.failure()) return error;
  axes.describe(&params.problem);
  set_sizes(params.q_len, params.kv_len, 1, 1, 1, 1, &params.problem);
  params.problem.band.left = clamp_side(attributes.left);
  params.problem.band.right = clamp_side(attributes.right);
  params.problem.band.bottom_right = attributes.bottom_right;
  params.captures = captured.describe(rank, axes);
  params.captures.batch_numbers = batch_numbers.typed_data();
  axes.strides(batch_shape, 1, params.captures.batch_numbers_stride);
  params.head_numbers = head_numbers.typed_data();
  axes.strides(head_shape, 1, params.head_numbers_stride);
  params.predicate = state->kernel;
  const int64_t row_words = 2 * params.count * blocks_of(params.rows);
  const int64_t key_words = 2 * params.count * blocks_of(params.keys);
  params.row_sees = static_cast<uint32_t*>(workspace->untyped_data());
  params.key_is_seen = params.row_sees + row_words;
  params.blocks = reinterpret_cast<uint8_t*>(params.key_is_seen + key_words);
  const auto bytes = static_cast<size_t>(4 * (row_words + key_words) + number_of_blocks(params));
  if (auto error = check_workspace("a predicate", *workspace, bytes); error.failure()) return error;
  return to_error(jaxflash_predicate(&params, stream));
}

XLA_FFI_DEFINE_HANDLER(kDenseMask, dense_mask,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Attr<bool>("packs_keys")
                           .Arg<ffi::Buffer<ffi::PRED>>()  // mask (*B, rows, keys)
                           .Ret<ffi::Buffer<ffi::U32>>()   // the others: see DenseMaskParams
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::U8>>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kInstantiatePredicate, instantiate_predicate,
                       ffi::Ffi::BindInstantiate().Attrs<PredicateAttributes>());

XLA_FFI_DEFINE_HANDLER(kInitializePredicate, initialize_predicate,
                       ffi::Ffi::BindInitialize().Ctx<ffi::State<PredicateState>>());

XLA_FFI_DEFINE_HANDLER(kPredicate, predicate,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Ctx<ffi::State<PredicateState>>()
                           .Attrs<PredicateAttributes>()
                           .Arg<ffi::Buffer<ffi::S32>>()  // numbers of batch elements (*B), whose
                                                          // axes are full or 1, and
                           .Arg<ffi::Buffer<ffi::S32>>()  // of heads, likewise
                           .RemainingArgs()               // captures (*B, ...), likewise
                           .Ret<ffi::Buffer<ffi::S32>>()  // see MaskIntervals
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::U8>>(),  // workspace
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* dense_mask_handler() { return kDenseMask; }

Handlers predicate_handlers() { return {kInstantiatePredicate, kInitializePredicate, kPredicate}; }

StateType predicate_state_type() {
  static ffi::TypeInfo info = ffi::MakeTypeInfo<PredicateState>();
  return {&PredicateState::id, &info};
}

}  // namespace jaxflash
