// The derivatives of cross_entropy_rows, in both modes and of every order, and its batching rules. losses/row_kernels.h
// has the formulas (RowForward, RowGradient, RowTangents). With F the values, J their Jacobian by the logits z, u an
// upstream gradient, t a tangent of the logits, and a dot for a tangent in the direction (t, u.):
//
//   op                 is       backward of v, by its inputs          forward mode
//   _rows(z)           F        z: _gradient(z, v)                    _tangent(z, t)
//   _gradient(z, u)    J^T u    z: _second(z, u, v), u: _tangent(z, v)  _second(z, u, t, u.)
//   _tangent(z, t)     J t      z: _second(z, v, t), t: _gradient(z, v) _second(z, e, t) . z. + _tangent(z, t.)
//   _second(z, u, t, u.)        the formula below, of PyTorch's ops
//
// The Hessian of <u, F> is symmetric, which is why _second serves in each place.
#include <torch/library.h>

#include "pytorch/autograd/row_nodes.h"
#include "pytorch/ops/dispatch.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using namespace row_ops;

// --- the formula of _second ---

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

// --- what the nodes and batches need ---

namespace row_ops {

struct OfCrossEntropy {
  static constexpr const char* kName = "cross_entropy";
  static constexpr size_t kConstants = 0;

  template <class Call>
  static auto run(const Call& call) {
    return dispatch::cross_entropy_rows(call);
  }
  template <class Call, class Batched>
  static void check_batch(const Call& c, const Batched& batched) {
    TORCH_CHECK_NOT_IMPLEMENTED(!c.settings.weight || !batched(*c.settings.weight),
                                "cross_entropy: class weights must not be batched, but are");
  }
};

template <>
struct RowOp<CrossEntropyRows> : OfCrossEntropy {
  using Call = CrossEntropyRows;
  static constexpr const char* kNode = "CrossEntropyRowsBackward";
  static constexpr int64_t kRows = 1;
  static constexpr size_t kConstants = 1;  // stats

  static variable_list differentiable(const Call& c) { return {c.logits}; }
  static void each_of_rows(Call& c, const auto& visit) {
    visit(c.logits, 0);
    visit(c.settings.target, 0);
  }
  static variable_list gradients(const Call& c, const variable_list& constants, const variable_list& v,
                                 const std::vector<bool>& /*wanted*/) {
    return {dispatch::cross_entropy_rows(CrossEntropyRowsGradient{c.logits, v[0], constants[0], c.settings})};
  }
};

template <>
struct RowOp<CrossEntropyRowsGradient> : OfCrossEntropy {
  using Call = CrossEntropyRowsGradient;
  static constexpr const char* kNode = "CrossEntropyRowsGradientBackward";
  static constexpr int64_t kRows = 0;

  static variable_list differentiable(const Call& c) { return {c.logits, c.upstream}; }
  static void each_of_rows(Call& c, const auto& visit) {
    visit(c.logits, 0);
    visit(c.upstream, 1);
    visit(c.stats, 1);
    visit(c.settings.target, 0);
  }
  static variable_list gradients(const Call& c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    variable_list result(2);
    if (wanted[0]) {
      result[0] = dispatch::cross_entropy_rows(
          CrossEntropyRowsSecond{c.logits, c.upstream, v[0], std::nullopt, c.stats, c.settings});
    }
    if (wanted[1])
      result[1] = dispatch::cross_entropy_rows(CrossEntropyRowsTangent{c.logits, v[0], c.stats, c.settings});
    return result;
  }
};

template <>
struct RowOp<CrossEntropyRowsTangent> : OfCrossEntropy {
  using Call = CrossEntropyRowsTangent;
  static constexpr const char* kNode = "CrossEntropyRowsTangentBackward";
  static constexpr int64_t kRows = 1;

  static variable_list differentiable(const Call& c) { return {c.logits, c.tangent}; }
  static void each_of_rows(Call& c, const auto& visit) {
    visit(c.logits, 0);
    visit(c.tangent, 0);
    visit(c.stats, 1);
    visit(c.settings.target, 0);
  }
  static variable_list gradients(const Call& c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    variable_list result(2);
    if (wanted[0]) {
      result[0] = dispatch::cross_entropy_rows(
          CrossEntropyRowsSecond{c.logits, v[0], c.tangent, std::nullopt, c.stats, c.settings});
    }
    if (wanted[1])
      result[1] = dispatch::cross_entropy_rows(CrossEntropyRowsGradient{c.logits, v[0], c.stats, c.settings});
    return result;
  }
};

template <>
struct RowOp<CrossEntropyRowsSecond> : OfCrossEntropy {
  using Call = CrossEntropyRowsSecond;
  static constexpr const char* kNode = "CrossEntropyRowsSecondBackward";
  static constexpr int64_t kRows = 0;

  static variable_list differentiable(const Call& c) {
    return {c.logits, c.upstream, c.tangent, c.upstream_tangent.value_or(Tensor())};
  }
  static void each_of_rows(Call& c, const auto& visit) {
    visit(c.logits, 0);
    visit(c.upstream, 1);
    visit(c.tangent, 0);
    if (c.upstream_tangent) visit(*c.upstream_tangent, 1);
    visit(c.stats, 1);
    visit(c.settings.target, 0);
  }
  static variable_list gradients(Call c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    return composite::pulled([&] { return variable_list{second_formula(c)}; }, v,
                             {{&c.logits, wanted[0]},
                              {&c.upstream, wanted[1]},
                              {&c.tangent, wanted[2]},
                              composite::input_of(c.upstream_tangent, wanted[3])});
  }
};

}  // namespace row_ops

