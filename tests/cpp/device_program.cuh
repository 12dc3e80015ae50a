// What the programs that run kernels by themselves share: checks, memory of the GPU, times.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

inline void check(int status, const char* what) {
  if (status == 0) return;
  std::printf("%s failed: %d\n", what, status);
  std::exit(1);
}
#define CHECK(call) check(static_cast<int>(call), #call)

inline int failures = 0;
inline void expect(bool right, const std::string& what) {
  if (right) return;
  ++failures;
  std::printf("WRONG: %s\n", what.c_str());
}

template <class T>
struct Buffer {
  T* data = nullptr;
  size_t count = 0;
  explicit Buffer(size_t n) : count(n) {
    CHECK(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T)));
    CHECK(cudaMemset(data, 0xff, n * sizeof(T)));  // NaN: what is not written shows
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) { put(values); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  void put(const std::vector<T>& values) {
    CHECK(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> get() const {
    std::vector<T> values(count);
    CHECK(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
};

/// The median of some runs.
template <class Run>
double milliseconds(Run&& run) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) run();
  std::vector<float> times(15);
  for (auto& t : times) {
    CHECK(cudaEventRecord(begin));
    run();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&t, begin, end));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}
