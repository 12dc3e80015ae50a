// The derivatives of jsd_soft, in both modes and of every order, and its batching rules. losses/row_kernels.h has the
// formulas (RowJsd, RowJsdTangents). With F the soft parts, J their Jacobian by both sides' logits z, u an upstream
// gradient, t a tangent of z, and a dot for a tangent in the direction (t, u.):
//
//   op                 is       backward of v, by its inputs          forward mode
//   jsd_soft(z)        F        z: _gradient(z, v)                    _tangent(z, t)
//   _gradient(z, u)    J^T u    z: _second(z, u, v), u: _tangent(z, v)  _second(z, u, t, u.)
//   _tangent(z, t)     J t      z: _second(z, v, t), t: _gradient(z, v) _second(z, 1, t) . z. + _tangent(z, t.)
//   _second(z, u, t, u.)        the formula below, of PyTorch's ops
//
// as row_values.cpp has it for cross entropy.
#include <torch/library.h>

#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/row_nodes.h"
#include "pytorch/ops/dispatch.h"

namespace fusegrad {
namespace {

using namespace row_ops;

// --- the formula of _second ---

// A side's log-probabilities, as functions of which the divergence is taken, and what leads from them to its values.
struct Side {
  Tensor log, probability, moved;  // and the tangent of log; both logarithms are 0 where the probability is
  Tensor slope, curve;             // d z / d x, and the tangent of that; undefined: `scale`, and 0
  double scale;

  Side(const Tensor& given, const OptionalTensor& tangent, double logit_scale, double softcap, double temperature,
       const std::optional<composite::Labels>& labels, bool log_probs)
      : scale(logit_scale / temperature) {
    const auto acc = acc_type(given.scalar_type());
    auto x = given.to(acc);
    if (labels) x = labels->without_ignored(x);
    moved = tangent ? tangent->to(acc) : at::zeros_like(x);
    if (softcap != 0.0) {
      const auto t = (x * (logit_scale / softcap)).tanh();
      slope = (1 - t * t) * scale;
      curve = slope * t * moved * (-2 * logit_scale / softcap);
      log = t * (softcap / temperature);
      moved = slope * moved;
    } else {
      log = x * scale;
      moved = moved * scale;
    }
    if (!log_probs) log = composite::log_softmax(log);
    probability = log.exp();
    none = probability.detach().eq(0);
    log = log.masked_fill(none, 0);
    if (!log_probs) moved = moved - (probability * moved.masked_fill(none, 0)).sum(1, /*keepdim=*/true);
  }
  // What a probability of 0 is a factor of is left out, whatever its value.
  Tensor times(const Tensor& x) const { return probability * x.masked_fill(none, 0); }
  Tensor by_value(const Tensor& gradient, const Tensor& first, const Tensor& like) const {
    const auto found = slope.defined() ? slope * gradient + curve * first : gradient * scale;
    return found.to(like.scalar_type());
  }

