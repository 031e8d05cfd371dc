// Host side of TMA: which arrays it can read and write in place, and the maps that describe them.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cmath>
#include <cstdint>

#include "attention.h"
#include "common/status.h"
#include "sm90/hardware/tensor_map_bytes.h"

namespace jaxflash::sm90 {

// Axes of a tensor map beside head size, length and heads.
inline constexpr int kBatchDims = 2;

// The batch axes of a call, merged across all of its tensors; index 0 is the fastest axis.
struct BatchAxes {
  int count = 0;
  int64_t extent[kBatchDims] = {1, 1};
};

// One tensor over merged batch axes, in elements. An axis that the tensor does not have (stride 0)
// gets extent 1 here, and `step` 0: what the axis' index is multiplied with.
struct MappedTensor {
  void* data;
  int64_t extent[5];  // head size, length, heads, batch axes
  int64_t stride[5];  // stride[0] is 1
  int32_t batch_step[kBatchDims];
};

// Merges the batch axes that are contiguous in every tensor alike; false when more than kBatchDims
// remain. strides[t][axis] are those of tensor t over the merged axes.
template <int kTensors>
inline bool merge_batch_axes(const Problem& problem, const Tensor* const (&tensors)[kTensors],
                             BatchAxes& merged, int64_t (&strides)[kTensors][kBatchDims]) {
  merged = BatchAxes{};
  for (auto& row : strides) row[0] = row[1] = 0;
  for (int axis = problem.num_batch_axes - 1; axis >= 0; --axis) {
    const int64_t extent = problem.batch_extent[axis];
    if (extent == 1) continue;
    const int last = merged.count - 1;
    bool continues = last >= 0;
    for (int t = 0; t < kTensors && continues; ++t) {
      continues = tensors[t]->batch_stride[axis] == strides[t][last] * merged.extent[last];
    }
    if (continues) {
      merged.extent[last] *= extent;
      continue;
    }
    if (merged.count == kBatchDims) return false;
    for (int t = 0; t < kTensors; ++t) strides[t][merged.count] = tensors[t]->batch_stride[axis];
    merged.extent[merged.count++] = extent;
  }
  return true;
}

inline MappedTensor map_tensor(const Tensor& tensor, int64_t head_size, int64_t length,
                               int64_t heads, const BatchAxes& batch,
                               const int64_t (&batch_stride)[kBatchDims]) {
  MappedTensor mapped{tensor.data,
                      {head_size, length, heads, 1, 1},
                      {1, tensor.seq_stride, tensor.head_stride, 0, 0},
                      {0, 0}};
  for (int axis = 0; axis < kBatchDims; ++axis) {
    if (batch_stride[axis] == 0) continue;
    mapped.extent[3 + axis] = batch.extent[axis];
    mapped.stride[3 + axis] = batch_stride[axis];
    mapped.batch_step[axis] = 1;
  }
  return mapped;
}

// What keeps TMA from an array: for a text "needs <wanted>, got <got>".
struct MapFault {
  const char* wanted = nullptr;  // null: nothing does
  int64_t got = 0;
};

// TMA wants a base and strides that are multiples of 16 bytes (16-bit elements here), strides below
// 2^40 bytes, and 32-bit coordinates.
inline MapFault map_fault(const MappedTensor& tensor) {
  const auto base = reinterpret_cast<uintptr_t>(tensor.data);
  if (base % 16 != 0) return {"an address that is 0 modulo 16", static_cast<int64_t>(base % 16)};
  for (int axis = 0; axis < 5; ++axis) {
    const int64_t extent = tensor.extent[axis], stride = tensor.stride[axis];
    if (extent > INT32_MAX - 256) return {"at most 2^31 - 257 elements along an axis", extent};
    if (axis == 0 || extent <= 1) continue;
    if (stride <= 0 || stride % 8 != 0 || stride >= int64_t{1} << 39) {
      return {"steps along its axes of a multiple of 8 elements, less than 2^39", stride};
    }
  }
  return {};
}

inline bool mappable(const MappedTensor& tensor) { return map_fault(tensor).wanted == nullptr; }

// An array of a call, by which of its lengths and sizes are those of queries and of values.
struct Operand {
  const Tensor* tensor;
  bool of_rows;    // not of keys
  bool of_values;  // value_dim, not head_dim
};

// Maps over the batch axes merged across all operands; false where TMA does not take them.
template <int kOperands>
inline bool map_operands(const Problem& problem, const Operand (&operands)[kOperands],
                         BatchAxes& batch, MappedTensor (&mapped)[kOperands]) {
  const Tensor* tensors[kOperands];
  for (int i = 0; i < kOperands; ++i) tensors[i] = operands[i].tensor;
  int64_t strides[kOperands][kBatchDims];
  if (!merge_batch_axes(problem, tensors, batch, strides)) return false;
  for (int i = 0; i < kOperands; ++i) {
    const Operand& operand = operands[i];
    mapped[i] =
        map_tensor(*operand.tensor, operand.of_values ? problem.value_dim : problem.head_dim,
                   operand.of_rows ? problem.q_len : problem.kv_len,
                   operand.of_rows ? problem.q_heads : problem.kv_heads, batch, strides[i]);
    if (!mappable(mapped[i])) return false;
  }
  return true;
}

// Whether the kernels of all passes take head sizes and a scale like these, whatever the lengths
// and strides are.
inline bool takes_sizes(const Problem& problem) {
  if (problem.math != Math::kFloat16 && problem.math != Math::kBFloat16) return false;
  if (problem.head_dim <= 0 || problem.head_dim % 8 != 0) return false;
  if (problem.value_dim <= 0 || problem.value_dim % 8 != 0) return false;
  // A masked product is -inf before the scale, and the running maximum is taken there: the scale
  // must keep the order, and 0 would turn masked logits into NaN.
  return problem.scale >= 1e-30f && std::isfinite(problem.scale);
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up so that the library does not link against the driver: until it
// is found, an error of another call may be in the way.
inline EncodeTiled encode_tiled() {
  static std::atomic<EncodeTiled> known = nullptr;
  EncodeTiled function = known;
  if (function != nullptr) return function;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();
  if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) {
    function = reinterpret_cast<EncodeTiled>(entry);
    known = function;
  }
  return function;
}

// What the L2 fetches from memory where a box misses it.
enum class Fetch {
  kNeighbours,  // 256 bytes
  kBox,         // what the box has of them
};

// Map whose boxes are `columns` elements (64, or 32; 128 or 64 bytes, swizzled) by `box_length`
// positions of `box_heads` heads.
inline Status encode(TensorMap& map, const MappedTensor& tensor, Math math, int box_length,
                     int box_heads = 1, Fetch fetch = Fetch::kNeighbours, int columns = 64) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  if (encode_tiled() == nullptr) {
    return error_status("the CUDA driver has no cuTensorMapEncodeTiled: update it");
  }
  cuuint64_t extents[5];
  cuuint64_t strides[4];  // bytes, of axes 1 to 4
  for (int axis = 0; axis < 5; ++axis) extents[axis] = tensor.extent[axis];
  for (int axis = 1; axis < 5; ++axis) {
    // The stride of a single element is never used, but has to look right.
    strides[axis - 1] = tensor.extent[axis] > 1 ? tensor.stride[axis] * 2 : 16;
  }
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(box_length),
                             static_cast<cuuint32_t>(box_heads), 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUtensorMapL2promotion promotion = fetch == Fetch::kNeighbours
                                               ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                               : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  const CUresult encoded = encode_tiled()(
      reinterpret_cast<CUtensorMap*>(&map),
      math == Math::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      5, tensor.data, extents, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, promotion,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (encoded == CUDA_SUCCESS) return {};
  return error_status("cuTensorMapEncodeTiled failed with CUresult %d", static_cast<int>(encoded));
}

inline Status encode(MappedOperand& operand, const MappedTensor& tensor, Math math,
                     int box_length) {
  for (int axis = 0; axis < kBatchDims; ++axis) {
    operand.batch_step[axis] = tensor.batch_step[axis];
  }
  return encode(operand.map, tensor, math, box_length);
}

}  // namespace jaxflash::sm90
