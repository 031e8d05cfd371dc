// What a program adds to scores for the key alone, as further columns of K (Tile::kKeyTerms):
// three, whose sum it is, times 1 in as many columns of Q. A step more for the matrix units, of
// which a product has as many as 16 divides the head size, and nothing for the softmax. (With Q's
// columns in registers the step waits, issued, for those ahead of it, and the warpgroup's turn with
// it.) Of what is proportional to the distance, the part of the key; that of the row is the same
// for all of a tile, and the softmax counts it in (see DistanceScores).
#pragma once

#include "common/program.cuh"
#include "sm90/forward_traits.cuh"

namespace jaxflash::sm90 {

template <class Traits>
struct KeyTermColumns {
  static_assert(Traits::kMath == Math::kBFloat16, "as many exponents as float32");
  static constexpr int kRowBytes = Traits::kTermRowBytes;
  // Of K, and of Q, whose groups of eight rows are one.
  __device__ __forceinline__ static uint64_t terms(const uint8_t* rows) {
    return wgmma_descriptor<kRowBytes>(shared_address(rows), 16, 8 * kRowBytes);
  }
  __device__ __forceinline__ static uint64_t ones(const uint8_t* rows) {
    return wgmma_descriptor<kRowBytes>(shared_address(rows), 16, 0);
  }

  // All threads of the block, ahead of __syncthreads(): what stays.
  template <class SharedMemory>
  __device__ __forceinline__ static void init(SharedMemory& smem) {
    constexpr int kBytes = sizeof(smem.terms) + sizeof(smem.ones);
    static_assert(sizeof(smem.terms) % sizeof(smem.ones) == 0, "one after the other");
    for (int byte = threadIdx.x * 16; byte < kBytes; byte += Traits::kThreads * 16) {
      store_shared_zero(shared_address(&smem.terms[0][0]) + byte);
    }
    __syncthreads();
    if (threadIdx.x < 8) {
      constexpr uint32_t kOne = 0x3f80;
      const int row = threadIdx.x;
      *piece(smem.ones, row) = make_uint2(kOne << 16 | kOne, kOne);
    }
    fence_proxy_async();
  }

  // Where the columns that are not 0 lie in a row.
  __device__ __forceinline__ static uint2* piece(uint8_t* rows, int row) {
    return reinterpret_cast<uint2*>(rows + row * kRowBytes + 16 * (row / 4 % 2));
  }
  // x as a sum of 16-bit numbers, of 24 bits together: packed in this order, and a zero.
  __device__ __forceinline__ static uint2 split(float x) {
    const uint32_t first = pack<Math::kBFloat16>(x, 0.f);
    const float high = __uint_as_float(first << 16);
    // Infinity is that alone.
    const float rest = fabsf(high) == INFINITY ? 0.f : x - high;
    const uint32_t second = pack<Math::kBFloat16>(rest, 0.f);
    const float last = rest - __uint_as_float(second << 16);
    return make_uint2(first | second << 16, pack<Math::kBFloat16>(last, 0.f));
  }
};

// What a program that follows the distance (Program::kFollowsDistance) adds, slope * (q - key), in
// parts: slope * (middle - key) for the key, of a tile with this middle, and slope * (q - middle)
// for the row. So what is rounded grows with the distance.
template <class Program, int kKeys>
class DistanceTerms {
 public:
  static constexpr int kMiddle = kKeys / 2;

  DistanceTerms() = default;
  // Of the rows of all units. `diagonal`: see diagonal_of().
  template <class Plan>
  __device__ __forceinline__ DistanceTerms(const Plan& plan, int diagonal) {
    constexpr int kUnits = sizeof(plan.units) / sizeof(plan.units[0]);
    const int ends[2] = {plan.units[0].position, plan.units[kUnits - 1].position};
    first_ = min(ends[0], ends[1]) + diagonal;
    last_ = max(ends[0], ends[1]) + diagonal + 63;
  }

  // In log 2, for a tile of keys. Infinity: not the same for all of them, or so large that what
  // both parts are rounded by would be seen in the small sums of near keys (ALiBi's are
  // below 1.44).
  __device__ __forceinline__ float slope(const typename Program::Head& head, int first_key) const {
    constexpr float kLargest = 4.f;
    float slope = Program::slope_before(head);
    if constexpr (Program::kBends) {
      if (first_key + kKeys - 1 > first_) {
        slope = first_key >= last_ ? Program::slope_behind(head) : INFINITY;
      }
    }
    return fabsf(slope) <= kLargest ? slope : INFINITY;
  }

