// One tile configuration of the Hopper kernels, checked and timed by itself. benchmarks/sweep.py
// compiles this file once for each candidate, after a header that defines
//   SWEEP_FORWARD    1 or 0 (backward)
//   SWEEP_TILE       a ForwardTile<...> or BackwardTile<...> of cuda/sm90/tile_config.h
// and runs it:
//   check            small cases against a reference in float32; exit status 1 if one is wrong
//   time SHAPE...    device time of each shape under sustained load, one JSON line each: also the
//                    clock, and the share of the matrix units' rate at that clock ("use")
//   burst SHAPE...   the same in the first 15 ms after a pause, at a higher clock
// A shape is B,T,S,N,K,H[,h][:causal][:window=LEFT/RIGHT][:deterministic].

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#if SWEEP_FORWARD
#include "sm90/forward.cuh"
#else
#include "sm90/backward.cuh"
#endif

namespace {

using jaxflash::kUnlimited;
using jaxflash::Problem;
using jaxflash::Status;
using jaxflash::Tensor;
using namespace jaxflash::sm90;  // for the names in SWEEP_TILE
using SweptTile = SWEEP_TILE;
constexpr bool kForward = SWEEP_FORWARD;
constexpr int kHeadDim = SweptTile::kHeadDim;
constexpr int kValueDim = SweptTile::kValueDim;

void expect(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  std::printf("{\"failed\": \"%s: %s\"}\n", doing, cudaGetErrorString(error));
  std::exit(2);
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) {
    expect(cudaMalloc(&data_, std::max<size_t>(size, 1) * sizeof(T)), "allocating");
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return data_; }
  size_t size() const { return size_; }
  // Not a number in every floating-point type: what is not written shows.
  void poison() { expect(cudaMemset(data_, 0xff, size_ * sizeof(T)), "poisoning"); }
  void copy_from(const std::vector<T>& host) {
    expect(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyDefault), "copying");
  }
  std::vector<T> to_host() const {
    std::vector<T> host(size_);
    expect(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDefault), "copying");
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

using Element = __nv_bfloat16;

// Dense arrays (batch, length, heads, dim).
Tensor dense(Element* data, int64_t length, int64_t heads, int64_t dim) {
  Tensor tensor{};
  tensor.data = data;
  tensor.batch_stride[0] = length * heads * dim;
  tensor.seq_stride = heads * dim;
  tensor.head_stride = dim;
  return tensor;
}

struct Shape {
  int batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim;
  int left = kUnlimited, right = kUnlimited;
  bool bottom_right = false;
  bool lengths = false;  // sequences of different lengths, padding that is not a number
  bool deterministic = false;

  std::string name() const {
    char text[160];
    std::snprintf(text, sizeof text, "%d,%d,%d,%d,%d,%d,%d:window=%d/%d%s%s%s", batch, q_len,
                  kv_len, q_heads, kv_heads, head_dim, value_dim, left, right,
                  bottom_right ? ":bottom_right" : "", lengths ? ":lengths" : "",
                  deterministic ? ":deterministic" : "");
    return text;
  }
};

Problem problem_of(const Shape& shape, const int32_t* q_lengths, const int32_t* kv_lengths) {
  Problem problem{};
  problem.math = jaxflash::Math::kBFloat16;
  problem.num_batch_axes = 1;
  problem.batch_extent[0] = shape.batch;
  problem.q_len = shape.q_len;
  problem.kv_len = shape.kv_len;
  problem.q_heads = shape.q_heads;
  problem.kv_heads = shape.kv_heads;
  problem.head_dim = shape.head_dim;
  problem.value_dim = shape.value_dim;
  problem.scale = 1.f / std::sqrt(static_cast<float>(shape.head_dim));
  problem.band = {shape.left, shape.right, shape.bottom_right, q_lengths, kv_lengths};
  return problem;
}

// --- reference ----------------------------------------------------------------------------------

struct Reference {
  Problem problem;
  const Element *q, *k, *v, *dout;
  const float* dlse;
  float *out, *lse, *dq, *dk, *dv, *delta;
};

__device__ int length_of(const int32_t* lengths, int batch, int limit) {
  return lengths == nullptr ? limit : min(lengths[batch], limit);
}

