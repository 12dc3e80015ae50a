// The source of a kernel of flex attention. Needs no GPU: what is compiled for which architecture can be made and
// compiled anywhere.
#pragma once

#include <string>

#include "cuda/attention/host/plan.h"
#include "jit/kernel_cache.h"

namespace fusegrad::cuda {

/// What determines the program.
std::string flex_id(const FlexCase& c, const FlexPlan& plan);
jit::KernelProgram flex_program(const FlexCase& c, const FlexPlan& plan, const std::string& architecture);

}  // namespace fusegrad::cuda
