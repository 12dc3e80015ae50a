#include "cuda/attention/host/program.h"

#include <algorithm>

#include "common/error.h"
#include "cuda/attention/host/plan.h"
#include "score_mod/cache.h"
#include "score_mod/kernel_size.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {
namespace {

std::string flag(bool value) { return value ? "true" : "false"; }
// device::Wgmma for `cols` columns.
std::string wgmma(DType dtype, int cols, bool register_a, bool transposed_b, bool transposed_a = false) {
  std::string registers, outputs;
  for (int i = 0; i < cols / 2; ++i) {
    registers += (i == 0 ? "%" : ", %") + std::to_string(i);
    outputs += std::string(i == 0 ? "" : ", ") + "\"+f\"(d[" + std::to_string(i) + "])";
  }
  const auto operand = [&](int i) { return std::string(1, '%').append(std::to_string(cols / 2 + i)); };
  const std::string type = dtype == DType::kFloat16 ? "f16" : "bf16", n = std::to_string(cols);
  std::string text = "namespace fusegrad::device {\ntemplate <>\nstruct Wgmma<" + std::string(element_name(dtype)) +
                     ", " + n + ", " + flag(register_a) + ", " + flag(transposed_b) + ", " + flag(transposed_a) +
                     "> {\n  static __device__ __forceinline__ void run(float* d, ";
  text += register_a ? "const unsigned* a" : "unsigned long long a";
  text += ", unsigned long long b, bool accumulate) {\n    asm volatile(\"{\\n.reg .pred p;\\nsetp.ne.b32 p, " +
          operand(register_a ? 5 : 2) + ", 0;\\nwgmma.mma_async.sync.aligned.m64n" + n + "k16.f32." + type + "." +
          type + " {" + registers + "}, ";
  text += register_a ? "{" + operand(0) + ", " + operand(1) + ", " + operand(2) + ", " + operand(3) + "}, " + operand(4)
                     : operand(0) + ", " + operand(1);
  text += ", p, 1, 1, ";
  if (!register_a) text += transposed_a ? "1, " : "0, ";
  text += std::string(transposed_b ? "1" : "0") + ";\\n}\" : " + outputs + " : ";
  text += register_a ? "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b)" : "\"l\"(a), \"l\"(b)";
  return text + ", \"r\"(static_cast<int>(accumulate)));\n  }\n};\n}  // namespace fusegrad::device\n";
}

// The products of a Hopper kernel. S and dP: both operands in shared memory, K-major. O, dV and dK, and dQ in a kernel
// of its own: P or dS in registers by an operand in shared memory, MN-major. dQ of the backward: both in shared memory,
// transposed, K by dS; of narrow heads dS by K.
std::string products(const KernelFacts& f) {
  if (!f.backward()) {
    return wgmma(f.dtype, f.tile.cols, false, false) + wgmma(f.dtype, f.value, true, true);
  }
  if (f.kernel == FlexKernel::kGradBuffers) return wgmma(f.dtype, f.tile.cols / 2, false, false);
  if (f.kernel == FlexKernel::kGradQuery) {
    return wgmma(f.dtype, f.tile.cols, false, false) + wgmma(f.dtype, f.head, true, true);
  }
  return wgmma(f.dtype, f.tile.rows, false, false) + wgmma(f.dtype, f.value, true, true) +
         (f.head == f.value ? "" : wgmma(f.dtype, f.head, true, true)) +
         (f.narrow ? wgmma(f.dtype, f.head, false, true)
                   : wgmma(f.dtype, f.head <= 64 ? f.tile.rows / 2 : f.tile.rows, false, false, true));
}

void check_size(const KernelFacts& f) {
  if (f.score_mod.text.empty()) return;
  const bool tangents = f.kernel == FlexKernel::kTangents;  // made of the derivative, and about as large
  try {
    score_mod::check_kernel_size(f.score_mod.text, tangents           ? &f.tangents_of.buffers
                                                   : f.has_derivative ? &f.wants_grad
                                                                      : nullptr);
  } catch (const score_mod::GraphError& error) {
    throw ValueError(error.what());
  }
}

// The rendered structs of the mods.
std::string mods(const KernelFacts& f) {
  std::string text;
  const auto score = f.score_mod.text.empty() ? nullptr : score_mod::cached_graph(f.score_mod.text);
  const auto render = [&](const FlexMod& mod, const score_mod::Graph& graph, const char* type) {
    score_mod::RenderOptions options;
    options.name = type;
    options.dtypes = mod.dtypes;
    if (f.small_lengths) options.lengths = {kSmallLength, kSmallLength, kSmallLength, kSmallLength};
    options.small_scalars = mod.small_scalars;
    options.small_buffers = mod.small_buffers;
    if (graph.kind() == score_mod::Kind::kDerivative) options.score_mod = score.get();
    text += score_mod::render_cuda(graph, options) + "\n";
  };
  if (score != nullptr) render(f.score_mod, *score, "ScoreMod");
  if (!f.mask_mod.text.empty()) render(f.mask_mod, *score_mod::cached_graph(f.mask_mod.text), "MaskMod");
  if (f.has_derivative)
    render(f.score_mod, *score_mod::cached_derivative(f.score_mod.text, f.wants_grad), "Derivative");
  if (f.kernel == FlexKernel::kPairTangents && f.has_derivative)
    render(f.score_mod, *score_mod::cached_curvature(f.score_mod.text), "Curvature");
  if (f.kernel == FlexKernel::kTangents && score != nullptr) {
    // Behind the score_mod's buffers come their tangents, of the same dtypes.
    FlexMod tangent = f.score_mod;
    tangent.small_buffers = f.tangents_of.small_buffers;
    for (size_t i = 0; i < f.tangents_of.buffers.size(); ++i) {
      if (f.tangents_of.buffers[i]) tangent.dtypes.push_back(f.score_mod.dtypes.at(i));
    }
    render(tangent, *score_mod::cached_tangent(f.score_mod.text, f.tangents_of.buffers), "Tangent");
  }
  return text;
}

// The extern "C" kernel.
std::string entry(const KernelSpec& spec) {
  const KernelFacts& f = spec.facts();
  const bool hopper = f.hopper(), backward = f.kernel == FlexKernel::kBackward;
  const bool sums = backward || f.kernel == FlexKernel::kGradBuffers;
  const std::string kernel = "fusegrad::device::" + std::string(spec.type()) + "<Config>";
  const bool tangents = f.kernel == FlexKernel::kTangents;
  const std::string arguments = f.kernel == FlexKernel::kForward        ? "Forward"
                                : f.kernel == FlexKernel::kPairTangents ? "PairTangents"
                                : tangents                              ? "Tangents"
                                                                        : "Backward";
  const std::string more = hopper ? arguments + "Hopper" : f.tile.key_boxes ? "ForwardFew" : "";
  std::string text = "static_assert(" + kernel + "::kSharedBytes == " + std::to_string(f.shared_bytes) + ");\n";
  if (sums) text += "struct Sums {\n  fusegrad::device::FlexSums of[Config::Derivative::kContributions + 1];\n};\n";
  text += "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(f.threads()) +
          (hopper           ? ", 1) "
           : f.resident > 0 ? ", " + std::to_string(f.resident) + ") "
                            : ") ") +
          spec.name() + "(\n    const __grid_constant__ fusegrad::device::Flex" + arguments +
          "Arguments arguments,\n    const __grid_constant__ Config::ScoreMod::Captured score_mod,\n"
          "    const __grid_constant__ Config::MaskMod::Captured mask_mod" +
          (sums ? ",\n    const __grid_constant__ Sums sums" : "") +
          (tangents ? ",\n    const __grid_constant__ Config::Tangent::Captured tangent" : "") +
          (more.empty() ? "" : ",\n    const __grid_constant__ fusegrad::device::Flex" + more + "Arguments more") +
          ") {\n  extern __shared__ __align__(" + ((hopper && sums) || f.tile.key_boxes ? "1024" : "16") +
          ") char shared[];\n";
  const std::string run = "(arguments, " + std::string(sums ? "sums.of, " : "") + (more.empty() ? "" : "more, ") +
                          "score_mod, mask_mod, " + (tangents ? "tangent, " : "") +
                          (backward ? "shared" : "fusegrad::device::shared_address(shared)") + ").run();\n";
  text += "  " + kernel + run + "}\n";
  return text;
}

}  // namespace

jit::KernelProgram flex_program(const KernelSpec& spec, const std::string& architecture) {
  const KernelFacts& f = spec.facts();
  check_size(f);
  std::string source = f.dtype == DType::kFloat32 ? "" : "#define FUSEGRAD_FAST_MATH\n";
  // Reads of each pair by itself are all different: sharing equal ones gains nothing.
  const bool own = f.kernel == FlexKernel::kForward && reads_pairs(f.score_mod);
  if (f.hopper()) source += own ? "#define FUSEGRAD_PREDICATED_READS\n" : "#define FUSEGRAD_SHARED_READS\n";
  source += "#include \"" + std::string(spec.header()) + "\"\n\n" + mods(f) + spec.config();
  if (f.hopper()) source += products(f);
  source += entry(spec);
  std::string text(f.score_mod.text);
  if (!f.mask_mod.text.empty()) (text += text.empty() ? "" : "\n") += f.mask_mod.text;
  return {{spec.name(), source, architecture, {}, text}, spec.name(), f.shared_bytes, false};
}

}  // namespace fusegrad::cuda