__device__ bool sees(const Problem& problem, int batch, int row, int key) {
  const int q_len = length_of(problem.band.q_lengths, batch, problem.q_len);
  const int kv_len = length_of(problem.band.kv_lengths, batch, problem.kv_len);
  const int64_t position = row + (problem.band.bottom_right ? kv_len - q_len : 0);
  if (row >= q_len || key >= kv_len) return false;
  if (problem.band.left < kUnlimited && key < position - problem.band.left) return false;
  return problem.band.right >= kUnlimited || key <= position + problem.band.right;
}

__device__ float dot(const Element* a, const Element* b, int dim) {
  float sum = 0.f;
  for (int i = 0; i < dim; ++i) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  return sum;
}

// One block a query row: out and lse, then dq and delta from them.
__global__ void reference_rows(Reference r) {
  extern __shared__ float p[];  // kv_len
  const Problem& problem = r.problem;
  const int head = blockIdx.x % problem.q_heads;
  const int row = blockIdx.x / problem.q_heads % problem.q_len;
  const int batch = blockIdx.x / problem.q_heads / problem.q_len;
  const int kv_head = head / (problem.q_heads / problem.kv_heads);
  const Element* q = r.q + int64_t{blockIdx.x} * problem.head_dim;
  const auto key_row = [&](int key) {
    return (int64_t{batch} * problem.kv_len + key) * problem.kv_heads + kv_head;
  };
  __shared__ float top, sum;
  for (int key = threadIdx.x; key < problem.kv_len; key += blockDim.x) {
    p[key] = sees(problem, batch, row, key)
                 ? dot(q, r.k + key_row(key) * problem.head_dim, problem.head_dim) * problem.scale
                 : -INFINITY;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    top = -INFINITY;
    sum = 0.f;
    for (int key = 0; key < problem.kv_len; ++key) top = fmaxf(top, p[key]);
    for (int key = 0; key < problem.kv_len; ++key) {
      if (p[key] != -INFINITY) sum += expf(p[key] - top);
    }
    r.lse[blockIdx.x] = sum == 0.f ? -INFINITY : top + logf(sum);
  }
  __syncthreads();
  for (int key = threadIdx.x; key < problem.kv_len; key += blockDim.x) {
    p[key] = p[key] == -INFINITY ? 0.f : expf(p[key] - top) / sum;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < problem.value_dim; d += blockDim.x) {
    float value = 0.f;
    for (int key = 0; key < problem.kv_len; ++key) {
      if (p[key] != 0.f) {
        value += p[key] * static_cast<float>(r.v[key_row(key) * problem.value_dim + d]);
      }
    }
    r.out[int64_t{blockIdx.x} * problem.value_dim + d] = value;
  }
  __syncthreads();
  if (r.dout == nullptr) return;
  const Element* dout = r.dout + int64_t{blockIdx.x} * problem.value_dim;
  __shared__ float delta;
  if (threadIdx.x == 0) {
    delta = 0.f;
    if (sum != 0.f) {
      for (int d = 0; d < problem.value_dim; ++d) {
        delta += r.out[int64_t{blockIdx.x} * problem.value_dim + d] * static_cast<float>(dout[d]);
      }
      delta -= r.dlse[blockIdx.x];
    }
    r.delta[blockIdx.x] = delta;
  }
  __syncthreads();
  for (int key = threadIdx.x; key < problem.kv_len; key += blockDim.x) {
    if (p[key] == 0.f) continue;
    p[key] *= dot(dout, r.v + key_row(key) * problem.value_dim, problem.value_dim) - delta;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < problem.head_dim; d += blockDim.x) {
    float value = 0.f;
    for (int key = 0; key < problem.kv_len; ++key) {
      if (p[key] != 0.f) {
        value += p[key] * static_cast<float>(r.k[key_row(key) * problem.head_dim + d]);
      }
    }
    r.dq[int64_t{blockIdx.x} * problem.head_dim + d] = value * problem.scale;
  }
}

