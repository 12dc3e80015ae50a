#include "cuda/attention/captured/convert.h"

#include <algorithm>

#include "common/error.h"
#include "cuda/dtype.h"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256;

Grid grid_of(int64_t count) { return {std::min<int64_t>((count + kThreads - 1) / kThreads, 8192), kThreads}; }

template <class T>
__global__ void __launch_bounds__(kThreads) convert_kernel(const float* from, T* to, int64_t count) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t{kThreads} * gridDim.x) {
    to[i] = static_cast<T>(from[i]);
  }
}

__global__ void __launch_bounds__(kThreads) divide_kernel(const float* a, const float* b, float* out, int64_t count) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t{kThreads} * gridDim.x) {
    out[i] = a[i] / b[i];
  }
}

template <class T>
void convert(const float* from, void* to, int64_t count, void* stream) {
  launch("flex_convert", convert_kernel<T>, grid_of(count), stream, from, static_cast<T*>(to), count);
}

}  // namespace

void flex_fill_zeros(void* data, int64_t bytes, void* stream) {
  if (bytes == 0) return;
  check(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)), "flex_fill_zeros");
}

void flex_fill_ones(void* data, int64_t bytes, void* stream) {
  if (bytes == 0) return;
  check(cudaMemsetAsync(data, 0xff, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)), "flex_fill_ones");
}

std::vector<std::byte> flex_read(const void* data, int64_t bytes, void* stream) {
  std::vector<std::byte> read(static_cast<size_t>(bytes));
  if (bytes == 0) return read;
  const auto s = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(read.data(), data, read.size(), cudaMemcpyDeviceToHost, s), "flex_read");
  check(cudaStreamSynchronize(s), "flex_read");
  return read;
}

void flex_copy_bytes(const void* from, void* to, int64_t bytes, void* stream) {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice,
                        static_cast<cudaStream_t>(stream)),
        "flex_copy_bytes");
}

void flex_convert(const float* from, void* to, score_mod::DType dtype, int64_t count, void* stream) {
  if (count == 0) return;
  switch (dtype) {
    case score_mod::DType::kFloat64:
      return convert<double>(from, to, count, stream);
    case score_mod::DType::kFloat32:
      return flex_copy_bytes(from, to, count * 4, stream);
    case score_mod::DType::kBFloat16:
      return convert<__nv_bfloat16>(from, to, count, stream);
    case score_mod::DType::kFloat16:
      return convert<__half>(from, to, count, stream);
    default:
      fail<NotImplementedError>("flex_convert: the gradient of a captured buffer must be floating point");
  }
}

void flex_divide(const float* a, const float* b, float* out, int64_t count, void* stream) {
  if (count == 0) return;
  launch("flex_divide", divide_kernel, grid_of(count), stream, a, b, out, count);
}

}  // namespace fusegrad::cuda
