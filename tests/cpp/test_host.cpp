// What the core takes of a front end: threads, and functions of vectors.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/host.h"
#include "common/recent.h"
#include "common/sleef.h"
#include "losses/row_kernels.h"
#include "pytorch/host.h"

namespace fusegrad {
namespace {

std::atomic<int> calls{0};

__attribute__((target("avx2"))) __m256 counted_tanhf8(__m256 x) {
  ++calls;
  return x;
}
__attribute__((target("avx512f"))) __m512 counted_tanhf16(__m512 x) {
  ++calls;
  return x;
}

// The loss of rows of logits with a softcap, whose tanh is a vector function.
double capped_loss(const cpu::Host& host) {
  constexpr int64_t kRows = 64, kCols = 1024;
  std::vector<float> logits(kRows * kCols), loss(kRows);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i % 97) / 16 - 3;
  const std::vector<int64_t> target(kRows, 5);
  RowForward p;
  p.rows = kRows;
  p.cols = p.logits_stride = kCols;
  p.logits = logits.data();
  p.targets.index = target.data();
  p.transform = {1.0, 2.0};
  p.loss = loss.data();
  kCpuRowKernels.forward(p, DType::kFloat32, const_cast<cpu::Host*>(&host));
  double total = 0;
  for (const float one : loss) total += one;
  return total;
}

double by_definition() {
  double sum = 0, at_target = 0;
  std::vector<double> z;
  for (int64_t i = 0; i < 64 * 1024; ++i) z.push_back(2 * std::tanh((static_cast<double>(i % 97) / 16 - 3) / 2));
  for (int64_t row = 0; row < 64; ++row) {
    double row_sum = 0;
    for (int64_t c = 0; c < 1024; ++c) row_sum += std::exp(z[static_cast<size_t>(row * 1024 + c)]);
    sum += std::log(row_sum);
    at_target += z[static_cast<size_t>(row * 1024 + 5)];
  }
  return sum - at_target;
}

TEST(Host, AnyFrontEndsThreads) {
  const double expected = by_definition();
  EXPECT_NEAR(capped_loss(torch_host()), expected, 1e-3);
  const cpu::Host alone{[](void*, int64_t count, int64_t, void (*body)(void*, int64_t, int64_t), void* closure) {
                          for (int64_t i = 0; i < count; ++i) body(closure, i, i + 1);
                        },
                        [](void*) { return int64_t{1}; }, nullptr};
  EXPECT_NEAR(capped_loss(alone), expected, 1e-3);
}

TEST(Host, VectorMathIsTheFrontEnds) {
  if (cpu::instruction_set() == cpu::InstructionSet::kDefault) GTEST_SKIP() << "needs AVX2";
  const cpu::VectorMath* sleef = cpu::exchange_vector_math(nullptr);
  EXPECT_NEAR(capped_loss(torch_host()), by_definition(), 1e-3) << "lane by lane";
  cpu::VectorMath counted = *sleef;
  counted.tanhf8_u10 = counted_tanhf8;
  counted.tanhf16_u10 = counted_tanhf16;
  cpu::exchange_vector_math(&counted);
  capped_loss(torch_host());
  EXPECT_GE(calls, 64 * 1024 / 16);
  EXPECT_EQ(cpu::exchange_vector_math(sleef), &counted);
  calls = 0;
  EXPECT_NEAR(capped_loss(torch_host()), by_definition(), 1e-3) << "PyTorch's SLEEF";
  EXPECT_EQ(calls, 0);
}

TEST(Host, ErrorsOfItsThreadsKeepTheirType) {
  EXPECT_THROW(cpu::parallel_for(torch_host(), 1000, 1, [](int64_t, int64_t) { throw std::out_of_range("row"); }),
               std::out_of_range);
}

TEST(Recent, KeepsWhatWasUsedLast) {
  Recent<std::string, int, 2> recent;
  int made = 0;
  const auto get = [&](const char* key) { return *recent.get(key, [&] { return ++made; }); };
  EXPECT_EQ(get("a"), 1);
  EXPECT_EQ(get("b"), 2);
  EXPECT_EQ(get("a"), 1);
  EXPECT_EQ(get("c"), 3);  // in the place of b
  EXPECT_EQ(get("a"), 1);
  EXPECT_EQ(get("b"), 4);
  EXPECT_THROW(recent.get("d", []() -> int { throw std::runtime_error("not made"); }), std::runtime_error);
  EXPECT_EQ(get("d"), 5);
}

}  // namespace
}  // namespace fusegrad
