// The same for the divergences, see bad_input_cases.h.
#pragma once

#include "bad_input_cases.h"

namespace fusegrad::testing {

struct JsdCall {
  static constexpr const char* kOp = "jsd";

  void run(bool inplace) const {
    const auto o = JSDOptions(options).inplace(inplace);
    top_k.indices.defined() ? jsd_with_aux(student, top_k, o, aux) : jsd_with_aux(student, teacher, o, aux);
  }
  std::vector<Tensor> tensors() const { return {student, teacher}; }

  Tensor student = at::randn({4, 10}).requires_grad_().clone();
  Tensor teacher = at::randn({4, 10});
  TopK top_k;  // taken where its indices are defined
  JSDOptions options = JSDOptions().labels(at::tensor({1, 0, 9, -100}, at::kLong));
  JSDAux aux;
};

struct LinearJsdCall {
  static constexpr const char* kOp = "linear_jsd";

  void run(bool inplace) const {
    const auto o = LinearJSDOptions(options).inplace(inplace);
    top_k.indices.defined() ? linear_jsd_with_aux(student, student_weight, top_k, o, aux)
                            : linear_jsd_with_aux(student, student_weight, teacher, teacher_weight, o, aux);
  }
  std::vector<Tensor> tensors() const { return {student, student_weight, teacher, teacher_weight}; }

