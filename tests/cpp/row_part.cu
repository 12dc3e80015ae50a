// The statistics of rows by segments of the vocabulary (csrc/cuda/losses/host/row_part.cu): parity with float64, bits
// of rows alone and in parts of 2 to 16 processes, and times beside the kernel that reads whole rows.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr --expt-extended-lambda -gencode=arch=compute_90a,code=sm_90a
//     -I csrc tests/cpp/row_part.cu csrc/cuda/losses/host/row_part.cu csrc/cuda/losses/host/row_forward.cu
//     -o row_part && ./row_part
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cuda/dtype.h"
#include "cuda/losses/host/row_kernels.h"
#include "device_program.cuh"

namespace {

using namespace fusegrad;

struct Options {
  const char* name;
  double smoothing = 0, cap = 0;
  bool weighted = false, predicted = false;
};

constexpr int kOutputs = 8;  // loss, lse, lse_low, log_prob, entropy, mean, variance, slope

// The options and outputs of rows [0, n).
struct Call {
  int64_t n, v;
  Options options;
  Buffer<int64_t> target, predicted;
  Buffer<float> weight, outputs;

  Call(const std::vector<int64_t>& target, const std::vector<float>& weight, const Options& options)
      : n(target.size()),
        v(weight.size()),
        options(options),
        target(target),
        predicted(n),
        weight(weight),
        outputs(kOutputs * n) {}

  void describe(RowForward& p, const void* logits, int64_t cols, int64_t stride) const {
    p.rows = n;
    p.cols = cols;
    p.logits = logits;
    p.logits_stride = stride;
    p.targets.index = target.data;
    p.targets.class_weight = options.weighted ? weight.data : nullptr;
    p.targets.smoothing = options.smoothing;
    p.targets.dense = options.weighted && options.smoothing > 0;
    p.transform = {0.7, options.cap};
    p.alone = true;
    p.predicted = options.predicted ? predicted.data : nullptr;
    void** places[kOutputs] = {&p.loss,    &p.lse,  &p.lse_low,  &p.token_log_prob,
                               &p.entropy, &p.mean, &p.variance, &p.slope};
    for (int i = 0; i < kOutputs; ++i) *places[i] = outputs.data + i * n;
  }

  // As `world` processes, each of which has its part of the logits in memory of its own.
  template <class T>
  std::vector<float> run(const std::vector<T>& logits, DType dtype, int64_t world) const {
    const int64_t segment = vocab_segment(v, kGpuSegmentUnit), each = kVocabSegments / world;
    Buffer<float> states(kVocabSegments * n * cuda::kRowStates);
    for (int64_t rank = 0; rank < world; ++rank) {
      const int64_t start = std::min(v, rank * each * segment), stop = std::min(v, (rank + 1) * each * segment);
      const int64_t stride = (stop - start + 15) / 8 * 8;
      std::vector<T> part(std::max<int64_t>(n * stride, 1), static_cast<T>(NAN));
      for (int64_t row = 0; row < n; ++row) {
        std::copy(logits.begin() + row * v + start, logits.begin() + row * v + stop, part.begin() + row * stride);
      }
      const Buffer<T> own(part);
      RowPart p;
      describe(p, own.data, stop - start, stride);
      p.vocab = v;
      p.col_offset = start;
      p.segment = segment;
      p.segments = each;
      p.states = states.data + rank * each * n * cuda::kRowStates;
      cuda::row_part(p, dtype, nullptr);
    }
    RowWhole whole;
    describe(whole, nullptr, 0, 0);
    whole.vocab = v;
    whole.states = states.data;
    cuda::row_whole(whole, dtype, nullptr);
    CHECK(cudaDeviceSynchronize());
    auto found = outputs.get();
    if (options.predicted) {
      for (const auto column : predicted.get()) found.push_back(static_cast<float>(column));
    }
    return found;
  }
};

bool same(float a, float b) { return __builtin_memcmp(&a, &b, sizeof(float)) == 0; }

template <class T>
void test(DType dtype, const char* type, int64_t n, int64_t v, const Options& options) {
  const std::string what = std::string(type) + ", " + std::to_string(v) + " columns, " + options.name;
  std::mt19937 engine(1);
  std::normal_distribution<float> values;
  std::vector<T> logits(n * v);
  for (auto& x : logits) x = static_cast<T>(3 * values(engine) + 40);
  std::vector<float> weight(v);
  for (auto& x : weight) x = 0.5f + std::abs(values(engine));
  std::vector<int64_t> target(n);
  for (auto& y : target) y = static_cast<int64_t>(engine() % v);
  target[n / 2] = -100;

  const auto whole = Call(target, weight, options).run(logits, dtype, 1);
  for (const int64_t world : {2, 4, 8, 16}) {
    const auto found = Call(target, weight, options).run(logits, dtype, world);
    for (size_t i = 0; i < whole.size(); ++i) {
      if (same(found[i], whole[i])) continue;
      expect(false, what + ": output " + std::to_string(i / n) + " of row " + std::to_string(i % n) + " differs in " +
                        std::to_string(world) + " processes");
      break;
    }
  }
  for (const int64_t row : {int64_t{0}, n / 2, n - 1}) {
    const std::vector<T> one(logits.begin() + row * v, logits.begin() + (row + 1) * v);
    const auto found = Call({target[row]}, weight, options).run(one, dtype, 4);
    for (size_t i = 0; i < found.size(); ++i) {
      expect(same(found[i], whole[i * n + row]),
             what + ": output " + std::to_string(i) + " of row " + std::to_string(row) + " alone differs");
    }
    if (target[row] < 0) continue;
    double largest = -INFINITY, sum = 0, mean = 0, cost = 0, mass = 0;
    std::vector<double> z(v);
    for (int64_t c = 0; c < v; ++c) {
      z[c] = 0.7 * static_cast<double>(static_cast<float>(one[c]));
      if (options.cap != 0) z[c] = options.cap * std::tanh(z[c] / options.cap);
      largest = std::max(largest, z[c]);
    }
    for (const double x : z) sum += std::exp(x - largest);
    for (const double x : z) mean += std::exp(x - largest) / sum * x;
    const double lse = largest + std::log(sum);
    for (int64_t c = 0; c < v; ++c) {
      double a = options.smoothing / static_cast<double>(v) * (options.weighted ? weight[c] : 1);
      if (c == target[row]) a += (1 - options.smoothing) * (options.weighted ? weight[c] : 1);
      mass += a, cost += a * (lse - z[c]);
    }
    const double right[] = {cost, lse, 0, z[target[row]] - lse, lse - mean};
    for (const int i : {0, 1, 3, 4}) {
      const double away = std::abs(whole[i * n + row] - right[i]);
      expect(away <= 2e-5 * (1 + std::abs(right[i])), what + ": output " + std::to_string(i) + " of row " +
                                                          std::to_string(row) + " is off by " + std::to_string(away));
    }
    if (!options.predicted) continue;
    const auto best = std::max_element(one.begin(), one.end(),
                                       [](T a, T b) { return static_cast<float>(a) < static_cast<float>(b); });
    expect(whole[kOutputs * n + row] == static_cast<float>(best - one.begin()),
           what + ": the prediction of row " + std::to_string(row) + " is wrong");
  }
}

__global__ void put_logits(__nv_bfloat16* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = static_cast<__nv_bfloat16>(static_cast<float>((i * 2654435761u >> 13) % 4096) / 512.f - 4.f);
  }
}

