// Scalar expressions, for score_mods and mask_mods: see fusegrad/score_mod.h. Standard library only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace fusegrad {

namespace score_mod {
struct Trace;
enum class Type : uint8_t;
}  // namespace score_mod

/// A float, an integer or a bool that is computed for each pair of a query and a key. Operators record what is
/// computed; operands are promoted from bool to integer to float.
class Expression {
 public:
  template <class Number>
    requires std::is_arithmetic_v<Number>
  Expression(Number value) {  // NOLINT(google-explicit-constructor): numbers are meant to mix with expressions
    if constexpr (std::is_floating_point_v<Number>) {
      *this = constant(static_cast<double>(value));
    } else if constexpr (std::is_same_v<Number, bool>) {
      *this = constant(value);
    } else {
      *this = constant(static_cast<int64_t>(value));
    }
  }

  // For the library.
  Expression(std::shared_ptr<score_mod::Trace> trace, int32_t node) : trace_(std::move(trace)), node_(node) {}
  const std::shared_ptr<score_mod::Trace>& trace() const { return trace_; }
  int32_t node() const { return node_; }

 private:
  static Expression constant(double value);
  static Expression constant(int64_t value);
  static Expression constant(bool value);

  std::shared_ptr<score_mod::Trace> trace_;
  int32_t node_ = -1;
};

/// `/` gives a float whatever its operands are; floor_div and % round as Python's // and % do.
Expression operator+(const Expression& a, const Expression& b);
Expression operator-(const Expression& a, const Expression& b);
Expression operator*(const Expression& a, const Expression& b);
Expression operator/(const Expression& a, const Expression& b);
Expression operator%(const Expression& a, const Expression& b);
Expression operator-(const Expression& a);
Expression floor_div(const Expression& a, const Expression& b);
Expression pow(const Expression& a, const Expression& b);
Expression min(const Expression& a, const Expression& b);
Expression max(const Expression& a, const Expression& b);
Expression clamp(const Expression& x, const Expression& low, const Expression& high);

Expression operator==(const Expression& a, const Expression& b);
Expression operator!=(const Expression& a, const Expression& b);
Expression operator<(const Expression& a, const Expression& b);
Expression operator<=(const Expression& a, const Expression& b);
Expression operator>(const Expression& a, const Expression& b);
Expression operator>=(const Expression& a, const Expression& b);

/// Truth; both operands are always computed.
Expression operator&&(const Expression& a, const Expression& b);
Expression operator||(const Expression& a, const Expression& b);
Expression operator!(const Expression& a);
/// Bits of integers, truth of bools.
Expression operator&(const Expression& a, const Expression& b);
Expression operator|(const Expression& a, const Expression& b);
Expression operator^(const Expression& a, const Expression& b);
Expression operator~(const Expression& a);
Expression operator<<(const Expression& a, const Expression& b);
Expression operator>>(const Expression& a, const Expression& b);

/// `condition` must be a bool. What the branch not taken would contribute to a gradient is 0, never NaN.
Expression where(const Expression& condition, const Expression& a, const Expression& b);
Expression to_float(const Expression& x);
Expression to_int(const Expression& x);  ///< towards zero
Expression to_bool(const Expression& x);

Expression abs(const Expression& x);
Expression sign(const Expression& x);
Expression square(const Expression& x);
Expression floor(const Expression& x);
Expression ceil(const Expression& x);
Expression trunc(const Expression& x);
Expression round(const Expression& x);  ///< to even
Expression sqrt(const Expression& x);
Expression rsqrt(const Expression& x);
Expression exp(const Expression& x);
Expression exp2(const Expression& x);
Expression expm1(const Expression& x);
Expression log(const Expression& x);
Expression log2(const Expression& x);
Expression log1p(const Expression& x);
Expression tanh(const Expression& x);
Expression sigmoid(const Expression& x);
Expression silu(const Expression& x);
Expression relu(const Expression& x);
Expression gelu(const Expression& x);       ///< with erf
Expression gelu_tanh(const Expression& x);  ///< its approximation
Expression erf(const Expression& x);
Expression erfc(const Expression& x);
Expression sin(const Expression& x);
Expression cos(const Expression& x);
Expression tan(const Expression& x);
Expression asin(const Expression& x);
Expression acos(const Expression& x);
Expression atan(const Expression& x);
Expression sinh(const Expression& x);
Expression cosh(const Expression& x);
Expression asinh(const Expression& x);
Expression acosh(const Expression& x);
Expression atanh(const Expression& x);
Expression atan2(const Expression& y, const Expression& x);
Expression hypot(const Expression& a, const Expression& b);
Expression detach(const Expression& x);  ///< x, with no gradient

/// `value` with a derivative of its own, as torch.autograd.Function has: nothing flows into what the value is computed
/// from. Instead `input` receives backward(upstream), computed from the gradient by the result and from whatever the
/// forward computes. A straight-through estimator:
///
///   with_gradient(round(score), score, [](const Expression& upstream) { return upstream; })
///
/// `input` must be a float; neither it nor the gradient may depend on an axis of a reduction (fusegrad/reductions.h).
Expression with_gradient(const Expression& value, const Expression& input,
                         const std::function<Expression(const Expression& upstream)>& backward);

/// Several values and inputs: `backward` gets an upstream for each value, 0 for one that is not used, and returns a
/// gradient for each input.
std::vector<Expression> with_gradients(
    const std::vector<Expression>& values, const std::vector<Expression>& inputs,
    const std::function<std::vector<Expression>(const std::vector<Expression>& upstreams)>& backward);

namespace score_mod {

/// What a buffer is known by: the same address, the same buffer.
using BufferKey = std::shared_ptr<const void>;

/// A read of a buffer that holds `type` and has as many dimensions as indices. Buffers are numbered as first read.
Expression load(const BufferKey& key, Type type, const std::vector<Expression>& indices);

/// A number that is known when the op is called: another value, the same kernel.
Expression runtime_scalar(Type type, const BufferKey& key);

}  // namespace score_mod
}  // namespace fusegrad