  Tensor student = at::randn({4, 6}).requires_grad_().clone();
  Tensor student_weight = at::randn({10, 6}).requires_grad_();
  Tensor teacher = at::randn({4, 3});
  Tensor teacher_weight = at::randn({10, 3});
  TopK top_k;
  LinearJSDOptions options = LinearJSDOptions().labels(at::tensor({1, 0, 9, -100}, at::kLong));
  JSDAux aux;
};

/// A top-k teacher that is right.
inline TopK good_top_k() { return {at::full({4, 2}, -1.0), at::tensor({0, 9}, at::kLong).repeat({4, 1})}; }

template <typename Call>
std::vector<Case<Call>> divergence_cases() {
  return {
      {"beta < 0", kValue, {"beta must be in [0, 1]", "but got -0.5"}, [](Call& c) { c.options.beta(-0.5); }},
      {"beta > 1", kValue, {"beta must be in [0, 1]", "but got 2"}, [](Call& c) { c.options.beta(2); }},
      {"beta is NaN", kValue, {"beta", "but got nan"}, [](Call& c) { c.options.beta(kNaN); }},
      {"temperature is 0",
       kValue,
       {"temperature must be a finite number > 0", "but got 0"},
       [](Call& c) { c.options.temperature(0); }},
      {"temperature is infinite", kValue, {"temperature", "but got inf"}, [](Call& c) { c.options.temperature(kInf); }},
      {"reduction",
       kValue,
       {"reduction must be 'none', 'mean', 'sum' or 'batchmean'", "but got 'average'"},
       [](Call& c) { c.options.reduction("average"); }},
      {"tail", kValue, {"tail must be 'bucket' or 'renormalize'", "but got ''"}, [](Call& c) { c.options.tail(""); }},
      {"soft_weight < 0", kValue, {"soft_weight", "but got -1"}, [](Call& c) { c.options.soft_weight(-1); }},
      {"hard_weight is NaN", kValue, {"hard_weight", "but got nan"}, [](Call& c) { c.options.hard_weight(kNaN); }},
      {"hard part without labels",
       kValue,
       {"labels must be given where the hard loss is wanted", "but got hard_weight 1"},
       [](Call& c) { c.options.hard_weight(1).labels(std::nullopt); }},
      {"hard loss without labels",
       kValue,
       {"labels must be given", "hard_loss"},
       [](Call& c) { c.options.labels(std::nullopt), c.aux.hard_loss(true); }},
      {"labels are floating",
       kType,
       {"labels must be int64 or int32", "Float"},
       [](Call& c) { c.options.labels(at::zeros({4})); }},
      {"labels are too short",
       kValue,
       {"labels must have shape [4]", "but got [3]"},
       [](Call& c) { c.options.labels(at::zeros({3}, at::kLong)); }},
      {"labels are on another device",
       kValue,
       {"labels must be on the input's device", "but got meta"},
       [](Call& c) { c.options.labels(at::zeros({4}, at::TensorOptions(at::kMeta).dtype(at::kLong))); }},
      {"label is V",
       kIndex,
       {"labels must be in [0, 10)", "but got 10 at row 1"},
       [](Call& c) { c.options.labels(at::tensor({9, 10, 0, -1}, at::kLong)); }},
      {"label is -100 but not ignore_index",
       kIndex,
       {"ignore_index (5)", "but got -100 at row 3"},
       [](Call& c) { c.options.ignore_index(5); }},
      {"token_weight is too long",
       kValue,
       {"token_weight must have shape [4]", "but got [5]"},
       [](Call& c) { c.options.token_weight(at::ones({5})); }},
      {"token_weight requires grad",
       kValue,
       {"token_weight must not require grad"},
       [](Call& c) { c.options.token_weight(at::ones({4}).requires_grad_()); }},
      {"normalizer with reduction sum",
       kValue,
       {"normalizer must come with reduction 'mean' or 'batchmean'", "but got reduction 'sum'"},
       [](Call& c) { c.options.normalizer(4.0).reduction("sum"); }},
      {"normalizer has a shape",
       kValue,
       {"normalizer must be a number or a 0-d tensor", "but got shape [1]"},
       [](Call& c) { c.options.normalizer(at::ones({1})); }},
      {"top-k indices are int16",
       kType,
       {"indices must be int64 or int32", "but got Short"},
       [](Call& c) { c.top_k = good_top_k(), c.top_k.indices = c.top_k.indices.to(at::kShort); }},
      {"top-k teacher is logits",
       kValue,
       {"a top-k teacher must be log-probabilities", "at row 0"},
       [](Call& c) { c.top_k = good_top_k(), c.top_k.log_probs = c.top_k.log_probs + 3; }},
      {"top-k teacher with a tail too large",
       kValue,
       {"whose exponentials sum to at most 1"},
       [](Call& c) { c.top_k = good_top_k(), c.top_k.tail_log_prob = at::zeros({4}); }},
      {"tail_log_prob of another shape",
       kValue,
       {"tail_log_prob must have shape [4]", "but got [5]"},
       [](Call& c) { c.top_k = good_top_k(), c.top_k.tail_log_prob = at::full({5}, -3.0); }},
      {"tail_log_prob with tail renormalize",
       kValue,
       {"tail_log_prob must come with tail 'bucket'"},
       [](Call& c) {
         c.top_k = good_top_k(), c.top_k.tail_log_prob = at::full({4}, -3.0), c.options.tail("renormalize");
       }},
      {"tail renormalize with a dense teacher",
       kValue,
       {"tail 'renormalize' must come with a top-k teacher"},
       [](Call& c) { c.options.tail("renormalize"); }},
      {"ignore_index without labels",
       kValue,
       {"an ignore_index must come with labels", "but got 7"},
       [](Call& c) { c.options.labels(std::nullopt).ignore_index(7); }},
      {"top-k indices have another K",
       kValue,
       {"indices must have its log-probabilities' shape [4, 2]", "but got [4, 1]"},
       [](Call& c) { c.top_k = good_top_k(), c.top_k.indices = c.top_k.indices.narrow(1, 0, 1); }},
      {"top-k with K = 0",
       kValue,
       {"must have K >= 1", "but got [4, 0]"},
       [](Call& c) { c.top_k = {at::ones({4, 0}), at::ones({4, 0}, at::kLong)}; }},
      {"top-k with other rows",
       kValue,
       {"with rows [4]", "but got [3, 2]"},
       [](Call& c) { c.top_k = {good_top_k().log_probs.narrow(0, 0, 3), good_top_k().indices.narrow(0, 0, 3)}; }},
      {"top-k index is V",
       kIndex,
       {"indices must be in [0, 10), or -1 as padding", "but got 10 at row 0, column 1"},
       [](Call& c) { c.top_k = good_top_k(), c.top_k.indices = c.top_k.indices + 1; }},
      {"top-k index is twice there",
       kValue,
       {"indices must be distinct in a row", "but got 0 twice at row 0"},
       [](Call& c) { c.top_k = good_top_k(), c.top_k.indices.zero_(); }},
      {"top-k requires grad",
       kValue,
       {"must not require grad"},
       [](Call& c) { c.top_k = good_top_k(), c.top_k.log_probs.requires_grad_(); }},
      {"reverse KL without a tail",
       kValue,
       {"tail 'renormalize' must come with beta < 1", "but got beta 1"},
       [](Call& c) { c.top_k = good_top_k(), c.options.beta(1).tail("renormalize"); }},
      {"student is of integers",
       kType,
       {"must be float64, float32, bfloat16 or float16", "but got Long"},
       [](Call& c) { c.student = c.student.to(at::kLong); }},
      {"student is undefined", kType, {"must be a tensor", "undefined"}, [](Call& c) { c.student = Tensor(); }},
      {"teacher is undefined", kType, {"must be a tensor", "undefined"}, [](Call& c) { c.teacher = Tensor(); }},
      {"teacher is sparse",
       kType,
       {"must be a dense tensor", "Sparse"},
       [](Call& c) { c.teacher = c.teacher.to_sparse(); }},
  };
}

inline std::vector<Case<JsdCall>> jsd_cases() {
  using Call = JsdCall;
  return {
      {"teacher has another V",
       kValue,
       {"teacher must have the student's shape [4, 10]", "but got [4, 9]"},
       [](Call& c) { c.teacher = at::ones({4, 9}); }},
      {"teacher is on another device",
       kValue,
       {"teacher must be on the input's device cpu", "but got meta"},
       [](Call& c) { c.teacher = c.teacher.to(at::kMeta); }},
      {"teacher is of integers",
       kType,
       {"teacher must be float64", "but got Long"},
       [](Call& c) { c.teacher = c.teacher.to(at::kLong); }},
      {"log_probs with a temperature",
       kValue,
       {"log_probs must come with temperature 1", "but got 2"},
       [](Call& c) { c.options.log_probs(true).temperature(2); }},
      {"log_probs with a hard part",
       kValue,
       {"log_probs must come without a hard loss"},
       [](Call& c) { c.options.log_probs(true).hard_weight(1); }},
      {"log_probs with a top-k teacher",
       kValue,
       {"log_probs must come with a dense teacher"},
       [](Call& c) { c.options.log_probs(true), c.top_k = good_top_k(); }},
      {"student is 0-d", kValue, {"student must have shape", "0-d"}, [](Call& c) { c.student = c.student.sum(); }},
  };
}

inline std::vector<Case<LinearJsdCall>> linear_jsd_cases() {
  using Call = LinearJsdCall;
  return {
      {"student_weight is transposed",
       kValue,
       {"student_weight must have shape [V, H] with the student_input's H = 6", "but got [6, 10]"},
       [](Call& c) { c.student_weight = c.student_weight.t(); }},
      {"student_weight is float64",
       kType,
       {"student_weight must be float64 where the student_input is", "but got Double"},
       [](Call& c) { c.student_weight = c.student_weight.to(at::kDouble); }},
      {"teacher_weight has another V",
       kValue,
       {"teacher_weight must have the student's V = 10 rows", "but got [9, 3]"},
       [](Call& c) { c.teacher_weight = at::ones({9, 3}); }},
      {"teacher_weight has another H",
       kValue,
       {"teacher_weight must have shape [V, H] with the teacher_input's H = 3", "but got [10, 6]"},
       [](Call& c) { c.teacher_weight = at::ones({10, 6}); }},
      {"teacher has other rows",
       kValue,
       {"teacher_input must have shape [..., H] with rows [4]", "but got [5, 3]"},
       [](Call& c) { c.teacher = at::ones({5, 3}); }},
      {"teacher requires grad",
       kValue,
       {"teacher_input must not require grad"},
       [](Call& c) { c.teacher.requires_grad_(); }},
      {"teacher_weight requires grad",
       kValue,
       {"teacher_weight must not require grad"},
       [](Call& c) { c.teacher_weight.requires_grad_(); }},
      {"teacher_bias requires grad",
       kValue,
       {"teacher_bias must not require grad"},
       [](Call& c) { c.options.teacher_bias(at::ones({10}).requires_grad_()); }},
      {"student_bias has another V",
       kValue,
       {"student_bias must have shape [V] = [10]", "but got [9]"},
       [](Call& c) { c.options.student_bias(at::ones({9})); }},
      {"teacher_bias with a top-k teacher",
       kValue,
       {"teacher_weight and teacher_bias must be None"},
       [](Call& c) { c.top_k = good_top_k(), c.options.teacher_bias(at::ones({10})); }},
      {"teacher_temperature is 0",
       kValue,
       {"teacher_temperature must be a finite number > 0", "but got 0"},
       [](Call& c) { c.options.teacher_temperature(0); }},
      {"student_softcap < 0",
       kValue,
       {"student_softcap must be a finite number > 0 or None", "but got -3"},
       [](Call& c) { c.options.student_softcap(-3.0); }},
      {"teacher_logit_scale is NaN",
       kValue,
       {"teacher_logit_scale must be a finite number", "but got nan"},
       [](Call& c) { c.options.teacher_logit_scale(kNaN); }},
      {"vocab_size is 0",
       kValue,
       {"vocab_size must be in [1, 10], the rows of student_weight", "but got 0"},
       [](Call& c) { c.options.vocab_size(0); }},
      {"vocab_size exceeds the teacher's",
       kValue,
       {"vocab_size must be in [1, 9], the rows of teacher_weight", "but got 10"},
       [](Call& c) { c.teacher_weight = at::ones({9, 3}), c.options.vocab_size(10); }},
      {"label beyond vocab_size",
       kIndex,
       {"labels must be in [0, 8)", "but got 9 at row 2"},
       [](Call& c) { c.options.vocab_size(8); }},
      {"accumulate_dtype is narrower",
       kType,
       {"accumulate_dtype must be Float or student_weight's dtype", "but got BFloat16"},
       [](Call& c) { c.options.accumulate_dtype(at::kBFloat16); }},
      {"workspace_mib < 0", kValue, {"workspace_mib", "but got -1"}, [](Call& c) { c.options.workspace_mib(-1); }},
  };
}

}  // namespace fusegrad::testing