 private:
  Tensor none;
};

std::vector<Tensor> second_formula(const JsdSoftSecond& call) {
  const auto& s = call.settings;
  std::optional<composite::Labels> labels;
  if (s.labels) labels.emplace(*s.labels, s.ignore_index, call.student.sym_size(1).guard_int(__FILE__, __LINE__));
  const Side student(call.student, call.student_tangent, s.student_logit_scale, s.student_softcap,
                     s.student_temperature, labels, s.log_probs);
  const Side teacher(call.teacher, call.teacher_tangent, s.teacher_logit_scale, s.teacher_softcap,
                     s.teacher_temperature, labels, s.log_probs);
  const auto row = [&](const Tensor& values) {
    const auto all = labels ? labels->of_rows(values) : values;
    return all.unsqueeze(1);
  };
  const auto upstream = row(call.upstream);
  const bool mixed = s.beta > 0 && s.beta < 1;
  const double normalized = s.log_probs ? 0 : 1;
  // By one side's value: x, of which `share` is the weight in the mixture, beside y. `end`: all is n x - y.
  const auto gradient = [&](const Side& x, const Side& y, double share, bool end, const Tensor& like) {
    Tensor g, moved;
    if (end) {
      g = normalized * x.probability - y.probability;
      moved = normalized * x.times(x.moved) - y.times(y.moved);
    } else {
      Tensor ratio, r;
      if (mixed) {
        const auto sum = share * x.probability + (1 - share) * y.probability;
        const auto m = sum.masked_fill(sum.detach().eq(0), 1);
        ratio = share * (x.log - m.log());
        r = share * (1 - share) * x.probability * y.probability / m;
      } else {
        ratio = x.log - y.log + (1 - normalized);
        r = x.probability;
      }
      const auto none = r.detach().eq(0);
      const auto apart = r * (x.moved - y.moved).masked_fill(none, 0);
      if (!s.log_probs) ratio = ratio - x.times(ratio).sum(1, /*keepdim=*/true);
      g = x.times(ratio);
      moved = x.times(ratio * x.moved) + apart;
      if (!s.log_probs) {
        // A. is what makes the sum 0.
        moved = moved - x.probability * moved.sum(1, /*keepdim=*/true);
      }
    }
    auto tangent = upstream * moved;
    if (call.upstream_tangent) tangent = tangent + row(*call.upstream_tangent) * g;
    return x.by_value(tangent, upstream * g, like);
  };
  std::vector<Tensor> wanted;
  if (call.needs_grad[0]) wanted.push_back(gradient(student, teacher, 1 - s.beta, s.beta == 0, call.student));
  if (call.needs_grad[1]) wanted.push_back(gradient(teacher, student, s.beta, s.beta == 1, call.teacher));
  return wanted;
}

}  // namespace

// --- what the nodes and batches need ---

namespace row_ops {

struct OfJsd {
  static constexpr const char* kName = "jsd";
  static constexpr int64_t kRows = 0;
  static constexpr size_t kConstants = 0;

  template <class Call>
  static auto run(const Call& call) {
    return dispatch::jsd_soft(call);
  }
  template <class Call, class Batched>
  static void check_batch(const Call& /*call*/, const Batched& /*batched*/) {}

  static void visit_all(JsdSoftSettings& settings, const auto& visit, std::initializer_list<Tensor*> tensors,
                        std::initializer_list<OptionalTensor*> optional = {}) {
    for (auto* t : tensors) visit(*t, 0);
    for (auto* t : optional) {
      if (*t) visit(**t, 0);
    }
    if (settings.labels) visit(*settings.labels, 0);
  }
  static std::array<bool, 2> both(const std::vector<bool>& wanted) { return {wanted[0], wanted[1]}; }
};

template <>
struct RowOp<JsdSoft> : OfJsd {
  using Call = JsdSoft;
  static constexpr const char* kNode = "JsdSoftBackward";

  static variable_list differentiable(const Call& c) { return {c.student, c.teacher}; }
  static void each_of_rows(Call& c, const auto& visit) { visit_all(c.settings, visit, {&c.student, &c.teacher}); }
  static variable_list gradients(const Call& c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    return in_places(dispatch::jsd_soft(JsdSoftGradient{c.student, c.teacher, v[0], both(wanted), c.settings}), wanted,
                     2);
  }
};

template <>
struct RowOp<JsdSoftGradient> : OfJsd {
  using Call = JsdSoftGradient;
  static constexpr const char* kNode = "JsdSoftGradientBackward";

  static variable_list differentiable(const Call& c) { return {c.student, c.teacher, c.upstream}; }
  static void each_of_rows(Call& c, const auto& visit) {
    visit_all(c.settings, visit, {&c.student, &c.teacher, &c.upstream});
  }
  static variable_list gradients(const Call& c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    // Tangents in the place of student and teacher.
    const auto tangents = in_places(v, {c.needs_grad[0], c.needs_grad[1]}, 2);
    const auto by_student = optional_of(tangents[0]), by_teacher = optional_of(tangents[1]);
    variable_list result(3);
    if (wanted[0] || wanted[1]) {
      const auto second = dispatch::jsd_soft(JsdSoftSecond{c.student, c.teacher, c.upstream, by_student, by_teacher,
                                                           std::nullopt, both(wanted), c.settings});
      const auto placed = in_places(second, wanted, 2);
      std::copy(placed.begin(), placed.end(), result.begin());
    }
    if (wanted[2])
      result[2] = dispatch::jsd_soft(JsdSoftTangent{c.student, c.teacher, by_student, by_teacher, c.settings});
    return result;
  }
};

template <>
struct RowOp<JsdSoftTangent> : OfJsd {
  using Call = JsdSoftTangent;
  static constexpr const char* kNode = "JsdSoftTangentBackward";

