#include "common/host.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

namespace fusegrad::cpu {

InstructionSet instruction_set() {
  const auto capability = at::get_cpu_capability();
  return capability == "AVX512" ? InstructionSet::kAvx512
         : capability == "AVX2" ? InstructionSet::kAvx2
                                : InstructionSet::kDefault;
}

void parallel_for(void* /*stream*/, int64_t count, int64_t grain,
                  const std::function<void(int64_t, int64_t)>& function) {
  at::parallel_for(0, count, grain, function);
}

}  // namespace fusegrad::cpu