// One block a key: dk and dv.
__global__ void reference_keys(Reference r) {
  extern __shared__ float shared[];
  const Problem& problem = r.problem;
  float* p = shared;
  float* ds = shared + problem.q_len;
  const int group = problem.q_heads / problem.kv_heads;
  const int kv_head = blockIdx.x % problem.kv_heads;
  const int key = blockIdx.x / problem.kv_heads % problem.kv_len;
  const int batch = blockIdx.x / problem.kv_heads / problem.kv_len;
  const Element* k = r.k + int64_t{blockIdx.x} * problem.head_dim;
  const Element* v = r.v + int64_t{blockIdx.x} * problem.value_dim;
  float dk[2] = {0.f, 0.f}, dv[2] = {0.f, 0.f};  // of columns threadIdx.x and 128 further
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const auto query_row = [&](int row) {
      return (int64_t{batch} * problem.q_len + row) * problem.q_heads + head;
    };
    __syncthreads();
    for (int row = threadIdx.x; row < problem.q_len; row += blockDim.x) {
      p[row] = ds[row] = 0.f;
      if (!sees(problem, batch, row, key)) continue;
      const int64_t index = query_row(row);
      const float s = dot(r.q + index * problem.head_dim, k, problem.head_dim) * problem.scale;
      p[row] = expf(s - r.lse[index]);
      ds[row] =
          p[row] * (dot(r.dout + index * problem.value_dim, v, problem.value_dim) - r.delta[index]);
    }
    __syncthreads();
    for (int half = 0; half < 2; ++half) {
      const int d = threadIdx.x + 128 * half;
      for (int row = 0; row < problem.q_len; ++row) {
        if (p[row] == 0.f) continue;
        if (d < problem.value_dim) {
          dv[half] += p[row] * static_cast<float>(r.dout[query_row(row) * problem.value_dim + d]);
        }
        if (d < problem.head_dim) {
          dk[half] += ds[row] * static_cast<float>(r.q[query_row(row) * problem.head_dim + d]);
        }
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int d = threadIdx.x + 128 * half;
    if (d < problem.value_dim) r.dv[int64_t{blockIdx.x} * problem.value_dim + d] = dv[half];
    if (d < problem.head_dim) {
      r.dk[int64_t{blockIdx.x} * problem.head_dim + d] = dk[half] * problem.scale;
    }
  }
}

// --- one call -----------------------------------------------------------------------------------

// Drawing every value anew would take longer than the measurement: arrays are pieces of one pool.
std::vector<Element> normal(size_t size, std::mt19937& random) {
  static const std::vector<Element> pool = [] {
    std::mt19937 generator(1);
    std::normal_distribution<float> distribution;
    std::vector<Element> values((1 << 20) - 3);
    for (Element& value : values) value = __float2bfloat16(distribution(generator));
    return values;
  }();
  std::vector<Element> values(size);
  for (size_t at = 0; at < size;) {
    const size_t first = random() % pool.size();
    const size_t count = std::min(size - at, pool.size() - first);
    std::copy_n(pool.begin() + first, count, values.begin() + at);
    at += count;
  }
  return values;
}

struct Call {
  Shape shape;
  size_t rows, keys;  // over batch and heads
  DeviceArray<Element> q, k, v, dout, out, dq, dk, dv;
  DeviceArray<float> lse, dlse;
  DeviceArray<int32_t> q_lengths, kv_lengths;
  Problem problem;
  DeviceArray<char> workspace;

  explicit Call(const Shape& s)
      : shape(s),
        rows(size_t{1} * s.batch * s.q_len * s.q_heads),
        keys(size_t{1} * s.batch * s.kv_len * s.kv_heads),
        q(rows * s.head_dim),
        k(keys * s.head_dim),
        v(keys * s.value_dim),
        dout(kForward ? 0 : rows * s.value_dim),
        out(rows * s.value_dim),
        dq(kForward ? 0 : rows * s.head_dim),
        dk(kForward ? 0 : keys * s.head_dim),
        dv(kForward ? 0 : keys * s.value_dim),
        lse(rows),
        dlse(kForward ? 0 : rows),
        q_lengths(s.batch),
        kv_lengths(s.batch),
        problem(problem_of(s, s.lengths ? q_lengths.get() : nullptr,
                           s.lengths ? kv_lengths.get() : nullptr)),
        workspace(workspace_bytes(problem)) {
    std::mt19937 random(1234);
    fill(q, random);
    fill(k, random);
    fill(v, random);
    fill(dout, random);
    std::vector<float> cotangent(dlse.size());
    std::normal_distribution<float> distribution;
    if (rows < size_t{1} << 20) {
      for (float& value : cotangent) value = distribution(random);
    }
    dlse.copy_from(cotangent);
    if (s.lengths) shorten(random);
  }

  static size_t workspace_bytes(const Problem& problem) {
#if SWEEP_FORWARD
    return SweptTile::kShares ? jaxflash::forward_workspace(problem).bytes : 0;
#else
    return jaxflash::backward_workspace_bytes(problem);
#endif
  }

  static void fill(DeviceArray<Element>& array, std::mt19937& random) {
    array.copy_from(normal(array.size(), random));
  }

  // Sequence 0 is empty, the others end anywhere.
  void shorten(std::mt19937& random) {
    std::vector<int32_t> valid_rows(shape.batch), valid_keys(shape.batch);
    for (int b = 1; b < shape.batch; ++b) {
      valid_rows[b] = std::uniform_int_distribution<int>(0, shape.q_len)(random);
      valid_keys[b] = std::uniform_int_distribution<int>(0, shape.kv_len)(random);
    }
    q_lengths.copy_from(valid_rows);
    kv_lengths.copy_from(valid_keys);
    spoil(q, valid_rows, shape.q_len, shape.q_heads, shape.head_dim);
    spoil(dout, valid_rows, shape.q_len, shape.q_heads, shape.value_dim);
    spoil(k, valid_keys, shape.kv_len, shape.kv_heads, shape.head_dim);
    spoil(v, valid_keys, shape.kv_len, shape.kv_heads, shape.value_dim);
  }
  void spoil(DeviceArray<Element>& array, const std::vector<int32_t>& valid, int length, int heads,
             int dim) {
    if (array.size() == 0) return;
    std::vector<Element> host = array.to_host();
    const size_t sequence = size_t{1} * length * heads * dim;
    for (int b = 0; b < shape.batch; ++b) {
      const size_t begin = size_t{1} * valid[b] * heads * dim;
      std::fill(host.begin() + b * sequence + begin, host.begin() + (b + 1) * sequence,
                __float2bfloat16(NAN));
    }
    array.copy_from(host);
  }

  Status run(cudaStream_t stream) {
#if SWEEP_FORWARD
    jaxflash::ForwardParams params{};
    params.problem = problem;
    params.q = dense(q.get(), shape.q_len, shape.q_heads, shape.head_dim);
    params.k = dense(k.get(), shape.kv_len, shape.kv_heads, shape.head_dim);
    params.v = dense(v.get(), shape.kv_len, shape.kv_heads, shape.value_dim);
    params.out = dense(out.get(), shape.q_len, shape.q_heads, shape.value_dim);
    params.lse = lse.get();
    params.workspace = workspace.get();
    return jaxflash::sm90::forward_with<jaxflash::Math::kBFloat16, SweptTile>(params, stream);
#else
    jaxflash::BackwardParams params{};
    params.problem = problem;
    params.q = dense(q.get(), shape.q_len, shape.q_heads, shape.head_dim);
    params.k = dense(k.get(), shape.kv_len, shape.kv_heads, shape.head_dim);
    params.v = dense(v.get(), shape.kv_len, shape.kv_heads, shape.value_dim);
    params.out = dense(out.get(), shape.q_len, shape.q_heads, shape.value_dim);
    params.dout = dense(dout.get(), shape.q_len, shape.q_heads, shape.value_dim);
    params.lse = lse.get();
    params.dlse = dlse.get();
    params.dq = dense(dq.get(), shape.q_len, shape.q_heads, shape.head_dim);
    params.dk = dense(dk.get(), shape.kv_len, shape.kv_heads, shape.head_dim);
    params.dv = dense(dv.get(), shape.kv_len, shape.kv_heads, shape.value_dim);
    params.workspace = workspace.get();
    params.deterministic = shape.deterministic;
    return jaxflash::sm90::backward_with<jaxflash::Math::kBFloat16, SweptTile>(params, stream);
#endif
  }
};

// --- checking -----------------------------------------------------------------------------------

float to_float(float value) { return value; }
float to_float(Element value) { return __bfloat162float(value); }

// The largest error in units of what rounding to 16 bits explains; infinite where one side is not a
// number and the other is. Errors are relative to the element and to the typical one, at least
// `floor`: a gradient may be small because large terms cancel.
template <class T>
float error_of(const std::vector<T>& got, const std::vector<float>& wanted, float floor = 0.f) {
  double square = 0;
  size_t count = 0;
  for (float value : wanted) {
    if (!std::isfinite(value) || value == 0.f) continue;
    square += double{value} * value;
    ++count;
  }
  const float typical = std::max<float>(std::sqrt(square / std::max<size_t>(count, 1)), floor);
  const float unit = std::is_same_v<T, float> ? 1.f / 8192 : 1.f / 128;
  float worst = 0.f;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const float value = to_float(got[i]);
    if (value == wanted[i]) continue;
    const float error = std::abs(value - wanted[i]) / (unit * (std::abs(wanted[i]) + typical));
    worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
  }
  return worst;
}

