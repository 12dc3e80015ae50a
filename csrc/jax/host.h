// The stream that the CPU's row kernels get from XLA's handlers.
#pragma once

#include <xla/ffi/api/ffi.h>

namespace fusegrad::jax {

/// A pool of threads that lives as long as the call of a handler.
struct HostStream {
  xla::ffi::ThreadPool* pool;
};

}  // namespace fusegrad::jax