namespace {

// --- forward mode ---

RowValuesTuple rows_autograd(const CrossEntropyRows& call) {
  if (!has_tangent(call.logits)) return recorded(call);
  const CrossEntropyRows primal{primal_of(call.logits), call.settings};
  const auto [values, stats] = recorded(call);
  return {with_tangent(values, dispatch::cross_entropy_rows(CrossEntropyRowsTangent{
                                   primal.logits, tangent_of(call.logits), stats, call.settings})),
          stats};
}

Tensor gradient_autograd(const CrossEntropyRowsGradient& call) {
  const CrossEntropyRowsGradient primal{primal_of(call.logits), primal_of(call.upstream), call.stats, call.settings};
  auto result = recorded(call);
  const auto by_logits = tangent_of(call.logits), by_upstream = tangent_of(call.upstream);
  Tensor tangent;
  if (by_logits.defined()) {
    tangent = dispatch::cross_entropy_rows(CrossEntropyRowsSecond{primal.logits, primal.upstream, by_logits,
                                                                  optional_of(by_upstream), call.stats, call.settings});
  } else if (by_upstream.defined()) {
    tangent =
        dispatch::cross_entropy_rows(CrossEntropyRowsGradient{primal.logits, by_upstream, call.stats, call.settings});
  }
  return with_tangent(result, tangent);
}

Tensor tangent_autograd(const CrossEntropyRowsTangent& call) {
  const auto& s = call.settings;
  const CrossEntropyRowsTangent primal{primal_of(call.logits), primal_of(call.tangent), call.stats, s};
  auto result = recorded(call);
  const auto by_logits = tangent_of(call.logits), by_tangent = tangent_of(call.tangent);
  Tensor tangent;
  if (by_tangent.defined()) {
    tangent = dispatch::cross_entropy_rows(CrossEntropyRowsTangent{primal.logits, by_tangent, call.stats, s});
  }
  if (by_logits.defined()) {
    // In acc, as the sum is over products with it.
    const auto acc = acc_type(call.logits.scalar_type());
    const auto logits = primal.logits.to(acc), first = primal.tangent.to(acc), second = by_logits.to(acc);
    std::vector<Tensor> rows;
    for (int64_t i = 0; i < kRowValues; ++i) {
      const auto unit = at::zeros_like(call.stats.slice(0, 0, kRowValues))
                            .index_fill(0, at::full({1}, i, call.stats.options().dtype(at::kLong)), 1);
      const bool there =
          (i != kRowEntropy || (s.aux & kAuxEntropy) != 0) && (i != kRowLogProb || (s.aux & kAuxTokenLogProb) != 0);
      if (!there) {
        rows.push_back(at::zeros_like(unit.select(0, i)));
        continue;
      }
      const auto column =
          dispatch::cross_entropy_rows(CrossEntropyRowsSecond{logits, unit, first, std::nullopt, call.stats, s});
      // A column that the second derivative leaves out stays out, whatever its tangent.
      rows.push_back((column * second.masked_fill(column.detach().eq(0), 0)).sum(1));
    }
    const auto curved = at::stack(rows);
    tangent = tangent.defined() ? tangent + curved : curved;
  }
  return with_tangent(result, tangent);
}

Tensor second_autograd(const CrossEntropyRowsSecond& call) {
  for (const auto& t : RowOp<CrossEntropyRowsSecond>::differentiable(call)) {
    if (has_tangent(t)) return second_formula(call);
  }
  return recorded(call);
}

void implement_row_autograd(torch::Library& m) {
  m.impl("cross_entropy_rows", named_kernel<"cross_entropy", unpacked<rows_autograd>()>());
  m.impl("cross_entropy_rows_gradient", named_kernel<"cross_entropy", unpacked<gradient_autograd>()>());
  m.impl("cross_entropy_rows_tangent", named_kernel<"cross_entropy", unpacked<tangent_autograd>()>());
  m.impl("cross_entropy_rows_second", named_kernel<"cross_entropy", unpacked<second_autograd>()>());
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, Autograd, m) { implement_row_autograd(m); }

TORCH_LIBRARY_IMPL(fusegrad, FuncTorchBatched, m) {
  m.impl("cross_entropy_rows", named_kernel<"cross_entropy", unpacked<under_vmap<CrossEntropyRows>>()>());
  m.impl("cross_entropy_rows_gradient",
         named_kernel<"cross_entropy", unpacked<under_vmap<CrossEntropyRowsGradient>>()>());
  m.impl("cross_entropy_rows_tangent",
         named_kernel<"cross_entropy", unpacked<under_vmap<CrossEntropyRowsTangent>>()>());
  m.impl("cross_entropy_rows_second", named_kernel<"cross_entropy", unpacked<under_vmap<CrossEntropyRowsSecond>>()>());
}

TORCH_LIBRARY_IMPL(fusegrad, Batched, m) {
  m.impl("cross_entropy_rows", named_kernel<"cross_entropy", unpacked<vectorized<CrossEntropyRows>>()>());
  m.impl("cross_entropy_rows_gradient",
         named_kernel<"cross_entropy", unpacked<vectorized<CrossEntropyRowsGradient>>()>());
  m.impl("cross_entropy_rows_tangent",
         named_kernel<"cross_entropy", unpacked<vectorized<CrossEntropyRowsTangent>>()>());
  m.impl("cross_entropy_rows_second", named_kernel<"cross_entropy", unpacked<vectorized<CrossEntropyRowsSecond>>()>());
}

}  // namespace fusegrad
