// The Python module: the custom calls' handlers, and what the kernel library says of itself.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/workspace.h"
#include "ffi/call.h"
#include "ffi/handlers.h"
#include "problem.h"
#include "sm90/tile_config.h"

namespace jaxflash {

namespace nb = nanobind;

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Whether a block of the Hopper backward kernel has a tile of keys to itself; false where no tile
// is for heads of just this size.
template <int kHeadDim, class = void>
constexpr bool kHasSingleBlocks = false;
template <int kHeadDim>
constexpr bool kHasSingleBlocks<
    kHeadDim, std::void_t<typename sm90::BackwardTileFor<kHeadDim, kHeadDim>::Type>> =
    sm90::BackwardTileFor<kHeadDim, kHeadDim>::Type::kBlocks == 1;

// Of sizes from 0 on, to more than there are tiles for.
template <int... kHeadDims>
constexpr int largest_single_head_dim(std::integer_sequence<int, kHeadDims...>) {
  return std::max({(kHasSingleBlocks<kHeadDims> ? kHeadDims : 0)...});
}

// What Python modules repeat: tests/test_constants.py compares it with them.
nb::dict constants() {
  nb::dict values;
  values["max_length"] = kMaxLength;
  values["unlimited"] = kUnlimited;
  values["max_batch_axes"] = kMaxBatchAxes;
  values["max_captures"] = kMaxCaptures;
  values["max_capture_rank"] = kMaxCaptureRank;
  values["max_key_sums"] = kMaxKeySums;
  values["max_batch_sum"] = kMaxBatchSum;
  values["max_single_head_dim"] = largest_single_head_dim(std::make_integer_sequence<int, 513>());
  values["key_terms"] = kKeyTerms;
  values["distance_terms"] = kDistanceTerms;
  values["kind_of_band"] = static_cast<int32_t>(MaskKind::kBand);
  values["kind_of_ranges"] = static_cast<int32_t>(MaskKind::kRanges);
  values["kind_of_segments"] = static_cast<int32_t>(MaskKind::kSegments);
  values["kind_of_program_ranges"] = static_cast<int32_t>(MaskKind::kProgramRanges);
  values["kind_of_program_segments"] = static_cast<int32_t>(MaskKind::kProgramSegments);
  values["least_page_size"] = 1 << Pages::kLeastLog2Size;
  values["most_page_size"] = 1 << Pages::kMostLog2Size;
  values["range_block"] = kRangeBlock;
  values["visit_word_bits"] = 8 * sizeof(*Ranges::row_visits);
  values["mask_word_bits"] = 8 * sizeof(*DenseMaskParams::words);
  values["mask_sharers"] = DenseMaskParams::kSharers;
  // Of workspaces: for a block of rows and keys, for a row or a key, and for a block of rows.
  values["mask_block_bytes"] = sizeof(MaskBlock);
  values["segment_bytes"] = segment_buckets(1) * sizeof(SegmentBucket);
  values["walk_bytes"] = sizeof(*RangeSummaryParams::walks);
  values["workspace_rows"] = kWorkspaceRows;
  return values;
}

#ifdef JAXFLASH_WITH_KERNELS

nb::dict by_stage(const Handlers& handlers) {
  nb::dict result;
  result["instantiate"] = capsule(handlers.instantiate);
  result["initialize"] = capsule(handlers.initialize);
  result["execute"] = capsule(handlers.execute);
  return result;
}

// As `jaxflash._config.CompiledKernel`.
using ReportRow =
    std::tuple<std::string, std::string, std::string, int32_t, int32_t, bool, double, bool>;

ReportRow row_of(const KernelReport& report) {
  return {report.label,   report.tile,       report.architecture, report.registers,
          report.spilled, report.serialised, report.seconds,      report.from_disk};
}

Pass pass_of(const std::string& name) {
  if (name == "forward") return Pass::kForward;
  if (name == "backward") return Pass::kBackward;
  if (name == "tangent") return Pass::kTangent;
  throw nb::value_error("pass_name must be 'forward', 'backward' or 'tangent'");
}

// Family, query/key and value head size.
using VariantKey = std::tuple<std::string, int32_t, int32_t>;

// The variant that dispatch picks for dense, aligned arrays.
std::optional<VariantKey> variant_for(Pass pass, const std::string& dtype, bool highest_precision,
                                      const std::vector<int64_t>& q, const std::vector<int64_t>& k,
                                      const std::vector<int64_t>& v) {
  if (q.size() < 3 || k.size() != q.size() || v.size() != q.size()) return std::nullopt;
  const auto shape = [](const std::vector<int64_t>& dims) {
    return Shape{ffi::Span<const int64_t>(dims.data(), dims.size())};
  };
  const Shape q_shape = shape(q), k_shape = shape(k), v_shape = shape(v);
  std::vector<int64_t> out = q;
  out.back() = v.back();
  const Shape out_shape = shape(out);
  if (!batch_fits(k_shape, out_shape) || !batch_fits(v_shape, out_shape)) return std::nullopt;
  const BatchAxes axes(out_shape, {q_shape, k_shape, v_shape});
  if (axes.check().failure()) return std::nullopt;

  Problem problem = {};
  const std::optional<Math> math = math_of(dtype, highest_precision);
  if (!math) return std::nullopt;
  problem.math = *math;
  set_sizes(q_shape.length(), k_shape.length(), q_shape.heads(), k_shape.heads(), q_shape.dim(),
            v_shape.dim(), &problem);
  problem.scale = 1.f;
  problem.band.left = problem.band.right = kUnlimited;
  axes.describe(&problem);

  const Tensor q_tensor = axes.tensor(nullptr, q_shape), k_tensor = axes.tensor(nullptr, k_shape);
  const Tensor v_tensor = axes.tensor(nullptr, v_shape);
  const Tensor out_tensor = axes.tensor(nullptr, out_shape);
  const Variant* variant = nullptr;
  const auto describe = [&](auto& params) {
    params.problem = problem;
    params.q = q_tensor, params.k = k_tensor, params.v = v_tensor, params.out = out_tensor;
  };
  switch (pass) {
    case Pass::kForward: {
      ForwardParams params = {};
      describe(params);
      variant = jaxflash_forward_variant(&params);
      break;
    }
    case Pass::kBackward: {
      BackwardParams params = {};
      describe(params);
      params.dq = q_tensor, params.dk = k_tensor, params.dv = v_tensor, params.dout = out_tensor;
      variant = jaxflash_backward_variant(&params);
      break;
    }
    case Pass::kTangent: {
      TangentParams params = {};
      describe(params);
      params.tq = q_tensor, params.tk = k_tensor, params.tv = v_tensor, params.tout = out_tensor;
      variant = jaxflash_tangent_variant(&params);
      break;
    }
  }
  if (variant == nullptr) return std::nullopt;
  return std::make_tuple(std::string(variant->family), variant->head_dim, variant->value_dim);
}

// As far as workspace and kernels depend on it.
Problem forward_problem(const std::string& dtype, int64_t batch, int64_t q_len, int64_t kv_len,
                        int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t value_dim,
                        int64_t left, int64_t right) {
  Problem problem = {};
  problem.math = math_of(dtype, false).value_or(Math::kTF32);
  problem.num_batch_axes = 1;
  problem.batch_extent[0] = batch;
  set_sizes(q_len, kv_len, q_heads, kv_heads, head_dim, value_dim, &problem);
  problem.band.left = clamp_side(left);
  problem.band.right = clamp_side(right);
  return problem;
}

// The custom calls.
void define_handlers(nb::module_& m) {
  m.def(
      "cuda_handlers",
      [] {
        nb::dict handlers;
        handlers["forward"] = by_stage(forward_handlers());
        handlers["backward"] = by_stage(backward_handlers());
        handlers["tangent"] = by_stage(tangent_handlers());
        handlers["paged"] = by_stage(paged_handlers());
        handlers["predicate"] = by_stage(predicate_handlers());
        const auto alone = [](XLA_FFI_Handler* handler) {
          nb::dict stages;
          stages["execute"] = capsule(handler);
          return stages;
        };
        handlers["dense_mask"] = alone(dense_mask_handler());
        handlers["segment_matches"] = alone(segment_matches_handler());
        handlers["range_summary"] = alone(range_summary_handler());
        handlers["segment_ranges"] = alone(segment_ranges_handler());
        return handlers;
      },
      "Handlers for the CUDA platform, by custom call and stage.");
  m.def(
      "state_types",
      [] {
        const auto pair = [](const StateType& type) {
          return nb::make_tuple(nb::capsule(static_cast<void*>(type.id)),
                                nb::capsule(static_cast<void*>(type.info)));
        };
        nb::dict types;
        types["program"] = pair(program_state_type());
        types["predicate"] = pair(predicate_state_type());
        return types;
      },
      "(type id, type info) of what calls keep, by name, for jax.ffi.register_ffi_type.");
}

// Kernels that are compiled at run time.
void define_compiler(nb::module_& m) {
  m.def(
      "set_compiler",
      [](const std::vector<std::pair<std::string, std::optional<std::string>>>& locations,
         const std::string& headers) {
        std::vector<CompilerLocation> list;
        for (const auto& [library, builtins] : locations) {
          list.push_back({library.c_str(), builtins ? builtins->c_str() : nullptr});
        }
        jaxflash_set_compiler(list.data(), static_cast<int32_t>(list.size()), headers.c_str());
      },
      nb::arg("locations"), nb::arg("headers"),
      "Where to look for NVRTC, best first: (library, its builtins or None); and the folder of the "
      "kernels' headers.");
  m.def(
      "compiler",
      []() -> std::pair<std::optional<std::pair<int32_t, int32_t>>, std::string> {
        int32_t major = 0, minor = 0;
        const char* library = nullptr;
        const nb::gil_scoped_release unlocked;
        const Status status = jaxflash_compiler(&major, &minor, &library);
        if (!status.ok()) return {std::nullopt, status.message};
        return {std::make_pair(major, minor), library};
      },
      "(version, path) of NVRTC, loaded if need be; (None, what is wrong) without one.");
  m.def(
      "compile_program",
      [](const std::string& pass, const std::string& source, bool unit_slope, bool bounded,
         const std::string& dtype, bool highest_precision, int32_t head_dim, int32_t value_dim,
         float scale, int32_t arch, int32_t shared_memory, int64_t mask, bool walks, bool one_sided,
         bool deterministic, bool paged, int32_t shared_units, const std::vector<int64_t>& sizes,
         int32_t start_capture) {
        // Which arrays the program captures does not matter: as many as there may be.
        constexpr int64_t kRanks[kMaxCaptures] = {};
        PassAttributes attributes = {};
        attributes.problem.scale = scale;
        attributes.problem.left = kUnlimited;
        attributes.problem.right = one_sided ? 0 : kUnlimited;
        attributes.problem.highest_precision = highest_precision;
        attributes.problem.mask = mask;
        attributes.problem.walks = walks;
        attributes.unit_slope = unit_slope;
        attributes.bounded = bounded;
        attributes.head_dim = head_dim;
        attributes.value_dim = value_dim;
        attributes.dtype = dtype;
        attributes.capture_ranks = {kRanks, kMaxCaptures};
        KernelOptions options;
        options.deterministic = deterministic;
        options.paged = paged;
        options.shared_units = shared_units;
        options.sizes = {sizes.data(), sizes.size()};
        options.start_capture = start_capture;
        ProgramDescription description = {};
        if (const ffi::Error error =
                describe_program(pass_of(pass), attributes, options, &description);
            error.failure()) {
          throw nb::value_error(error.message().c_str());
        }
        description.source = source.c_str();
        KernelReport report;
        Status status;
        {
          const nb::gil_scoped_release unlocked;
          status = jaxflash_compile_program(&description, arch, shared_memory, &report);
        }
        if (!status.ok()) throw std::runtime_error(status.message);
        return row_of(report);
      },
      nb::kw_only(), nb::arg("pass_name"), nb::arg("source"), nb::arg("unit_slope"),
      nb::arg("bounded"), nb::arg("dtype"), nb::arg("highest_precision"), nb::arg("head_dim"),
      nb::arg("value_dim"), nb::arg("scale"), nb::arg("arch"), nb::arg("shared_memory"),
      nb::arg("mask") = 0, nb::arg("walks") = false, nb::arg("one_sided") = false,
      nb::arg("deterministic") = false, nb::arg("paged") = false, nb::arg("shared_units") = 0,
      nb::arg("sizes") = std::vector<int64_t>(), nb::arg("start_capture") = -1,
      "Compiles a score program as for a GPU of compute capability `arch` / 10 whose blocks may "
      "have that many bytes of shared memory; needs no GPU. Returns a row of kernel_reports(), "
      "with "
      "`walks` that of the kernel that walks.");
  m.def(
      "compile_kernel",
      [](const std::string& source, const std::string& kernel, const std::string& architecture) {
        KernelReport report;
        Status status;
        {
          const nb::gil_scoped_release unlocked;
          status = jaxflash_compile_kernel(source.c_str(), kernel.c_str(), architecture.c_str(),
                                           &report);
        }
        if (!status.ok()) throw std::runtime_error(status.message);
        return row_of(report);
      },
      nb::arg("source"), nb::arg("kernel"), nb::arg("architecture"),
      "Compiles a kernel of a source that may include the kernels' headers.");
  m.def(
      "kernel_reports",
      [] {
        std::vector<KernelReport> reports(256);
        int32_t count = jaxflash_kernel_reports(reports.data(), 256);
        while (count > static_cast<int32_t>(reports.size())) {
          reports.resize(count);
          count = jaxflash_kernel_reports(reports.data(), count);
        }
        reports.resize(count);
        std::vector<ReportRow> rows;
        for (const KernelReport& report : reports) rows.push_back(row_of(report));
        return rows;
      },
      "What this process has compiled: (kernel, tile, architecture, registers, "
      "bytes spilled, serialised, seconds, from disk).");
  m.def(
      "cache_folder",
      [] {
        std::string path(4096, '\0');
        path.resize(std::min<size_t>(path.size() - 1, jaxflash_cache_folder(path.data(), 4096)));
        return path;
      },
      "Folder of the cache on disk; empty if there is none.");
}

// What calls of some sizes need.
void define_sizes(nb::module_& m) {
  m.def(
      "forward_workspace_bytes",
      [](const std::string& dtype, int64_t batch, int64_t q_len, int64_t kv_len, int64_t q_heads,
         int64_t kv_heads, int64_t head_dim, int64_t value_dim, int64_t left, int64_t right,
         std::optional<int32_t> shared_units) {
        const Problem problem = forward_problem(dtype, batch, q_len, kv_len, q_heads, kv_heads,
                                                head_dim, value_dim, left, right);
        return shared_units ? jaxflash_program_workspace_bytes(&problem, *shared_units)
                            : jaxflash_forward_workspace_bytes(&problem);
      },
      nb::kw_only(), nb::arg("dtype"), nb::arg("batch"), nb::arg("q_len"), nb::arg("kv_len"),
      nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_dim"),
      nb::arg("left"), nb::arg("right"), nb::arg("shared_units") = nb::none(),
      "Bytes of workspace that the forward pass of one problem needs, with a score program if its "
      "`shared_units` are given; no more for more sequences.");
  m.def(
      "shared_units",
      [](const std::string& dtype, int64_t batch, int64_t q_len, int64_t kv_len, int64_t q_heads,
         int64_t kv_heads, int64_t head_dim, int64_t value_dim, int64_t left, int64_t right,
         bool paged) {
        const Problem problem = forward_problem(dtype, batch, q_len, kv_len, q_heads, kv_heads,
                                                head_dim, value_dim, left, right);
        return jaxflash_shared_units(&problem, paged);
      },
      nb::kw_only(), nb::arg("dtype"), nb::arg("batch"), nb::arg("q_len"), nb::arg("kv_len"),
      nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_dim"),
      nb::arg("left"), nb::arg("right"), nb::arg("paged"),
      "The units of 64 rows, 1 or 2, whose keys the blocks of a score program's forward kernels "
      "should share; 0: none.");
  m.def(
      "backward_workspace_bytes",
      [](int64_t batch, int64_t q_len, int64_t kv_len, int64_t q_heads, int64_t kv_heads,
         int64_t head_dim, int64_t value_dim) {
        Problem problem = {};
        problem.num_batch_axes = 1;
        problem.batch_extent[0] = batch;
        set_sizes(q_len, kv_len, q_heads, kv_heads, head_dim, value_dim, &problem);
        return jaxflash_backward_workspace_bytes(&problem);
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("q_len"), nb::arg("kv_len"), nb::arg("q_heads"),
      nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_dim"),
      "Bytes of workspace that the backward pass of one problem needs.");
  m.def(
      "batch_sum_workspace_bytes",
      [](int64_t batch, int64_t kv_len, int64_t kv_heads, int32_t batch_sum) {
        Problem problem = {};
        problem.num_batch_axes = 1;
        problem.batch_extent[0] = batch;
        set_sizes(0, kv_len, kv_heads, kv_heads, 0, 0, &problem);
        return jaxflash_batch_sum_workspace_bytes(&problem, batch_sum);
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("kv_len"), nb::arg("kv_heads"), nb::arg("batch_sum"),
      "What its workspace has beside where it stores a gradient that is the sum of that many batch "
      "elements.");
}

// What was compiled ahead of time, and for which GPUs.
void define_library(nb::module_& m) {
  m.def("build_info", [] { return std::string(jaxflash_build_info()); });
  m.def("variants", [] {
    const Variant* variants = nullptr;
    const int32_t count = jaxflash_variants(&variants);
    std::vector<std::tuple<std::string, std::string, std::string, int32_t, int32_t>> rows;
    for (int32_t i = 0; i < count; ++i) {
      rows.emplace_back(variants[i].family, variants[i].pass, variants[i].math,
                        variants[i].head_dim, variants[i].value_dim);
    }
    return rows;
  });
  m.def(
      "variant",
      [](const std::string& pass, const std::string& dtype, bool highest_precision,
         const std::vector<int64_t>& q, const std::vector<int64_t>& k,
         const std::vector<int64_t>& v) -> std::optional<VariantKey> {
        return variant_for(pass_of(pass), dtype, highest_precision, q, k, v);
      },
      nb::kw_only(), nb::arg("pass_name"), nb::arg("dtype"), nb::arg("highest_precision"),
      nb::arg("q"), nb::arg("k"), nb::arg("v"),
      "(family, head size, value head size) of the variant that the current GPU runs for "
      "q (*B, T, N, H), k (*B, S, K, H), v (*B, S, K, h), densely stored; None if it runs none.");
  m.def("devices", [] {
    Device devices[64];
    const int32_t count = std::min(jaxflash_devices(devices, 64), 64);
    std::vector<std::tuple<std::string, int32_t, int32_t, int32_t, bool>> rows;
    for (int32_t i = 0; i < count; ++i) {
      rows.emplace_back(devices[i].name, devices[i].major, devices[i].minor,
                        devices[i].shared_memory_per_block, devices[i].has_kernels);
    }
    return rows;
  });
}

#endif  // JAXFLASH_WITH_KERNELS

}  // namespace

NB_MODULE(_extension, m) {
  m.doc() = "FFI handlers of the jaxflash kernels, and what the kernel library was built with.";
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("constants") = constants();
  m.def(
      "wrong_platform_handler", [] { return capsule(wrong_platform_handler()); },
      "Handler that reports a platform without kernels.");

#ifdef JAXFLASH_WITH_KERNELS
  if (const std::string hash = jaxflash_source_hash(); hash != JAXFLASH_SOURCE_HASH) {
    throw nb::import_error(("jaxflash: libjaxflash_cuda.so was built from other sources (hash " +
                            hash +
                            ") than the extension beside it (" JAXFLASH_SOURCE_HASH
                            "); install the package again, with JAXFLASH_PREBUILT_KERNELS unset or "
                            "naming a library of the same sources")
                               .c_str());
  }
  m.attr("kernels") = true;
  define_handlers(m);
  define_compiler(m);
  define_sizes(m);
  define_library(m);
#else
  m.attr("kernels") = false;
#endif
}

}  // namespace jaxflash
