// head_product.cuh alone, on a Hopper GPU: rows' bits alone, packed, permuted and padded, parity with float64, and
// times beside cuBLAS and one pass over the weight.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -I csrc
//     tests/cpp/head_product.cu -o head_product -lcuda -lcublas && ./head_product
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/losses/device/head_product.cuh"
#include "cuda/losses/device/head_wgmma.cuh"

namespace {

namespace head = fusegrad::device::head;
using fusegrad::device::BFloat16;
using fusegrad::device::TensorMap;

void check(int status, const char* what) {
  if (status == 0) return;
  std::printf("%s failed: %d\n", what, status);
  std::exit(1);
}
#define CHECK(call) check(static_cast<int>(call), #call)

int failures = 0;
void expect(bool right, const std::string& what) {
  if (right) return;
  ++failures;
  std::printf("WRONG: %s\n", what.c_str());
}

template <class T>
struct Buffer {
  T* data = nullptr;
  size_t count = 0;
  explicit Buffer(size_t n) : count(n) { CHECK(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T))); }
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

uint16_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bits(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

TensorMap map_of(const void* data, int64_t rows, int64_t cols, int box_rows) {
  CUtensorMap map;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows), 1, 1};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(cols) * 2, static_cast<cuuint64_t>(rows * cols) * 2,
                                 static_cast<cuuint64_t>(rows * cols) * 2};
  const cuuint32_t box[4] = {head::kDepth, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  CHECK(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides, box,
                               steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  TensorMap out;
  static_assert(sizeof out == sizeof map);
  std::memcpy(&out, &map, sizeof map);
  return out;
}

// One head and the room for so many rows.
struct Problem {
  int rows, hidden, vocab, segment;
  Buffer<uint16_t> input, weight, bias, logits;
  Buffer<int> target;
  Buffer<float> tile_sums, at_target, states;

  Problem(int n, int h, int v, bool keep)
      : rows(n),
        hidden(h),
        vocab(v),
        segment((v + 15) / 16),
        input(static_cast<size_t>(n) * h),
        weight(static_cast<size_t>(v) * h),
        bias(v),
        logits(keep ? static_cast<size_t>(n) * v : 0),
        target(n),
        tile_sums(static_cast<size_t>(16) * head::tiles_of(segment) * head::kTileSums * n),
        at_target(n),
        states(static_cast<size_t>(head::kTileSums) * n) {}

  void run(int count) const {
    static const int multiprocessors = [] {
      int found = 0;
      CHECK(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, 0));
      CHECK(cudaFuncSetAttribute(head::head_product_kernel<BFloat16, false>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, head::kSharedBytes));
      return found;
    }();
    head::Params p{};
    p.input = map_of(input.data, count, hidden, head::kRows);
    p.weight = map_of(weight.data, vocab, hidden, head::kCols);
    p.rows = count;
    p.hidden = hidden;
    p.cols = vocab;
    p.segment = segment;
    p.segments = 16;
    p.bias = bias.data;
    p.logits = logits.count == 0 ? nullptr : logits.data;
    p.logits_stride = vocab;
    p.scale = 1;
    p.target = target.data;
    p.tile_sums = tile_sums.data;
    p.at_target = at_target.data;
    p.states = states.data;
    CHECK(cudaMemsetAsync(at_target.data, 0, count * sizeof(float)));
    const int tiles = (count + head::kRows - 1) / head::kRows * head::tiles_of(segment) * 16;
    head::head_product_kernel<BFloat16, false>
        <<<std::min(tiles, multiprocessors), head::kThreads, head::kSharedBytes>>>(p);
    CHECK(cudaGetLastError());
    constexpr int kRowsOfCta = head::kMergeThreads / head::kMergeLanes;
    head::head_states_kernel<<<(count + kRowsOfCta - 1) / kRowsOfCta, head::kMergeThreads>>>(p);
    CHECK(cudaGetLastError());
  }
};

std::vector<uint16_t> normal(size_t count, float factor, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> values;
  std::vector<uint16_t> made(count);
  for (auto& x : made) x = to_bits(factor * values(engine));
  return made;
}

bool same(float a, float b) { return std::memcmp(&a, &b, 4) == 0; }

