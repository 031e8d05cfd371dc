// What a consumer warpgroup of the forward kernel has in common with others: buffers, and turns.
#pragma once

#include "sm90/forward/key_terms.cuh"
#include "sm90/forward_traits.cuh"

namespace jaxflash::sm90 {

// The place of a consumer warpgroup in the rings of Q, K and V, and its turn. A buffer that it has
// waited for is there until it releases it. The rings of K and V are variables of the caller.
template <class Traits>
class ConsumerBuffers {
  using Tile = typename Traits::Tile;
  using SharedMemory = typename Traits::SharedMemory;
  using KeyRing = Ring<Tile::kStages>;

 public:
  __device__ __forceinline__ ConsumerBuffers(SharedMemory& smem, int group, int lane,
                                             KeyRing& k_ring, KeyRing& v_ring)
      : smem_(smem),
        group_(group),
        lane_(lane),
        q_base_(descriptor(smem.q[0][group], 16)),
        k_base_(descriptor(smem.k[0] + Traits::Plan::batch_index(group) * Traits::kKBytes, 16)),
        v_base_(descriptor(smem.v[0] + Traits::Plan::batch_index(group) * Traits::kVBytes,
                           Traits::kKeyPanelBytes)),
        v_ring_(v_ring),
        k_ring_(k_ring) {}

  __device__ __forceinline__ void wait_q() const {
    smem_.q_full[q_ring_.stage][group_].wait(q_ring_.phase);
  }
  __device__ __forceinline__ void wait_k() const {
    smem_.k_full[k_ring_.stage].wait(k_ring_.phase);
  }
  __device__ __forceinline__ void wait_v() const {
    smem_.v_full[v_ring_.stage].wait(v_ring_.phase);
  }
  // What is known of the tile of K that has landed.
  __device__ __forceinline__ const StagedTile& staged_tile() const {
    return smem_.staged[k_ring_.stage];
  }
  // Whether the tiles of K and V after the present ones are there. Asked beside a product, because
  // a wait takes its 60 clocks even where there is nothing to wait for: 1 to 2 % with kValues.
  __device__ __forceinline__ bool next_landed() const {
    const auto next_k = k_ring_.next();
    const auto next_v = v_ring_.next();
    return smem_.k_full[next_k.stage].completed(next_k.phase) &&
           smem_.v_full[next_v.stage].completed(next_v.phase);
  }

  // The buffers as operands.
  __device__ __forceinline__ uint64_t q() const {
    return q_base_ + q_ring_.stage * descriptor_step(Traits::kWarpGroups * Traits::kQBytes);
  }
  __device__ __forceinline__ uint64_t k() const {
    return k_base_ + k_ring_.stage * descriptor_step(Traits::kBatches * Traits::kKBytes);
  }
  __device__ __forceinline__ uint64_t v() const {
    return v_base_ + v_ring_.stage * descriptor_step(Traits::kBatches * Traits::kVBytes);
  }

  // Further columns of Q and K, where they have any.
  __device__ __forceinline__ uint64_t ones() const {
    if constexpr (Traits::kKeyTerms) return KeyTermColumns<Traits>::ones(smem_.ones);
    return 0;
  }
  __device__ __forceinline__ uint64_t key_terms() const {
    if constexpr (Traits::kKeyTerms) {
      return KeyTermColumns<Traits>::terms(smem_.terms[k_ring_.stage]);
    }
    return 0;
  }

  // Where the product of the tile of K starts from, if that is loaded beside it.
  __device__ __forceinline__ uint32_t starts(int tile) const {
    if constexpr (Traits::kLoadsStarts) {
      const int buffer = Traits::start_buffer(k_ring_.stage, tile);
      return shared_address(smem_.starts[buffer][Traits::Plan::index_in_batch(group_)]);
    } else {
      return 0;
    }
  }
  // After the last product of a tile of query rows has started.
  __device__ __forceinline__ void release_starts() const {
    if constexpr (Traits::kHoldsStarts) {
      __syncwarp();
      if (lane_ == 0) smem_.starts_read.add();
    }
  }

  // One arrival a warp: a warp's wait covers its own part of a product only.
  __device__ __forceinline__ void release_k() {
    if (lane_ == 0) smem_.k_empty[k_ring_.stage].arrive();
    k_ring_.advance();
  }
  __device__ __forceinline__ void release_v() {
    if (lane_ == 0) smem_.v_empty[v_ring_.stage].arrive();
    v_ring_.advance();
  }
  // Directly stored output leaves Q's buffer alone: it is empty after the last scores.
  __device__ __forceinline__ void release_q() const {
    if (Traits::kDirect && lane_ == 0) smem_.q_empty[q_ring_.stage][group_].arrive();
  }
  __device__ __forceinline__ void advance_q() { q_ring_.advance(); }

  // Where output is staged, that is in Q's place, and what announces it.
  __device__ __forceinline__ uint8_t* staged_output() const {
    return smem_.q[q_ring_.stage][group_];
  }
  __device__ __forceinline__ Barrier& output_full() const {
    return smem_.o_full[q_ring_.stage][group_];
  }

  // The warpgroups issue their products in turn, one turn for every tile of the block: left alone
  // they fall into step, and the matrix units idle while all of them work on a softmax.
  __device__ __forceinline__ void take_turn() const {
    if constexpr (Tile::kTurns) named_barrier_sync(kFirstTurn + group_, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Tile::kTurns) {
      const int next = group_ + 1 == Traits::kWarpGroups ? 0 : group_ + 1;
      named_barrier_arrive(kFirstTurn + next, 256);
    }
  }

  // Past a tile of keys that other warpgroups of the block need and this one does not.
  __device__ __forceinline__ void skip_keys() {
    wait_k();
    release_k();
    wait_v();
    release_v();
    take_turn();
    pass_turn();
    // Lane 0 releases for all: the others must not fall a round of the ring behind.
    if constexpr (!Tile::kTurns) __syncwarp();
  }

 private:
  __device__ __forceinline__ static uint64_t descriptor(const uint8_t* operand,
                                                        uint32_t leading_offset) {
    return wgmma_descriptor<Traits::kPanelRowBytes>(shared_address(operand), leading_offset,
                                                    8 * Traits::kPanelRowBytes);
  }

  SharedMemory& smem_;
  int group_;
  int lane_;
  uint64_t q_base_;
  uint64_t k_base_;
  uint64_t v_base_;
  KeyRing& v_ring_;
  KeyRing& k_ring_;
  Ring<Tile::kQStages> q_ring_;
};

}  // namespace jaxflash::sm90