void time(int64_t n, int64_t v) {
  const int64_t stride = (v + 63) / 64 * 64;
  const Buffer<__nv_bfloat16> logits(n * stride);
  put_logits<<<1056, 256>>>(logits.data, n * stride);
  const Call call(std::vector<int64_t>(n, 7), std::vector<float>(v, 1.f), {"plain"});
  const Buffer<float> states(kVocabSegments * n * cuda::kRowStates);
  for (const bool entropy : {false, true}) {
    RowForward rows;
    call.describe(rows, logits.data, v, stride);
    rows.mean = rows.variance = rows.slope = nullptr;
    if (!entropy) rows.entropy = nullptr;
    RowPart part;
    RowWhole whole;
    static_cast<RowForward&>(part) = static_cast<RowForward&>(whole) = rows;
    part.vocab = whole.vocab = v;
    part.segment = vocab_segment(v, kGpuSegmentUnit);
    part.segments = kVocabSegments;
    part.states = states.data;
    whole.states = states.data;
    const double before = milliseconds([&] { cuda::row_forward(rows, DType::kBFloat16, nullptr); });
    const double parts = milliseconds([&] { cuda::row_part(part, DType::kBFloat16, nullptr); });
    const double both = milliseconds([&] {
      cuda::row_part(part, DType::kBFloat16, nullptr);
      cuda::row_whole(whole, DType::kBFloat16, nullptr);
    });
    std::printf("N %lld V %lld%s: %.4f ms (states %.4f), %.0f GB/s; whole rows %.4f ms\n", static_cast<long long>(n),
                static_cast<long long>(v), entropy ? ", entropy" : "", both, parts,
                1e-6 * static_cast<double>(2 * n * v) / both, before);
  }
}

}  // namespace

int main() {
  for (const Options& options :
       {Options{"plain"}, Options{"predicted", 0, 0, false, true}, Options{"softcap", 0, 30}, Options{"smoothing", 0.1},
        Options{"class weights", 0, 0, true}, Options{"dense", 0.1, 0, true, true}}) {
    for (const int64_t v : {37, 250, 4852, 20011, 128256}) {
      test<float>(DType::kFloat32, "float32", 5, v, options);
      test<__nv_bfloat16>(DType::kBFloat16, "bfloat16", 5, v, options);
      test<__half>(DType::kFloat16, "float16", 5, v, options);
    }
  }
  for (const int64_t n : {1, 16, 64, 512, 8192}) time(n, 151936);
  time(8192, 32000);
  std::printf(failures == 0 ? "all right\n" : "%d failures\n", failures);
  return failures != 0;
}
