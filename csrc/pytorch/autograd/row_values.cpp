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
// The Hessian of <u, F> is symmetric, which is why _second serves in each place. Rows are independent of each other, so
// a batch is more rows. These are nodes of the engine's own kind and not torch::autograd::Functions, which have no
// forward mode and which function transforms refuse.
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include "pytorch/autograd/batches.h"
#include "pytorch/autograd/composite_parts.h"
#include "pytorch/ops/dispatch.h"
#include "pytorch/ops/faults.h"
#include "pytorch/rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
Tensor tangent_of(const Tensor& t) { return t._fw_grad(/*level=*/0); }
Tensor primal_of(const Tensor& t) { return has_tangent(t) ? t._fw_primal(/*level=*/0) : t; }
OptionalTensor optional_of(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// --- the tensors of a call ---

// visit(tensor, which of its dimensions is the rows'), of the tensors that have rows; those that can be differentiated
// come first.
template <class Visit>
void each_of_rows(CrossEntropyRows& c, const Visit& visit) {
  visit(c.logits, 0);
  visit(c.settings.target, 0);
}
template <class Visit>
void each_of_rows(CrossEntropyRowsGradient& c, const Visit& visit) {
  visit(c.logits, 0);
  visit(c.upstream, 1);
  visit(c.stats, 1);
  visit(c.settings.target, 0);
}
template <class Visit>
void each_of_rows(CrossEntropyRowsTangent& c, const Visit& visit) {
  visit(c.logits, 0);
  visit(c.tangent, 0);
  visit(c.stats, 1);
  visit(c.settings.target, 0);
}
template <class Visit>
void each_of_rows(CrossEntropyRowsSecond& c, const Visit& visit) {
  visit(c.logits, 0);
  visit(c.upstream, 1);
  visit(c.tangent, 0);
  if (c.upstream_tangent) visit(*c.upstream_tangent, 1);
  visit(c.stats, 1);
  visit(c.settings.target, 0);
}

std::vector<Tensor> differentiable(const CrossEntropyRows& c) { return {c.logits}; }
std::vector<Tensor> differentiable(const CrossEntropyRowsGradient& c) { return {c.logits, c.upstream}; }
std::vector<Tensor> differentiable(const CrossEntropyRowsTangent& c) { return {c.logits, c.tangent}; }
std::vector<Tensor> differentiable(const CrossEntropyRowsSecond& c) {
  return {c.logits, c.upstream, c.tangent, c.upstream_tangent.value_or(Tensor())};
}

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
  const auto lse = z.logsumexp(1, /*keepdim=*/true);
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

// --- backward ---

variable_list gradients(const CrossEntropyRows& c, const Tensor& stats, const Tensor& upstream,
                        const std::vector<bool>& /*wanted*/) {
  return {dispatch::cross_entropy_rows(CrossEntropyRowsGradient{c.logits, upstream, stats, c.settings})};
}

variable_list gradients(const CrossEntropyRowsGradient& c, const Tensor& /*stats*/, const Tensor& v,
                        const std::vector<bool>& wanted) {
  variable_list result(2);
  if (wanted[0]) {
    result[0] = dispatch::cross_entropy_rows(
        CrossEntropyRowsSecond{c.logits, c.upstream, v, std::nullopt, c.stats, c.settings});
  }
  if (wanted[1]) result[1] = dispatch::cross_entropy_rows(CrossEntropyRowsTangent{c.logits, v, c.stats, c.settings});
  return result;
}

variable_list gradients(const CrossEntropyRowsTangent& c, const Tensor& /*stats*/, const Tensor& v,
                        const std::vector<bool>& wanted) {
  variable_list result(2);
  if (wanted[0]) {
    result[0] =
        dispatch::cross_entropy_rows(CrossEntropyRowsSecond{c.logits, v, c.tangent, std::nullopt, c.stats, c.settings});
  }
  if (wanted[1]) result[1] = dispatch::cross_entropy_rows(CrossEntropyRowsGradient{c.logits, v, c.stats, c.settings});
  return result;
}

variable_list gradients(CrossEntropyRowsSecond c, const Tensor& /*stats*/, const Tensor& v,
                        const std::vector<bool>& wanted) {
  const bool again = at::GradMode::is_enabled();
  const at::AutoGradMode enabled(true);
  const auto inputs = composite::aliases({{&c.logits, wanted[0]},
                                          {&c.upstream, wanted[1]},
                                          {&c.tangent, wanted[2]},
                                          composite::input_of(c.upstream_tangent, wanted[3])});
  auto found = composite::differentiate({second_formula(c)}, {v}, inputs);
  for (auto& g : found) {
    if (!again && g.defined()) g = g.detach();
  }
  return found;
}

/// A call in the graph. Its tensors are saved, and put back for the backward.
template <class Call>
class RowsNode : public Node {
 public:
  RowsNode(const Call& call, const char* name) : call_(call), name_(name) {
    for_each_field<Call>([&](const auto& field) {
      using Value = typename std::decay_t<decltype(field)>::Value;
      auto& value = field.of(call_);
      if constexpr (std::is_same_v<Value, Tensor>) {
        saved_.emplace_back(value, /*is_output=*/false);
        value.reset();
      } else if constexpr (std::is_same_v<Value, OptionalTensor>) {
        saved_.emplace_back(value.value_or(Tensor()), false);
        if (value) value->reset();
      }
    });
  }
  void save_stats(const Tensor& stats) { stats_ = SavedVariable(stats, /*is_output=*/false); }

  std::string name() const override { return name_; }
  void release_variables() override {
    saved_.clear();
    stats_.reset_data();
    released_ = true;
  }

  variable_list apply(variable_list&& grads) override {
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    std::vector<bool> wanted;
    for (uint32_t i = 0; i < num_outputs(); ++i) wanted.push_back(task_should_compute_output(i));
    if (!grads[0].defined()) return variable_list(num_outputs());
    return named_errors("cross_entropy", [&] { return gradients(restored(), stats_.unpack(), grads[0], wanted); });
  }

 private:
  Call restored() const {
    auto call = call_;
    auto next = saved_.begin();
    for_each_field<Call>([&](const auto& field) {
      using Value = typename std::decay_t<decltype(field)>::Value;
      auto& value = field.of(call);
      if constexpr (std::is_same_v<Value, Tensor>) {
        value = next++->unpack();
      } else if constexpr (std::is_same_v<Value, OptionalTensor>) {
        const auto tensor = next++->unpack();
        if (value) value = tensor;
      }
    });
    return call;
  }

  Call call_;  // without its tensors
  const char* name_;
  std::vector<SavedVariable> saved_;
  SavedVariable stats_;
  bool released_ = false;
};

Tensor first_of(const Tensor& result) { return result; }
Tensor first_of(const RowValuesTuple& result) { return std::get<0>(result); }

/// A node, by the pointer that this version of PyTorch counts it with.
template <class T, class Pointer = decltype(torch::autograd::Edge::function), class... Arguments>
Pointer make_node(const Arguments&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(new T(arguments...), [](auto* node) { deleteNode(node); });  // of a long graph without recursion
  } else {
    return c10::make_intrusive<T>(arguments...);
  }
}

