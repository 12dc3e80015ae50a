// PyTorch's threads and vector functions for the kernels below.
#pragma once

#include "common/host.h"

namespace fusegrad {

const cpu::Host& torch_host();

}  // namespace fusegrad
