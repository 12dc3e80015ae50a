// The linear losses' products on a Hopper GPU (csrc/cuda/losses/host/head_product.cu): parity with float64, rows' bits
// alone, packed, permuted, repeated and in parts of 2 to 16 processes, and times beside cuBLAS and one pass over the
// weight.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr --expt-extended-lambda -gencode=arch=compute_90a,code=sm_90a
//     -DFUSEGRAD_SM90A -I csrc tests/cpp/head_product.cu csrc/cuda/losses/host/head_product.cu csrc/jit/driver.cpp
//     -o head_product -lcublas -ldl && ./head_product
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/losses/host/row_kernels.h"
#include "device_program.cuh"

namespace {

using fusegrad::DType;
using fusegrad::Product;
using Words = std::vector<uint16_t>;

uint16_t to_bits(DType dtype, float x) {
  return dtype == DType::kFloat16 ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
float from_bits(DType dtype, uint16_t x) {
  return dtype == DType::kFloat16 ? __half2float(__ushort_as_half(x)) : __bfloat162float(__ushort_as_bfloat16(x));
}

Words normal(DType dtype, size_t count, float factor, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> values;
  Words made(count);
  for (auto& x : made) x = to_bits(dtype, factor * values(engine));
  return made;
}

int64_t padded(int64_t cols) { return (cols + 7) / 8 * 8; }

// One product of a head, [rows, hidden] and [vocab, hidden], and its memory. `sums`: of the vocabulary, with a
// [rows, vocab]; otherwise of the hidden dimension, the logits. Rows of the vocabulary's columns are padded.
struct Problem {
  DType dtype;
  bool sums;
  int64_t rows, hidden, vocab;
  Buffer<uint16_t> a, weight, bias, out;
  Buffer<char> workspace;

  Problem(DType type, bool of_vocab, int64_t n, int64_t h, int64_t v)
      : dtype(type),
        sums(of_vocab),
        rows(n),
        hidden(h),
        vocab(v),
        a(n * (sums ? padded(v) : h)),
        weight(v * h),
        bias(v),
        out(n * (sums ? h : padded(v))),
        workspace(fusegrad::cuda::product_workspace(product(nullptr))) {
    CHECK(cudaMemset(out.data, 0xff, out.count * 2));  // NaN: what is not written shows
    CHECK(cudaMemset(workspace.data, 0xff, workspace.count));
  }

  Product product(void* room) const {
    Product p;
    p.rows = rows;
    p.cols = sums ? hidden : vocab;
    p.terms = sums ? vocab : hidden;
    p.a = a.data;
    p.a_stride = sums ? padded(vocab) : hidden;
    p.b = weight.data;
    p.b_stride = hidden;
    p.bias = sums ? nullptr : bias.data;
    p.out = out.data;
    p.out_stride = sums ? hidden : padded(vocab);
    p.segment = sums ? fusegrad::vocab_segment(vocab, fusegrad::kGpuSegmentUnit) : 0;
    p.segments = sums ? fusegrad::kVocabSegments : 0;
    p.workspace = room;
    return p;
  }
  void run() const { fusegrad::cuda::product(product(workspace.data), dtype, nullptr); }
};

void test(DType dtype, bool sums, int n, int h, int v) {
  const std::string what = std::string(sums ? "sums " : "logits ") + (dtype == DType::kFloat16 ? "f16 " : "bf16 ") +
                           std::to_string(n) + " x " + std::to_string(h) + " x " + std::to_string(v);
  const int64_t terms = sums ? v : h, cols = sums ? h : v;
  const int64_t a_stride = sums ? padded(v) : h, out_stride = sums ? h : padded(v);
  auto a = normal(dtype, n * a_stride, 1, 1);
  const auto w = normal(dtype, static_cast<size_t>(v) * h, 0.05f, 2), b = normal(dtype, v, 1, 3);
  // What stands in the padding is not read.
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t k = terms; k < a_stride; ++k) a[row * a_stride + k] = 0x7fff;
  }
  const auto run = [&](const std::vector<int>& order) {
    Problem some(dtype, sums, static_cast<int64_t>(order.size()), h, v);
    Words rows(some.a.count);
    for (size_t i = 0; i < order.size(); ++i) {
      std::copy_n(a.begin() + order[i] * a_stride, a_stride, rows.begin() + i * a_stride);
    }
    some.a.put(rows), some.weight.put(w), some.bias.put(b);
    some.run();
    CHECK(cudaDeviceSynchronize());
    return some.out.get();
  };
  std::vector<int> all(n);
  std::iota(all.begin(), all.end(), 0);
  const auto whole = run(all);

