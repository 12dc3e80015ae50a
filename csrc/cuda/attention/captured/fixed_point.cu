#include "cuda/attention/captured/fixed_point.h"

#include <algorithm>

#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kPartialSums = 16;  // that a thread adds up

// The unit of fixed point.
struct Unit {
  int exponent;
  bool finite;
  __device__ Unit(const float* largest, int bits) {
    const int most = static_cast<int>(__float_as_uint(*largest) >> 23 & 255);
    // As device::FlexBufferSums::limit_above has it.
    exponent = min(max(most + 1, 27), 254) - 127 - bits;
    finite = most < 255;
  }
};
__device__ double power_of_two(int exponent) {
  return __longlong_as_double(static_cast<long long>(1023 + exponent) << 52);
}

__global__ void __launch_bounds__(kThreads) largest_kernel(const float* sums, int64_t count, float* largest) {
  unsigned most = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t{kThreads} * gridDim.x) {
    most = max(most, __float_as_uint(fabsf(sums[i])));
  }
  for (int bit = kWarp / 2; bit > 0; bit /= 2) most = max(most, __shfl_xor_sync(~0u, most, bit));
  auto* to = reinterpret_cast<unsigned*>(largest);
  if (threadIdx.x % kWarp == 0 && most > *static_cast<volatile unsigned*>(to)) atomicMax(to, most);
}

// A thread's sums of one element after the other are added together first, and a warp's: additions to one place of
// memory come one after the other.
__global__ void __launch_bounds__(kThreads)
    add_partial_sums_kernel(const float* sums, const int64_t* elements, int64_t count, const float* largest, int bits,
                            int64_t* out) {
  const double scale = power_of_two(-Unit(largest, bits).exponent);
  const auto add = [&](int64_t at, long long x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(out + at), static_cast<unsigned long long>(x));
  };
  int64_t at = -1;
  long long sum = 0;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kPartialSums + threadIdx.x;
#pragma unroll 4
  for (int64_t i = first; i < min(first + kThreads * kPartialSums, count); i += kThreads) {
    const float x = sums[i];
    if (x == 0.0f) continue;
    if (elements[i] != at) {
      if (at >= 0) add(at, sum);
      at = elements[i];
      sum = 0;
    }
    sum += __double2ll_rn(x * scale);
  }
  const unsigned some = __ballot_sync(~0u, at >= 0);
  if (some == 0) return;
  const int64_t one = __shfl_sync(~0u, at, __ffs(some) - 1);
  if (!__all_sync(~0u, at < 0 || at == one)) {
    if (at >= 0) add(at, sum);
    return;
  }
  for (int bit = kWarp / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  if (threadIdx.x % kWarp == 0) add(one, sum);
}

__global__ void __launch_bounds__(kThreads)
    fixed_to_float_kernel(const int64_t* sums, const float* largest, int bits, int64_t elements, float* out) {
  const auto [exponent, finite] = Unit(largest, bits);
  const double unit = power_of_two(exponent);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements;
       i += int64_t{kThreads} * gridDim.x) {
    out[i] = finite ? static_cast<float>(static_cast<double>(sums[i]) * unit) : __int_as_float(0x7fffffff);
  }
}

}  // namespace

void flex_largest(const float* sums, int64_t count, float* largest, void* stream) {
  if (count == 0) return;
  launch("flex_largest", largest_kernel, {std::min<int64_t>((count + kThreads - 1) / kThreads, 256), kThreads}, stream,
         sums, count, largest);
}
void flex_add_partial_sums(const float* sums, const int64_t* elements, int64_t count, const float* largest,
                           int fixed_bits, int64_t* out, void* stream) {
  if (count == 0) return;
  constexpr int kEach = kThreads * kPartialSums;
  launch("flex_add_partial_sums", add_partial_sums_kernel, {(count + kEach - 1) / kEach, kThreads}, stream, sums,
         elements, count, largest, fixed_bits, out);
}

void flex_fixed_to_float(const int64_t* sums, const float* largest, int fixed_bits, int64_t elements, float* out,
                         void* stream) {
  if (elements == 0) return;
  launch("flex_fixed_to_float", fixed_to_float_kernel,
         {std::min<int64_t>((elements + kThreads - 1) / kThreads, 4096), kThreads}, stream, sums, largest, fixed_bits,
         elements, out);
}

}  // namespace fusegrad::cuda
