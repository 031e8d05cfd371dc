// The custom calls that make the ranges of a call: intervals of segments, summaries, and both.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "ffi/arrays.h"
#include "ffi/handlers.h"

namespace jaxflash {
namespace {

// An optional operand (*B, *own), if it is one.
template <ffi::DataType kType>
std::optional<ffi::Buffer<kType>> operand(const ffi::RemainingArgs& operands, size_t i,
                                          const Lead& lead, std::vector<int64_t> own) {
  const auto buffer = operands.get<ffi::Buffer<kType>>(i);
  if (!buffer || !lead.has_shape(buffer->dimensions(), std::move(own))) return std::nullopt;
  return *buffer;
}

size_t bucket_bytes(const SegmentMatchesParams& params) {
  return params.count * segment_buckets(int64_t{params.rows} + params.keys) * sizeof(SegmentBucket);
}

// Of ids (*B, T) and (*B, S), and the intervals made of them.
ffi::Error describe_segments(ffi::Buffer<ffi::S32> q_ids, ffi::Buffer<ffi::S32> kv_ids,
                             ffi::Buffer<ffi::S32> keys_of_row, ffi::Buffer<ffi::S32> rows_of_key,
                             SegmentMatchesParams* params) {
  const auto row_dims = q_ids.dimensions(), key_dims = kv_ids.dimensions();
  const auto shapes = [&] {
    return text_of({{"ids of rows", row_dims},
                    {"of keys", key_dims},
                    {"keys of rows", keys_of_row.dimensions()},
                    {"rows of keys", rows_of_key.dimensions()}});
  };
  if (row_dims.size() < 1 || key_dims.size() < 1) {
    return invalid("ids have an axis of rows or keys, got ", shapes());
  }
  const int64_t rows = row_dims.back(), keys = key_dims.back();
  if (std::min(rows, keys) < 1 || std::max(rows, keys) > kMaxLength) {
    return invalid("there are 1 to ", kMaxLength, " rows and keys, got ", shapes());
  }
  const Lead lead(row_dims, 1);
  if (!lead.has_shape(key_dims, {keys}) || !lead.has_shape(keys_of_row.dimensions(), {rows, 2}) ||
      !lead.has_shape(rows_of_key.dimensions(), {keys, 2})) {
    return invalid("ids and their intervals, pairs, have the same leading axes, got ", shapes());
  }
  params->count = lead.count();
  params->rows = static_cast<int32_t>(rows);
  params->keys = static_cast<int32_t>(keys);
  params->q_ids = q_ids.typed_data();
  params->kv_ids = kv_ids.typed_data();
  params->keys_of_row = keys_of_row.typed_data();
  params->rows_of_key = rows_of_key.typed_data();
  return ffi::Error::Success();
}

ffi::Error segment_matches(CUstream_st* stream, ffi::Buffer<ffi::S32> q_ids,
                           ffi::Buffer<ffi::S32> kv_ids,
                           ffi::Result<ffi::Buffer<ffi::S32>> keys_of_row,
                           ffi::Result<ffi::Buffer<ffi::S32>> rows_of_key,
                           ffi::Result<ffi::Buffer<ffi::PRED>> keys_solid,
                           ffi::Result<ffi::Buffer<ffi::PRED>> rows_solid,
                           ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  SegmentMatchesParams params = {};
  if (auto error = describe_segments(q_ids, kv_ids, *keys_of_row, *rows_of_key, &params);
      error.failure()) {
    return error;
  }
  const Lead lead(q_ids.dimensions(), 1);
  if (!lead.has_shape(keys_solid->dimensions(), {params.rows}) ||
      !lead.has_shape(rows_solid->dimensions(), {params.keys})) {
    return invalid("which intervals are solid is a bool for each of ids ",
                   text_of(q_ids.dimensions()), " and ", text_of(kv_ids.dimensions()), ", got ",
                   text_of(keys_solid->dimensions()), " and ", text_of(rows_solid->dimensions()));
  }
  params.keys_solid = reinterpret_cast<uint8_t*>(keys_solid->typed_data());
  params.rows_solid = reinterpret_cast<uint8_t*>(rows_solid->typed_data());
  params.buckets = reinterpret_cast<SegmentBucket*>(workspace->untyped_data());
  if (auto error = check_workspace("segments", *workspace, bucket_bytes(params)); error.failure()) {
    return error;
  }
  return to_error(jaxflash_segment_matches(&params, stream));
}

// The results of a summary whose sizes are known.
ffi::Error describe_summary(const Lead& lead, ffi::Buffer<ffi::S32> row_blocks,
                            ffi::Buffer<ffi::S32> key_blocks, ffi::Buffer<ffi::S32> hulls,
                            RangeSummaryParams* params) {
  if (!lead.has_shape(row_blocks.dimensions(), {blocks_of(params->rows), 2 * kSummaries}) ||
      !lead.has_shape(key_blocks.dimensions(), {blocks_of(params->keys), 2 * kSummaries}) ||
      !lead.has_shape(hulls.dimensions(), {2 * kHulls})) {
    return invalid("summaries have the leading axes of the intervals, and ", 2 * kSummaries,
                   " numbers of ", blocks_of(params->rows), " and ", blocks_of(params->keys),
                   " blocks and ", 2 * kHulls, " of hulls, got ",
                   text_of({{"blocks of rows", row_blocks.dimensions()},
                            {"of keys", key_blocks.dimensions()},
                            {"hulls", hulls.dimensions()}}));
  }
  params->row_blocks = row_blocks.typed_data();
  params->key_blocks = key_blocks.typed_data();
  params->hulls = hulls.typed_data();
  return ffi::Error::Success();
}

ffi::Error range_summary(CUstream_st* stream, bool has_solid, bool has_inside, bool has_visits,
                         ffi::Buffer<ffi::S32> keys_of_row, ffi::Buffer<ffi::S32> rows_of_key,
                         ffi::RemainingArgs optional, ffi::Result<ffi::Buffer<ffi::S32>> row_blocks,
                         ffi::Result<ffi::Buffer<ffi::S32>> key_blocks,
                         ffi::Result<ffi::Buffer<ffi::S32>> hulls,
                         ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const auto row_dims = keys_of_row.dimensions(), key_dims = rows_of_key.dimensions();
  if (ffi::Error error = check_intervals(row_dims, key_dims); error.failure()) return error;
  const int64_t rows = row_dims[row_dims.size() - 2], keys = key_dims[key_dims.size() - 2];
  const int64_t of_rows = blocks_of(static_cast<int32_t>(rows));
  const int64_t of_keys = blocks_of(static_cast<int32_t>(keys));
  const Lead lead(row_dims, 2);
  if (!lead.has_shape(key_dims, {keys, 2})) {
    return invalid("intervals of rows and keys have the same leading axes, got ",
                   text_of({{"keys of rows", row_dims}, {"rows of keys", key_dims}}));
  }
  const size_t count = size_t{2} * has_solid + size_t{2} * has_inside + has_visits;
  if (optional.size() != count) {
    return invalid("intervals come with ", count, " arrays, got ", optional.size());
  }
  RangeSummaryParams params = {};
  params.count = lead.count();
  params.rows = static_cast<int32_t>(rows);
  params.keys = static_cast<int32_t>(keys);
  params.keys_of_row = keys_of_row.typed_data();
  params.rows_of_key = rows_of_key.typed_data();
  if (has_solid) {
    const auto of_row = operand<ffi::PRED>(optional, 0, lead, {rows});
    const auto of_key = operand<ffi::PRED>(optional, 1, lead, {keys});
    if (!of_row || !of_key) {
      return invalid("which intervals are solid is a PRED for each of ", text_of(row_dims), " and ",
                     text_of(key_dims), ", got ", text_of(optional, 0), ", ", text_of(optional, 1));
    }
    params.keys_solid = reinterpret_cast<const uint8_t*>(of_row->typed_data());
    params.rows_solid = reinterpret_cast<const uint8_t*>(of_key->typed_data());
  }
  if (has_inside) {
    const auto of_row = operand<ffi::S32>(optional, 2 * has_solid, lead, {of_rows, 4});
    const auto of_key = operand<ffi::S32>(optional, 2 * has_solid + 1, lead, {of_keys, 4});
    if (!of_row || !of_key) {
      return invalid("what lies inside intervals are two pairs, S32, for each of ", of_rows,
                     " and ", of_keys, " blocks, got ", text_of(optional, 2 * has_solid), ", ",
                     text_of(optional, 2 * has_solid + 1));
    }
    params.keys_inside = of_row->typed_data();
    params.rows_inside = of_key->typed_data();
  }
  if (has_visits) {
    const auto visits = optional.get<ffi::Buffer<ffi::S32>>(optional.size() - 1);
    const int64_t of_one = of_rows * block_words_of(params.keys) * 2;
    const int64_t size = visits ? static_cast<int64_t>(visits->element_count()) : 0;
    if (!has_inside || !visits || (size != of_one && size != params.count * of_one)) {
      return invalid(
          "visits, beside what lies inside, are two words for 32 blocks of keys and each "
          "of rows, S32, ",
          of_one, " for all or each of ", params.count, ", got ",
          text_of(optional, optional.size() - 1));
    }
    params.row_visits = visits->typed_data();
    params.shares_visits = size == of_one;
  }
  if (auto error = describe_summary(lead, *row_blocks, *key_blocks, *hulls, &params);
      error.failure()) {
    return error;
  }
  params.walks = static_cast<WalkCounts*>(workspace->untyped_data());
  const size_t walk_bytes = params.count * of_rows * sizeof(WalkCounts);
  if (auto error = check_workspace("a summary", *workspace, walk_bytes); error.failure()) {
    return error;
  }
  return to_error(jaxflash_range_summary(&params, stream));
}

ffi::Error segment_ranges(
    CUstream_st* stream, ffi::Buffer<ffi::S32> q_ids, ffi::Buffer<ffi::S32> kv_ids,
    ffi::Result<ffi::Buffer<ffi::S32>> keys_of_row, ffi::Result<ffi::Buffer<ffi::S32>> rows_of_key,
    ffi::Result<ffi::Buffer<ffi::S32>> row_blocks, ffi::Result<ffi::Buffer<ffi::S32>> key_blocks,
    ffi::Result<ffi::Buffer<ffi::S32>> hulls, ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  SegmentRangesParams params = {};
  SegmentMatchesParams& matches = params.matches;
  if (auto error = describe_segments(q_ids, kv_ids, *keys_of_row, *rows_of_key, &matches);
      error.failure()) {
    return error;
  }
  RangeSummaryParams& summary = params.summary;
  summary.count = matches.count;
  summary.rows = matches.rows;
  summary.keys = matches.keys;
  summary.keys_of_row = matches.keys_of_row;
  summary.rows_of_key = matches.rows_of_key;
  if (auto error =
          describe_summary(Lead(q_ids.dimensions(), 1), *row_blocks, *key_blocks, *hulls, &summary);
      error.failure()) {
    return error;
  }
  auto* const bytes = static_cast<uint8_t*>(workspace->untyped_data());
  matches.buckets = reinterpret_cast<SegmentBucket*>(bytes);
  matches.keys_solid = bytes + bucket_bytes(matches);
  matches.rows_solid = matches.keys_solid + matches.count * matches.rows;
  summary.keys_solid = matches.keys_solid;
  summary.rows_solid = matches.rows_solid;
  const uint8_t* const end = matches.rows_solid + matches.count * matches.keys;
  if (auto error = check_workspace("segments", *workspace, static_cast<size_t>(end - bytes));
      error.failure()) {
    return error;
  }
  return to_error(jaxflash_segment_ranges(&params, stream));
}

XLA_FFI_DEFINE_HANDLER(kSegmentMatches, segment_matches,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Arg<ffi::Buffer<ffi::S32>>()  // see SegmentMatchesParams
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::PRED>>()
                           .Ret<ffi::Buffer<ffi::PRED>>()
                           .Ret<ffi::Buffer<ffi::U8>>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kRangeSummary, range_summary,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Attr<bool>("has_solid")
                           .Attr<bool>("has_inside")
                           .Attr<bool>("has_visits")
                           .Arg<ffi::Buffer<ffi::S32>>()  // see RangeSummaryParams
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::U8>>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSegmentRanges, segment_ranges,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CUstream_st*>>()
                           .Arg<ffi::Buffer<ffi::S32>>()  // see SegmentRangesParams
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::U8>>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* segment_matches_handler() { return kSegmentMatches; }
XLA_FFI_Handler* range_summary_handler() { return kRangeSummary; }
XLA_FFI_Handler* segment_ranges_handler() { return kSegmentRanges; }

}  // namespace jaxflash
