// What the front ends of the process offer to kernels that are compiled and loaded at run time.
#pragma once

#include <string>
#include <vector>

namespace fusegrad::jit {

struct FrontEnd {
  /// Shows a warning to its user. Any thread may call it.
  void (*warn)(const std::string& message) = nullptr;
  /// Lets go of GPU memory that it holds without using it; false where there is none, or where it must not now (while a
  /// stream is captured).
  bool (*release_memory)() = nullptr;
  /// Its Python packages' folder, where those of NVIDIA may be too; empty: none.
  std::string packages;
};

/// Called once by each front end, when its library is loaded.
void add_front_end(FrontEnd front_end);

/// By the first front end; without one, to stderr.
void warn(const std::string& message);
/// By all of them: whether any let go of some.
bool release_memory();
/// Those of all of them, in their order.
std::vector<std::string> package_folders();

}  // namespace fusegrad::jit
