// Ops over rows that are independent of each other, whose derivatives are such ops again: their nodes in the graph,
// what forward mode makes of their results, and their batching rules, where a batch is more rows. RowOp<Call> says what
// there is to know of one.
//
// These are nodes of the engine's own kind and not torch::autograd::Functions, which have no forward mode and which
// function transforms refuse.
#pragma once

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "pytorch/autograd/batches.h"
#include "pytorch/autograd/composite_parts.h"
#include "pytorch/ops/faults.h"
#include "pytorch/ops/fields.h"

namespace fusegrad::row_ops {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// Specialised for each op's arguments:
///   kName, kNode                 names: in errors, of the node in a graph
///   kRows                       which dimension of the results is the rows'
///   kConstants                  so many of the results, the last ones, are not differentiated; the backward gets them
///   run(call)                   the op, through the dispatcher
///   differentiable(call)        the inputs that derivatives are by; some may be undefined
///   each_of_rows(call, visit)   visit(tensor, dimension of rows) for all tensors that have rows
///   check_batch(call, batched)  raises where a tensor without rows is batched: `batched(tensor)`
///   gradients(call, constants, upstream, wanted)   of the inputs, each where wanted; upstream may be undefined
template <class Call>
struct RowOp;

inline bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
// In the tensor's dtype: below torch.func a number in a formula makes the tangent of a float32 scalar float64.
inline Tensor tangent_of(const Tensor& t) {
  const auto tangent = t.defined() ? t._fw_grad(/*level=*/0) : Tensor();
  return tangent.defined() ? tangent.to(t.scalar_type()) : tangent;
}
inline Tensor primal_of(const Tensor& t) { return has_tangent(t) ? t._fw_primal(/*level=*/0) : t; }
inline OptionalTensor optional_of(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

inline Tensor with_tangent(Tensor result, const Tensor& tangent) {
  if (tangent.defined()) result._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  return result;
}

// What an op returns, as a list and back.
inline variable_list list_of(const Tensor& result) { return {result}; }
inline variable_list list_of(const std::vector<Tensor>& results) { return results; }
inline variable_list list_of(const std::tuple<Tensor, Tensor>& results) {
  return {std::get<0>(results), std::get<1>(results)};
}
template <class Result>
Result from_list(const variable_list& results) {
  if constexpr (std::is_same_v<Result, Tensor>) {
    return results[0];
  } else if constexpr (std::is_same_v<Result, std::tuple<Tensor, Tensor>>) {
    return {results[0], results[1]};
  } else {
    return results;
  }
}

/// Results of those that are wanted, in the places of all.
inline variable_list in_places(const std::vector<Tensor>& results, const std::vector<bool>& wanted, size_t places) {
  variable_list all(places);
  for (size_t i = 0, next = 0; i < std::min(places, wanted.size()); ++i) {
    if (wanted[i]) all[i] = results[next++];
  }
  return all;
}

/// A call in the graph. Its tensors are saved, and put back for the backward.
template <class Call>
class RowsNode : public Node {
 public:
  explicit RowsNode(const Call& call) : call_(call) {
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
  void save_constant(const Tensor& constant) { constants_.emplace_back(constant, /*is_output=*/false); }

  std::string name() const override { return RowOp<Call>::kNode; }
  void release_variables() override {
    saved_.clear();
    constants_.clear();
    released_ = true;
  }

  variable_list apply(variable_list&& grads) override {
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    std::vector<bool> wanted;
    for (uint32_t i = 0; i < num_outputs(); ++i) wanted.push_back(task_should_compute_output(i));
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); }))
      return variable_list(num_outputs());
    return named_errors(RowOp<Call>::kName, [&] {
      variable_list constants;
      for (const auto& constant : constants_) constants.push_back(constant.unpack());
      return RowOp<Call>::gradients(restored(), constants, grads, wanted);
    });
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
  std::vector<SavedVariable> saved_, constants_;
  bool released_ = false;
};

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
auto recorded(const Call& call) {
  const auto inputs = RowOp<Call>::differentiable(call);
  bool wanted = false;
  for (const auto& t : inputs) wanted = wanted || (t.defined() && torch::autograd::compute_requires_grad(t));
  decltype(make_node<RowsNode<Call>>(call)) node;
  if (wanted) {
    node = make_node<RowsNode<Call>>(call);
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  }
  auto result = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return RowOp<Call>::run(call);
  }();
  if (node != nullptr) {
    auto results = list_of(result);
    for (auto i = results.size() - RowOp<Call>::kConstants; i < results.size(); ++i) {
      static_cast<RowsNode<Call>*>(node.get())->save_constant(results[i]);
    }
    results.resize(results.size() - RowOp<Call>::kConstants);
    torch::autograd::set_history(results, node);
  }
  return result;
}