  static variable_list differentiable(const Call& c) {
    return {c.student, c.teacher, c.student_tangent.value_or(Tensor()), c.teacher_tangent.value_or(Tensor())};
  }
  static void each_of_rows(Call& c, const auto& visit) {
    visit_all(c.settings, visit, {&c.student, &c.teacher}, {&c.student_tangent, &c.teacher_tangent});
  }
  static variable_list gradients(const Call& c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    variable_list result(4);
    if (wanted[0] || wanted[1]) {
      const auto second = dispatch::jsd_soft(JsdSoftSecond{c.student, c.teacher, v[0], c.student_tangent,
                                                           c.teacher_tangent, std::nullopt, both(wanted), c.settings});
      const auto placed = in_places(second, wanted, 2);
      std::copy(placed.begin(), placed.end(), result.begin());
    }
    if (wanted[2] || wanted[3]) {
      const std::vector<bool> sides{wanted[2], wanted[3]};
      const auto first = dispatch::jsd_soft(JsdSoftGradient{c.student, c.teacher, v[0], both(sides), c.settings});
      const auto placed = in_places(first, sides, 2);
      std::copy(placed.begin(), placed.end(), result.begin() + 2);
    }
    return result;
  }
};

template <>
struct RowOp<JsdSoftSecond> : OfJsd {
  using Call = JsdSoftSecond;
  static constexpr const char* kNode = "JsdSoftSecondBackward";