bool check(const Shape& shape) {
  Call call(shape);
  DeviceArray<float> out(call.rows * shape.value_dim), lse(call.rows), delta(call.rows);
  DeviceArray<float> dq(call.rows * shape.head_dim);
  DeviceArray<float> dk(call.keys * shape.head_dim), dv(call.keys * shape.value_dim);
  Reference reference{call.problem,
                      call.q.get(),
                      call.k.get(),
                      call.v.get(),
                      kForward ? nullptr : call.dout.get(),
                      call.dlse.get(),
                      out.get(),
                      lse.get(),
                      dq.get(),
                      dk.get(),
                      dv.get(),
                      delta.get()};
  if (call.rows > 0) {
    reference_rows<<<call.rows, 128, shape.kv_len * sizeof(float)>>>(reference);
  }
  if (!kForward && call.keys > 0) {
    reference_keys<<<call.keys, 128, 2 * shape.q_len * sizeof(float)>>>(reference);
  }
  expect(cudaDeviceSynchronize(), "computing the reference");
  if (!kForward) {  // what the forward pass hands over
    std::vector<float> values = out.to_host();
    std::vector<Element> rounded(values.size());
    for (size_t i = 0; i < values.size(); ++i) rounded[i] = __float2bfloat16(values[i]);
    call.out.copy_from(rounded);
    call.lse.copy_from(lse.to_host());
  } else {
    call.out.poison();
    call.lse.poison();
  }
  call.dq.poison();
  call.dk.poison();
  call.dv.poison();
  call.workspace.poison();
  const Status status = call.run(nullptr);
  if (!status.ok()) {
    std::printf("{\"failed\": \"%s: %s\"}\n", shape.name().c_str(), status.message);
    return false;
  }
  expect(cudaDeviceSynchronize(), shape.name().c_str());
  struct {
    const char* name;
    float error;
  } errors[3];
  int count = 0;
  if (kForward) {
    errors[count++] = {"out", error_of(call.out.to_host(), out.to_host())};
    errors[count++] = {"lse", error_of(call.lse.to_host(), lse.to_host())};
  } else {
    constexpr float kFloor = .25f;
    errors[count++] = {"dq", error_of(call.dq.to_host(), dq.to_host(), kFloor)};
    errors[count++] = {"dk", error_of(call.dk.to_host(), dk.to_host(), kFloor)};
    errors[count++] = {"dv", error_of(call.dv.to_host(), dv.to_host(), kFloor)};
  }
  bool right = true;
  for (int i = 0; i < count; ++i) {
    constexpr float kTolerance = kForward ? 4.f : 12.f;
    if (errors[i].error <= kTolerance) continue;
    std::printf("{\"wrong\": \"%s\", \"array\": \"%s\", \"error\": %.3g}\n", shape.name().c_str(),
                errors[i].name, errors[i].error);
    right = false;
  }
  return right;
}

