// A function of rows whose derivatives are ops too: its four ops in the graph, in forward mode and in batches. With F
// the values, J their Jacobian by the inputs z, u an upstream gradient, t a tangent of z, and a dot for a tangent in
// the direction (t, u.):
//
//   op                 is       backward of v, by its inputs            forward mode
//   values(z)          F        z: gradient(z, v)                       tangent(z, t)
//   gradient(z, u)     J^T u    z: second(z, u, v), u: tangent(z, v)    second(z, u, t, u.)
//   tangent(z, t)      J t      z: second(z, v, t), t: gradient(z, v)   second(z, e, t) . z. + tangent(z, t.)
//   second(z, u, t, u.)         R::formula, of PyTorch's ops
//
// The Hessian of <u, F> is symmetric, which is why `second` serves in each place.
#pragma once

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "pytorch/autograd/row_nodes.h"

namespace fusegrad::row_ops {

/// Where derivatives are taken: the inputs, what the values returned beside them, and the settings.
template <class R>
struct Point {
  std::array<Tensor, R::kInputs> z;
  Tensor constant;
  typename R::Settings settings;
};

/// What a function of rows R says of itself:
///   kText, kName                   its name in errors, the first as a template's argument
///   kOps                           the ops: values, gradient, tangent, second
///   kInputs                        so many tensors are z
///   kValueRows                     which dimension of the values, of u and of what comes with them is the rows'
///   Settings, Values, Gradient, Tangent, Second     the ops' arguments: the settings, and calls whose tensors are z,
///   u,
///                                  t and u. in this order, and constants (is_constant)
///   is_constant(name), has_rows(name)               whether a tensor of a call has no derivatives; has rows
///   point(call)                    Point, without what the values return
///   values_of(result), constant_of(result)          of the values' result
///   gradient(point, u, wanted), tangent(point, t), second(point, u, t, u., wanted)
///                                  the ops, through the dispatcher; gradients of what is wanted, in the places of z
///   of_values(values, f)           the values' shape from f(u) [N], for u that are 1 of one value and 0 of the others
///   formula(call)                  second's results by PyTorch's ops
template <class R>
struct FunctionOp {
  static constexpr const char* kName = R::kName;
  static constexpr size_t kConstants = 0;

  template <class Call>
  static auto run(const Call& call) {
    return R::run(call);
  }
  template <class Call, class Batched>
  static void check_batch(const Call& call, const Batched& batched) {
    each(call, [&](std::string_view name, const Tensor& t) {
      TORCH_CHECK_NOT_IMPLEMENTED(R::has_rows(name) || !batched(t), kName, ": ", name, " must not be batched, but is");
    });
  }
  template <class Call>
  static variable_list differentiable(const Call& call) {
    variable_list found;
    for_each_field<Call>([&](const auto& field) {
      using Value = typename std::decay_t<decltype(field)>::Value;
      if (R::is_constant(field.name)) return;
      if constexpr (std::is_same_v<Value, Tensor>) found.push_back(field.of(call));
      if constexpr (std::is_same_v<Value, OptionalTensor>) found.push_back(field.of(call).value_or(Tensor()));
    });
    return found;
  }
  template <class Call>
  static void each_of_rows(Call& call, const auto& visit) {
    each(call, [&](std::string_view name, auto& t) {
      const bool of_values = name.starts_with("upstream") || name == "stats";
      if (R::has_rows(name)) visit(t, of_values ? R::kValueRows : 0);
    });
  }

 private:
  // visit(name, tensor) for the tensors that are there.
  template <class Call>
  static void each(Call& call, const auto& visit) {
    for_each_field<std::remove_const_t<Call>>([&](const auto& field) {
      using Value = typename std::decay_t<decltype(field)>::Value;
      auto& value = const_cast<Value&>(field.of(call));
      if constexpr (std::is_same_v<Value, Tensor>) {
        visit(field.name, value);
      } else if constexpr (std::is_same_v<Value, OptionalTensor>) {
        if (value) visit(field.name, *value);
      }
    });
  }
};

/// The tangents of z that a call has, in their places.
template <class R, class Call>
std::array<OptionalTensor, R::kInputs> tangents_in(const Call& call, size_t first) {
  const auto all = FunctionOp<R>::differentiable(call);
  std::array<OptionalTensor, R::kInputs> found;
  for (size_t i = 0; i < R::kInputs; ++i) found[i] = optional_of(all[first + i]);
  return found;
}

template <class R>
using Wanted = std::array<bool, R::kInputs>;
template <class R>
Wanted<R> wanted_from(const std::vector<bool>& wanted, size_t first) {
  Wanted<R> found{};
  for (size_t i = 0; i < R::kInputs; ++i) found[i] = wanted[first + i];
  return found;
}
template <class R>
bool any(const Wanted<R>& wanted) {
  return std::any_of(wanted.begin(), wanted.end(), [](bool one) { return one; });
}

template <class R>
struct ValuesOp : FunctionOp<R> {
  static constexpr int64_t kRows = R::kValueRows;
  static constexpr size_t kConstants = R::kConstants;

