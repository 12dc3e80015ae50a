// Errors below the front ends. Each class has the name of the Python exception that it becomes: a front end turns it
// into its framework's own, with the same words.
#pragma once

#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace fusegrad {

struct RuntimeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct NotImplementedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct ValueError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
struct IndexError : std::out_of_range {
  using std::out_of_range::out_of_range;
};

/// The device's memory did not suffice.
class OutOfDeviceMemory : public std::bad_alloc {
 public:
  explicit OutOfDeviceMemory(std::string message) : message_(std::make_shared<const std::string>(std::move(message))) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<const std::string> message_;  // copies must not throw
};

/// Raises `Error` of the parts, one after the other.
template <class Error = std::runtime_error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace fusegrad

/// Raises fusegrad::`Error` of the parts where the condition does not hold; only then are the parts computed.
#define FUSEGRAD_CHECK(Error, condition, ...)           \
  do {                                                  \
    if (!(condition)) [[unlikely]] {                    \
      ::fusegrad::fail<::fusegrad::Error>(__VA_ARGS__); \
    }                                                   \
  } while (false)
