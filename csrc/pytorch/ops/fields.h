// An op's arguments as a struct whose fields are listed once, by name and member, in the order of the schema:
//
//   struct Scale {
//     FIELDS_OF(Scale)
//     REQUIRED(at::Tensor, input);
//     OPTION(double, factor) = 1.0;
//   };
//
// From the list, Scale::fields(), come the schema (schema_of), the typed call through the dispatcher (Op), the
// dispatcher's kernel of a function of the struct (unpacked), what an autograd Function saves
// (pytorch/autograd/saved.h) and the checks of numbers (check_numbers). pytorch/ops/arguments.h has the lists.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fusegrad/options.h"
#include "pytorch/ops/check.h"

namespace fusegrad {

enum class Kind {
  kRequired,
  kOverwritten,    ///< required; the op with a trailing underscore writes over it
  kAddedTo,        ///< required; the op writes to it, with and without the underscore
  kForward,        ///< required; of options that two directions have alike, this one only the forward reads
  kOption,         ///< its default is the member's initial value
  kNoneIsDefault,  ///< so is this one's, and the schema writes it None
};

/// What a number must be, for check_numbers().
struct Range {
  bool (*holds)(double);
  const char* words;
};
inline constexpr Range kFinite{[](double x) { return std::isfinite(x); }, "a finite number"};
inline constexpr Range kPositive{[](double x) { return x > 0 && std::isfinite(x); }, "a finite number > 0"};
inline constexpr Range kNotNegative{[](double x) { return x >= 0 && std::isfinite(x); }, "a finite number >= 0"};
inline constexpr Range kUnit{[](double x) { return x >= 0 && x <= 1; }, "in [0, 1]"};

/// One argument: `member` leads from the struct to the value, which is a T.
template <Kind kind, class T, class Member>
struct Field {
  static constexpr Kind kKind = kind;
  using Value = T;
  const char* name;
  Member member;
  const Range* range = nullptr;