void test(int n, int h, int v) {
  const std::string what = std::to_string(n) + " x " + std::to_string(h) + " x " + std::to_string(v);
  Problem whole(n, h, v, true);
  const auto x = normal(static_cast<size_t>(n) * h, 1, 1), w = normal(static_cast<size_t>(v) * h, 0.05f, 2);
  const auto b = normal(v, 1, 3);
  std::vector<int> target(n);
  for (int i = 0; i < n; ++i) target[i] = static_cast<int>(int64_t{7919} * (i + 1) % v);
  whole.input.put(x), whole.weight.put(w), whole.bias.put(b), whole.target.put(target);
  whole.run(n);
  CHECK(cudaDeviceSynchronize());
  const auto states = whole.states.get(), at = whole.at_target.get();
  const auto logits = whole.logits.get();

  for (int row : {0, n / 2, n - 1}) {
    std::vector<double> z(v);
    double largest = -INFINITY, sum = 0, dot = 0, away = 0;
    for (int c = 0; c < v; ++c) {
      double exact = from_bits(b[c]);
      for (int k = 0; k < h; ++k) exact += double(from_bits(x[size_t(row) * h + k])) * from_bits(w[size_t(c) * h + k]);
      z[c] = from_bits(logits[size_t(row) * v + c]);
      away = std::max(away, std::abs(z[c] - exact) / (std::abs(exact) + 1));
      largest = std::max(largest, z[c]);
    }
    for (double c : z) sum += std::exp(c - largest), dot += std::exp(c - largest) * (c - largest);
    expect(away < 1.0 / 200, what + ": logits of row " + std::to_string(row) + " are off by " + std::to_string(away));
    expect(states[row] == static_cast<float>(largest), what + ": max");
    expect(std::abs(states[n + row] / sum - 1) < 1e-5, what + ": sum");
    expect(std::abs(states[2 * n + row] / dot - 1) < 1e-4, what + ": dot");
    expect(at[row] == static_cast<float>(z[target[row]]), what + ": the target's logit");
  }

  const auto compare = [&](const std::vector<int>& order, const std::string& name) {
    const int m = static_cast<int>(order.size());
    Problem some(m, h, v, true);
    std::vector<uint16_t> rows(static_cast<size_t>(m) * h);
    std::vector<int> targets(m);
    for (int i = 0; i < m; ++i) {
      std::copy_n(x.begin() + size_t(order[i]) * h, h, rows.begin() + size_t(i) * h);
      targets[i] = target[order[i]];
    }
    some.input.put(rows), some.weight.put(w), some.bias.put(b), some.target.put(targets);
    some.run(m);
    CHECK(cudaDeviceSynchronize());
    const auto found = some.states.get(), found_at = some.at_target.get();
    const auto found_logits = some.logits.get();
    for (int i = 0; i < m; ++i) {
      bool equal = same(found_at[i], at[order[i]]);
      for (int s = 0; s < head::kTileSums; ++s) equal = equal && same(found[s * m + i], states[s * n + order[i]]);
      equal = equal && std::equal(found_logits.begin() + size_t(i) * v, found_logits.begin() + size_t(i + 1) * v,
                                  logits.begin() + size_t(order[i]) * v);
      if (!equal) return expect(false, what + ", " + name + ": row " + std::to_string(order[i]) + " differs");
    }
  };
  for (int row : {0, 1, n / 2, n - 1}) compare({row}, "alone");
  std::vector<int> all(n);
  for (int i = 0; i < n; ++i) all[i] = n - 1 - i;
  compare(all, "reversed");
  all.resize(std::min(n, 65));
  compare(all, "65 rows");
  for (int i = 0; i < 3 * n; ++i) all.resize(3 * n), all[i] = i % n;
  compare(all, "three times");
}

template <class Run>
double milliseconds(Run&& run) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) run();
  std::vector<float> times(9);
  for (auto& t : times) {
    CHECK(cudaEventRecord(begin));
    run();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&t, begin, end));
  }
  std::sort(times.begin(), times.end());
  return times[4];
}

__global__ void read_all(const uint4* from, size_t count, unsigned* to) {
  unsigned all = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const uint4 x = from[i];
    all |= x.x ^ x.y ^ x.z ^ x.w;
  }
  if (all == 0x12345678) *to = all;
}

void time(int h, int v) {
  cublasHandle_t blas;
  CHECK(cublasCreate(&blas));
  for (int n : {1, 16, 64, 512, 8192}) {
    for (bool keep : {false, true}) {
      Problem p(n, h, v, keep);
      p.input.put(normal(size_t(n) * h, 1, 1));
      CHECK(cudaMemset(p.weight.data, 0x3c, p.weight.count * 2));
      CHECK(cudaMemset(p.bias.data, 0, p.bias.count * 2));
      CHECK(cudaMemset(p.target.data, 0, n * 4));
      const double ours = milliseconds([&] { p.run(n); });
      const double reading = milliseconds([&] {
        read_all<<<1056, 256>>>(reinterpret_cast<const uint4*>(p.weight.data), p.weight.count / 8,
                                reinterpret_cast<unsigned*>(p.states.data));
      });
      double theirs = 0;
      if (keep) {
        const float one = 1, zero = 0;
        theirs = milliseconds([&] {
          CHECK(cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, v, n, h, &one, p.weight.data, CUDA_R_16BF, h, p.input.data,
                             CUDA_R_16BF, h, &zero, p.logits.data, CUDA_R_16BF, v, CUBLAS_COMPUTE_32F,
                             CUBLAS_GEMM_DEFAULT));
        });
      }
      std::printf("N %d H %d V %d %s: %.3f ms, %.0f TFLOP/s, %.2f of reading the weight; cuBLAS's product %.3f ms\n", n,
                  h, v, keep ? "kept" : "statistics", ours, 2e-9 * n * h * v / ours, ours / reading, theirs);
    }
  }
  cublasDestroy(blas);
}

}  // namespace

int main() {
  CHECK(cudaFree(nullptr));
  CHECK(cuInit(0));
  test(5, 64, 4096);
  test(200, 72, 5000);  // the last tiles of rows, columns and of the hidden dimension are short
  test(300, 1024, 10016);
  test(2100, 128, 4112);  // more than one group of tiles of rows
  if (failures == 0) time(4096, 151936);
  std::printf(failures == 0 ? "passed\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
