// One wrapper per instruction, named after it: where inline assembly belongs, apart from the matrix
// products in wgmma.cuh. Shared-memory addresses are 32-bit addresses of the shared window.
#pragma once

#include "common/element.cuh"
#include "problem.h"
#include "sm90/hardware/tensor_map_bytes.h"

namespace jaxflash::sm90 {

template <Math kMath>
struct MathTraits;

template <>
struct MathTraits<Math::kFloat16> {
  using Element = Float16;
  static constexpr char kPtxType[] = "f16";
};

template <>
struct MathTraits<Math::kBFloat16> {
  using Element = BFloat16;
  static constexpr char kPtxType[] = "bf16";
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarriers ----------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Suspends the thread for up to 10 ms, or until the phase completes. Without a limit of its own it
// tries again every 20 to 100 clocks: those that wait for long took up to a sixth of the
// instructions of a block's schedulers, and 3 % of the time of short sequences with a bias.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  constexpr uint32_t kNanoseconds = 10'000'000;
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity), "r"(kNanoseconds)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ bool mbarrier_try_wait_parity_briefly(uint32_t barrier,
                                                                 uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Without waiting.
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Makes mbarrier_init visible to the asynchronous proxy and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// --- words of a block ---------------------------------------------------------------------------

__device__ __forceinline__ void add_release_shared(uint32_t address, uint32_t value) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(address), "r"(value)
               : "memory");
}

__device__ __forceinline__ uint32_t load_acquire_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// --- clusters -----------------------------------------------------------------------------------
// Remote addresses are 32-bit addresses of the cluster's shared window.

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where block `rank` of the cluster has what lies at `address` here.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// All threads of the cluster. Waits for this thread's outstanding writes and adds: not for loops.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// With the default scope: that of the cluster would wait for outstanding adds to global memory.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx_remote(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// A word for another block, announced by 4 bytes on a barrier of that block.
__device__ __forceinline__ void store_remote(uint32_t destination, uint32_t word,
                                             uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
          destination),
      "r"(word), "r"(barrier)
      : "memory");
}

// `bytes` (a multiple of 16) of this block's shared memory for another block, announced on a
// barrier of that block; both addresses are multiples of 16.
__device__ __forceinline__ void bulk_store_remote(uint32_t destination, uint32_t source,
                                                  uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(destination),
      "r"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// --- tensor memory accelerator ------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box, its first element at (c0, ..., c4), fastest axis first. Elements outside the array read
// as zero and count as transferred.
__device__ __forceinline__ void tensor_load(uint32_t destination, const TensorMap* map,
                                            uint32_t barrier, int c0, int c1, int c2, int c3,
                                            int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same for every block of the cluster whose bit is set in `blocks`: to the same address, and
// announced on the same barrier, of each.
__device__ __forceinline__ void tensor_load_multicast(uint32_t destination, const TensorMap* map,
                                                      uint32_t barrier, uint16_t blocks, int c0,
                                                      int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(blocks)
      : "memory");
}

// Brings a box into the L2.
__device__ __forceinline__ void tensor_prefetch(const TensorMap* map, int c0, int c1, int c2,
                                                int c3, int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// Elements of the box outside the array are not written.
__device__ __forceinline__ void tensor_store(const TensorMap* map, uint32_t source, int c0, int c1,
                                             int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same, added to what is there in the map's dtype.
__device__ __forceinline__ void tensor_reduce_add(const TensorMap* map, uint32_t source, int c0,
                                                  int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group"
      " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// `bytes` (a multiple of 16) of contiguous memory; both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source,
                                          uint32_t barrier, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Adds floats to contiguous global memory, each atomically; same conditions.
__device__ __forceinline__ void bulk_reduce_add(float* destination, uint32_t source,
                                                uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   destination),
               "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the newest kPending groups of this thread have finished reading shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// The same groups have also been performed in global memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary shared-memory accesses before later ones of TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders this thread's ordinary accesses to global memory and those of TMA.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// --- warpgroups ---------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading accumulators before the wait that precedes this.
template <int kElements>
__device__ __forceinline__ void hold(float (&registers)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
// And from reusing the registers of an operand that a product may still read.
template <int kElements>
__device__ __forceinline__ void hold(uint32_t (&registers)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Matrix descriptor of a swizzled operand whose panels are kRowBytes wide: 128 (64 elements), 64
// or 32. Both offsets are in bytes: from one panel to the next along the leading axis, and from one
// group of eight rows to the next.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_offset,
                                                     uint32_t stride_offset) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32);
  constexpr uint64_t kSwizzle = uint64_t{kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3} << 62;
  return kSwizzle | static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(leading_offset >> 4) << 16 |
         static_cast<uint64_t>(stride_offset >> 4) << 32;
}

// What to add to a descriptor to move it by that many bytes.
__device__ __forceinline__ constexpr uint64_t descriptor_step(int bytes) {
  return static_cast<uint64_t>(bytes >> 4);
}

// --- arithmetic and shared memory ---------------------------------------------------------------

// Unlike the one for all families it stays where it is written: beside the products.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two values rounded to 16 bits, `low` in the lower half.
template <Math kMath>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  asm volatile("cvt.rn.%3x2.f32 %0, %2, %1;"
               : "=r"(packed)
               : "f"(low), "f"(high), "C"(MathTraits<kMath>::kPtxType));
  return packed;
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// The same, each matrix transposed on the way.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t* matrices) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
      : "memory");
}

__device__ __forceinline__ void store_shared_f32x4(uint32_t address, const float* values) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

__device__ __forceinline__ void load_shared_f32x4(uint32_t address, float (&values)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(address)
               : "memory");
}

// Four matrices of 8 rows x 16 bytes, as a fragment of A wants them: `address` is that of row
// lane % 16, and of its second 16 bytes from lane 16 on.
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed; lane i says where row i % 8 of matrix i / 8 is.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Volatile, unlike a load by pointer: it stays ahead of the products that it is written ahead of.
__device__ __forceinline__ float2 load_shared_f32x2(uint32_t address) {
  float2 values;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(values.x), "=f"(values.y)
               : "r"(address)
               : "memory");
  return values;
}

__device__ __forceinline__ void store_shared_zero(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ void store_shared_volatile(uint32_t address, float value) {
  asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared_volatile(uint32_t address, uint16_t value) {
  asm volatile("st.volatile.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// --- global memory ------------------------------------------------------------------------------

__device__ __forceinline__ void store_global(void* address, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Transposes 8 x 8 elements of 16 bits, of which each lane has two neighbours of a row. The whole
// warp.
__device__ __forceinline__ float transpose_pairs(float pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
               : "=r"(transposed)
               : "r"(__float_as_uint(pair)));
  return __uint_as_float(transposed);
}

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace jaxflash::sm90
