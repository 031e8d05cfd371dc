// Where products start from in tiles whose producers load it (Tile::kLoadsStarts): rows of a dense
// capture of 16 bits, one element for each key, that follow one another as queries do. Boxes of it,
// one for each unit, lie beside a tile of keys, and are announced together with it. With
// Tile::kHeldTiles the boxes stay for the block's next tile of query rows, which may start from the
// same ones.
#pragma once

#include "sm90/forward_traits.cuh"

namespace jaxflash::sm90 {

// begin() is for the whole warp, and each tile of query rows; load() for one lane.
template <class Traits, class Scores, bool kLoadsStarts = Traits::kLoadsStarts>
class StartSource {
 public:
  template <class Plan, class SharedMemory>
  __device__ __forceinline__ void begin(const ForwardArgs&, const Plan&, SharedMemory&,
                                        uint32_t /*count*/) {}
  template <class SharedMemory>
  __device__ __forceinline__ void load(const TensorMap&, SharedMemory&, int /*stage*/,
                                       int /*tile*/) {}
};

template <class Traits, class Scores>
class StartSource<Traits, Scores, true> {
  static_assert(Scores::kStarts);
  static constexpr int kUnits = Traits::kUnits;  // whose rows all batch elements of a tile share

 public:
  // `count`: of the block's tiles so far. Each lane finds the rows of a unit.
  template <class Plan, class SharedMemory>
  __device__ __forceinline__ void begin(const ForwardArgs& args, const Plan& plan,
                                        SharedMemory& smem, uint32_t count) {
    const auto& unit = plan.units[min(static_cast<int>(threadIdx.x % 32), kUnits - 1)];
    int row = -64;  // of a unit without rows: outside of the map, where TMA reads zeros
    if (unit.position < args.problem.q_len) {
      row = Scores::start_row(args, plan.batches[0].number, unit.head, unit.position);
    }
    bool same = true;
    for (int unit = 0; unit < kUnits; ++unit) {
      const int of_unit = __shfl_sync(~0u, row, unit);
      same = same && of_unit == rows_[unit];
      rows_[unit] = of_unit;
    }
    if constexpr (Traits::kHoldsStarts) {
      if (same && count > 0) return;
      smem.starts_read.wait(count * 4 * Traits::kWarpGroups);
      held_ = 0;
    }
  }

  // Rows behind a head's are other heads' or zeros, as are keys behind the last: no result depends
  // on them. Ahead of the arrival at the barrier, which is with the keys: every consumer waits for
  // the first one that has a tile of keys, so that a held one is there for all.
  template <class SharedMemory>
  __device__ __forceinline__ void load(const TensorMap& map, SharedMemory& smem, int stage,
                                       int tile) {
    if constexpr (Traits::kHoldsStarts) {
      const uint32_t bit = 1u << tile;
      if ((held_ & bit) != 0) return;
      held_ |= bit;
    }
    const int first_key = tile * Traits::Tile::kKeys;
    const int buffer = Traits::start_buffer(stage, tile);
    Barrier& landed = smem.k_full[stage];
    landed.expect(kUnits * Traits::kStartBytes);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int panel = 0; panel < Traits::kStartPanels; ++panel) {
        tensor_load(shared_address(smem.starts[buffer][unit]) + panel * Traits::kStartPanelBytes,
                    &map, landed.address(), first_key + 64 * panel, rows_[unit], 0, 0, 0);
      }
    }
  }

 private:
  int rows_[kUnits];  // where the units begin, among all rows of the capture
  uint32_t held_;     // the first lane's: which tiles of keys they are there for
};

}  // namespace jaxflash::sm90