  static variable_list gradients(const typename R::Values& c, const variable_list& constants, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    auto point = R::point(c);
    if (!constants.empty()) point.constant = constants[0];
    return R::gradient(point, v[0], wanted_from<R>(wanted, 0));
  }
};

template <class R>
struct GradientOp : FunctionOp<R> {
  static constexpr int64_t kRows = 0;

  static variable_list gradients(const typename R::Gradient& c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    constexpr size_t k = R::kInputs;
    // The upstream gradients are tangents in the places of the inputs whose gradients the op made.
    const auto placed = in_places(v, R::wanted_of(c), k);
    std::array<OptionalTensor, k> t;
    for (size_t i = 0; i < k; ++i) t[i] = optional_of(placed[i]);
    variable_list result(k + 1);
    if (const auto by = wanted_from<R>(wanted, 0); any<R>(by)) {
      const auto second = R::second(R::point(c), c.upstream, t, std::nullopt, by);
      std::copy(second.begin(), second.end(), result.begin());
    }
    if (wanted[k]) result[k] = R::tangent(R::point(c), t);
    return result;
  }
};

template <class R>
struct TangentOp : FunctionOp<R> {
  static constexpr int64_t kRows = R::kValueRows;

  static variable_list gradients(const typename R::Tangent& c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    constexpr size_t k = R::kInputs;
    variable_list result(2 * k);
    if (const auto by = wanted_from<R>(wanted, 0); any<R>(by)) {
      const auto second = R::second(R::point(c), v[0], tangents_in<R>(c, k), std::nullopt, by);
      std::copy(second.begin(), second.end(), result.begin());
    }
    if (const auto by = wanted_from<R>(wanted, k); any<R>(by)) {
      const auto first = R::gradient(R::point(c), v[0], by);
      std::copy(first.begin(), first.end(), result.begin() + k);
    }
    return result;
  }
};

template <class R>
struct SecondOp : FunctionOp<R> {
  static constexpr int64_t kRows = 0;

  static variable_list gradients(typename R::Second c, const variable_list&, const variable_list& v,
                                 const std::vector<bool>& wanted) {
    std::vector<composite::Input> inputs;
    for_each_field<typename R::Second>([&](const auto& field) {
      using Value = typename std::decay_t<decltype(field)>::Value;
      if (R::is_constant(field.name)) return;
      if constexpr (std::is_same_v<Value, Tensor>) inputs.push_back({&field.of(c), wanted[inputs.size()]});
      if constexpr (std::is_same_v<Value, OptionalTensor>)
        inputs.push_back(composite::input_of(field.of(c), wanted[inputs.size()]));
    });
    return composite::pulled([&] { return R::formula(c); }, v, inputs);
  }
};

// --- forward mode ---

template <class R>
Point<R> primal_of(Point<R> point) {
  for (auto& t : point.z) t = primal_of(t);
  return point;
}
template <class R>
std::array<OptionalTensor, R::kInputs> tangents_of(const Point<R>& point) {
  std::array<OptionalTensor, R::kInputs> found;
  for (size_t i = 0; i < R::kInputs; ++i) found[i] = optional_of(tangent_of(point.z[i]));
  return found;
}
template <size_t k>
bool any(const std::array<OptionalTensor, k>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.has_value(); });
}

template <class R>
auto values_autograd(const typename R::Values& call) {
  auto result = recorded(call);
  auto point = R::point(call);
  const auto t = tangents_of(point);
  if (!any(t)) return result;
  point.constant = R::constant_of(result);
  auto& values = R::values_of(result);
  values = with_tangent(values, R::tangent(primal_of(point), t));
  return result;
}

