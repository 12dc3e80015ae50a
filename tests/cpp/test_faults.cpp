// Errors that leave ops: their names, their types, and what was lost. Every allocation of every op fails in
// tests/python/contract/test_reliability.py.
#include "pytorch/ops/faults.h"

#include <c10/core/CPUAllocator.h>

#include <functional>
#include <new>
#include <stdexcept>

#include "common.h"
#include "common/error.h"
#include "pytorch/ops/dispatch.h"

namespace fusegrad::testing {
namespace {

template <class Error>
std::string words_of(const std::function<int()>& body) {
  try {
    named_errors("op", body);
  } catch (const Error& error) {
    if constexpr (std::is_base_of_v<c10::Error, Error>) return error.what_without_backtrace();
    return error.what();
  }
  return "no error";
}

TEST(Faults, TypesStayAndTheOpIsNamed) {
  const auto memory =
      words_of<c10::OutOfMemoryError>([]() -> int { TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory"); });
  EXPECT_EQ(memory, "CUDA out of memory (in op)");
  const auto index = words_of<c10::IndexError>([]() -> int { TORCH_CHECK_INDEX(false, "out of range"); });
  EXPECT_EQ(index, "out of range (in op)");
  const auto named = words_of<c10::ValueError>([]() -> int { TORCH_CHECK_VALUE(false, "op: must hold"); });
  EXPECT_EQ(named, "op: must hold");
  const auto nested =
      words_of<c10::Error>([] { return named_errors("op", []() -> int { TORCH_CHECK(false, "once"); }); });
  EXPECT_EQ(nested, "once (in op)");
}

TEST(Faults, WantOfHostMemory) {
  for (const bool length : {false, true}) {
    const auto words = words_of<c10::OutOfMemoryError>([&]() -> int {
      if (length) throw std::length_error("too long");
      throw std::bad_alloc();
    });
    EXPECT_EQ(words, std::string("op: memory must suffice, but an allocation failed (") +
                         (length ? "too long" : "std::bad_alloc") + ")");
  }
}

TEST(Faults, CoreErrorsBecomeTorchs) {
  EXPECT_EQ(words_of<c10::ValueError>([]() -> int { throw ValueError("op: must hold"); }), "op: must hold");
  EXPECT_EQ(words_of<c10::IndexError>([]() -> int { throw IndexError("out of range"); }), "out of range (in op)");
  EXPECT_EQ(words_of<c10::NotImplementedError>([]() -> int { throw NotImplementedError("op: no"); }), "op: no");
  EXPECT_EQ(words_of<c10::Error>([]() -> int { throw RuntimeError("jit: no NVRTC"); }), "jit: no NVRTC (in op)");
  const auto memory = words_of<c10::OutOfMemoryError>([]() -> int { throw OutOfDeviceMemory("cuModuleLoadData"); });
  EXPECT_EQ(memory, "op: memory must suffice, but an allocation failed (cuModuleLoadData)");
  // For the score_mod language.
  EXPECT_EQ(words_of<c10::ValueError>([]() -> int { throw std::invalid_argument("graph"); }), "graph (in op)");
}

TEST(Faults, KernelsErrorsAndOthers) {
  EXPECT_EQ(words_of<c10::Error>([]() -> int { throw std::runtime_error("a launch failed"); }), "op: a launch failed");
  struct Foreign : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  EXPECT_EQ(words_of<Foreign>([]() -> int { throw Foreign("of Python"); }), "of Python");
  EXPECT_THROW(named_errors("op", []() -> int { throw 3; }), int);
}

TEST(Faults, WhatWasLost) {
  const auto lost = words_of<c10::Error>([]() -> int {
    begin_overwriting("the input");
    TORCH_CHECK(false, "later");
  });
  EXPECT_EQ(lost, "later\n  in op\n  it had begun to write over the input, whose contents are lost");
  EXPECT_EQ(words_of<c10::Error>([]() -> int { TORCH_CHECK(false, "later"); }), "later (in op)");
  // What an inner op wrote the outer one lost.
  const auto outer = words_of<c10::OutOfMemoryError>([]() -> int {
    named_errors("inner", [] {
      begin_overwriting("the logits");
      return 0;
    });
    named_errors("another", [] { return 0; });
    throw std::bad_alloc();
  });
  EXPECT_NE(outer.find("; it had begun to write over the logits"), std::string::npos) << outer;
}

/// c10's allocator, of which one allocation fails.
class Failing : public c10::Allocator {
 public:
  explicit Failing(int nth) : left_(nth) { c10::SetCPUAllocator(this, /*priority=*/1); }
  ~Failing() override { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/1); }
  at::DataPtr allocate(size_t size) override {
    TORCH_CHECK_WITH(OutOfMemoryError, --left_ != 0, "no memory");
    return c10::GetDefaultCPUAllocator()->allocate(size);
  }
  at::DeleterFnPtr raw_deleter() const override { return c10::GetDefaultCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool came_to_it() const { return left_ <= 0; }

 private:
  int left_;
};

TEST(Faults, OpsBelowTheFrontEnds) {
  const auto gradient = at::ones({3, 4}), scale = at::ones({});
  const Failing failing(1);
  const auto words = words_of<c10::OutOfMemoryError>([&] {
    dispatch::scale_gradient(gradient, scale, std::nullopt);
    return 0;
  });
  EXPECT_EQ(words, "no memory\n  in scale_gradient\n  in op");
}

TEST(Faults, ForwardAndBackwardOfTheCppApi) {
  const auto target = random_target(6, 9, at::kCPU);
  const auto leaf = random({6, 9}, {at::kCPU, at::kFloat}).requires_grad_();
  for (const bool inplace : {false, true}) {
    for (int nth = 1;; ++nth) {
      const auto input = leaf.clone();
      const auto upstream = at::ones({});
      const auto before = input.detach().clone();
      bool came_to_it = false;
      std::string words;
      try {
        const Failing failing(nth);
        try {
          const Tensor loss = cross_entropy(input, target, CrossEntropyOptions().inplace(inplace));
          torch::autograd::grad({loss}, {leaf}, {upstream});
        } catch (...) {
          came_to_it = failing.came_to_it();
          throw;
        }
      } catch (const c10::OutOfMemoryError& error) {
        words = error.what_without_backtrace();
      }
      if (!came_to_it) {
        EXPECT_GT(nth, 3);
        break;
      }
      EXPECT_EQ(words, "no memory (in cross_entropy)") << nth;
      EXPECT_TRUE(at::equal(input, before)) << nth;  // what can fail does before the first write
    }
  }
}

}  // namespace
}  // namespace fusegrad::testing
