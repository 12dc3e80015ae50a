// Arguments that cannot be right: the exception's type, `op: what must hold, but got <value>`, and nothing
// written.
#include "bad_input_cases.h"
#include "bad_input_divergences.h"

namespace fusegrad::testing {
namespace {

/// A tensor's memory and version before a call; empty where it has no memory to compare.
struct Snapshot {
  explicit Snapshot(const Tensor& tensor)
      : tensor(tensor), comparable(tensor.defined() && !tensor.is_meta() && !tensor.is_sparse()) {
    if (comparable) values = tensor.detach().clone();
    if (comparable) version = tensor._version();
  }
  bool unchanged() const { return !comparable || (tensor._version() == version && at::equal(tensor.detach(), values)); }

  Tensor tensor, values;
  bool comparable;
  uint32_t version = 0;
};

template <typename Call>
void expect_errors(const std::vector<Case<Call>>& cases) {
  for (const auto& bad : cases) {
    for (const bool inplace : {false, true}) {
      SCOPED_TRACE(std::string(bad.name) + (inplace ? ", in place" : ""));
      Call call;
      bad.spoil(call);
      const auto tensors = call.tensors();
      const std::vector<Snapshot> before(tensors.begin(), tensors.end());
      try {
        call.run(inplace);
        ADD_FAILURE() << "no error";
      } catch (const c10::Error& error) {
        const std::string message = error.what_without_backtrace();
        EXPECT_TRUE(bad.type(error)) << "another type of error: " << message;
        EXPECT_EQ(message.find(std::string(Call::kOp) + ": "), 0) << message;
        for (const auto& part : bad.parts) EXPECT_NE(message.find(part), std::string::npos) << message;
      }
      for (const auto& snapshot : before) EXPECT_TRUE(snapshot.unchanged());
    }
  }
}

// The calls are right as they stand: what the cases report is due to what they spoil.
TEST(BadInput, NothingSpoiled) {
  for (const bool inplace : {false, true}) {
    EXPECT_NO_THROW(CrossEntropyCall().run(inplace));
    EXPECT_NO_THROW(LinearCrossEntropyCall().run(inplace));
    EXPECT_NO_THROW(JsdCall().run(inplace));
    EXPECT_NO_THROW(LinearJsdCall().run(inplace));
  }
}

TEST(BadInput, CrossEntropy) {
  expect_errors(shared_cases<CrossEntropyCall>());
  expect_errors(cross_entropy_cases());
}

TEST(BadInput, LinearCrossEntropy) {
  expect_errors(shared_cases<LinearCrossEntropyCall>());
  expect_errors(linear_cross_entropy_cases());
}

TEST(BadInput, Jsd) {
  expect_errors(divergence_cases<JsdCall>());
  expect_errors(jsd_cases());
}

TEST(BadInput, LinearJsd) {
  expect_errors(divergence_cases<LinearJsdCall>());
  expect_errors(linear_jsd_cases());
}

TEST(BadInput, Float64OnCuda) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto input = at::randn({4, 10}, at::TensorOptions(at::kCUDA).dtype(at::kDouble));
  const auto target = at::zeros({4}, at::TensorOptions(at::kCUDA).dtype(at::kLong));
  EXPECT_THROW(cross_entropy(input, target), c10::TypeError);
}

}  // namespace
}  // namespace fusegrad::testing
