// The calls that test_bad_input.cpp spoils, and how: each case names the error's type and parts of its
// message.
#pragma once

#include <functional>
#include <limits>
#include <typeinfo>

#include "common.h"

namespace fusegrad::testing {

inline const double kNaN = std::numeric_limits<double>::quiet_NaN();
inline const double kInf = std::numeric_limits<double>::infinity();

/// A call that is right, until a case spoils it.
struct CrossEntropyCall {
  static constexpr const char* kOp = "cross_entropy";

  void run(bool inplace) const {
    cross_entropy_with_aux(input, target, CrossEntropyOptions(options).inplace(inplace), aux);
  }
  std::vector<Tensor> tensors() const { return {input, target}; }

  Tensor input = at::randn({4, 10}).requires_grad_().clone();
  Tensor target = at::tensor({1, 0, 9, -100}, at::kLong);
  CrossEntropyOptions options;
  Aux aux;
};

struct LinearCrossEntropyCall {
  static constexpr const char* kOp = "linear_cross_entropy";

  void run(bool inplace) const {
    linear_cross_entropy_with_aux(input, linear_weight, target, LinearCrossEntropyOptions(options).inplace(inplace),
                                  aux);
  }
  std::vector<Tensor> tensors() const { return {input, linear_weight, target}; }