  template <class Struct>
  T& of(Struct& arguments) const {
    return std::invoke(member, arguments);
  }
  template <class Struct>
  const T& of(const Struct& arguments) const {
    return of(const_cast<Struct&>(arguments));  // read only: TORCH_ARG's accessors are a pair, of which one is kept
  }
};

/// A member of a member.
template <class Outer, class Inner>
struct Path {
  Outer outer;
  Inner inner;
  template <class Struct>
  decltype(auto) operator()(Struct& arguments) const {
    return std::invoke(inner, std::invoke(outer, arguments));
  }
};

template <Kind kind, class Struct, class T>
constexpr auto field(const char* name, T Struct::* member) {
  return std::tuple(Field<kind, T, T Struct::*>{name, member});
}
template <class Struct, class T>
constexpr auto required(const char* name, T Struct::* member) {
  return field<Kind::kRequired>(name, member);
}
template <class Struct, class T>
constexpr auto overwritten(const char* name, T Struct::* member) {
  return field<Kind::kOverwritten>(name, member);
}
template <class Struct, class T>
constexpr auto added_to(const char* name, T Struct::* member) {
  return field<Kind::kAddedTo>(name, member);
}
template <class Struct, class T>
constexpr auto forward_only(const char* name, T Struct::* member) {
  return field<Kind::kForward>(name, member);
}
template <class Struct, class T>
constexpr auto option(const char* name, T Struct::* member) {
  return field<Kind::kOption>(name, member);
}

/// An option that libtorch's TORCH_ARG declares, of the public struct that is a member of the arguments.
template <Kind kind = Kind::kOption, class Struct, class Options, class T>
constexpr auto option(Options Struct::* options, const char* name, T& (Options::*member)() noexcept,
                      const Range* range = nullptr) {
  using Member = Path<Options Struct::*, T& (Options::*)() noexcept>;
  return std::tuple(Field<kind, T, Member>{name, {options, member}, range});
}

/// A member of a member.
template <Kind kind = Kind::kOption, class Struct, class Member, class T>
constexpr auto option(Member Struct::* outer, const char* name, T Member::* inner) {
  using To = Path<Member Struct::*, T Member::*>;
  return std::tuple(Field<kind, T, To>{name, {outer, inner}});
}

template <class... Tuples>
constexpr auto list(Tuples... tuples) {
  return std::tuple_cat(tuples...);
}

/// The fields of a member, which has a list of its own, in their place. A backward leaves out those that only the
/// forward reads.
template <bool backward = false, class Struct, class Member>
constexpr auto all_of(Member Struct::* member) {
  return std::apply(
      [member](auto... inner) {
        return std::tuple_cat([&](auto field) {
          using F = decltype(field);
          if constexpr (backward && F::kKind == Kind::kForward) {
            return std::tuple();
          } else {
            using To = Path<Member Struct::*, decltype(field.member)>;
            return std::tuple(Field<F::kKind, typename F::Value, To>{field.name, {member, field.member}, field.range});
          }
        }(inner)...);
      },
      Member::fields());
}

/// A line of a struct, counted from the first (pytorch/ops/arguments.h).
template <int line>
using Line = std::integral_constant<int, line>;

inline constexpr int kMostLines = 64;

/// The fields of a struct's lines, in order. A template until the struct is complete: only then the types are known.
template <class Struct>
constexpr auto lines_of() {
  return []<int... n>(std::integer_sequence<int, n...> /*lines*/) {
    return std::tuple_cat([] {
      if constexpr (requires { Struct::line(Line<n>()); }) {
        return Struct::line(Line<n>());
      } else {
        return std::tuple();
      }
    }()...);
  }(std::make_integer_sequence<int, kMostLines>());
}

/// visit(field) for each, in order.
template <class Arguments, class Visit>
constexpr void for_each_field(Visit&& visit) {
  std::apply([&](const auto&... fields) { (visit(fields), ...); }, Arguments::fields());
}

// --- how the dispatcher passes a T, and what a schema calls it: a type that is not here does not compile ---

template <class T, class Type = T>
struct PassedAs {
  using Passed = Type;
};
template <class T>
struct ArgumentType;
template <>
struct ArgumentType<at::Tensor> : PassedAs<at::Tensor, const at::Tensor&> {
  static std::string name() { return "Tensor"; }
};
template <>
struct ArgumentType<at::TensorList> : PassedAs<at::TensorList> {
  static std::string name() { return "Tensor[]"; }
};
template <>
struct ArgumentType<bool> : PassedAs<bool> {
  static std::string name() { return "bool"; }
};
template <>
struct ArgumentType<int64_t> : PassedAs<int64_t> {
  static std::string name() { return "int"; }
};
template <>
struct ArgumentType<double> : PassedAs<double> {
  static std::string name() { return "float"; }
};
template <>
struct ArgumentType<at::ScalarType> : PassedAs<at::ScalarType> {
  static std::string name() { return "ScalarType"; }
};
template <>
struct ArgumentType<std::string_view> : PassedAs<std::string_view> {
  static std::string name() { return "str"; }
};
template <>
struct ArgumentType<std::string> : ArgumentType<std::string_view> {};
template <>
struct ArgumentType<at::IntArrayRef> : PassedAs<at::IntArrayRef> {
  static std::string name() { return "int[]"; }
};
template <>
struct ArgumentType<std::vector<int64_t>> : ArgumentType<at::IntArrayRef> {};
template <>
struct ArgumentType<at::ArrayRef<double>> : PassedAs<at::ArrayRef<double>> {
  static std::string name() { return "float[]"; }
};
template <>
struct ArgumentType<c10::List<bool>> : PassedAs<c10::List<bool>, const c10::List<bool>&> {
  static std::string name() { return "bool[]"; }
};
template <size_t size>
struct ArgumentType<std::array<bool, size>> : PassedAs<std::array<bool, size>> {
  static std::string name() { return "bool[" + std::to_string(size) + "]"; }
};
template <class T>
struct ArgumentType<std::optional<T>> : PassedAs<std::optional<T>> {
  static std::string name() { return ArgumentType<T>::name() + "?"; }
};
template <>
struct ArgumentType<std::optional<at::Tensor>> : PassedAs<std::optional<at::Tensor>, const std::optional<at::Tensor>&> {
  static std::string name() { return "Tensor?"; }
};
template <>
struct ArgumentType<Normalizer> : ArgumentType<std::optional<at::Tensor>> {};

template <class F>
using TypeOf = ArgumentType<
    std::conditional_t<F::kKind == Kind::kNoneIsDefault, std::optional<typename F::Value>, typename F::Value>>;
template <class F>
using Passed = typename TypeOf<F>::Passed;

template <class F>
void take(typename F::Value& to, Passed<F> from) {
  if constexpr (F::kKind == Kind::kNoneIsDefault || std::is_same_v<typename F::Value, Normalizer>) {
    if (from.has_value()) to = *from;
  } else if constexpr (std::is_same_v<typename F::Value, std::vector<int64_t>>) {
    to.assign(from.begin(), from.end());
  } else {
    to = from;
  }
}

template <class F>
decltype(auto) give(const typename F::Value& value) {
  if constexpr (std::is_same_v<typename F::Value, Normalizer>) {
    TORCH_INTERNAL_ASSERT(!std::holds_alternative<double>(value));  // normalizer_on() made a tensor of it
    const auto* tensor = std::get_if<at::Tensor>(&value);
    return tensor != nullptr ? std::optional<at::Tensor>(*tensor) : std::nullopt;
  } else if constexpr (F::kKind == Kind::kNoneIsDefault) {
    return std::optional<typename F::Value>(value);
  } else {
    return (value);
  }
}

// --- the schema ---

inline std::string default_text(bool value) { return value ? "True" : "False"; }
inline std::string default_text(int64_t value) { return std::to_string(value); }
inline std::string default_text(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.begin(), text.end(), value).ptr};  // the shortest that is this very number
}
inline std::string default_text(const std::string& value) { return "'" + value + "'"; }
inline std::string default_text(const std::vector<int64_t>& /*value: empty*/) { return "[]"; }
inline std::string default_text(const Normalizer& /*value*/) { return "None"; }
template <class T>
std::string default_text(const std::optional<T>& value) {
  return value.has_value() ? default_text(*value) : "None";
}
inline std::string default_text(const std::optional<at::Tensor>& /*value*/) { return "None"; }
inline std::string default_text(const std::optional<at::ScalarType>& /*value*/) { return "None"; }

