// Errors of TORCH_CHECK for the Python module, which is compiled without torch's headers: they bring a pybind11 of
// their own.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace fusegrad::jit {

struct DescribedError {
  bool value_error;     // else a RuntimeError
  std::string message;  // without the C++ stack, as torch.ops gives it to Python
};

/// Nothing if the exception is not torch's.
std::optional<DescribedError> describe_error(const std::exception_ptr& error);

}  // namespace fusegrad::jit
