// Host helpers of the CUDA kernels: launches with a cluster, what the device can do, errors with a name.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>

#include "common/error.h"
#include "cuda/limits.h"

namespace fusegrad::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  // The runtime keeps the error for whoever asks next, which would be an op that has nothing to do with it.
  (void)cudaGetLastError();
  if (status == cudaErrorMemoryAllocation) fail<OutOfDeviceMemory>("fusegrad: ", what, " failed: out of memory");
  fail("fusegrad: ", what, " failed: ", cudaGetErrorString(status));
}

constexpr int kMostStatic = 8 << 10;  // of a kernel's shared memory
constexpr int kPortableCluster = 8;   // CTAs a cluster may have on every GPU with clusters

struct Device {
  int multiprocessors = 0;
  int shared_bytes = 0;  // a CTA may have, opted in
  int shared_of_multiprocessor = 0;
  int cluster = 1;             // CTAs a cluster may have
  int compute_capability = 0;  // 90: 9.0
};

inline const Device& current_device_itself() {
  constexpr int kMaxDevices = 64;
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> known;
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  if (index >= kMaxDevices) fail("fusegrad: the device's index must be below ", kMaxDevices, ", but got ", index);
  auto& device = devices[index];
  std::call_once(known[index], [&] {
    Device found;
    int clusters = 0, major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&found.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index), "a query");
    check(cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, index), "a query");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "a query");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), "a query");
    found.compute_capability = 10 * major + minor;
    check(cudaDeviceGetAttribute(&found.shared_of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index),
          "a query");
    // 16 on the GPUs of data centres (9.0, 10.x).
    if (clusters != 0) found.cluster = major == 9 || major == 10 ? 2 * kPortableCluster : kPortableCluster;
    check(cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, index), "a query");
    device = found;
  });
  return device;
}
/// What the current device can do, within forced_limits().
inline Device current_device() {
  Device limited = current_device_itself();
  if (const int cluster = forced_limits().cluster) limited.cluster = std::min(limited.cluster, cluster);
  if (const int bytes = forced_limits().shared_bytes) {
    limited.shared_bytes = std::min(limited.shared_bytes, bytes);
    limited.shared_of_multiprocessor = std::min(limited.shared_of_multiprocessor, bytes + kReserved);
  }
  return limited;
}

struct Grid {
  int64_t blocks = 1;
  int threads = 1;
  int cluster = 1;  // CTAs
  int shared_bytes = 0;
  int64_t blocks_y = 1;
};

/// A launch of a kernel as the runtime takes it. Points into itself.
struct LaunchConfig {
  LaunchConfig(const char* name, const void* kernel, const Grid& grid, void* stream) {
    if (grid.blocks > INT32_MAX) fail("fusegrad: ", name, ": too many rows for one launch: ", grid.blocks, " CTAs");
    int shared_bytes = grid.shared_bytes;
    if (const int forced = forced_limits().shared_bytes; forced > 0 && shared_bytes > kMostStatic) {
      shared_bytes = bytes_for_as_many(shared_bytes, current_device().shared_of_multiprocessor,
                                       current_device_itself().shared_of_multiprocessor, kReserved + kMostStatic);
    }
    if (shared_bytes > 0) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
    }
    if (grid.cluster > kPortableCluster) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
    }
    config.gridDim = dim3(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.blocks_y));
    config.blockDim = dim3(static_cast<unsigned>(grid.threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(grid.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = grid.cluster > 1 ? 1 : 0;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute cluster = {};
};

inline std::mutex launching;

template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), const Grid& grid, void* stream, const Args&... args) {
  // The kernel's largest shared memory is set for all threads: between setting and launching none may set less.
  std::unique_lock<std::mutex> lock(launching, std::defer_lock);
  if (grid.shared_bytes > 0) lock.lock();
  const LaunchConfig launch(name, reinterpret_cast<const void*>(kernel), grid, stream);
  check(cudaLaunchKernelEx(&launch.config, kernel, static_cast<Params>(args)...), name);
}

template <class T>
struct TypeTag {
  using type = T;
};

}  // namespace fusegrad::cuda
