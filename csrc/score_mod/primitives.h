// The primitives of the score_mod language: what primitives.def says of each, as a table in memory. Standard library
// only, like all of the language but its ops and bindings.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace fusegrad::score_mod {

/// The type of a value. Floats are float32 in kernels, float64 where the inputs of the op are. In this order a value
/// of an earlier type is promoted to a later one.
enum class Type : uint8_t { kBool, kInt, kFloat };

/// How it is written: "bool", "i64", "f".
std::string_view type_name(Type type);

/// What is no primitive, with the reductions over an axis, then the primitives of primitives.def.
enum class Op : uint8_t {
  kConstant,
  kInput,
  kScalar,
  kLoad,
  kUpstream,  ///< of a backward: the gradient by the result of the custom with this key
  kBackward,  ///< operands x1 d1 x2 d2 …: what each x receives, from the upstreams of its customs
  kCustom,    ///< operands value and backward: the value, whose gradient goes to the backward
  kAxis,
  kSum,
  kAmax,
  kAmin,
  kProd,
#define PRIMITIVE(Id, name, arity, rule, cuda_float, cuda_integer) k##Id,
#include "score_mod/primitives.def"
#undef PRIMITIVE
};

/// What operands become before the primitive is applied, and what it gives. "Common" is the latest type of the
/// operands in Type's order.
enum class Rule : uint8_t {
  kNumeric,  ///< all become common, bools i64; gives that type
  kFloat,    ///< all become f; gives f
  kCompare,  ///< all become common, bools i64; gives bool
  kBitwise,  ///< all become common, f is refused; gives that type
  kInteger,  ///< all become i64, f is refused; gives i64
  kWhere,    ///< the first is bool; the others become common; gives that type
  kToFloat,  ///< anything; gives f
  kToInt,    ///< anything; gives i64
  kToBool,   ///< anything; gives bool
};

/// A number with its type: `f` for floats, `i` for integers and bools (0 or 1).
struct Value {
  Type type = Type::kFloat;
  double f = 0;
  int64_t i = 0;
  bool operator==(const Value&) const = default;
};

/// A row of the table.
struct Primitive {
  Op op;
  std::string_view name;
  int arity;
  Rule rule;
  std::string_view cuda_float;
  std::string_view cuda_integer;
  /// The CPU functor on single values, floats in float64; operands have the types that the rule makes of them.
  Value (*fold)(const Value* operands);
};

inline constexpr int kOpsBesides = 12;  ///< before those of the table
inline constexpr int kMaxArity = 3;

#define PRIMITIVE(Id, name, arity, rule, cuda_float, cuda_integer) +1
inline constexpr int kPrimitiveCount = 0
#include "score_mod/primitives.def"
    ;
#undef PRIMITIVE

/// In the order of Op.
extern const std::array<Primitive, kPrimitiveCount> kPrimitives;

inline bool is_primitive(Op op) { return static_cast<int>(op) >= kOpsBesides; }
/// Its operands are an axis and what is reduced over it.
inline bool is_reduction(Op op) { return op >= Op::kSum && op <= Op::kProd; }

/// The row of a primitive.
inline const Primitive& primitive(Op op) { return kPrimitives[static_cast<int>(op) - kOpsBesides]; }

/// "sum", "amax", "amin", "prod"
std::string_view reduction_name(Op op);
/// What makes of two values of a reduction one.
inline Op combining(Op op) {
  return op == Op::kSum ? Op::kAdd : op == Op::kAmax ? Op::kMax : op == Op::kAmin ? Op::kMin : Op::kMul;
}
/// What a reduction begins with.
Value identity_of(Op reduction, Type type);

/// By its name in the text; null if there is none.
const Primitive* find_primitive(std::string_view name);

}  // namespace fusegrad::score_mod
