// The CUDA source of a kernel of flex attention, from its spec alone. Needs no GPU: the source for any architecture can
// be made and compiled anywhere.
#pragma once

#include <string>

#include "cuda/attention/host/kernel_spec.h"
#include "jit/kernel_cache.h"

namespace fusegrad::cuda {

/// Throws where a score_mod is too large to compile.
jit::KernelProgram flex_program(const KernelSpec& spec, const std::string& architecture);

}  // namespace fusegrad::cuda