template <class R>
auto gradient_autograd(const typename R::Gradient& call) {
  const auto result = recorded(call);
  const auto point = primal_of(R::point(call));
  const auto t = tangents_of(R::point(call));
  const auto by_upstream = optional_of(tangent_of(call.upstream));
  const auto needs = R::wanted_of(call);
  const auto wanted = wanted_from<R>(needs, 0);
  if (!any(t) && !by_upstream) return result;
  const variable_list tangents = any(t) ? R::second(point, primal_of(call.upstream), t, by_upstream, wanted)
                                        : R::gradient(point, *by_upstream, wanted);
  auto results = list_of(result);
  size_t next = 0;
  for (size_t i = 0; i < R::kInputs; ++i) {
    if (!needs[i]) continue;
    results[next] = with_tangent(results[next], tangents[i]);
    ++next;
  }
  return from_list<std::decay_t<decltype(result)>>(results);
}

template <class R>
Tensor tangent_op_autograd(const typename R::Tangent& call) {
  const auto result = recorded(call);
  auto point = primal_of(R::point(call));
  auto t = tangents_in<R>(call, R::kInputs);
  std::array<OptionalTensor, R::kInputs> next;
  for (size_t i = 0; i < R::kInputs; ++i) {
    if (!t[i]) continue;
    next[i] = optional_of(tangent_of(*t[i]));
    t[i] = primal_of(*t[i]);
  }
  Tensor tangent;
  if (any(next)) tangent = R::tangent(point, next);
  if (const auto by = tangents_of(R::point(call)); any(by)) {
    // In acc, as the sum is over products with it.
    const auto acc = acc_type(point.z[0].scalar_type());
    for (auto& z : point.z) z = z.to(acc);
    for (auto& one : t) {
      if (one) one = one->to(acc);
    }
    Wanted<R> wanted{};
    for (size_t i = 0; i < R::kInputs; ++i) wanted[i] = by[i].has_value();
    const auto curved = R::of_values(point, result, [&](const Tensor& unit) {
      const auto columns = R::second(point, unit, t, std::nullopt, wanted);
      Tensor sum;
      for (size_t i = 0; i < R::kInputs; ++i) {
        if (!by[i]) continue;
        // A column that the second derivative leaves out stays out, whatever its tangent.
        const auto moved = by[i]->to(acc).masked_fill(columns[i].detach().eq(0), 0);
        const auto part = (columns[i] * moved).sum(1);
        sum = sum.defined() ? sum + part : part;
      }
      return sum;
    });
    tangent = tangent.defined() ? tangent + curved : curved;
  }
  return with_tangent(result, tangent);
}

template <class R>
auto second_autograd(const typename R::Second& call) {
  using Result = decltype(recorded(call));
  for (const auto& t : FunctionOp<R>::differentiable(call)) {
    if (has_tangent(t)) return from_list<Result>(R::formula(call));
  }
  return recorded(call);
}

// --- registration ---

template <class R>
void implement_autograd(torch::Library& m) {
  m.impl(R::kOps[0], named_kernel<R::kText, unpacked<values_autograd<R>>()>());
  m.impl(R::kOps[1], named_kernel<R::kText, unpacked<gradient_autograd<R>>()>());
  m.impl(R::kOps[2], named_kernel<R::kText, unpacked<tangent_op_autograd<R>>()>());
  m.impl(R::kOps[3], named_kernel<R::kText, unpacked<second_autograd<R>>()>());
}
template <class R>
void implement_vmap(torch::Library& m) {
  m.impl(R::kOps[0], named_kernel<R::kText, unpacked<under_vmap<typename R::Values>>()>());
  m.impl(R::kOps[1], named_kernel<R::kText, unpacked<under_vmap<typename R::Gradient>>()>());
  m.impl(R::kOps[2], named_kernel<R::kText, unpacked<under_vmap<typename R::Tangent>>()>());
  m.impl(R::kOps[3], named_kernel<R::kText, unpacked<under_vmap<typename R::Second>>()>());
}
template <class R>
void implement_batched(torch::Library& m) {
  m.impl(R::kOps[0], named_kernel<R::kText, unpacked<vectorized<typename R::Values>>()>());
  m.impl(R::kOps[1], named_kernel<R::kText, unpacked<vectorized<typename R::Gradient>>()>());
  m.impl(R::kOps[2], named_kernel<R::kText, unpacked<vectorized<typename R::Tangent>>()>());
  m.impl(R::kOps[3], named_kernel<R::kText, unpacked<vectorized<typename R::Second>>()>());
}

}  // namespace fusegrad::row_ops