  for (const int row : {0, n / 3, n / 2, n - 1}) {
    double worst = 0;
    int64_t where = 0;
    for (int64_t c = 0; c < cols; ++c) {
      double exact = sums ? 0 : from_bits(dtype, b[c]), size = std::abs(exact);
      for (int64_t k = 0; k < terms; ++k) {
        const double x = from_bits(dtype, a[row * a_stride + k]);
        const double product = x * from_bits(dtype, sums ? w[k * h + c] : w[c * h + k]);
        exact += product;
        size += std::abs(product);
      }
      const double found = from_bits(dtype, whole[row * out_stride + c]);
      const double away = std::abs(found - exact) / (std::abs(exact) / 256 + size * 1e-5);
      if (!(away <= worst)) worst = away, where = c;
    }
    expect(worst <= 1, what + ": row " + std::to_string(row) + " is off by " + std::to_string(worst) +
                           " of what it may, most in column " + std::to_string(where));
  }

  const auto compare = [&](const std::vector<int>& order, const std::string& name) {
    const auto found = run(order);
    for (size_t i = 0; i < order.size(); ++i) {
      for (int64_t c = 0; c < cols; ++c) {
        if (found[i * out_stride + c] == whole[order[i] * out_stride + c]) continue;
        return expect(false, what + ", " + name + ": row " + std::to_string(order[i]) + " differs in column " +
                                 std::to_string(c));
      }
    }
  };
  for (const int row : {0, 1, n / 2, n - 1}) compare({row}, "alone");
  std::vector<int> order(all.rbegin(), all.rend());
  compare(order, "reversed");
  for (const int count : {7, 63, 64, 65, 127, 128, 129, 300}) {
    if (count >= n) continue;
    order.assign(all.begin() + (n - count) / 2, all.begin() + (n - count) / 2 + count);
    compare(order, std::to_string(count) + " rows");
  }
  order.resize(3 * n);
  for (int i = 0; i < 3 * n; ++i) order[i] = i % n;
  compare(order, "three times");
}