/// The op below, recorded where one of the inputs requires grad. The graph has the inputs with their tangents, of which
/// a backward within forward mode makes those of the gradients.
template <class Call>
auto recorded(const Call& call, const char* name) {
  const auto inputs = differentiable(call);
  bool wanted = false;
  for (const auto& t : inputs) wanted = wanted || torch::autograd::compute_requires_grad(t);
  decltype(make_node<RowsNode<Call>>(call, name)) node;
  if (wanted) {
    node = make_node<RowsNode<Call>>(call, name);
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  }
  auto result = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::cross_entropy_rows(call);
  }();
  if (node != nullptr) {
    torch::autograd::set_history(first_of(result), node);
    if constexpr (std::is_same_v<Call, CrossEntropyRows>) {
      static_cast<RowsNode<Call>*>(node.get())->save_stats(std::get<1>(result));
    }
  }
  return result;
}

// --- forward mode ---

Tensor with_tangent(Tensor result, const Tensor& tangent) {
  if (tangent.defined()) result._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  return result;
}

RowValuesTuple rows_autograd(const CrossEntropyRows& call) {
  if (!has_tangent(call.logits)) return recorded(call, "CrossEntropyRowsBackward");
  const CrossEntropyRows primal{primal_of(call.logits), call.settings};
  const auto [values, stats] = recorded(call, "CrossEntropyRowsBackward");
  return {with_tangent(values, dispatch::cross_entropy_rows(CrossEntropyRowsTangent{
                                   primal.logits, tangent_of(call.logits), stats, call.settings})),
          stats};
}

Tensor gradient_autograd(const CrossEntropyRowsGradient& call) {
  const CrossEntropyRowsGradient primal{primal_of(call.logits), primal_of(call.upstream), call.stats, call.settings};
  auto result = recorded(call, "CrossEntropyRowsGradientBackward");
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
  auto result = recorded(call, "CrossEntropyRowsTangentBackward");
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
  for (const auto& t : differentiable(call)) {
    if (has_tangent(t)) return second_formula(call);
  }
  return recorded(call, "CrossEntropyRowsSecondBackward");
}

// --- batches ---

