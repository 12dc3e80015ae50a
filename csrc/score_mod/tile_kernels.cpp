#include "score_mod/tile_kernels.h"

#include "common/capability.h"

namespace fusegrad::score_mod {

const TileKernels& tile_kernels() {
  static const TileKernels& chosen =
      cpu::for_this_machine(DEFAULT::kTileKernels, AVX2::kTileKernels, AVX512::kTileKernels);
  return chosen;
}

}  // namespace fusegrad::score_mod
