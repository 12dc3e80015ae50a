// What the CPU's kernels need of the framework that calls them: a table of functions, passed by each call. The library
// below the front ends serves several of them in one process.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fusegrad::cpu {

struct Host {
  /// body(closure, begin, end) for ranges that make up [0, count), of at least `grain` but for the last, on several
  /// threads. An exception of one of them is rethrown.
  void (*parallel_for)(void* context, int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                       void* closure);
  /// On how many threads at most.
  int64_t (*threads)(void* context);
  void* context;
};

/// function(begin, end) for ranges as above.
template <class Function>
void parallel_for(const Host& host, int64_t count, int64_t grain, Function&& function) {
  using Called = std::remove_reference_t<Function>;
  host.parallel_for(
      host.context, count, grain,
      [](void* closure, int64_t begin, int64_t end) { (*static_cast<Called*>(closure))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&function)));
}

inline int64_t threads(const Host& host) { return host.threads(host.context); }

enum class InstructionSet { kDefault, kAvx2, kAvx512 };

/// The largest that this machine has and PyTorch's variable ATEN_CPU_CAPABILITY ("default", "avx2", "avx512") allows.
/// Ask once.
InstructionSet instruction_set();

}  // namespace fusegrad::cpu