 private:
  int first_;
  int last_;
};

// What the columns of a key hold, of a program that adds something for the key alone: kept by the
// warp that loads K, all lanes.
template <class Program, int kKeys, bool kOfDistance>
class KeyValues {
  static_assert(Program::kStarts);

 public:
  // All units of a tile add the same: the program does not ask for the head, or they are of one.
  template <class Plan>
  __device__ __forceinline__ void begin(const ForwardArgs&, const Plan&,
                                        const typename Program::Head& head) {
    head_ = head;
  }
  // What it takes from the array, ahead of a wait.
  __device__ __forceinline__ void load(int first_key) {
    const int last = Program::neighbours_end(head_) - 1;
    const auto* neighbours = Program::neighbours(head_, typename Program::Row{});
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int key = first_key + 32 * i + threadIdx.x % 32;
      loaded_[i] = load_capture(neighbours, min(key, last));
    }
  }
  // Of the lane's key in step i.
  __device__ __forceinline__ float of(int i, int key) const {
    return Program::start(head_, typename Program::Row{}, Program::column(head_, key), 0, key, 0.f,
                          loaded_[i]);
  }

 private:
  static constexpr int kSteps = (kKeys + 31) / 32;
  typename Program::Head head_;
  float loaded_[kSteps];
};

// Of one that follows the distance.
template <class Program, int kKeys>
class KeyValues<Program, kKeys, true> {
 public:
  template <class Plan>
  __device__ __forceinline__ void begin(const ForwardArgs& args, const Plan& plan,
                                        const typename Program::Head& head) {
    head_ = head;
    terms_ = Terms(plan, diagonal_of(args.problem, plan.batches[0].mask));
    over_scale_ = 1.f / args.scale_log2;
  }
  __device__ __forceinline__ void load(int first_key) {
    const float slope = terms_.slope(head_, first_key);
    slope_ = slope == INFINITY ? 0.f : slope * over_scale_;
  }
  __device__ __forceinline__ float of(int i, int /*key*/) const {
    const int place = 32 * i + static_cast<int>(threadIdx.x % 32);
    return slope_ * static_cast<float>(Terms::kMiddle - place);
  }

 private:
  using Terms = DistanceTerms<Program, kKeys>;
  typename Program::Head head_;
  Terms terms_;
  float over_scale_;
  float slope_;
};

// By the warp that loads K. All lanes.
template <class Traits, class Program, bool kKeyTerms = Traits::kKeyTerms>
class KeyTerms {
 public:
  template <class Plan>
  __device__ __forceinline__ void begin(const ForwardArgs&, const Plan&) {}
  __device__ __forceinline__ void load(int /*first_key*/) {}
  template <class SharedMemory>
  __device__ __forceinline__ void store(SharedMemory&, int /*stage*/, int /*first_key*/) const {}
};

template <class Traits, class Program>
class KeyTerms<Traits, Program, true> {
  static constexpr int kKeys = Traits::Tile::kKeys;

 public:
  template <class Plan>
  __device__ __forceinline__ void begin(const ForwardArgs& args, const Plan& plan) {
    const int b = batch_number(args.captures, args.problem, plan.batches[0].number);
    const int h = head_number(args.captures, plan.kv_head * args.group);
    values_.begin(args, plan,
                  Program::head(args.captures, args.problem, plan.batches[0].number, b, h));
  }
  __device__ __forceinline__ void load(int first_key) { values_.load(first_key); }

  // The columns, visible to products once a lane has arrived at a barrier behind this. The other
  // columns stay 0.
  template <class SharedMemory>
  __device__ __forceinline__ void store(SharedMemory& smem, int stage, int first_key) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < (kKeys + 31) / 32; ++i) {
      const int row = 32 * i + lane;
      if (kKeys % 32 != 0 && row >= kKeys) break;
      using Columns = KeyTermColumns<Traits>;
      *Columns::piece(smem.terms[stage], row) = Columns::split(values_.of(i, first_key + row));
    }
    fence_proxy_async();
    __syncwarp();
  }

 private:
  KeyValues<Program, kKeys, Program::kFollowsDistance> values_;
};

}  // namespace jaxflash::sm90