// A batch of `size` as the first rows' dimension's factor: [size, N, ...] as [size * N, ...].
Tensor folded(const Tensor& t, std::optional<int64_t> batch, const c10::SymInt& size, int64_t rows) {
  Tensor whole;
  if (batch) {
    whole = t.movedim(*batch, rows);
  } else {
    whole = t.unsqueeze(rows);
    std::vector<c10::SymInt> sizes(whole.sym_sizes().begin(), whole.sym_sizes().end());
    sizes[static_cast<size_t>(rows)] = size;
    whole = whole.expand_symint(sizes);
  }
  return whole.flatten(rows, rows + 1);
}
Tensor unfolded(const Tensor& t, const c10::SymInt& size, int64_t rows) {
  std::vector<c10::SymInt> sizes(t.sym_sizes().begin(), t.sym_sizes().end());
  const auto count = sizes[static_cast<size_t>(rows)] / size;
  sizes[static_cast<size_t>(rows)] = size;
  sizes.insert(sizes.begin() + rows + 1, count);
  return t.view_symint(sizes);
}

Tensor again(const Tensor& result, const c10::SymInt& size, int64_t rows, const auto& wrap) {
  return wrap(unfolded(result, size, rows), rows);
}

/// The call of all of a batch. `unwrap(tensor)`: what is in it, and which dimension is the batch's; `wrap(tensor,
/// dim)`.
template <class Call, class Unwrap, class Wrap>
auto of_batch(Call call, const Unwrap& unwrap, const Wrap& wrap) {
  std::optional<c10::SymInt> size;
  if (call.settings.weight) {
    const auto [value, batch] = unwrap(*call.settings.weight);
    TORCH_CHECK_NOT_IMPLEMENTED(!batch, "cross_entropy: class weights must not be batched, but are");
  }
  each_of_rows(call, [&](const Tensor& t, int64_t) {
    const auto [value, batch] = unwrap(t);
    if (batch) size = value.sym_size(*batch);
  });
  TORCH_INTERNAL_ASSERT(size.has_value());
  each_of_rows(call, [&](Tensor& t, int64_t rows) {
    const auto [value, batch] = unwrap(t);
    t = folded(value, batch, *size, rows);
  });
  const auto result = dispatch::cross_entropy_rows(call);
  if constexpr (std::is_same_v<Call, CrossEntropyRows>) {
    return RowValuesTuple(again(std::get<0>(result), *size, 1, wrap), again(std::get<1>(result), *size, 1, wrap));
  } else {
    return again(result, *size, std::is_same_v<Call, CrossEntropyRowsTangent> ? 1 : 0, wrap);
  }
}

// Of torch.vmap: the innermost of several first, whichever is running.
template <class Call>
auto under_vmap(const Call& call) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  int64_t level = -1;
  for (const auto* t : tensors_of(call)) {
    if (const auto* batched = at::functorch::maybeGetBatchedImpl(*t)) level = std::max(level, batched->level());
  }
  if (level < 0) return dispatch::cross_entropy_rows(call);
  const auto unwrap = [level](const Tensor& t) -> std::tuple<Tensor, std::optional<int64_t>> {
    const auto* batched = at::functorch::maybeGetBatchedImpl(t);
    if (batched == nullptr || batched->level() != level) return {t, std::nullopt};
    return {batched->value(), batched->bdim()};
  };
  return of_batch(call, unwrap,
                  [level](const Tensor& t, int64_t dim) { return at::functorch::makeBatched(t, dim, level); });
}

// Of torch.autograd's vectorized functions (is_grads_batched=True, jacobian(vectorize=True)), which have batches of
// torch's older vmap: the innermost of several first.
template <class Call>
auto vectorized(const Call& call) {
  int64_t level = -1;
  for (const auto* t : tensors_of(call)) {
    if (const auto* batched = at::maybeGetBatchedImpl(*t)) {
      for (const auto& dim : batched->bdims()) level = std::max(level, dim.level());
    }
  }
  const auto unwrap = [level](const Tensor& t) -> std::tuple<Tensor, std::optional<int64_t>> {
    const auto* batched = at::maybeGetBatchedImpl(t);
    if (batched == nullptr) return {t, std::nullopt};
    at::BatchDims others;
    std::optional<int64_t> dim;
    for (const auto& each : batched->bdims()) {
      if (each.level() == level) {
        dim = each.dim();
      } else {
        others.push_back(each);
      }
    }
    if (!dim) return {t, std::nullopt};
    TORCH_CHECK_NOT_IMPLEMENTED(others.empty(),
                                "cross_entropy: vectorized derivatives must be batched once, but got a batch of "
                                "batches; use torch.func");
    return {batched->value(), dim};
  };
  // Some of what autograd does with such a batch asks for it to be the outermost in memory.
  return of_batch(call, unwrap, [level](const Tensor& t, int64_t dim) {
    return at::makeBatched(t.movedim(dim, 0).contiguous(), {at::BatchDim(level, 0)});
  });
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
