// fusegrad: fused losses whose gradients cannot be silently wrong. Include this one header.
#pragma once

#include "fusegrad/cross_entropy.h"
#include "fusegrad/linear_cross_entropy.h"
#include "fusegrad/options.h"

namespace fusegrad {

/// Whether class indices out of range raise on the GPU too, which synchronises at every call (off by default).
/// Without it such a row's loss and gradient are NaN. The CPU always raises.
void set_check_targets(bool enabled);

}  // namespace fusegrad
