#include "score_mod/primitives.h"

#include <limits>

#include "score_mod/functors.h"

namespace fusegrad::score_mod {
namespace {

Value boolean(uint8_t value) { return {Type::kBool, 0, value}; }
Value result_of(double value) { return {Type::kFloat, value, 0}; }
Value result_of(int64_t value) { return {Type::kInt, 0, value}; }
Value result_of(uint8_t value) { return boolean(value); }

template <class T>
T get(const Value& value) {
  if constexpr (std::is_same_v<T, double>) {
    return value.f;
  } else {
    return static_cast<T>(value.i);
  }
}

// Functor on operands that are all of type T.
template <class Functor, int arity, class T>
Value apply(const Value* x) {
  if constexpr (arity == 1) {
    return result_of(Functor::apply(get<T>(x[0])));
  } else if constexpr (arity == 2) {
    return result_of(Functor::apply(get<T>(x[0]), get<T>(x[1])));
  } else {
    return result_of(Functor::apply(get<T>(x[0]), get<T>(x[1]), get<T>(x[2])));
  }
}

// The types that the rule lets through.
template <class Functor, int arity, Rule rule>
Value fold(const Value* x) {
  if constexpr (rule == Rule::kFloat) {
    return apply<Functor, arity, double>(x);
  } else if constexpr (rule == Rule::kNumeric || rule == Rule::kCompare) {
    return x[0].type == Type::kFloat ? apply<Functor, arity, double>(x) : apply<Functor, arity, int64_t>(x);
  } else if constexpr (rule == Rule::kBitwise) {
    return x[0].type == Type::kBool ? apply<Functor, arity, uint8_t>(x) : apply<Functor, arity, int64_t>(x);
  } else if constexpr (rule == Rule::kInteger) {
    return apply<Functor, arity, int64_t>(x);
  } else if constexpr (rule == Rule::kWhere) {
    return x[0].i != 0 ? x[1] : x[2];
  } else if constexpr (rule == Rule::kToFloat) {
    return x[0].type == Type::kFloat ? x[0] : result_of(static_cast<double>(x[0].i));
  } else if constexpr (rule == Rule::kToInt) {
    return result_of(x[0].type == Type::kFloat ? functors::ToInt::apply(x[0].f) : x[0].i);
  } else {
    static_assert(rule == Rule::kToBool);
    return boolean(x[0].type == Type::kFloat ? x[0].f != 0 : x[0].i != 0);
  }
}

}  // namespace

const std::array<Primitive, kPrimitiveCount> kPrimitives = {{
#define PRIMITIVE(Id, name, arity, rule, cuda_float, cuda_integer) \
  {Op::k##Id, name, arity, Rule::k##rule, cuda_float, cuda_integer, &fold<functors::Id, arity, Rule::k##rule>},
#include "score_mod/primitives.def"
#undef PRIMITIVE
}};

std::string_view type_name(Type type) {
  switch (type) {
    case Type::kBool:
      return "bool";
    case Type::kInt:
      return "i64";
    default:
      return "f";
  }
}

std::string_view reduction_name(Op op) {
  return op == Op::kSum ? "sum" : op == Op::kAmax ? "amax" : op == Op::kAmin ? "amin" : "prod";
}

Value identity_of(Op reduction, Type type) {
  if (reduction == Op::kSum) return {type, 0, 0};
  if (reduction == Op::kProd) return {type, 1, 1};
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (reduction == Op::kAmax) return {type, -kInfinity, std::numeric_limits<int64_t>::min()};
  return {type, kInfinity, std::numeric_limits<int64_t>::max()};
}

const Primitive* find_primitive(std::string_view name) {
  for (const Primitive& p : kPrimitives) {
    if (p.name == name) return &p;
  }
  return nullptr;
}

}  // namespace fusegrad::score_mod
