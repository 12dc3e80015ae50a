#include "score_mod/tile_kernels.h"

#include <ATen/Version.h>

namespace fusegrad::score_mod {

const TileKernels& tile_kernels() {
  static const TileKernels& chosen = []() -> const TileKernels& {
    const auto capability = at::get_cpu_capability();
    if (capability == "AVX512") return AVX512::kTileKernels;
    if (capability == "AVX2") return AVX2::kTileKernels;
    return DEFAULT::kTileKernels;
  }();
  return chosen;
}

}  // namespace fusegrad::score_mod
