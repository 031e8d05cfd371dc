// Where products start from in tiles whose producers load it (Tile::kLoadsStarts): rows of a dense
// capture of 16 bits, one element for each key, that follow one another as queries do. Boxes of it,
// one for each unit, lie beside a tile of keys, and are announced together with it.
#pragma once

#include "sm90/forward_traits.cuh"

namespace jaxflash::sm90 {

// Of a tile of query rows. Made by the whole warp.
template <class Traits, class Scores, bool kLoadsStarts = Traits::kLoadsStarts>
class StartSource {
 public:
  template <class Plan>
  __device__ __forceinline__ StartSource(const ForwardArgs&, const Plan&) {}
  template <class SharedMemory>
  __device__ __forceinline__ void load(const TensorMap&, SharedMemory&, int /*stage*/,
                                       int /*first_key*/) const {}
};

template <class Traits, class Scores>
class StartSource<Traits, Scores, true> {
  static_assert(Scores::kStarts);
  static constexpr int kWarpGroups = Traits::kWarpGroups;

 public:
  // Each lane finds the rows of a unit.
  template <class Plan>
  __device__ __forceinline__ StartSource(const ForwardArgs& args, const Plan& plan) {
    const auto& unit = plan.units[min(static_cast<int>(threadIdx.x % 32), kWarpGroups - 1)];
    int row = -64;  // of a unit without rows: outside of the map, where TMA reads zeros
    if (unit.position < args.problem.q_len) {
      row = Scores::start_row(args, plan.batch, unit.head, unit.position);
    }
    for (int group = 0; group < kWarpGroups; ++group) rows_[group] = __shfl_sync(~0u, row, group);
  }

  // Rows behind a head's are other heads' or zeros, as are keys behind the last: no result depends
  // on them. Ahead of the arrival at the barrier, which is with the keys.
  template <class SharedMemory>
  __device__ __forceinline__ void load(const TensorMap& map, SharedMemory& smem, int stage,
                                       int first_key) const {
    Barrier& landed = smem.k_full[stage];
    landed.expect(kWarpGroups * Traits::kStartBytes);
#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
      for (int panel = 0; panel < Traits::kStartPanels; ++panel) {
        tensor_load(shared_address(smem.starts[stage][group]) + panel * Traits::kStartPanelBytes,
                    &map, landed.address(), first_key + 64 * panel, rows_[group], 0, 0, 0);
      }
    }
  }

 private:
  int rows_[kWarpGroups];  // where the units begin, among all rows of the capture
};

}  // namespace jaxflash::sm90