/// `name(arguments) -> returns`. A mutating op's arguments that it writes over have (a!), (b!), ... in their types.
template <class Arguments>
std::string schema_of(const std::string& name, const std::string& returns, bool mutating = false) {
  const auto defaults = Arguments();
  std::string text;
  char alias = 'a';
  for_each_field<Arguments>([&](const auto& field) {
    using F = std::decay_t<decltype(field)>;
    auto type = TypeOf<F>::name();
    if (F::kKind == Kind::kAddedTo || (F::kKind == Kind::kOverwritten && mutating)) {
      type.insert(std::string_view("Tensor").size(), {'(', alias++, '!', ')'});
    }
    text += (text.empty() ? "" : ", ") + type + " " + field.name;
    if constexpr (F::kKind == Kind::kNoneIsDefault) text += "=None";
    if constexpr (F::kKind == Kind::kOption) text += "=" + default_text(field.of(defaults));
  });
  return name + "(" + text + ") -> " + returns;
}

// --- the call and the kernel ---

template <class Result, class Fields>
struct Unboxed;
template <class Result, class... F>
struct Unboxed<Result, std::tuple<F...>> {
  using Signature = Result(Passed<F>...);
};

/// An op, called by its arguments' struct.
template <class Arguments, class Result>
class Op {
  static_assert(std::tuple_size_v<decltype(Arguments::fields())> > 0);