  Tensor input = at::randn({4, 6}).requires_grad_().clone();
  Tensor linear_weight = at::randn({10, 6}).requires_grad_();
  Tensor target = at::tensor({1, 0, 9, -100}, at::kLong);
  LinearCrossEntropyOptions options;
  Aux aux;
};

/// Whether the error is of exactly this type.
using IsType = bool (*)(const c10::Error&);
template <typename Expected>
bool is(const c10::Error& error) {
  return typeid(error) == typeid(Expected);
}
inline constexpr IsType kValue = is<c10::ValueError>, kType = is<c10::TypeError>, kIndex = is<c10::IndexError>;

template <typename Call>
struct Case {
  const char* name;
  IsType type;
  std::vector<std::string> parts;  // of the message
  std::function<void(Call&)> spoil;
};

/// What both losses check alike: the target [4], V = 10, and the options that they share.
template <typename Call>
std::vector<Case<Call>> shared_cases() {
  return {
      {"target is bool",
       kType,
       {"target must be int64, int32 or uint8", "Bool"},
       [](Call& c) { c.target = c.target.to(at::kBool); }},
      {"target is int16",
       kType,
       {"target must be int64, int32 or uint8", "Short"},
       [](Call& c) { c.target = c.target.to(at::kShort); }},
      {"target is on another device",
       kValue,
       {"target must be on the input's device cpu", "but got meta"},
       [](Call& c) { c.target = c.target.to(at::kMeta); }},
      {"target is too short",
       kValue,
       {"must have shape [4]", "but got [3]"},
       [](Call& c) { c.target = c.target.narrow(0, 0, 3); }},
      {"target is one-hot integers",
       kValue,
       {"must have shape [4]", "but got [4, 10]"},
       [](Call& c) { c.target = at::zeros({4, 10}, at::kLong); }},
      {"target is 0-d",
       kValue,
       {"must have shape [4]", "but got []"},
       [](Call& c) { c.target = at::zeros({}, at::kLong); }},
      {"probabilities have another V",
       kValue,
       {"class probabilities", "[4, 10]", "but got [4, 9]"},
       [](Call& c) { c.target = at::ones({4, 9}); }},
      {"probabilities are one a row",
       kValue,
       {"class probabilities", "[4, 10]", "but got [4]"},
       [](Call& c) { c.target = at::ones({4}); }},
      {"target is V",
       kIndex,
       {"target must be in [0, 10)", "but got 10 at row 1"},
       [](Call& c) { c.target = at::tensor({9, 10, 0, -1}, at::kLong); }},
      {"target is negative",
       kIndex,
       {"ignore_index (-100)", "but got -1 at row 2"},
       [](Call& c) { c.target = at::tensor({9, 0, -1, 0}, at::kLong); }},
      {"target is -100 but not ignore_index",
       kIndex,
       {"ignore_index (5)", "but got -100 at row 3"},
       [](Call& c) { c.options.ignore_index(5); }},
      {"target is a large int32",
       kIndex,
       {"but got 2147483647 at row 0"},
       [](Call& c) { c.target = at::full({4}, std::numeric_limits<int32_t>::max(), at::kInt); }},
      {"reduction",
       kValue,
       {"reduction must be 'none', 'mean' or 'sum'", "but got 'average'"},
       [](Call& c) { c.options.reduction("average"); }},
      {"reduction is empty", kValue, {"reduction must be", "but got ''"}, [](Call& c) { c.options.reduction(""); }},
      {"label_smoothing < 0",
       kValue,
       {"label_smoothing must be in [0, 1]", "but got -0.1"},
       [](Call& c) { c.options.label_smoothing(-0.1); }},
      {"label_smoothing > 1",
       kValue,
       {"label_smoothing must be in [0, 1]", "but got 1.5"},
       [](Call& c) { c.options.label_smoothing(1.5); }},
      {"label_smoothing is NaN",
       kValue,
       {"label_smoothing", "but got nan"},
       [](Call& c) { c.options.label_smoothing(kNaN); }},
      {"z_loss < 0",
       kValue,
       {"z_loss must be a finite number >= 0", "but got -1"},
       [](Call& c) { c.options.z_loss(-1); }},
      {"z_loss is infinite", kValue, {"z_loss", "but got inf"}, [](Call& c) { c.options.z_loss(kInf); }},
      {"softcap is 0",
       kValue,
       {"softcap must be a finite number > 0", "but got 0"},
       [](Call& c) { c.options.softcap(0.0); }},
      {"softcap < 0", kValue, {"softcap", "but got -3"}, [](Call& c) { c.options.softcap(-3.0); }},
      {"softcap is NaN", kValue, {"softcap", "but got nan"}, [](Call& c) { c.options.softcap(kNaN); }},
      {"weight has another V",
       kValue,
       {"weight must have shape [10]", "but got [9]"},
       [](Call& c) { c.options.weight(at::ones({9})); }},
      {"weight is a matrix",
       kValue,
       {"weight must have shape [10]", "but got [10, 1]"},
       [](Call& c) { c.options.weight(at::ones({10, 1})); }},
      {"weight is of integers",
       kType,
       {"weight must be floating-point", "Long"},
       [](Call& c) { c.options.weight(at::ones({10}, at::kLong)); }},
      {"weight is on another device",
       kValue,
       {"weight must be on the input's device", "but got meta"},
       [](Call& c) { c.options.weight(at::ones({10}, at::kMeta)); }},
      {"weight requires grad",
       kValue,
       {"weight must not require grad"},
       [](Call& c) { c.options.weight(at::ones({10}).requires_grad_()); }},
      {"weight is sparse",
       kType,
       {"weight must be a dense tensor", "Sparse"},
       [](Call& c) { c.options.weight(at::ones({10}).to_sparse()); }},
      {"token_weight is too long",
       kValue,
       {"token_weight must have shape [4]", "but got [5]"},
       [](Call& c) { c.options.token_weight(at::ones({5})); }},
      {"token_weight is of integers",
       kType,
       {"token_weight must be floating-point", "Int"},
       [](Call& c) { c.options.token_weight(at::ones({4}, at::kInt)); }},
      {"token_weight requires grad",
       kValue,
       {"token_weight must not require grad"},
       [](Call& c) { c.options.token_weight(at::ones({4}).requires_grad_()); }},
      {"token_weight is on another device",
       kValue,
       {"token_weight must be on the input's device", "but got meta"},
       [](Call& c) { c.options.token_weight(at::ones({4}, at::kMeta)); }},
      {"normalizer has a shape",
       kValue,
       {"normalizer must be a number or a 0-d tensor", "but got shape [1]"},
       [](Call& c) { c.options.normalizer(at::ones({1})); }},
      {"normalizer requires grad",
       kValue,
       {"normalizer must not require grad"},
       [](Call& c) { c.options.normalizer(at::ones({}).requires_grad_()); }},
      {"normalizer is on another device",
       kValue,
       {"normalizer must be on the input's device", "but got meta"},
       [](Call& c) { c.options.normalizer(at::ones({}, at::kMeta)); }},
      {"normalizer with reduction sum",
       kValue,
       {"normalizer must come with reduction 'mean'", "but got reduction 'sum'"},
       [](Call& c) { c.options.normalizer(4.0).reduction("sum"); }},
      {"accuracy against probabilities",
       kValue,
       {"token_accuracy and token_log_prob must come with class indices", "but got"},
       [](Call& c) { c.target = at::ones({4, 10}), c.aux.token_accuracy(true); }},
      {"log-probability with probabilities",
       kValue,
       {"must come with class indices", "but got"},
       [](Call& c) { c.target = at::ones({4, 10}), c.aux.token_log_prob(true); }},
      {"input is of integers",
       kType,
       {"input must be float64, float32, bfloat16 or float16", "but got Long"},
       [](Call& c) { c.input = c.input.to(at::kLong); }},
      {"input is complex",
       kType,
       {"input must be float64", "ComplexFloat"},
       [](Call& c) { c.input = c.input.to(at::kComplexFloat); }},
      {"input is float8",
       kType,
       {"input must be float64", "Float8_e4m3fn"},
       [](Call& c) { c.input = c.input.detach().to(at::kFloat8_e4m3fn); }},
      {"input is sparse",
       kType,
       {"input must be a dense tensor", "Sparse"},
       [](Call& c) { c.input = c.input.detach().to_sparse(); }},
      {"input is 0-d", kValue, {"input must have shape", "0-d"}, [](Call& c) { c.input = c.input.sum(); }},
      {"input has more rows",
       kValue,
       {"must have shape [5]", "but got [4]"},
       [](Call& c) { c.input = at::cat({c.input, c.input}).narrow(0, 0, 5); }},
      {"input is undefined", kType, {"input must be a tensor", "undefined"}, [](Call& c) { c.input = Tensor(); }},
      {"target is sparse",
       kType,
       {"target must be a dense tensor", "Sparse"},
       [](Call& c) { c.target = at::ones({4, 10}).to_sparse(); }},
      {"weight is undefined",
       kType,
       {"weight must be a tensor", "undefined"},
       [](Call& c) { c.options.weight(Tensor()); }},
      {"token_weight is undefined",
       kType,
       {"token_weight must be a tensor", "undefined"},
       [](Call& c) { c.options.token_weight(Tensor()); }},
      {"target is undefined", kType, {"target must be a tensor", "undefined"}, [](Call& c) { c.target = Tensor(); }},
  };
}

inline std::vector<Case<CrossEntropyCall>> cross_entropy_cases() {
  using Call = CrossEntropyCall;
  return {
      {"K-dimensional target",
       kValue,
       {"must have shape [4, 5]", "but got [4, 6]"},
       [](Call& c) { c.input = at::randn({4, 10, 5}), c.target = at::zeros({4, 6}, at::kLong); }},
      {"K-dimensional probabilities",
       kValue,
       {"class probabilities", "[4, 10, 5]", "but got [4, 5, 10]"},
       [](Call& c) { c.input = at::randn({4, 10, 5}), c.target = at::ones({4, 5, 10}); }},
      {"one row without a batch dimension",
       kValue,
       {"must have shape []", "but got [1]"},
       [](Call& c) { c.input = at::randn({10}), c.target = at::zeros({1}, at::kLong); }},
      {"no classes, but a target",
       kIndex,
       {"target must be in [0, 0)", "but got 1 at row 0"},
       [](Call& c) { c.input = c.input.narrow(1, 0, 0); }},
  };
}

inline std::vector<Case<LinearCrossEntropyCall>> linear_cross_entropy_cases() {
  using Call = LinearCrossEntropyCall;
  return {
      {"linear_weight is a vector",
       kValue,
       {"linear_weight must have shape [V, H]", "but got [60]"},
       [](Call& c) { c.linear_weight = c.linear_weight.flatten(); }},
      {"linear_weight is 3-D",
       kValue,
       {"linear_weight must have shape [V, H]", "but got [1, 10, 6]"},
       [](Call& c) { c.linear_weight = c.linear_weight.unsqueeze(0); }},
      {"linear_weight is transposed",
       kValue,
       {"H = 6", "but got [6, 10]"},
       [](Call& c) { c.linear_weight = c.linear_weight.t(); }},
      {"linear_weight is of integers",
       kType,
       {"linear_weight must be float64", "but got Int"},
       [](Call& c) { c.linear_weight = at::ones({10, 6}, at::kInt); }},
      {"linear_weight is float64",
       kType,
       {"linear_weight must be float64 where the input is", "but got Double for an input of Float"},
       [](Call& c) { c.linear_weight = at::ones({10, 6}, at::kDouble); }},
      {"linear_weight is on another device",
       kValue,
       {"linear_weight must be on the input's device cpu", "but got meta"},
       [](Call& c) { c.linear_weight = at::ones({10, 6}, at::kMeta); }},
      {"linear_weight is undefined",
       kType,
       {"linear_weight must be a tensor", "undefined"},
       [](Call& c) { c.linear_weight = Tensor(); }},
      {"linear_bias has another V",
       kValue,
       {"linear_bias must have shape [V] = [10]", "but got [9]"},
       [](Call& c) { c.options.linear_bias(at::ones({9})); }},
      {"linear_bias is a matrix",
       kValue,
       {"linear_bias must have shape", "but got [1, 10]"},
       [](Call& c) { c.options.linear_bias(at::ones({1, 10})); }},
      {"linear_bias is bool",
       kType,
       {"linear_bias must be float64", "but got Bool"},
       [](Call& c) { c.options.linear_bias(at::ones({10}, at::kBool)); }},
      {"linear_bias is on another device",
       kValue,
       {"linear_bias must be on the input's device", "but got meta"},
       [](Call& c) { c.options.linear_bias(at::ones({10}, at::kMeta)); }},
      {"logit_scale is NaN",
       kValue,
       {"logit_scale must be a finite number", "but got nan"},
       [](Call& c) { c.options.logit_scale(kNaN); }},
      {"logit_scale is infinite",
       kValue,
       {"logit_scale must be a finite number", "but got -inf"},
       [](Call& c) { c.options.logit_scale(-kInf); }},
      {"accumulate_dtype is narrower",
       kType,
       {"accumulate_dtype must be Float", "but got BFloat16"},
       [](Call& c) { c.options.accumulate_dtype(at::kBFloat16); }},
      {"accumulate_dtype is integral",
       kType,
       {"accumulate_dtype must be", "but got Long"},
       [](Call& c) { c.options.accumulate_dtype(at::kLong); }},
      {"workspace_mib < 0",
       kValue,
       {"workspace_mib must be a number of MiB >= 0", "but got -1"},
       [](Call& c) { c.options.workspace_mib(-1); }},
      {"probabilities require grad",
       kValue,
       {"target must not require grad"},
       [](Call& c) { c.target = at::ones({4, 10}).requires_grad_(); }},
  };
}

}  // namespace fusegrad::testing