int check_all() {
  struct Lengths {
    int q_len, kv_len;
  };
  const Lengths lengths[] = {{1, 1},     {64, 64},   {63, 65},   {128, 128}, {127, 129},
                             {197, 197}, {200, 333}, {513, 257}, {1, 300},   {300, 1},
                             {192, 240}, {384, 320}, {30, 700},  {700, 30},  {577, 640},
                             {7, 0},     {1, 3000},  {6, 2111},  {70, 1500}};
  struct Mask {
    int left, right;
    bool bottom_right;
  };
  const Mask masks[] = {{kUnlimited, kUnlimited, false},
                        {kUnlimited, 0, false},
                        {kUnlimited, 0, true},
                        {100, 0, false},
                        {17, 133, true},
                        {kUnlimited, -3, false},
                        {90, kUnlimited, false}};
  struct Heads {
    int batch, q_heads, kv_heads;
  };
  const Heads heads[] = {{2, 3, 3}, {3, 8, 2}, {2, 6, 1}};
  int cases = 0, wrong = 0;
  for (const Lengths& length : lengths) {
    for (const Mask& mask : masks) {
      for (const bool ragged : {false, true}) {
        const Heads& head = heads[cases / 2 % std::size(heads)];
        Shape shape{head.batch,
                    length.q_len,
                    length.kv_len,
                    head.q_heads,
                    head.kv_heads,
                    kHeadDim - (ragged ? 8 : 0),
                    kValueDim - (ragged ? 16 : 0)};
        shape.left = mask.left;
        shape.right = mask.right;
        shape.bottom_right = mask.bottom_right;
        shape.lengths = ragged;
        shape.deterministic = !kForward && cases % 3 == 0;
        ++cases;
        wrong += !check(shape);
      }
    }
  }
  std::printf("{\"cases\": %d, \"wrong\": %d}\n", cases, wrong);
  return wrong == 0 ? 0 : 1;
}

