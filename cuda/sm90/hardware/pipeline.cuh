// How the roles of a block hand tiles to one another.
#pragma once

#include "sm90/hardware/ptx.cuh"

namespace jaxflash::sm90 {

// An mbarrier in shared memory, named by the fact that its completed phase announces.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ uint32_t address() const { return shared_address(&state); }
  __device__ __forceinline__ void init(int arrivals) { mbarrier_init(address(), arrivals); }
  __device__ __forceinline__ void arrive() { mbarrier_arrive(address()); }
  // At the barrier of block `rank` of the cluster.
  __device__ __forceinline__ void arrive_remote(uint32_t rank) {
    mbarrier_arrive_remote(remote_address(address(), rank));
  }
  // Arrives once, and holds the phase open until TMA has delivered `bytes`.
  __device__ __forceinline__ void arrive_expecting(int bytes) {
    mbarrier_arrive_expect_tx(address(), bytes);
  }
  // Only holds it open, ahead of the arrival.
  __device__ __forceinline__ void expect(int bytes) { mbarrier_expect_tx(address(), bytes); }
  __device__ __forceinline__ bool completed(uint32_t parity) const {
    return mbarrier_test_wait_parity(address(), parity);
  }
  __device__ __forceinline__ void wait(uint32_t parity) const {
    while (!mbarrier_try_wait_parity(address(), parity)) {
    }
  }
  // Without a limit of its own, where that takes registers.
  __device__ __forceinline__ void poll(uint32_t parity) const {
    while (!mbarrier_try_wait_parity_briefly(address(), parity)) {
    }
  }
};

// A count in shared memory, where one side may be further ahead than a parity could say.
struct Counter {
  uint32_t count;

  __device__ __forceinline__ void init() { count = 0; }
  // What came before can be overwritten after a wait for it.
  __device__ __forceinline__ void add() { add_release_shared(shared_address(&count), 1); }
  __device__ __forceinline__ void wait(uint32_t least) const {
    while (load_acquire_shared(shared_address(&count)) < least) {
    }
  }
};

// Position in a ring of kStages buffers. The `full` barrier of the current stage completes with
// parity `phase`; its `empty` barrier is free for the first round, hence `phase ^ 1`.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ Ring next() const {
    Ring ring = *this;
    ring.advance();
    return ring;
  }
};

// Messages from one warp of a block to other warps, in a ring. Both sides count the messages; all
// lanes of a warp call together.
template <class Message, int kSlots>
struct Mailbox {
  static_assert((kSlots & (kSlots - 1)) == 0);
  Message message[kSlots];
  Barrier full[kSlots];   // the message is complete
  Barrier empty[kSlots];  // every reading warp is through with it

  __device__ __forceinline__ void init(int readers) {
    for (int slot = 0; slot < kSlots; ++slot) {
      full[slot].init(32);
      empty[slot].init(readers);
    }
  }

  // The writer's: any lane may fill in the slot before all of them send it. It may read what it has
  // sent until the slot comes round again.
  __device__ __forceinline__ Message& prepare(uint32_t count) {
    empty[count % kSlots].wait(count / kSlots % 2 ^ 1);
    return message[count % kSlots];
  }
  __device__ __forceinline__ const Message& sent(uint32_t count) const {
    return message[count % kSlots];
  }
  __device__ __forceinline__ void send(uint32_t count) {
    full[count % kSlots].arrive();  // each lane for what it has written
    __syncwarp();                   // and the lanes may read what the others have
  }

  // A reader's: what it has received may be read until it is released.
  __device__ __forceinline__ const Message& receive(uint32_t count) const {
    full[count % kSlots].wait(count / kSlots % 2);
    return message[count % kSlots];
  }
  __device__ __forceinline__ void release(uint32_t count) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[count % kSlots].arrive();
  }
};

}  // namespace jaxflash::sm90
