#include "jit/describe_error.h"

#include <c10/util/Exception.h>

namespace fusegrad::jit {

std::optional<DescribedError> describe_error(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const c10::ValueError& e) {
    return DescribedError{true, e.what_without_backtrace()};
  } catch (const c10::Error& e) {
    return DescribedError{false, e.what_without_backtrace()};
  } catch (...) {
    return {};
  }
  return {};
}

}  // namespace fusegrad::jit