// --- timing -------------------------------------------------------------------------------------

Shape parse(const char* text) {
  int sizes[7];
  const char* at = text;
  int count = 0;
  while (count < 7) {
    char* end;
    sizes[count++] = static_cast<int>(std::strtol(at, &end, 10));
    at = end;
    if (*at != ',') break;
    ++at;
  }
  if (count < 6) {
    std::printf("{\"failed\": \"%s is not a shape\"}\n", text);
    std::exit(2);
  }
  Shape shape{sizes[0],
              sizes[1],
              sizes[2],
              sizes[3],
              sizes[4],
              sizes[5],
              count == 7 ? sizes[6] : std::min(sizes[5], kValueDim)};
  if (std::strstr(at, ":causal")) shape.right = 0;
  if (const char* window = std::strstr(at, ":window=")) {
    std::sscanf(window, ":window=%d/%d", &shape.left, &shape.right);
  }
  shape.deterministic = std::strstr(at, ":deterministic") != nullptr;
  return shape;
}

int64_t visible_keys(const Shape& shape, int64_t row) {
  const int64_t begin = shape.left < kUnlimited ? std::max<int64_t>(row - shape.left, 0) : 0;
  const int64_t end = shape.right < kUnlimited
                          ? std::min<int64_t>(row + shape.right + 1, shape.kv_len)
                          : shape.kv_len;
  return std::max<int64_t>(end - begin, 0);
}

constexpr int kMaxMultiprocessors = 256;

// By multiprocessor: its clock, and the time in nanoseconds.
__global__ void read_clocks(long long* clocks, long long* times) {
  unsigned multiprocessor;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  if (multiprocessor >= kMaxMultiprocessors) return;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(times[multiprocessor]));
  clocks[multiprocessor] = clock64();
}

// The mean clock, in GHz, between its construction and a call of ghz(). What nvidia-smi shows under
// a power limit is up to 0.1 GHz above it.
class ClockMeter {
 public:
  explicit ClockMeter(int multiprocessors)
      : multiprocessors_(multiprocessors),
        clocks_(kMaxMultiprocessors),
        times_(kMaxMultiprocessors) {
    begin_ = read();
  }
  double ghz() {
    const Reading end = read();
    double sum = 0;
    int count = 0;
    for (int i = 0; i < kMaxMultiprocessors; ++i) {
      if (begin_.times[i] == 0 || end.times[i] == 0) continue;
      sum +=
          static_cast<double>(end.clocks[i] - begin_.clocks[i]) / (end.times[i] - begin_.times[i]);
      ++count;
    }
    return sum / count;
  }

