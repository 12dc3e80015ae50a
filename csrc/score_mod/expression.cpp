#include <fusegrad/expression.h>
#include <fusegrad/reductions.h>

#include <algorithm>
#include <string>
#include <utility>

#include "score_mod/simplify.h"
#include "score_mod/trace.h"

namespace fusegrad {
namespace score_mod {
namespace {

thread_local std::shared_ptr<Trace> current_trace;

const std::shared_ptr<Trace>& current() {
  if (current_trace == nullptr) {
    throw GraphError("expressions can be built only within the function that trace_score_mod or trace_mask_mod runs");
  }
  return current_trace;
}

NodeId node_of(const Expression& x) {
  if (x.trace() != current()) throw GraphError("an expression of another score_mod or mask_mod was used");
  return x.node();
}

Expression apply(Op op, std::initializer_list<Expression> operands) {
  std::vector<NodeId> nodes;
  for (const Expression& x : operands) nodes.push_back(node_of(x));
  return {current(), current()->graph.apply(op, std::move(nodes))};
}

Expression reduced(Op op, int64_t extent, const Element& element) {
  // `element` may run another trace, which is current() then: a copy.
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
  const std::shared_ptr<Trace> trace = current();
  const NodeId axis = trace->graph.axis(trace->graph.add_axis(extent));
  const Expression value = element({trace, axis});
  return {trace, trace->graph.reduce(op, axis, node_of(value))};
}

}  // namespace

TraceScope::TraceScope(Kind kind) : trace_(std::make_shared<Trace>(kind)), outer_(std::move(current_trace)) {
  current_trace = trace_;
}
TraceScope::~TraceScope() { current_trace = std::move(outer_); }

Compact TraceScope::finish(const Expression& result) const {
  const NodeId id = node_of(result);
  check_limits(trace_->graph, id);
  trace_->graph.set_result(id);
  check_steps(trace_->graph);
  return compact(simplify(trace_->graph));
}

Expression load(const BufferKey& key, Type type, const std::vector<Expression>& indices) {
  Trace& trace = *current();
  const auto found = std::find(trace.buffers.begin(), trace.buffers.end(), key);
  const auto buffer = static_cast<int>(found - trace.buffers.begin());
  std::vector<NodeId> nodes;
  for (const Expression& index : indices) nodes.push_back(node_of(index));
  if (found == trace.buffers.end()) {
    trace.graph.add_buffer(type, static_cast<int>(indices.size()));
    trace.buffers.push_back(key);
  }
  return {current(), trace.graph.load(buffer, std::move(nodes))};
}

Expression runtime_scalar(Type type, const BufferKey& key) {
  Trace& trace = *current();
  const auto found = std::find(trace.scalars.begin(), trace.scalars.end(), key);
  const auto index = static_cast<int>(found - trace.scalars.begin());
  if (found == trace.scalars.end()) {
    trace.graph.add_scalar(type);
    trace.scalars.push_back(key);
  }
  return {current(), trace.graph.scalar(index)};
}

}  // namespace score_mod

using score_mod::apply;
using score_mod::current;
using score_mod::node_of;
using score_mod::Op;
using score_mod::reduced;

Expression Expression::constant(double value) { return {current(), current()->graph.constant(value)}; }
Expression Expression::constant(int64_t value) { return {current(), current()->graph.constant(value)}; }
Expression Expression::constant(bool value) { return {current(), current()->graph.constant(value)}; }

Expression operator+(const Expression& a, const Expression& b) { return apply(Op::kAdd, {a, b}); }
Expression operator-(const Expression& a, const Expression& b) { return apply(Op::kSub, {a, b}); }
Expression operator*(const Expression& a, const Expression& b) { return apply(Op::kMul, {a, b}); }
Expression operator/(const Expression& a, const Expression& b) { return apply(Op::kDiv, {a, b}); }
Expression operator%(const Expression& a, const Expression& b) { return apply(Op::kMod, {a, b}); }
Expression operator-(const Expression& a) { return apply(Op::kNeg, {a}); }
Expression floor_div(const Expression& a, const Expression& b) { return apply(Op::kFloorDiv, {a, b}); }
Expression pow(const Expression& a, const Expression& b) { return apply(Op::kPow, {a, b}); }
Expression min(const Expression& a, const Expression& b) { return apply(Op::kMin, {a, b}); }
Expression max(const Expression& a, const Expression& b) { return apply(Op::kMax, {a, b}); }
Expression clamp(const Expression& x, const Expression& low, const Expression& high) {
  return apply(Op::kClamp, {x, low, high});
}

Expression operator==(const Expression& a, const Expression& b) { return apply(Op::kEq, {a, b}); }
Expression operator!=(const Expression& a, const Expression& b) { return apply(Op::kNe, {a, b}); }
Expression operator<(const Expression& a, const Expression& b) { return apply(Op::kLt, {a, b}); }
Expression operator<=(const Expression& a, const Expression& b) { return apply(Op::kLe, {a, b}); }
Expression operator>(const Expression& a, const Expression& b) { return apply(Op::kGt, {a, b}); }
Expression operator>=(const Expression& a, const Expression& b) { return apply(Op::kGe, {a, b}); }

Expression operator&&(const Expression& a, const Expression& b) { return to_bool(a) & to_bool(b); }
Expression operator||(const Expression& a, const Expression& b) { return to_bool(a) | to_bool(b); }
Expression operator!(const Expression& a) { return ~to_bool(a); }
Expression operator&(const Expression& a, const Expression& b) { return apply(Op::kAnd, {a, b}); }
Expression operator|(const Expression& a, const Expression& b) { return apply(Op::kOr, {a, b}); }
Expression operator^(const Expression& a, const Expression& b) { return apply(Op::kXor, {a, b}); }
Expression operator~(const Expression& a) { return apply(Op::kNot, {a}); }
Expression operator<<(const Expression& a, const Expression& b) { return apply(Op::kShl, {a, b}); }
Expression operator>>(const Expression& a, const Expression& b) { return apply(Op::kShr, {a, b}); }

Expression where(const Expression& condition, const Expression& a, const Expression& b) {
  return apply(Op::kWhere, {condition, a, b});
}
Expression to_float(const Expression& x) { return apply(Op::kToFloat, {x}); }
Expression to_int(const Expression& x) { return apply(Op::kToInt, {x}); }
Expression to_bool(const Expression& x) { return apply(Op::kToBool, {x}); }

Expression abs(const Expression& x) { return apply(Op::kAbs, {x}); }
Expression sign(const Expression& x) { return apply(Op::kSign, {x}); }
Expression square(const Expression& x) { return apply(Op::kSquare, {x}); }
Expression floor(const Expression& x) { return apply(Op::kFloor, {x}); }
Expression ceil(const Expression& x) { return apply(Op::kCeil, {x}); }
Expression trunc(const Expression& x) { return apply(Op::kTrunc, {x}); }
Expression round(const Expression& x) { return apply(Op::kRound, {x}); }
Expression sqrt(const Expression& x) { return apply(Op::kSqrt, {x}); }
Expression rsqrt(const Expression& x) { return apply(Op::kRsqrt, {x}); }
Expression exp(const Expression& x) { return apply(Op::kExp, {x}); }
Expression exp2(const Expression& x) { return apply(Op::kExp2, {x}); }
Expression expm1(const Expression& x) { return apply(Op::kExpm1, {x}); }
Expression log(const Expression& x) { return apply(Op::kLog, {x}); }
Expression log2(const Expression& x) { return apply(Op::kLog2, {x}); }
Expression log1p(const Expression& x) { return apply(Op::kLog1p, {x}); }
Expression tanh(const Expression& x) { return apply(Op::kTanh, {x}); }
Expression sigmoid(const Expression& x) { return apply(Op::kSigmoid, {x}); }
Expression silu(const Expression& x) { return apply(Op::kSilu, {x}); }
Expression relu(const Expression& x) { return apply(Op::kRelu, {x}); }
Expression gelu(const Expression& x) { return apply(Op::kGelu, {x}); }
Expression gelu_tanh(const Expression& x) { return apply(Op::kGeluTanh, {x}); }
Expression erf(const Expression& x) { return apply(Op::kErf, {x}); }
Expression erfc(const Expression& x) { return apply(Op::kErfc, {x}); }
Expression sin(const Expression& x) { return apply(Op::kSin, {x}); }
Expression cos(const Expression& x) { return apply(Op::kCos, {x}); }
Expression tan(const Expression& x) { return apply(Op::kTan, {x}); }
Expression asin(const Expression& x) { return apply(Op::kAsin, {x}); }
Expression acos(const Expression& x) { return apply(Op::kAcos, {x}); }
Expression atan(const Expression& x) { return apply(Op::kAtan, {x}); }
Expression sinh(const Expression& x) { return apply(Op::kSinh, {x}); }
Expression cosh(const Expression& x) { return apply(Op::kCosh, {x}); }
Expression asinh(const Expression& x) { return apply(Op::kAsinh, {x}); }
Expression acosh(const Expression& x) { return apply(Op::kAcosh, {x}); }
Expression atanh(const Expression& x) { return apply(Op::kAtanh, {x}); }
Expression atan2(const Expression& y, const Expression& x) { return apply(Op::kAtan2, {y, x}); }
Expression hypot(const Expression& a, const Expression& b) { return apply(Op::kHypot, {a, b}); }
Expression detach(const Expression& x) { return apply(Op::kDetach, {x}); }

Expression with_gradient(const Expression& value, const Expression& input,
                         const std::function<Expression(const Expression& upstream)>& backward) {
  return with_gradients({value}, {input}, [&](const std::vector<Expression>& upstreams) {
    return std::vector<Expression>{backward(upstreams[0])};
  })[0];
}

std::vector<Expression> with_gradients(
    const std::vector<Expression>& values, const std::vector<Expression>& inputs,
    const std::function<std::vector<Expression>(const std::vector<Expression>& upstreams)>& backward) {
  const std::shared_ptr<score_mod::Trace> trace = current();
  score_mod::Graph& graph = trace->graph;
  const int64_t first = trace->upstreams;
  trace->upstreams += static_cast<int64_t>(values.size());
  std::vector<Expression> results;
  for (size_t i = 0; i < values.size(); ++i)
    results.emplace_back(trace, graph.upstream(first + static_cast<int64_t>(i)));
  const std::vector<Expression> gradients = backward(results);
  if (gradients.size() != inputs.size()) {
    throw score_mod::GraphError("with_gradients: backward must return a gradient for each of " +
                                std::to_string(inputs.size()) + " inputs, but returned " +
                                std::to_string(gradients.size()));
  }
  std::vector<score_mod::NodeId> pairs;
  for (size_t i = 0; i < inputs.size(); ++i) pairs.insert(pairs.end(), {node_of(inputs[i]), node_of(gradients[i])});
  const score_mod::NodeId own = graph.backward(std::move(pairs));
  for (size_t i = 0; i < values.size(); ++i) {
    results[i] = {trace, graph.custom(first + static_cast<int64_t>(i), node_of(values[i]), own)};
  }
  return results;
}

Expression sum_over(int64_t extent, const Element& element) { return reduced(Op::kSum, extent, element); }
Expression amax_over(int64_t extent, const Element& element) { return reduced(Op::kAmax, extent, element); }
Expression amin_over(int64_t extent, const Element& element) { return reduced(Op::kAmin, extent, element); }
Expression prod_over(int64_t extent, const Element& element) { return reduced(Op::kProd, extent, element); }

}  // namespace fusegrad
