// Which of the kernels that are compiled once for each instruction set this machine runs.
#pragma once

#include "common/host.h"

/// Declarations, in the namespace of each instruction set.
#if defined(__x86_64__)
#define FUSEGRAD_EACH_CAPABILITY(...) \
  namespace DEFAULT {                 \
  __VA_ARGS__                         \
  }                                   \
  namespace AVX2 {                    \
  __VA_ARGS__                         \
  }                                   \
  namespace AVX512 {                  \
  __VA_ARGS__                         \
  }
#else
#define FUSEGRAD_EACH_CAPABILITY(...) \
  namespace DEFAULT {                 \
  __VA_ARGS__                         \
  }                                   \
  namespace AVX2 = DEFAULT;           \
  namespace AVX512 = DEFAULT;
#endif

namespace fusegrad::cpu {

/// The one for the machine's instruction set.
template <class T>
const T& for_this_machine(const T& plain, const T& avx2, const T& avx512) {
  const auto set = instruction_set();
  // NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter): all three are constants of a namespace.
  return set == InstructionSet::kAvx512 ? avx512 : set == InstructionSet::kAvx2 ? avx2 : plain;
}

}  // namespace fusegrad::cpu
