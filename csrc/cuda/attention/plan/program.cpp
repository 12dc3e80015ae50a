#include "cuda/attention/plan/program.h"

#include <algorithm>

#include "common/error.h"
#include "cuda/attention/plan/case_facts.h"
#include "cuda/attention/plan/kernel.h"
#include "score_mod/cache.h"
#include "score_mod/kernel_size.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {
namespace {

std::string flag(bool value) { return value ? "true" : "false"; }

}  // namespace

std::string wgmma(DType dtype, int cols, bool register_a, bool transposed_b, bool transposed_a) {
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

std::string score_text(const FlexCase& c) {
  return c.score_mod.text.empty() ? std::string(score_mod::kNoScoreMod) : c.score_mod.text;
}

std::string rendered(const FlexCase& c, const FlexMod& mod, const score_mod::Graph& graph, const char* type,
                     score_mod::Unread unread) {
  score_mod::RenderOptions options;
  options.name = type;
  options.dtypes = mod.dtypes;
  if (c.small_lengths) options.lengths = {kSmallLength, kSmallLength, kSmallLength, kSmallLength};
  options.small_scalars = mod.small_scalars;
  options.small_buffers = mod.small_buffers;
  options.given = !mod.text.empty();
  options.fast_math = c.dtype != DType::kFloat32;
  options.unread = unread;
  const auto score = score_mod::cached_graph(score_text(c));
  if (graph.kind() == score_mod::Kind::kDerivative) options.score_mod = score.get();
  return score_mod::render_cuda(graph, options) + "\n";
}

namespace {

void check_size(const FlexCase& c) {
  if (c.score_mod.text.empty()) return;
  const bool tangents = kernel_of(c.kernel).tangent;  // made of the derivative, and about as large
  try {
    score_mod::check_kernel_size(c.score_mod.text, tangents                     ? &c.tangents_of.buffers
                                                   : planner::has_derivative(c) ? &c.wants_grad
                                                                                : nullptr);
  } catch (const score_mod::GraphError& error) {
    throw ValueError(error.what());
  }
}

// The rendered structs of the mods.
std::string mods(const FlexCase& c, score_mod::Unread unread) {
  const FlexMod &score = c.score_mod, &mask = c.mask_mod;
  const std::string mask_text = mask.text.empty() ? std::string(score_mod::kNoMaskMod) : mask.text;
  std::string text = rendered(c, score, *score_mod::cached_graph(score_text(c)), "ScoreMod", unread) +
                     rendered(c, mask, *score_mod::cached_graph(mask_text), "MaskMod", unread);
  const Kernel& kernel = kernel_of(c.kernel);
  if (kernel.derives)
    text += rendered(c, score, *score_mod::cached_derivative(score_text(c), c.wants_grad), "Derivative", unread);
  if (kernel.structs != nullptr) text += kernel.structs(c, unread);
  return text;
}

// The extern "C" kernel.
std::string entry(const KernelSpec& spec) {
  const KernelFacts& f = spec.facts();
  const Kernel& kernel = kernel_of(f.kernel);
  const std::string type = "fusegrad::device::" + std::string(spec.type()) + "<Config>";
  const bool more = spec.more() != nullptr;
  std::string text = "static_assert(" + type + "::kSharedBytes == " + std::to_string(f.shared_bytes) + ");\n";
  if (kernel.sums)
    text += "struct Sums {\n  fusegrad::device::FlexSums of[Config::Derivative::kContributions + 1];\n};\n";
  text += "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(f.threads()) +
          (f.hopper()       ? ", 1) "
           : f.resident > 0 ? ", " + std::to_string(f.resident) + ") "
                            : ") ") +
          spec.name() + "(\n    const __grid_constant__ fusegrad::device::" + kernel.arguments +
          " arguments,\n    const __grid_constant__ Config::ScoreMod::Captured score_mod,\n"
          "    const __grid_constant__ Config::MaskMod::Captured mask_mod" +
          (kernel.sums ? ",\n    const __grid_constant__ Sums sums" : "") +
          (kernel.tangent ? ",\n    const __grid_constant__ Config::Tangent::Captured tangent" : "") +
          (more ? ",\n    const __grid_constant__ fusegrad::device::" + std::string(spec.more()) + " more" : "") +
          ") {\n  extern __shared__ __align__(" + ((f.hopper() && kernel.sums) || f.tile.key_boxes() ? "1024" : "16") +
          ") char shared[];\n";
  const std::string run = "(arguments, " + std::string(kernel.sums ? "sums.of, " : "") + (more ? "more, " : "") +
                          "score_mod, mask_mod, " + (kernel.tangent ? "tangent, " : "") +
                          (kernel.shared_pointer ? "shared" : "fusegrad::device::shared_address(shared)") +
                          ").run();\n";
  text += "  " + type + run + "}\n";
  return text;
}

// The gradient of max_scores goes to the scores that equal the forward's to the bit. Two kernels that both compute a
// score_mod contract other products and sums to one rounding.
std::vector<std::string> flags(const FlexCase& c) {
  const bool compares = (c.max_scores || c.max_gradient) && !c.score_mod.text.empty();
  return compares || kernel_of(c.kernel).exact ? std::vector<std::string>{"--fmad=false"} : std::vector<std::string>{};
}

}  // namespace

jit::KernelProgram flex_program(const KernelSpec& spec, const std::string& architecture) {
  const KernelFacts& f = spec.facts();
  const FlexCase& c = spec.asked();
  const Kernel& kernel = kernel_of(c.kernel);
  check_size(c);
  // Reads of each pair by itself are all different: sharing equal ones gains nothing.
  const bool own = kernel.predicates_reads && reads_pairs(c.score_mod);
  const auto unread = !f.hopper() ? score_mod::Unread::kBranch
                      : own       ? score_mod::Unread::kPredicate
                                  : score_mod::Unread::kElsewhere;
  std::string source = "#include \"" + std::string(spec.header()) + "\"\n\n" + mods(c, unread) + spec.config();
  if (f.hopper()) source += kernel.products(c.dtype, f);
  source += entry(spec);
  std::string text(c.score_mod.text);
  if (!c.mask_mod.text.empty()) (text += text.empty() ? "" : "\n") += c.mask_mod.text;
  return {{spec.name(), source, architecture, flags(c), text}, spec.name(), f.shared_bytes, false};
}

}  // namespace fusegrad::cuda
