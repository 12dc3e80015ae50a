#pragma once

namespace fusegrad {

/// Whether class indices out of range raise IndexError on the GPU too, which synchronises at every call (off by
/// default). Without it such a row's loss and gradient are NaN. The CPU always raises.
void set_check_targets(bool enabled);
bool check_targets_enabled();

}  // namespace fusegrad
