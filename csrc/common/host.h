// What the CPU's row kernels need of the framework that calls them. They are linked into two libraries, each with a
// definition of these: common/host.cpp has ATen's, jax/host.cpp XLA's.
#pragma once

#include <cstdint>
#include <functional>

namespace fusegrad::cpu {

enum class InstructionSet { kDefault, kAvx2, kAvx512 };

/// The one to use on this machine. It may read strings: ask once.
InstructionSet instruction_set();

/// function(begin, end) for ranges that make up [0, count), of at least `grain` but for the last, on several threads.
/// `stream` is the one that the kernel was given.
void parallel_for(void* stream, int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& function);

}  // namespace fusegrad::cpu