 public:
  explicit Op(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>()) {}

  Result operator()(const Arguments& arguments) const {
    return std::apply(
        [&](const auto&... fields) {
          return handle_.call(give<std::decay_t<decltype(fields)>>(fields.of(arguments))...);
        },
        Arguments::fields());
  }

  /// Whether the op is composite. One that the Python package implements is not before that is imported.
  bool is_composite() const { return handle_.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd); }

  /// The kernel of a composite op, whatever transforms or modes are active: it sees them itself.
  Result composite(const Arguments& arguments) const {
    return std::apply(
        [&](const auto&... fields) {
          return handle_.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU),
                                    give<std::decay_t<decltype(fields)>>(fields.of(arguments))...);
        },
        Arguments::fields());
  }

 private:
  using Signature = typename Unboxed<Result, decltype(Arguments::fields())>::Signature;
  c10::TypedOperatorHandle<Signature> handle_;
};

/// An op and the one that writes over its arguments.
template <class Arguments, class Result>
struct Twins {
  explicit Twins(const std::string& name) : functional(name.c_str()), mutating((name + "_").c_str()) {}
  Result operator()(const Arguments& arguments, bool inplace) const {
    return (inplace ? mutating : functional)(arguments);
  }
  Op<Arguments, Result> functional, mutating;
};

template <auto body, class Fields>
struct Unpacked;
template <class Result, class Arguments, Result (*body)(const Arguments&), class... F>
struct Unpacked<body, std::tuple<F...>> {
  static Result call(Passed<F>... values) {
    Arguments arguments;
    std::apply([&](const auto&... fields) { (take<F>(fields.of(arguments), values), ...); }, Arguments::fields());
    return body(arguments);
  }
};
template <class Arguments, class Result>
Arguments arguments_of(Result (*body)(const Arguments&));

/// A function of an op's arguments as one of many parameters, which is what the dispatcher takes.
template <auto body>
constexpr auto unpacked() {
  return &Unpacked<body, decltype(decltype(arguments_of(body))::fields())>::call;
}

// --- checks ---

/// Every tensor of a call that is there, in the list's order.
using Tensors = c10::SmallVector<const at::Tensor*, 12>;

inline void add_tensors(Tensors& tensors, const at::Tensor& value) {
  if (value.defined()) tensors.push_back(&value);
}
inline void add_tensors(Tensors& tensors, const std::optional<at::Tensor>& value) {
  if (value.has_value()) add_tensors(tensors, *value);
}
inline void add_tensors(Tensors& tensors, const Normalizer& value) {
  if (const auto* tensor = std::get_if<at::Tensor>(&value)) add_tensors(tensors, *tensor);
}
inline void add_tensors(Tensors& tensors, at::TensorList values) {
  for (const auto& value : values) add_tensors(tensors, value);
}

template <class Arguments>
Tensors tensors_of(const Arguments& arguments) {
  Tensors tensors;
  for_each_field<Arguments>([&](const auto& field) {
    const auto& value = field.of(arguments);
    if constexpr (requires { add_tensors(tensors, value); }) add_tensors(tensors, value);
  });
  return tensors;
}

/// Raises where a number is not what its field says.
template <class Arguments>
void check_numbers(const char* op, const Arguments& arguments) {
  for_each_field<Arguments>([&](const auto& field) {
    const auto check = [&](double value, const char* or_none) {
      FUSEGRAD_CHECK_VALUE(field.range->holds(value), op, field.name, " must be ", field.range->words, or_none,
                           ", but got ", value);
    };
    using Value = typename std::decay_t<decltype(field)>::Value;
    if constexpr (std::is_same_v<Value, double>) {
      if (field.range != nullptr) check(field.of(arguments), "");
    } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
      const auto& value = field.of(arguments);
      if (field.range != nullptr && value.has_value()) check(*value, " or None");
    }
  });
}

}  // namespace fusegrad
