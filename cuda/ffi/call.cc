#include "ffi/call.h"

#include <algorithm>

namespace jaxflash {

int32_t clamp_side(int64_t side) {
  return static_cast<int32_t>(std::min<int64_t>(side, kUnlimited));
}

namespace {

constexpr char kDtypes[] = "float16, bfloat16 or float32";

ffi::Error check_mask(int64_t kind) {
  constexpr auto kLast = static_cast<int64_t>(MaskKind::kProgramSegments);
  if (kind >= 0 && kind <= kLast) return ffi::Error::Success();
  return invalid("kinds of masks are 0 to ", kLast, ", got ", kind);
}

ffi::Error check_ranks(ffi::Span<const int64_t> capture_ranks) {
  if (capture_ranks.size() > kMaxCaptures) {
    return invalid("a program captures at most ", kMaxCaptures, " arrays, got ",
                   capture_ranks.size());
  }
  for (const int64_t rank : capture_ranks) {
    if (rank < 0 || rank > kMaxCaptureRank) {
      return invalid("captured arrays have at most ", kMaxCaptureRank,
                     " axes beside those of the batch, got ", rank);
    }
  }
  return ffi::Error::Success();
}

ffi::ErrorOr<CallSizes> sizes_of(ffi::Span<const int64_t> numbers) {
  constexpr size_t kNumbers = 7;
  CallSizes sizes = {};
  if (numbers.size() == 0) return sizes;
  bool sound = numbers.size() == kNumbers;
  for (size_t i = 0; sound && i < kNumbers; ++i) {
    sound = numbers[i] >= 0 && (i == 0 || numbers[i] <= INT32_MAX);
  }
  if (!sound) {
    return ffi::Unexpected(invalid("the sizes of a call are none or ", kNumbers,
                                   " numbers from 0, all but the first to ", INT32_MAX, ", got ",
                                   text_of(numbers)));
  }

  sizes.batch = std::min(numbers[0], int64_t{1} << 40);
  sizes.q_len = static_cast<int32_t>(numbers[1]);
  sizes.kv_len = static_cast<int32_t>(numbers[2]);
  sizes.q_heads = static_cast<int32_t>(numbers[3]);
  sizes.kv_heads = static_cast<int32_t>(numbers[4]);
  sizes.starts_shared = numbers[5] != 0;
  sizes.sequences = static_cast<int32_t>(numbers[6]);
  return sizes;
}

}  // namespace

ffi::Error describe_program(Pass pass, const PassAttributes& attributes,
                            const KernelOptions& options, ProgramDescription* description) {
  const std::optional<Math> math = math_of(attributes.dtype, attributes.problem.highest_precision);
  if (!math) {
    return invalid("the dtype of a score program must be ", kDtypes, ", got ", attributes.dtype);
  }
  const auto ranks = attributes.capture_ranks;
  if (ffi::Error error = check_ranks(ranks); error.failure()) return error;

  if (ffi::Error error = check_mask(attributes.problem.mask); error.failure()) return error;
  if (options.shared_units < (options.paged ? 1 : 0) || options.shared_units > 2) {
    return invalid("blocks share the keys of one unit or two", options.paged ? "" : ", or none",
                   ", got ", options.shared_units);
  }
  const ffi::ErrorOr<CallSizes> sizes = sizes_of(options.sizes);
  if (!sizes) return sizes.error();
  if (options.start_capture < (pass == Pass::kForward ? kDistanceTerms : -1) ||
      options.start_capture >= static_cast<int64_t>(ranks.size())) {
    return invalid("products cannot start from an array that is not captured: got number ",
                   options.start_capture, " of ", ranks.size());
  }
  const bool limits_left = attributes.problem.left < kUnlimited;
  const bool limits_right = attributes.problem.right < kUnlimited;
  description->pass = pass;
  description->unit_slope = attributes.unit_slope;
  description->bounded = attributes.bounded;
  description->math = *math;
  description->head_dim = static_cast<int32_t>(attributes.head_dim);
  description->value_dim = static_cast<int32_t>(attributes.value_dim);
  description->scale = attributes.problem.scale;
  description->mask = static_cast<MaskKind>(attributes.problem.mask);
  description->walks = attributes.problem.walks;
  description->one_sided = limits_left != limits_right;
  description->deterministic = options.deterministic;
  description->paged = options.paged;
  description->shared_units = static_cast<int32_t>(options.shared_units);
  description->sizes = *sizes;
  description->start_capture = static_cast<int32_t>(options.start_capture);
  return ffi::Error::Success();
}

ffi::ErrorOr<std::vector<CaptureLoad>> loads_of(const BackwardAttributes& attributes) {
  constexpr size_t kNumbers = 8;
  const auto numbers = attributes.gradient_loads;
  const int64_t key_sums = attributes.key_sums;
  const auto unknown = [&](const auto&... why) {
    return ffi::Unexpected(invalid("unknown loads of captured arrays, ", text_of(numbers), " and ",
                                   key_sums, " key sums: ", why...));
  };
  if (numbers.size() % kNumbers != 0) return unknown("a load has ", kNumbers, " numbers");
  if (key_sums < 0 || key_sums > kMaxKeySums) return unknown("at most ", kMaxKeySums, " key sums");
  if ((numbers.size() == 0 && key_sums == 0) != attributes.gradient_program.empty()) {
    return unknown("there is a gradient program where there is either, and only there");
  }

  std::vector<CaptureLoad> loads;
  bool taken[kMaxCaptures] = {};
  bool any_stored = false, any_summed = false;
  for (size_t i = 0; i < numbers.size(); i += kNumbers) {
    const size_t load_number = i / kNumbers;
    const int64_t capture = numbers[i], query_axis = numbers[i + 1], key_axis = numbers[i + 2];
    if (capture < 0 || capture >= static_cast<int64_t>(attributes.capture_ranks.size()) ||
        capture >= kMaxCaptures) {
      return unknown("load ", load_number, " is of one of ", attributes.capture_ranks.size(),
                     " captured arrays");
    }
    if (taken[capture] && loads.back().capture != capture) {
      return unknown("those of capture ", capture, " are neighbours");
    }
    taken[capture] = true;
    const int64_t rank = attributes.capture_ranks[capture];
    if (query_axis < -1 || query_axis >= rank || key_axis < -1 || key_axis >= rank ||
        (query_axis >= 0 && query_axis == key_axis)) {
      return unknown("load ", load_number, " has an axis of queries and another one of keys, of ",
                     rank, ", or -1");
    }
    const bool scatter = numbers[i + 3] != 0, narrow = numbers[i + 4] != 0;
    const bool stored = numbers[i + 5] != 0;
    const bool of_matrices = query_axis == rank - 2 && key_axis == rank - 1 && rank >= 2;
    const bool sums_batch = numbers[i + 7] != 0;
    if (stored && (any_stored || scatter || !narrow || !of_matrices)) {
      return unknown("one is stored, narrow, of (query, key) as last axes, which is not scattered");
    }
    if (sums_batch && !stored) return unknown("what is not stored does not sum the batch");
    any_stored |= stored;
    loads.push_back({static_cast<int32_t>(capture), static_cast<int32_t>(rank),
                     static_cast<int32_t>(query_axis), static_cast<int32_t>(key_axis), scatter,
                     narrow, stored, numbers[i + 6] != 0, sums_batch});
    const CaptureLoad& load = loads.back();
    if (!load.summed) continue;
    // One, that nothing else is added to.
    const size_t next = i + kNumbers;
    const bool alone = (loads.size() == 1 || loads[loads.size() - 2].capture != capture) &&
                       (next == numbers.size() || numbers[next] != capture);
    if (any_summed || !alone || !load.scatter || load.narrow) {
      return unknown("one is summed, the only one of its capture, scattered and not narrow");
    }
    any_summed = true;
  }
  loads.insert(loads.end(), key_sums, kKeySumLoad);
  return loads;
}

void set_sizes(int64_t q_len, int64_t kv_len, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
               int64_t value_dim, Problem* problem) {
  problem->q_len = static_cast<int32_t>(q_len);
  problem->kv_len = static_cast<int32_t>(kv_len);
  problem->q_heads = static_cast<int32_t>(q_heads);
  problem->kv_heads = static_cast<int32_t>(kv_heads);
  problem->head_dim = static_cast<int32_t>(head_dim);
  problem->value_dim = static_cast<int32_t>(value_dim);
}

namespace {

// Of keys and values in these shapes, wherever they lie.
ffi::Error describe_shapes(const ProblemAttributes& attributes, ffi::AnyBuffer q, Shape k_shape,
                           Shape v_shape, Shape out, ffi::RemainingArgs optional,
                           Problem* problem) {
  const Shape q_shape{q.dimensions()};
  const size_t rank = out.dims.size();
  const auto shapes = [&] {
    return text_of(
        {{"q", q_shape.dims}, {"k", k_shape.dims}, {"v", v_shape.dims}, {"out", out.dims}});
  };
  if (rank < 3 || q_shape.dims.size() != rank || k_shape.dims.size() != rank ||
      v_shape.dims.size() != rank) {
    return invalid("q, k, v and out must have one rank, at least 3, got ", shapes());
  }
  if (!batch_fits(q_shape, out) || !batch_fits(k_shape, out) || !batch_fits(v_shape, out)) {
    return invalid("each batch axis of q, k and v must be that of out or 1, got ", shapes());
  }
  if (q_shape.length() != out.length() || q_shape.heads() != out.heads() ||
      k_shape.length() != v_shape.length() || k_shape.heads() != v_shape.heads() ||
      q_shape.dim() != k_shape.dim() || v_shape.dim() != out.dim()) {
    return invalid("the shapes do not fit together: ", shapes());
  }
  if (k_shape.heads() == 0 || q_shape.heads() % k_shape.heads() != 0) {
    return invalid("query heads must be a multiple of key heads, got ", q_shape.heads(), " and ",
                   k_shape.heads());
  }
  if (q_shape.length() > kMaxLength || k_shape.length() > kMaxLength) {
    return invalid("sequences have at most ", kMaxLength, " positions, got ", shapes());
  }
  for (const int64_t size : {q_shape.heads(), k_shape.heads(), q_shape.dim(), v_shape.dim()}) {
    if (size > INT32_MAX) {
      return invalid("heads and head sizes are at most ", INT32_MAX, ", got ", shapes());
    }
  }
  const std::optional<Math> math = math_of(q.element_type(), attributes.highest_precision);
  if (!math) return invalid("the dtype of q must be ", kDtypes, ", got ", text_of(q));
  problem->math = *math;
  set_sizes(q_shape.length(), k_shape.length(), q_shape.heads(), k_shape.heads(), q_shape.dim(),
            v_shape.dim(), problem);
  problem->scale = attributes.scale;
  if (attributes.left < 0 || attributes.right < 0) {
    return invalid("left and right, the sides of a window, must not be negative, got ",
                   attributes.left, " and ", attributes.right);
  }
  problem->band.left = clamp_side(attributes.left);
  problem->band.right = clamp_side(attributes.right);
  problem->band.bottom_right = attributes.bottom_right;
  if (ffi::Error error = check_mask(attributes.mask); error.failure()) return error;

  size_t next = 0;
  const int64_t batch = batch_count(out);
  auto lengths = [&](bool given, const int32_t** data) {
    if (!given) return true;
    auto buffer = optional.get<ffi::Buffer<ffi::S32>>(next++);
    if (!buffer.has_value() || static_cast<int64_t>(buffer->element_count()) != batch) return false;
    *data = buffer->typed_data();
    return true;
  };
  if (!lengths(attributes.has_q_lengths, &problem->band.q_lengths) ||
      !lengths(attributes.has_kv_lengths, &problem->band.kv_lengths)) {
    return invalid("sequence lengths must be S32, one for each of the ", batch,
                   " sequences of the batch, got ", text_of(optional, next - 1));
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error describe(const ProblemAttributes& attributes, ffi::AnyBuffer q, ffi::AnyBuffer k,
                    ffi::AnyBuffer v, Shape out, ffi::RemainingArgs optional, Problem* problem) {
  if (k.element_type() != q.element_type() || v.element_type() != q.element_type()) {
    return invalid("q, k and v must have one dtype, got ", text_of(q), ", ", text_of(k), ", ",
                   text_of(v));
  }
  return describe_shapes(attributes, q, {k.dimensions()}, {v.dimensions()}, out, optional, problem);
}

ffi::Error describe_paged(const ProblemAttributes& attributes, ffi::AnyBuffer q,
                          ffi::AnyBuffer key_pages, ffi::AnyBuffer value_pages,
                          ffi::Buffer<ffi::S32> table, Shape out, ffi::RemainingArgs optional,
                          Problem* problem, Pages* pages) {
  const auto key_dims = key_pages.dimensions(), value_dims = value_pages.dimensions();
  const auto table_dims = table.dimensions();
  const size_t rank = out.dims.size();
  const auto shapes = [&] {
    return text_of({{"pages of keys", key_dims},
                    {"of values", value_dims},
                    {"table", table_dims},
                    {"out", out.dims}});
  };
  if (key_pages.element_type() != q.element_type() ||
      value_pages.element_type() != q.element_type()) {
    return invalid("q and the pages must have one dtype, got ", text_of(q), ", ",
                   text_of(key_pages), ", ", text_of(value_pages));
  }
  if (rank < 3 || key_dims.size() != 4 || value_dims.size() != 4 || table_dims.size() != rank - 2) {
    return invalid("pages must have four axes, and the table one beside those of the batch, got ",
                   shapes());
  }
  if (key_dims[0] != value_dims[0] || key_dims[1] != value_dims[1]) {
    return invalid("pages of keys and of values must be as many of one size, got ", shapes());
  }
  if (!std::equal(table_dims.begin(), table_dims.end() - 1, out.dims.begin())) {
    return invalid("the table must have the batch axes of out, got ", shapes());
  }
  if (!attributes.has_kv_lengths || attributes.has_q_lengths) {
    return invalid("sequences in pages have lengths of keys, and of keys alone, got ",
                   attributes.has_q_lengths ? "those of queries" : "none");
  }
  const int64_t count = key_dims[0], size = key_dims[1];
  pages->log2_size = Pages::kLeastLog2Size;
  while (pages->log2_size < Pages::kMostLog2Size && pages->size() < size) ++pages->log2_size;
  if (pages->size() != size) {
    return invalid("pages hold a power of two of keys from ", 1 << Pages::kLeastLog2Size, " to ",
                   1 << Pages::kMostLog2Size, ", got ", shapes());
  }
  if (count < 1 || count > kMaxLength) {
    return invalid("a pool has 1 to ", kMaxLength, " pages, got ", shapes());
  }
  pages->count = static_cast<int32_t>(count);
  pages->table = table.typed_data();
  // As contiguous arrays they would have the batch axes of the result.
  std::vector<int64_t> key(out.dims.begin(), out.dims.end() - 3), value;
  if (table_dims.back() > kMaxLength / size) {
    return invalid("sequences have at most ", kMaxLength, " positions, got ", shapes());
  }
  key.push_back(table_dims.back() * size);
  value = key;
  key.insert(key.end(), key_dims.begin() + 2, key_dims.end());
  value.insert(value.end(), value_dims.begin() + 2, value_dims.end());
  return describe_shapes(attributes, q, {{key.data(), key.size()}}, {{value.data(), value.size()}},
                         out, optional, problem);
}

Tensor pool_tensor(ffi::AnyBuffer pages) {
  const auto dims = pages.dimensions();
  Tensor tensor = {};
  tensor.data = pages.untyped_data();
  tensor.head_stride = dims[3];
  tensor.seq_stride = dims[2] * dims[3];
  return tensor;
}

namespace {

// Fills in the ranges from the operands, of which they are the last: there are at least as many.
// All have full batch axes, but for visits that all sequences share.
ffi::Error take_ranges(RangeArrays present, int64_t batch, ffi::RemainingArgs optional,
                       Problem* problem) {
  const size_t count = present.count();
  if (count == 0) return ffi::Error::Success();
  const int64_t row_blocks = blocks_of(problem->q_len), key_blocks = blocks_of(problem->kv_len);
  if (batch * std::max(row_blocks, key_blocks) > kMaxRangeBlocks) {
    return invalid("ranges have at most ", kMaxRangeBlocks, " blocks of ", kRangeBlock,
                   " positions, got ", batch, " times ", std::max(row_blocks, key_blocks));
  }
  Ranges& ranges = problem->ranges;
  struct Array {
    const int32_t** data;
    int64_t size;
    bool is_visits = false;
  };
  std::vector<Array> arrays = {{&ranges.keys_of_row, int64_t{2} * problem->q_len},
                               {&ranges.rows_of_key, int64_t{2} * problem->kv_len},
                               {&ranges.row_blocks, 2 * kSummaries * row_blocks},
                               {&ranges.key_blocks, 2 * kSummaries * key_blocks},
                               {&ranges.hulls, 2 * kHulls}};
  if (present.visits) {
    arrays.push_back({&ranges.row_visits, 2 * row_blocks * block_words_of(problem->kv_len), true});
    arrays.push_back({&ranges.key_visits, 2 * key_blocks * block_words_of(problem->q_len), true});
    const auto of_rows = optional.get<ffi::AnyBuffer>(optional.size() - count + 5);
    ranges.shares_visits =
        of_rows && static_cast<int64_t>(of_rows->element_count()) == arrays[5].size;
  }
  if (has_ids(present.mask)) {
    arrays.push_back({&ranges.q_ids, problem->q_len});
    arrays.push_back({&ranges.kv_ids, problem->kv_len});
  }
  for (size_t i = 0; i < count; ++i) {
    auto buffer = optional.get<ffi::Buffer<ffi::S32>>(optional.size() - count + i);
    const int64_t sequences = arrays[i].is_visits && ranges.shares_visits ? 1 : batch;
    if (!buffer.has_value() ||
        static_cast<int64_t>(buffer->element_count()) != sequences * arrays[i].size) {
      return invalid("array ", i, " of ranges must be S32 of ", sequences, " times ",
                     arrays[i].size, " elements, got ",
                     text_of(optional, optional.size() - count + i));
    }
    *arrays[i].data = buffer->typed_data();
  }
  ranges.of_program = is_of_program(present.mask);
  return ffi::Error::Success();
}

}  // namespace

ffi::Error ProgramOperands::take(const PassAttributes& attributes, RangeArrays ranges, Shape full,
                                 ffi::RemainingArgs optional, size_t first, Problem* problem) {
  if (attributes.program.empty()) {
    if (ranges.count() > 0) return invalid("ranges need a score program, got a plain call");
    return ffi::Error::Success();
  }
  if (attributes.head_dim != problem->head_dim || attributes.value_dim != problem->value_dim ||
      math_of(attributes.dtype, problem->math == Math::kFloat32) != problem->math) {
    return invalid("the score program was compiled for head sizes ", attributes.head_dim, " and ",
                   attributes.value_dim, " in ", attributes.dtype, ", got ", problem->head_dim,
                   " and ", problem->value_dim, ", or another dtype");
  }
  // Kernels number batch elements and heads in 32 bits.
  if (batch_count(full) * full.heads() > INT32_MAX) {
    return invalid("calls with a score program have at most ", INT32_MAX,
                   " heads of all sequences, got ", batch_count(full), " times ", full.heads());
  }
  const size_t batch_rank = full.batch_rank();
  // A program that does not ask for numbers may come without them.
  const size_t captured = attributes.capture_ranks.size() + ranges.count();
  if (optional.size() == first + 2 + captured) {
    auto numbers = optional.get<ffi::Buffer<ffi::S32>>(first);
    auto heads = optional.get<ffi::Buffer<ffi::S32>>(first + 1);
    if (!numbers.has_value() || numbers->dimensions().size() != batch_rank ||
        !batch_fits({numbers->dimensions()}, full)) {
      return invalid("the numbers of a program's batch elements must be S32, of the batch axes of ",
                     text_of(full.dims), " or 1, got ", text_of(optional, first));
    }
    if (!heads.has_value() || heads->dimensions().size() != 1 ||
        heads->dimensions()[0] != full.heads()) {
      return invalid("the numbers of a program's heads must be S32, one for each of ", full.heads(),
                     ", got ", text_of(optional, first + 1));
    }
    batch_numbers_ = *numbers;
    head_numbers_ = *heads;
    first += 2;
  } else if (optional.size() != first + captured) {
    return invalid("there are ", attributes.capture_ranks.size(), " captured arrays and ",
                   ranges.count(), " of ranges, after two of numbers or none, got ",
                   optional.size() - std::min(first, optional.size()), " arrays");
  }
  if (ffi::Error error = take_captures(attributes.capture_ranks, full, optional, first);
      error.failure()) {
    return error;
  }
  return take_ranges(ranges, batch_count(full), optional, problem);
}

ffi::Error ProgramOperands::take_captures(ffi::Span<const int64_t> ranks, Shape full,
                                          ffi::RemainingArgs optional, size_t first) {
  const size_t batch_rank = full.batch_rank();
  if (ffi::Error error = check_ranks(ranks); error.failure()) return error;
  for (size_t i = 0; i < ranks.size(); ++i) {
    auto buffer = optional.get<ffi::AnyBuffer>(first + i);
    if (!buffer.has_value()) {
      return invalid("captured arrays are ", ranks.size(), " buffers, number ", i, " is none");
    }
    const auto dims = buffer->dimensions();
    if (dims.size() != batch_rank + static_cast<size_t>(ranks[i]) || !batch_fits({dims}, full)) {
      return invalid("captured arrays have the batch axes of ", text_of(full.dims),
                     ", or 1, and axes of their own: number ", i, " has ", ranks[i], ", got ",
                     text_of(*buffer));
    }
    for (size_t axis = batch_rank; axis < dims.size(); ++axis) {
      if (dims[axis] < 1 || dims[axis] > INT32_MAX) {
        return invalid("axes of captured arrays have 1 to ", INT32_MAX, " elements, got ",
                       text_of(*buffer));
      }
    }
    switch (buffer->element_type()) {
      case ffi::DataType::F32:
      case ffi::DataType::BF16:
      case ffi::DataType::F16:
      case ffi::DataType::S32:
      case ffi::DataType::U32:
      case ffi::DataType::PRED:
        break;
      default:
        return invalid("captured arrays are F32, BF16, F16, S32, U32 or PRED, got ",
                       text_of(*buffer));
    }
    captures_.push_back(*buffer);
  }
  return ffi::Error::Success();
}

void ProgramOperands::add_shapes(std::vector<Shape>* shapes) const {
  if (batch_numbers_) shapes->push_back({batch_numbers_->dimensions()});
  for (const ffi::AnyBuffer& capture : captures_) shapes->push_back({capture.dimensions()});
}

Captures ProgramOperands::describe(size_t batch_rank, const BatchAxes& axes) const {
  Captures result = {};
  if (batch_numbers_) {
    result.batch_numbers = batch_numbers_->typed_data();
    axes.strides({batch_numbers_->dimensions()}, 1, result.batch_numbers_stride);
    result.head_numbers = head_numbers_->typed_data();
  }
  for (size_t i = 0; i < captures_.size(); ++i) {
    Capture& capture = result.of[i];
    const auto dims = captures_[i].dimensions();
    capture.data = captures_[i].untyped_data();
    int64_t size = 1;
    for (size_t axis = batch_rank; axis < dims.size(); ++axis) {
      capture.extent[axis - batch_rank] = static_cast<int32_t>(dims[axis]);
      size *= dims[axis];
    }
    axes.strides({dims}, size, capture.batch_stride);
  }
  return result;
}

// Of how many batch elements, one after the other, an array with these leading axes is the sum;
// nothing if that is more than kernels take, or they do not follow one another.
static std::optional<int32_t> batch_sum(ffi::Span<const int64_t> dims, Shape full) {
  int64_t sum = 1;
  for (size_t axis = 0; axis < full.batch_rank(); ++axis) {
    if (full.batch(axis) == 1) continue;
    if (dims[axis] == 1) {
      sum *= full.batch(axis);
    } else if (sum > 1) {
      return std::nullopt;
    }
  }
  if (sum < 1 || sum > kMaxBatchSum) return std::nullopt;
  return static_cast<int32_t>(sum);
}

ffi::Error CaptureGradientResults::take(const BackwardAttributes& attributes,
                                        const ProgramOperands& operands, const Problem& problem,
                                        Shape full, ffi::RemainingRets results) {
  const ffi::ErrorOr<std::vector<CaptureLoad>> loads = loads_of(attributes);
  if (!loads) return loads.error();
  if (!loads->empty() && attributes.program.empty()) {
    return invalid("gradients of captured arrays need a score program, got ", loads->size(),
                   " loads of a plain call");
  }
  const size_t batch_rank = full.batch_rank();
  for (int64_t i = 0; i < attributes.key_sums; ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) {
      return invalid("there are ", attributes.key_sums, " sums over the queries, got ",
                     results.size(), " results");
    }
    const ffi::AnyBuffer sum = **buffer;
    const auto dims = sum.dimensions();
    bool fits = sum.element_type() == ffi::DataType::F32 && dims.size() == batch_rank + 2;
    for (size_t axis = 0; fits && axis < batch_rank; ++axis) fits = dims[axis] == full.batch(axis);
    if (!fits || dims[batch_rank] != problem.q_heads || dims[batch_rank + 1] != problem.kv_len) {
      return invalid("a sum over the queries must be F32, for each sequence of ",
                     text_of(full.dims), " and its ", problem.q_heads, " heads and ",
                     problem.kv_len, " keys, got ", text_of(sum));
    }
    key_sums_.push_back(sum);
  }
  for (const CaptureLoad& load : *loads) {
    if (load.is_key_sum()) continue;
    if (!results_.empty() && results_.back().load.capture == load.capture) {
      if (results_.back().load.narrow || load.narrow) {
        return invalid("the gradient of several loads is F32, got narrow ones of capture ",
                       load.capture);
      }
      continue;
    }
    auto buffer = results.get<ffi::AnyBuffer>(key_sums_.size() + results_.size());
    if (!buffer.has_value()) {
      return invalid("the gradient of capture ", load.capture, " has no result, got ",
                     results.size());
    }
    const ffi::AnyBuffer result = **buffer;
    const ffi::AnyBuffer& capture = operands.capture(load.capture);
    const auto dims = result.dimensions(), own = capture.dimensions();
    const ffi::DataType dtype = capture.element_type();
    const bool floating =
        dtype == ffi::DataType::F32 || dtype == ffi::DataType::F16 || dtype == ffi::DataType::BF16;
    bool fits = floating && dims.size() == own.size() && batch_fits({dims}, full) &&
                (!load.narrow || dtype != ffi::DataType::F32) &&
                result.element_type() == (load.narrow ? dtype : ffi::DataType::F32);
    for (size_t axis = batch_rank; fits && axis < dims.size(); ++axis) {
      fits = dims[axis] == own[axis];
    }
    if (fits && load.stored) {
      // As TMA stores it from the operands' dtype.
      fits = math_of(dtype, false) == problem.math && own[own.size() - 2] == problem.q_len &&
             own[own.size() - 1] == problem.kv_len && problem.kv_len % 8 == 0;
    }
    if (!fits) {
      return invalid("the gradient of a captured ", text_of(capture), " of a call ",
                     text_of(full.dims), " with ", problem.kv_len, " keys, ",
                     load.stored ? "stored, " : "", load.narrow ? "as narrow" : "F32",
                     ", cannot be ", text_of(result));
    }
    if (load.sums_batch && !batch_sum(dims, full)) {
      return invalid("a stored gradient is the sum over the last of at most ", kMaxBatchSum,
                     " batch elements of ", text_of(full.dims), ", got ", text_of(dims));
    }
    results_.push_back({load, result});
  }
  if (results.size() != key_sums_.size() + results_.size()) {
    return invalid("there are ", key_sums_.size() + results_.size(), " gradients, got ",
                   results.size(), " results");
  }
  return ffi::Error::Success();
}

void CaptureGradientResults::add_shapes(std::vector<Shape>* shapes) const {
  for (const Gradient& result : results_) shapes->push_back({result.buffer.dimensions()});
}

void CaptureGradientResults::describe(size_t batch_rank, const BatchAxes& axes,
                                      CaptureGradientArray (&arrays)[kMaxCaptures]) const {
  for (const Gradient& result : results_) {
    const auto dims = result.buffer.dimensions();
    int64_t size = 1;
    for (size_t axis = batch_rank; axis < dims.size(); ++axis) size *= dims[axis];
    CaptureGradientArray& array = arrays[result.load.capture];
    array.data = result.buffer.untyped_data();
    axes.strides({dims}, size, array.batch_stride);
  }
}

void CaptureGradientResults::describe(const CaptureGradientArray (&arrays)[kMaxCaptures],
                                      BackwardParams* params) const {
  for (size_t i = 0; i < key_sums_.size(); ++i) {
    params->key_sums[i] = static_cast<float*>(key_sums_[i].untyped_data());
  }
  for (const Gradient& result : results_) {
    if (!result.load.summed) continue;
    params->diagonal_sums = arrays[result.load.capture];
    params->diagonal_sum_bytes = static_cast<int64_t>(result.buffer.size_bytes());
  }
}

void CaptureGradientResults::describe(Shape full, const BatchAxes& axes,
                                      StoredGradient* stored) const {
  for (const Gradient& result : results_) {
    if (!result.load.stored) continue;
    const auto dims = result.buffer.dimensions();
    int64_t batch = 1, own = 1;
    for (size_t axis = 0; axis < dims.size() - 2; ++axis) {
      (axis < full.batch_rank() ? batch : own) *= dims[axis];
    }
    stored->data = result.buffer.untyped_data();
    stored->matrices = batch * own;
    axes.strides({dims}, own, stored->batch_stride);
    if (result.load.sums_batch) stored->batch_sum = batch_sum(dims, full).value_or(1);
  }
}

}  // namespace jaxflash
