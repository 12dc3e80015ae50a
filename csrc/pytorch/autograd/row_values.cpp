// The derivatives of cross_entropy_rows (row_function.h). losses/row_kernels.h has the formulas (RowForward,
// RowGradient, RowTangents).
#include "pytorch/autograd/row_function.h"
#include "pytorch/ops/dispatch.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;

Tensor second_formula(const CrossEntropyRowsSecond& call) {
  const auto& s = call.settings;
  const auto acc = acc_type(call.logits.scalar_type());
  const auto columns = call.logits.sym_size(1).guard_int(__FILE__, __LINE__);
  const bool lse_of_ignored = (s.aux & kAuxLse) != 0;
  auto x = call.logits.to(acc);
  Tensor kept, wrong, at_target, coefficients;
  if (s.target.is_floating_point()) {
    coefficients = s.target.to(acc) * (1 - s.label_smoothing) + s.label_smoothing / static_cast<double>(columns);
    if (s.weight) coefficients = coefficients * *s.weight;
  } else {
    const composite::Labels labels(s.target, s.ignore_index, columns);
    kept = labels.valid.unsqueeze(1);
    wrong = labels.wrong.unsqueeze(1);
    if (!lse_of_ignored) x = labels.without_ignored(x);
    const auto index = labels.index.unsqueeze(1);
    at_target = at::zeros_like(x.detach()).scatter(1, index, 1);
    coefficients = at_target * (1 - s.label_smoothing);
    if (s.weight) coefficients = coefficients * *s.weight;
    const auto uniform = at::ones_like(x.detach()) * (s.label_smoothing / static_cast<double>(columns));
    coefficients = coefficients + (s.weight ? uniform * *s.weight : uniform);
  }
  auto tangent = call.tangent.to(acc);
  Tensor slope, curve;
  auto z = x;
  if (s.softcap != 0.0) {
    const auto t = (x / s.softcap).tanh();
    z = t * s.softcap;
    slope = 1 - t * t;
    curve = slope * t * (-2 / s.softcap) * tangent;
    tangent = slope * tangent;
  }
  const auto lse = composite::logsumexp(z, /*keepdim=*/true);
  const auto p = (z - lse).exp();
  // Where p is 0 all that it is a factor of is left out, whatever its value.
  const auto none = p.detach().eq(0);
  z = z.masked_fill(none, 0);
  const auto moved = tangent.masked_fill(none, 0);
  const auto mean = (p * z).sum(1, true), lse_tangent = (p * moved).sum(1, true);
  const auto away = (z - mean).masked_fill(none, 0);
  const auto mean_tangent = (p * away * moved).sum(1, true) + lse_tangent;
  struct Upstream {
    Tensor B, C, D, E, k;
  };
  const auto read = [&](const Tensor& all) {
    const auto row = [&](int64_t i) {
      const auto value = all.select(0, i).unsqueeze(1);
      return kept.defined() ? value.masked_fill(kept.logical_not(), 0) : value;
    };
    Upstream u{row(kRowCrossEntropy), row(kRowLse), row(kRowEntropy), row(kRowLogProb), {}};
    if (lse_of_ignored) u.C = all.select(0, kRowLse).unsqueeze(1);
    if ((s.aux & kAuxEntropy) == 0) u.D = at::zeros_like(u.D);
    if ((s.aux & kAuxTokenLogProb) == 0) u.E = at::zeros_like(u.E);
    u.k = coefficients.sum(1, true) * u.B + u.C - u.E;
    return u;
  };
  const auto u = read(call.upstream);
  auto g = p * ((moved - lse_tangent) * (u.k - u.D * away) - u.D * (moved - mean_tangent));
  if (call.upstream_tangent) {
    const auto v = read(*call.upstream_tangent);
    g = g + p * (v.k - v.D * away) - v.B * coefficients;
    if (at_target.defined()) g = g + v.E * at_target;
  }
  if (slope.defined()) {
    auto first = p * (u.k - u.D * away) - u.B * coefficients;
    if (at_target.defined()) first = first + u.E * at_target;
    g = slope * g + curve * first;
  }
  if (wrong.defined()) g = g.masked_fill(wrong, composite::kNaN);
  return g.to(call.logits.scalar_type());
}

}  // namespace

