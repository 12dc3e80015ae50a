// Loaded kernels of this process: what a launch asks for. The programs' cubins come from compile.h.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "jit/driver.h"
#include "jit/program.h"

namespace fusegrad::jit {

struct KernelProgram {
  Program program;
  std::string entry;             // the extern "C" kernel's name
  int dynamic_shared_bytes = 0;  // the most that it is launched with
  bool large_clusters = false;   // of more than 8 CTAs
};

struct Kernel {
  std::string name;  // of the program
  CUfunction function = nullptr;
  FunctionAttributes attributes;

  void launch(const Launch& how, void** arguments) const {
    Driver::get().launch(function, how, arguments, name.c_str());
  }
  /// For launches with more dynamic shared memory than the program was made for.
  void allow_shared(int bytes) const { Driver::get().allow_shared(function, bytes, name.c_str()); }
};

/// The architecture to compile for on the current device: "90a" on an H100, where kernels use what that alone has; else
/// the plain "80", "89", "100".
std::string current_architecture();

/// The current device's.
int current_multiprocessors();

/// The kernel named `id` on the current device; a thread's first call of it makes, compiles (compile.h) and loads the
/// program. `id` must determine what `make` returns on that architecture: an id that is known is not made again. The
/// reference stays valid for as long as the process runs. Threads may call it at once; of one program there is one
/// compilation at a time. Costs a hash of `id` where the kernel is known.
const Kernel& kernel(std::string_view id, const std::function<KernelProgram(const std::string& architecture)>& make);

}  // namespace fusegrad::jit
