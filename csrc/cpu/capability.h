// Which of the kernels that are compiled once for each instruction set this machine runs.
#pragma once

#include <ATen/Version.h>

namespace fusegrad::cpu {

/// The one for the machine's instruction set, as ATen chooses its own. It reads a string: ask once.
template <class T>
const T& for_this_machine(const T& plain, const T& avx2, const T& avx512) {
  const auto capability = at::get_cpu_capability();
  return capability == "AVX512" ? avx512 : capability == "AVX2" ? avx2 : plain;
}

}  // namespace fusegrad::cpu