// The sums of processes' parts, added up by pairs, have the bits of one process.
void test_parts(DType dtype, int n, int h, int v) {
  const auto a = normal(dtype, n * padded(v), 1, 1), w = normal(dtype, static_cast<size_t>(v) * h, 0.05f, 2);
  Problem whole(dtype, true, n, h, v);
  whole.a.put(a), whole.weight.put(w);
  whole.run();
  CHECK(cudaDeviceSynchronize());
  const auto right = whole.out.get();
  const int64_t segment = fusegrad::vocab_segment(v, fusegrad::kGpuSegmentUnit);
  for (const int64_t world : {2, 4, 8, 16}) {
    std::vector<std::vector<float>> sums;
    for (int64_t rank = 0; rank < world; ++rank) {
      const int64_t segments = fusegrad::kVocabSegments / world, first = rank * segments * segment;
      const int64_t columns = std::min<int64_t>(v - first, segments * segment), stride = padded(columns);
      sums.emplace_back(static_cast<size_t>(n) * h);
      if (columns <= 0) continue;
      Words part(n * stride);
      for (int64_t row = 0; row < n; ++row) {
        std::copy_n(a.begin() + row * padded(v) + first, columns, part.begin() + row * stride);
      }
      Buffer<uint16_t> own(part.size());
      own.put(part);
      Buffer<float> out(sums.back().size());
      Product p;
      p.rows = n, p.cols = h, p.terms = columns;
      p.a = own.data, p.a_stride = stride;
      p.b = whole.weight.data + first * h, p.b_stride = h;
      p.out = out.data, p.out_stride = h, p.float_out = true;
      p.segment = segment, p.segments = segments;
      const Buffer<char> workspace(fusegrad::cuda::product_workspace(p));
      p.workspace = workspace.data;
      fusegrad::cuda::product(p, dtype, nullptr);
      CHECK(cudaDeviceSynchronize());
      sums.back() = out.get();
    }
    for (; sums.size() > 1;) {
      for (size_t i = 0; i < sums.size() / 2; ++i) {
        if (i != 0) sums[i] = sums[2 * i];
        for (size_t j = 0; j < sums[i].size(); ++j) sums[i][j] += sums[2 * i + 1][j];
      }
      sums.resize(sums.size() / 2);
    }
    for (size_t i = 0; i < right.size(); ++i) {
      if (to_bits(dtype, sums[0][i]) == right[i]) continue;
      expect(false, std::to_string(n) + " x " + std::to_string(h) + " x " + std::to_string(v) + ": the sum of " +
                        std::to_string(world) + " processes differs at " + std::to_string(i));
      break;
    }
  }
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
  Buffer<unsigned> unused(1);
  for (const bool sums : {false, true}) {
    for (const int n : {1, 16, 64, 128, 512, 1024, 2048, 8192}) {
      Problem p(DType::kBFloat16, sums, n, h, v);
      // Ones everywhere would draw less power than a head does.
      const auto some = normal(DType::kBFloat16, 1 << 20, 0.02f, 1);
      for (const auto* buffer : {&p.a, &p.weight}) {
        for (size_t at = 0; at < buffer->count; at += some.size()) {
          CHECK(cudaMemcpy(buffer->data + at, some.data(), 2 * std::min(some.size(), buffer->count - at),
                           cudaMemcpyHostToDevice));
        }
      }
      CHECK(cudaMemset(p.bias.data, 0, p.bias.count * 2));
      const double ours = milliseconds([&] { p.run(); });
      const double reading = milliseconds([&] {
        read_all<<<1056, 256>>>(reinterpret_cast<const uint4*>(p.weight.data), p.weight.count / 8, unused.data);
      });
      const float one = 1, zero = 0;
      const double theirs = milliseconds([&] {
        if (sums) {
          CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, h, n, v, &one, p.weight.data, CUDA_R_16BF, h, p.a.data,
                             CUDA_R_16BF, padded(v), &zero, p.out.data, CUDA_R_16BF, h, CUBLAS_COMPUTE_32F,
                             CUBLAS_GEMM_DEFAULT));
        } else {
          CHECK(cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, v, n, h, &one, p.weight.data, CUDA_R_16BF, h, p.a.data,
                             CUDA_R_16BF, h, &zero, p.out.data, CUDA_R_16BF, padded(v), CUBLAS_COMPUTE_32F,
                             CUBLAS_GEMM_DEFAULT));
        }
      });
      std::printf(
          "%s N %d H %d V %d: %.3f ms, %.0f TFLOP/s, %.2f of reading the weight; cuBLAS's %.3f ms, %.2f of it\n",
          sums ? "sums" : "logits", n, h, v, ours, 2e-9 * n * h * v / ours, ours / reading, theirs, ours / theirs);
    }
  }
  cublasDestroy(blas);
}

}  // namespace

// Any argument: without the times.
int main(int count, char**) {
  CHECK(cudaFree(nullptr));
  if (!fusegrad::cuda::product_takes(DType::kBFloat16, 64)) {
    std::printf("no kernels for this GPU\n");
    return 1;
  }
  for (const bool sums : {false, true}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      test(dtype, sums, 5, 64, 4096);
      test(dtype, sums, 200, 72, 5003);  // short last tiles of rows, columns and both dimensions; odd columns
      test(dtype, sums, 70, 8, 13);      // fewer columns than segments
      test(dtype, sums, 300, 1024, 10016);
    }
    test(DType::kBFloat16, sums, 2100, 1032, 300);  // more than one group of tiles of rows; CTAs with all segments
  }
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    test_parts(dtype, 5, 64, 4096);
    test_parts(dtype, 200, 72, 5003);
    test_parts(dtype, 70, 8, 13);
    test_parts(dtype, 2100, 1032, 300);
  }
  if (failures == 0 && count == 1) time(4096, 151936);
  std::printf(failures == 0 ? "passed\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
