#include "common/host.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace fusegrad::cpu {

InstructionSet instruction_set() {
#if !defined(__x86_64__)
  return InstructionSet::kDefault;
#else
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  const auto most = avx512 ? InstructionSet::kAvx512 : avx2 ? InstructionSet::kAvx2 : InstructionSet::kDefault;
  const char* text = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view named = text == nullptr ? "" : text;
  return named == "default" ? InstructionSet::kDefault : named == "avx2" ? std::min(most, InstructionSet::kAvx2) : most;
#endif
}

}  // namespace fusegrad::cpu
