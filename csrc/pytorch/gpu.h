// The GPU as PyTorch has it. With FUSEGRAD_TORCH_CUDA by the functions of torch's own CUDA; without, by PyTorch's
// interface of every device, so that the library names no symbol of libtorch_cuda, libc10_cuda or CUDA's runtime: one
// library serves a torch of any CUDA version, and one without CUDA.
#pragma once

#ifdef FUSEGRAD_TORCH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#else
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "jit/driver.h"
#include "jit/kernel_cache.h"
#endif

struct CUstream_st;

namespace fusegrad::gpu {

#ifdef FUSEGRAD_TORCH_CUDA

/// The stream that is current on the device; -1: on the current one.
inline CUstream_st* current_stream(c10::DeviceIndex device = -1) {
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

/// The current device's.
inline int multiprocessors() { return at::cuda::getCurrentDeviceProperties()->multiProcessorCount; }

/// Torch may hold all of the GPU's memory without using it: lets go of that. Not in a capture, which forbids it.
inline bool release_memory() {
  if (c10::cuda::device_count() == 0) return false;
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return false;
  c10::cuda::CUDACachingAllocator::emptyCache();
  return true;
}

#else

inline CUstream_st* current_stream(c10::DeviceIndex device = -1) {
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  const c10::Device of = device < 0 ? cuda.getDevice() : c10::Device(c10::DeviceType::CUDA, device);
  return static_cast<CUstream_st*>(cuda.getStreamNativeHandle(cuda.getStream(of)));
}

inline int multiprocessors() { return jit::current_multiprocessors(); }

inline bool release_memory() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return false;
  if (c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount() == 0) return false;
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
  if (allocator == nullptr || !allocator->initialized() || jit::capturing(current_stream())) return false;
  allocator->emptyCache();
  return true;
}

#endif

}  // namespace fusegrad::gpu
