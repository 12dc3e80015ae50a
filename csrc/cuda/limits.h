// Limits below those of the device, for tests and benchmarks of what smaller GPUs run.
#pragma once

#include <algorithm>
#include <atomic>

namespace fusegrad::cuda {

/// Bytes of a multiprocessor's shared memory that each CTA takes beside its own.
inline constexpr int kReserved = 1 << 10;

struct ForcedLimits {
  std::atomic<int> cluster{0};       // CTAs a cluster may have
  std::atomic<int> shared_bytes{0};  // a CTA may have
};
/// 0: the device's own. Kernels are planned and launched as on a GPU that has at most such clusters, and so many bytes
/// of shared memory a CTA and 1 KiB more a multiprocessor.
ForcedLimits& forced_limits();

/// How many bytes of shared memory a CTA must ask for on a multiprocessor of `own` bytes, so that as many fit as do of
/// `bytes` each on one of `smaller` bytes. `besides`: what a CTA takes that it does not ask for.
inline int bytes_for_as_many(int bytes, int smaller, int own, int besides) {
  const int ctas = std::max(1, smaller / (bytes + besides));
  return std::max(bytes, (own / ctas - besides) & ~127);
}

}  // namespace fusegrad::cuda
