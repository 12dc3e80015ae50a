#include "cuda/limits.h"

namespace fusegrad::cuda {

ForcedLimits& forced_limits() {
  static ForcedLimits limits;
  return limits;
}

}  // namespace fusegrad::cuda
