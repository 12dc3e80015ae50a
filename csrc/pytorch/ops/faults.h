// Errors that leave an op: they say which op it was, keep their type, and say what was lost. The kernels of all ops
// and the backwards of all autograd Functions run within named_errors(); no op has a handler of its own.
#pragma once

#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fusegrad {

/// What this thread writes over since the scope's begin. Scopes nest: what an inner one saw the outer one sees too.
class OverwriteScope {
 public:
  OverwriteScope();
  ~OverwriteScope();
  OverwriteScope(const OverwriteScope&) = delete;
  OverwriteScope& operator=(const OverwriteScope&) = delete;

  /// The arguments that were being written over, in words; null: none was.
  const char* overwritten() const;

 private:
  const char* outer_;
};

/// For an op that writes over its arguments: called right before the first write, after whatever can be done before.
/// An error from here on loses the contents of `arguments`: the version is raised (bump_overwritten), and the error
/// says so. A string literal.
void begin_overwriting(const char* arguments);

/// Rethrows the exception that is being handled. An error of PyTorch's keeps its type, c10::OutOfMemoryError too, and
/// gets the op's name and what was lost as its context, where it does not have them. Those of common/error.h become
/// PyTorch's of the same name first, and a std::invalid_argument, such as a score_mod's graph throws, a
/// c10::ValueError. Want of memory below the front end (std::bad_alloc, std::length_error) becomes a
/// c10::OutOfMemoryError, a kernel's std::runtime_error a c10::Error.
/// Other exceptions, such as Python's, pass as they are.
[[noreturn]] void rethrow_named(const char* op, const char* overwritten);

template <class Body>
auto named_errors(const char* op, Body&& body) {
  const OverwriteScope scope;
  try {
    return body();
  } catch (...) {
    rethrow_named(op, scope.overwritten());
  }
}

/// A text as a template's argument.
template <size_t kSize>
struct OpName {
  // NOLINTNEXTLINE(google-explicit-constructor): written as a string literal.
  constexpr OpName(const char (&name)[kSize]) { std::copy_n(name, kSize, text); }
  char text[kSize]{};
};

template <OpName kOp, auto kFunction>
struct NamedKernel;
template <OpName kOp, class Result, class... Arguments, Result (*kFunction)(Arguments...)>
struct NamedKernel<kOp, kFunction> {
  static Result call(Arguments... arguments) {
    return named_errors(kOp.text, [&] { return kFunction(std::forward<Arguments>(arguments)...); });
  }
};

/// `kFunction` as a dispatcher's kernel whose errors have the op's name.
template <OpName kOp, auto kFunction>
constexpr auto named_kernel() {
  using Kernel = NamedKernel<kOp, kFunction>;
  return TORCH_FN(Kernel::call);
}

}  // namespace fusegrad