namespace row_ops {

struct OfCrossEntropy {
  static constexpr OpName kText{"cross_entropy"};
  static constexpr const char* kName = "cross_entropy";
  static constexpr size_t kInputs = 1, kConstants = 1;
  static constexpr int64_t kValueRows = 1;
  static constexpr std::array<const char*, 4> kOps{"cross_entropy_rows", "cross_entropy_rows_gradient",
                                                   "cross_entropy_rows_tangent", "cross_entropy_rows_second"};
  using Settings = RowSettings;
  using Values = CrossEntropyRows;
  using Gradient = CrossEntropyRowsGradient;
  using Tangent = CrossEntropyRowsTangent;
  using Second = CrossEntropyRowsSecond;
  using At = Point<OfCrossEntropy>;
  using Tangents = std::array<OptionalTensor, 1>;

  static bool is_constant(std::string_view name) { return name == "stats" || name == "target" || name == "weight"; }
  static bool has_rows(std::string_view name) { return name != "weight"; }
  static std::vector<bool> wanted_of(const Gradient& /*call*/) { return {true}; }
  static At point(const auto& call) {
    At found{{call.logits}, {}, call.settings};
    if constexpr (requires { call.stats; }) found.constant = call.stats;
    return found;
  }
  static Tensor& values_of(RowValuesTuple& result) { return std::get<0>(result); }
  static Tensor constant_of(const RowValuesTuple& result) { return std::get<1>(result); }
  static auto run(const auto& call) { return dispatch::cross_entropy_rows(call); }

  static variable_list gradient(const At& p, const Tensor& u, const std::array<bool, 1>& /*wanted*/) {
    return {run(Gradient{p.z[0], u, p.constant, p.settings})};
  }
  static Tensor tangent(const At& p, const Tangents& t) { return run(Tangent{p.z[0], *t[0], p.constant, p.settings}); }
  static variable_list second(const At& p, const Tensor& u, const Tangents& t, const OptionalTensor& moved,
                              const std::array<bool, 1>& /*wanted*/) {
    return {run(Second{p.z[0], u, *t[0], moved, p.constant, p.settings})};
  }
  static Tensor of_values(const At& p, const Tensor& values, const auto& f) {
    std::vector<Tensor> rows;
    for (int64_t i = 0; i < kRowValues; ++i) {
      const auto unit = at::zeros_like(values).index_fill(0, at::full({1}, i, values.options().dtype(at::kLong)), 1);
      const bool there = (i != kRowEntropy || (p.settings.aux & kAuxEntropy) != 0) &&
                         (i != kRowLogProb || (p.settings.aux & kAuxTokenLogProb) != 0);
      rows.push_back(there ? f(unit) : at::zeros_like(unit.select(0, i)));
    }
    return at::stack(rows);
  }
  static variable_list formula(const Second& call) { return {second_formula(call)}; }
};

template <>
struct RowOp<CrossEntropyRows> : ValuesOp<OfCrossEntropy> {
  static constexpr const char* kNode = "CrossEntropyRowsBackward";
};
template <>
struct RowOp<CrossEntropyRowsGradient> : GradientOp<OfCrossEntropy> {
  static constexpr const char* kNode = "CrossEntropyRowsGradientBackward";
};
template <>
struct RowOp<CrossEntropyRowsTangent> : TangentOp<OfCrossEntropy> {
  static constexpr const char* kNode = "CrossEntropyRowsTangentBackward";
};
template <>
struct RowOp<CrossEntropyRowsSecond> : SecondOp<OfCrossEntropy> {
  static constexpr const char* kNode = "CrossEntropyRowsSecondBackward";
};

}  // namespace row_ops

TORCH_LIBRARY_IMPL(fusegrad, Autograd, m) { row_ops::implement_autograd<row_ops::OfCrossEntropy>(m); }
TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) { row_ops::implement_vmap<row_ops::OfCrossEntropy>(m); }
TORCH_LIBRARY_IMPL(fusegrad, Batched, m) { row_ops::implement_batched<row_ops::OfCrossEntropy>(m); }

}  // namespace fusegrad