 private:
  struct Reading {
    std::vector<long long> clocks, times;
  };
  Reading read() {
    expect(cudaMemset(times_.get(), 0, times_.size() * sizeof(long long)), "clearing");
    read_clocks<<<multiprocessors_, 32>>>(clocks_.get(), times_.get());
    return {clocks_.to_host(), times_.to_host()};
  }

  int multiprocessors_;
  DeviceArray<long long> clocks_, times_;
  Reading begin_;
};

void time_shape(const char* text, bool burst) {
  const Shape shape = parse(text);
  Call call(shape);
  double pairs = 0;
  // Logits of random operands are standard normal: what lse then is, about.
  std::vector<float> lse(call.rows);
  for (int row = 0; row < shape.q_len; ++row) {
    const int64_t keys = visible_keys(shape, row);
    pairs += keys;
    const float value = keys == 0 ? -INFINITY : std::log(static_cast<float>(keys)) + .5f;
    for (int b = 0; b < shape.batch; ++b) {
      const size_t first = (size_t{1} * b * shape.q_len + row) * shape.q_heads;
      std::fill_n(lse.begin() + first, shape.q_heads, value);
    }
  }
  call.lse.copy_from(lse);
  const Status status = call.run(nullptr);
  if (!status.ok()) {
    std::printf("{\"failed\": \"%s: %s\"}\n", text, status.message);
    std::exit(2);
  }
  expect(cudaDeviceSynchronize(), text);

  cudaEvent_t begin, end;
  expect(cudaEventCreate(&begin), "creating an event");
  expect(cudaEventCreate(&end), "creating an event");
  const auto window = [&](int calls) {
    expect(cudaEventRecord(begin), "recording an event");
    for (int i = 0; i < calls; ++i) call.run(nullptr);
    expect(cudaEventRecord(end), "recording an event");
    expect(cudaEventSynchronize(end), text);
    float milliseconds;
    expect(cudaEventElapsedTime(&milliseconds, begin, end), "reading an event");
    return milliseconds / calls;
  };
  cudaDeviceProp device;
  expect(cudaGetDeviceProperties(&device, 0), "asking for the GPU");
  // Long enough for the clock to fall to what the power limit leaves: a short burst flatters those
  // that draw the most.
  constexpr float kWarmUp = 250.f, kWindow = 20.f, kBurst = 15.f;  // milliseconds
  const float once = window(3);
  const int windows = burst ? 1 : 5;
  const int calls = std::max(2, static_cast<int>((burst ? kBurst : kWindow) / once));
  if (burst) {
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    window(1);
  } else {
    window(std::max(1, static_cast<int>(kWarmUp / once)));
  }
  ClockMeter meter(device.multiProcessorCount);
  std::vector<float> samples;
  for (int i = 0; i < windows; ++i) samples.push_back(window(calls));
  const double ghz = meter.ghz();
  std::sort(samples.begin(), samples.end());
  const double milliseconds = samples[samples.size() / 2];
  const double flops = 2. * (shape.head_dim + shape.value_dim) * pairs * shape.batch *
                       shape.q_heads * (kForward ? 1. : 2.5);
  constexpr double kFlopsPerClock = 4096;  // of a multiprocessor's matrix units
  std::printf("{\"shape\": \"%s\", \"ms\": %.5f, \"tflops\": %.1f, \"ghz\": %.3f, \"use\": %.3f}\n",
              text, milliseconds, flops / milliseconds * 1e-9, ghz,
              flops / (milliseconds * 1e6 * kFlopsPerClock * device.multiProcessorCount * ghz));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc >= 2 && std::strcmp(argv[1], "check") == 0) return check_all();
  const bool burst = argc >= 2 && std::strcmp(argv[1], "burst") == 0;
  if (argc >= 3 && (burst || std::strcmp(argv[1], "time") == 0)) {
    for (int i = 2; i < argc; ++i) time_shape(argv[i], burst);
    return 0;
  }
  std::printf("usage: %s check | time SHAPE... | burst SHAPE...\n", argv[0]);
  return 2;
}