// --- batches ---

// A batch of `size` as the first rows' dimension's factor: [size, N, ...] as [size * N, ...].
inline Tensor folded(const Tensor& t, std::optional<int64_t> batch, const c10::SymInt& size, int64_t rows) {
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
inline Tensor unfolded(const Tensor& t, const c10::SymInt& size, int64_t rows) {
  std::vector<c10::SymInt> sizes(t.sym_sizes().begin(), t.sym_sizes().end());
  const auto count = sizes[static_cast<size_t>(rows)] / size;
  sizes[static_cast<size_t>(rows)] = size;
  sizes.insert(sizes.begin() + rows + 1, count);
  return t.view_symint(sizes);
}

/// The call of all of a batch. `unwrap(tensor)`: what is in it, and which dimension is the batch's; `wrap(tensor,
/// dim)`.
template <class Call, class Unwrap, class Wrap>
auto of_batch(Call call, const Unwrap& unwrap, const Wrap& wrap) {
  std::optional<c10::SymInt> size;
  RowOp<Call>::check_batch(call, [&](const Tensor& t) { return std::get<1>(unwrap(t)).has_value(); });
  RowOp<Call>::each_of_rows(call, [&](const Tensor& t, int64_t) {
    const auto [value, batch] = unwrap(t);
    if (batch) size = value.sym_size(*batch);
  });
  TORCH_INTERNAL_ASSERT(size.has_value());
  RowOp<Call>::each_of_rows(call, [&](Tensor& t, int64_t rows) {
    const auto [value, batch] = unwrap(t);
    t = folded(value, batch, *size, rows);
  });
  const auto result = RowOp<Call>::run(call);
  variable_list results;
  for (const auto& t : list_of(result))
    results.push_back(wrap(unfolded(t, *size, RowOp<Call>::kRows), RowOp<Call>::kRows));
  return from_list<std::decay_t<decltype(result)>>(results);
}

/// For the torch.vmap that is running: batches of those outside are within the levels between, which come first.
template <class Call>
auto under_vmap(const Call& call) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  const int64_t level = running_level();
  const auto tensors = tensors_of(call);
  const bool any = std::any_of(tensors.begin(), tensors.end(), [level](const Tensor* t) {
    const auto* batched = at::functorch::maybeGetBatchedImpl(*t);
    return batched != nullptr && batched->level() == level;
  });
  if (!any) return RowOp<Call>::run(call);
  const auto unwrap = [level](const Tensor& t) -> std::tuple<Tensor, std::optional<int64_t>> {
    const auto* batched = at::functorch::maybeGetBatchedImpl(t);
    if (batched == nullptr || batched->level() != level) return {t, std::nullopt};
    return {batched->value(), batched->bdim()};
  };
  return of_batch(call, unwrap,
                  [level](const Tensor& t, int64_t dim) { return at::functorch::makeBatched(t, dim, level); });
}

/// For torch.autograd's vectorized functions (is_grads_batched=True, jacobian(vectorize=True)), which have batches of
/// torch's older vmap: the innermost of several first.
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
    TORCH_CHECK_NOT_IMPLEMENTED(others.empty(), RowOp<Call>::kName,
                                ": vectorized derivatives must be batched once, but got a batch of batches; use "
                                "torch.func");
    return {batched->value(), dim};
  };
  // Some of what autograd does with such a batch asks for it to be the outermost in memory.
  return of_batch(call, unwrap, [level](const Tensor& t, int64_t dim) {
    return at::makeBatched(t.movedim(dim, 0).contiguous(), {at::BatchDim(level, 0)});
  });
}

}  // namespace fusegrad::row_ops
