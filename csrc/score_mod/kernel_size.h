// How large a score_mod may be in a kernel.
#pragma once

#include <string_view>
#include <vector>

namespace fusegrad::score_mod {

/// Raises GraphError, with the size and the limit, where NVRTC would take much more than a minute for the score_mod:
/// its kernels have it once for each of a thread's pairs. With a `wants_grad`, which says of each buffer whether it
/// requires grad, its derivative counts too.
void check_kernel_size(std::string_view text, const std::vector<bool>* wants_grad);

}  // namespace fusegrad::score_mod
