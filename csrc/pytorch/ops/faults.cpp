#include "pytorch/ops/faults.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>

#include "common/error.h"

namespace fusegrad {
namespace {

thread_local const char* overwriting = nullptr;

std::string lost(const char* overwritten) {
  return "it had begun to write over " + std::string(overwritten) + ", whose contents are lost";
}

bool mentions(const c10::Error& error, const std::string& words) {
  const auto in = [&](const std::string& text) { return text.find(words) != std::string::npos; };
  return in(error.msg()) || std::any_of(error.context().begin(), error.context().end(), in);
}

[[noreturn]] void out_of_memory(const char* op, const char* what, const char* overwritten) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, op, ": memory must suffice, but an allocation failed (", what, ")",
                   overwritten != nullptr ? "; " + lost(overwritten) : "");
}

// The exception that is being handled, where it is one of common/error.h, as PyTorch's of the same name.
[[noreturn]] void rethrow_as_torch() {
  try {
    throw;
  } catch (const RuntimeError& error) {
    C10_THROW_ERROR(Error, error.what());
  } catch (const NotImplementedError& error) {
    C10_THROW_ERROR(NotImplementedError, error.what());
  } catch (const ValueError& error) {
    C10_THROW_ERROR(ValueError, error.what());
  } catch (const IndexError& error) {
    C10_THROW_ERROR(IndexError, error.what());
  } catch (const std::invalid_argument& error) {  // a score_mod's graph
    C10_THROW_ERROR(ValueError, error.what());
  }
}

}  // namespace

OverwriteScope::OverwriteScope() : outer_(std::exchange(overwriting, nullptr)) {}
OverwriteScope::~OverwriteScope() {
  if (overwriting == nullptr) overwriting = outer_;
}
const char* OverwriteScope::overwritten() const { return overwriting; }

void begin_overwriting(const char* arguments) { overwriting = arguments; }

void rethrow_named(const char* op, const char* overwritten) {
  try {
    rethrow_as_torch();
  } catch (c10::Error& error) {
    if (!mentions(error, std::string(op))) error.add_context("in " + std::string(op));
    if (overwritten != nullptr && !mentions(error, "contents are lost")) error.add_context(lost(overwritten));
    throw;
  } catch (const std::bad_alloc& error) {
    out_of_memory(op, error.what(), overwritten);
  } catch (const std::length_error& error) {
    out_of_memory(op, error.what(), overwritten);
  } catch (const std::runtime_error& error) {
    // That very type alone: others' exceptions, such as Python's, derive from it.
    if (typeid(error) != typeid(std::runtime_error)) throw;
    TORCH_CHECK(false, op, ": ", error.what(), overwritten != nullptr ? "; " + lost(overwritten) : "");
  }
}

}  // namespace fusegrad
