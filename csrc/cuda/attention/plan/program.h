// The program of a kernel of flex attention from its KernelSpec: the mods' structs, the Config, the entry.
#pragma once

#include <string>

#include "cuda/attention/plan/kernel_spec.h"
#include "jit/kernel_cache.h"
#include "score_mod/graph.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {

/// The program. Raises where a score_mod's kernel would be too large.
jit::KernelProgram flex_program(const KernelSpec& spec, const std::string& architecture);

// For the rooms of kernels.

/// The text of the score_mod, or of one that changes nothing.
std::string score_text(const FlexCase& c);
/// The struct `type` of a mod's graph, one made of it or its derivative.
std::string rendered(const FlexCase& c, const FlexMod& mod, const score_mod::Graph& graph, const char* type,
                     score_mod::Unread unread);
/// device::Wgmma for `cols` columns. Operand a lies in shared memory, K-major unless transposed, or in registers.
std::string wgmma(DType dtype, int cols, bool register_a, bool transposed_b, bool transposed_a = false);

}  // namespace fusegrad::cuda
