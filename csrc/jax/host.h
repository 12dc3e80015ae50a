// XLA's threads for the kernels below.
#pragma once

#include <xla/ffi/api/ffi.h>

#include "common/host.h"

namespace fusegrad::jax {

/// For as long as the call of a handler, whose pool of threads it is.
cpu::Host host_of(xla::ffi::ThreadPool& pool);

}  // namespace fusegrad::jax