  static variable_list differentiable(const Call& c) {
    return {c.student,
            c.teacher,
            c.upstream,
            c.student_tangent.value_or(Tensor()),
            c.teacher_tangent.value_or(Tensor()),
            c.upstream_tangent.value_or(Tensor())};
  }
  static void each_of_rows(Call& c, const auto& visit) {
    visit_all(c.settings, visit, {&c.student, &c.teacher, &c.upstream},
              {&c.student_tangent, &c.teacher_tangent, &c.upstream_tangent});
  }
  static variable_list gradients(Call c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    return composite::pulled([&] { return second_formula(c); }, v,
                             {{&c.student, wanted[0]},
                              {&c.teacher, wanted[1]},
                              {&c.upstream, wanted[2]},
                              composite::input_of(c.student_tangent, wanted[3]),
                              composite::input_of(c.teacher_tangent, wanted[4]),
                              composite::input_of(c.upstream_tangent, wanted[5])});
  }
};

}  // namespace row_ops

namespace {

// --- forward mode ---

Tensor soft_autograd(const JsdSoft& call) {
  const auto result = recorded(call);
  if (!has_tangent(call.student) && !has_tangent(call.teacher)) return result;
  return with_tangent(result, dispatch::jsd_soft(JsdSoftTangent{primal_of(call.student), primal_of(call.teacher),
                                                                optional_of(tangent_of(call.student)),
                                                                optional_of(tangent_of(call.teacher)), call.settings}));
}

std::vector<Tensor> soft_gradient_autograd(const JsdSoftGradient& call) {
  auto results = recorded(call);
  const auto student = primal_of(call.student), teacher = primal_of(call.teacher);
  const auto by_student = tangent_of(call.student), by_teacher = tangent_of(call.teacher),
             by_upstream = tangent_of(call.upstream);
  std::vector<Tensor> tangents;
  if (by_student.defined() || by_teacher.defined()) {
    tangents = dispatch::jsd_soft(JsdSoftSecond{student, teacher, primal_of(call.upstream), optional_of(by_student),
                                                optional_of(by_teacher), optional_of(by_upstream), call.needs_grad,
                                                call.settings});
  } else if (by_upstream.defined()) {
    tangents = dispatch::jsd_soft(JsdSoftGradient{student, teacher, by_upstream, call.needs_grad, call.settings});
  }
  for (size_t i = 0; i < tangents.size(); ++i) results[i] = with_tangent(results[i], tangents[i]);
  return results;
}

Tensor soft_tangent_autograd(const JsdSoftTangent& call) {
  const auto student = primal_of(call.student), teacher = primal_of(call.teacher);
  const auto primal = [](const OptionalTensor& t) { return t ? OptionalTensor(primal_of(*t)) : std::nullopt; };
  const auto tangent_of_optional = [](const OptionalTensor& t) {
    return optional_of(tangent_of(t.value_or(Tensor())));
  };
  const auto result = recorded(call);
  const auto second_student = tangent_of_optional(call.student_tangent),
             second_teacher = tangent_of_optional(call.teacher_tangent);
  Tensor tangent;
  if (second_student || second_teacher) {
    tangent = dispatch::jsd_soft(JsdSoftTangent{student, teacher, second_student, second_teacher, call.settings});
  }
  const std::array by{tangent_of(call.student), tangent_of(call.teacher)};
  if (by[0].defined() || by[1].defined()) {
    // In acc, as the sum is over products with it.
    const auto acc = acc_type(student.scalar_type());
    const auto in_acc = [&](const OptionalTensor& t) { return t ? OptionalTensor(t->to(acc)) : std::nullopt; };
    const auto columns = dispatch::jsd_soft(JsdSoftSecond{student.to(acc),
                                                          teacher.to(acc),
                                                          at::ones_like(result),
                                                          in_acc(primal(call.student_tangent)),
                                                          in_acc(primal(call.teacher_tangent)),
                                                          std::nullopt,
                                                          {by[0].defined(), by[1].defined()},
                                                          call.settings});
    auto next = columns.begin();
    for (const auto& t : by) {
      if (!t.defined()) continue;
      const auto& column = *next++;
      // A column that the second derivative leaves out stays out, whatever its tangent.
      const auto curved = (column * t.to(acc).masked_fill(column.detach().eq(0), 0)).sum(1);
      tangent = tangent.defined() ? tangent + curved : curved;
    }
  }
  return with_tangent(result, tangent);
}

std::vector<Tensor> soft_second_autograd(const JsdSoftSecond& call) {
  for (const auto& t : RowOp<JsdSoftSecond>::differentiable(call)) {
    if (has_tangent(t)) return second_formula(call);
  }
  return recorded(call);
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, Autograd, m) {
  m.impl("jsd_soft", named_kernel<"jsd", unpacked<soft_autograd>()>());
  m.impl("jsd_soft_gradient", named_kernel<"jsd", unpacked<soft_gradient_autograd>()>());
  m.impl("jsd_soft_tangent", named_kernel<"jsd", unpacked<soft_tangent_autograd>()>());
  m.impl("jsd_soft_second", named_kernel<"jsd", unpacked<soft_second_autograd>()>());
}

TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) {
  m.impl("jsd_soft", named_kernel<"jsd", unpacked<under_vmap<JsdSoft>>()>());
  m.impl("jsd_soft_gradient", named_kernel<"jsd", unpacked<under_vmap<JsdSoftGradient>>()>());
  m.impl("jsd_soft_tangent", named_kernel<"jsd", unpacked<under_vmap<JsdSoftTangent>>()>());
  m.impl("jsd_soft_second", named_kernel<"jsd", unpacked<under_vmap<JsdSoftSecond>>()>());
}

TORCH_LIBRARY_IMPL(fusegrad, Batched, m) {
  m.impl("jsd_soft", named_kernel<"jsd", unpacked<vectorized<JsdSoft>>()>());
  m.impl("jsd_soft_gradient", named_kernel<"jsd", unpacked<vectorized<JsdSoftGradient>>()>());
  m.impl("jsd_soft_tangent", named_kernel<"jsd", unpacked<vectorized<JsdSoftTangent>>()>());
  m.impl("jsd_soft_second", named_kernel<"jsd", unpacked<vectorized<JsdSoftSecond>>()>());
}

}  // namespace fusegrad
