// The derivatives of jsd_soft (row_function.h). losses/row_kernels.h has the formulas (RowJsd, RowJsdTangents).
#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/row_function.h"
#include "pytorch/ops/dispatch.h"

namespace fusegrad {
namespace {

using at::Tensor;

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

namespace row_ops {

struct OfJsd {
  static constexpr OpName kText{"jsd"};
  static constexpr const char* kName = "jsd";
  static constexpr size_t kInputs = 2, kConstants = 0;
  static constexpr int64_t kValueRows = 0;
  static constexpr std::array<const char*, 4> kOps{"jsd_soft", "jsd_soft_gradient", "jsd_soft_tangent",
                                                   "jsd_soft_second"};
  using Settings = JsdSoftSettings;
  using Values = JsdSoft;
  using Gradient = JsdSoftGradient;
  using Tangent = JsdSoftTangent;
  using Second = JsdSoftSecond;
  using At = Point<OfJsd>;
  using Tangents = std::array<OptionalTensor, 2>;

  static bool is_constant(std::string_view name) { return name == "labels"; }
  static bool has_rows(std::string_view /*name*/) { return true; }
  static std::vector<bool> wanted_of(const Gradient& call) { return {call.needs_grad[0], call.needs_grad[1]}; }
  static At point(const auto& call) { return {{call.student, call.teacher}, {}, call.settings}; }
  static Tensor& values_of(Tensor& result) { return result; }
  static Tensor constant_of(const Tensor& /*result*/) { return {}; }
  static auto run(const auto& call) { return dispatch::jsd_soft(call); }

  static variable_list gradient(const At& p, const Tensor& u, const std::array<bool, 2>& wanted) {
    return in_places(run(Gradient{p.z[0], p.z[1], u, wanted, p.settings}), {wanted[0], wanted[1]}, 2);
  }
  static Tensor tangent(const At& p, const Tangents& t) { return run(Tangent{p.z[0], p.z[1], t[0], t[1], p.settings}); }
  static variable_list second(const At& p, const Tensor& u, const Tangents& t, const OptionalTensor& moved,
                              const std::array<bool, 2>& wanted) {
    return in_places(run(Second{p.z[0], p.z[1], u, t[0], t[1], moved, wanted, p.settings}), {wanted[0], wanted[1]}, 2);
  }
  static Tensor of_values(const At& /*p*/, const Tensor& values, const auto& f) { return f(at::ones_like(values)); }
  static variable_list formula(const Second& call) { return second_formula(call); }
};

template <>
struct RowOp<JsdSoft> : ValuesOp<OfJsd> {
  static constexpr const char* kNode = "JsdSoftBackward";
};
template <>
struct RowOp<JsdSoftGradient> : GradientOp<OfJsd> {
  static constexpr const char* kNode = "JsdSoftGradientBackward";
};
template <>
struct RowOp<JsdSoftTangent> : TangentOp<OfJsd> {
  static constexpr const char* kNode = "JsdSoftTangentBackward";
};
template <>
struct RowOp<JsdSoftSecond> : SecondOp<OfJsd> {
  static constexpr const char* kNode = "JsdSoftSecondBackward";
};

}  // namespace row_ops

TORCH_LIBRARY_IMPL(fusegrad, Autograd, m) { row_ops::implement_autograd<row_ops::OfJsd>(m); }
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) { row_ops::implement_vmap<row_ops::OfJsd>(m); }
TORCH_LIBRARY_IMPL(fusegrad, Batched, m) { row_ops::implement_batched<row_ops::OfJsd>(m); }

}  // namespace fusegrad
