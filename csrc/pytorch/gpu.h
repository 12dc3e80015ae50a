// The GPU as PyTorch's interface of every device gives it. Nothing here or in the files that use it names a symbol of
// libtorch_cuda, libc10_cuda or CUDA's runtime: one library serves a torch of any CUDA version, and one without CUDA.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

struct CUstream_st;

namespace fusegrad::gpu {

/// The stream that is current on the device; -1: on the current one.
inline CUstream_st* current_stream(c10::DeviceIndex device = -1) {
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  const c10::Device of = device < 0 ? cuda.getDevice() : c10::Device(c10::DeviceType::CUDA, device);
  return static_cast<CUstream_st*>(cuda.getStreamNativeHandle(cuda.getStream(of)));
}

}  // namespace fusegrad::gpu
