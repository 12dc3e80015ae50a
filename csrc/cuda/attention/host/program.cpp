#include "cuda/attention/host/program.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "score_mod/cache.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {
namespace {

std::string flag(bool value) { return value ? "true" : "false"; }
const char* element_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float" : dtype == DType::kFloat16 ? "Float16" : "BFloat16";
}

struct Names {
  const char *program, *header, *type;
};
Names names(const FlexCase& c, const FlexTileSize& tile) {
  const FlexFamily family = tile.family;
  switch (c.kernel) {
    case FlexKernel::kForward:
      if (family == FlexFamily::kHopper) {
        return {"flex_forward_hopper", "cuda/attention/hopper/forward.cuh", "FlexForwardHopper"};
      }
      return {"flex_forward", "cuda/attention/portable/forward.cuh", "FlexForward"};
    case FlexKernel::kGradQuery:
      if (family == FlexFamily::kHopper) {
        return {"flex_grad_query_hopper", "cuda/attention/hopper/grad_query.cuh", "FlexGradQueryHopper"};
      }
      return {"flex_grad_query", "cuda/attention/portable/grad_query.cuh", "FlexGradQuery"};
    case FlexKernel::kBackward:
      break;
  }
  if (keys_shared(c, tile)) {
    return {"flex_backward_wide_hopper", "cuda/attention/hopper/backward_wide.cuh", "FlexBackwardWideHopper"};
  }
  if (family == FlexFamily::kHopper) {
    return {"flex_backward_hopper", "cuda/attention/hopper/backward.cuh", "FlexBackwardHopper"};
  }
  return {"flex_backward", "cuda/attention/portable/backward.cuh", "FlexBackward"};
}

std::string list(std::string_view schemes) {
  std::string text;
  for (const char s : schemes) text += std::string("'") + s + "', ";
  return text + "0";
}
std::string list(const std::vector<int>& values) {
  std::string text;
  for (const int v : values) text += std::to_string(v) + ", ";
  return text + "0";
}

// device::Wgmma for `cols` columns.
std::string wgmma(DType dtype, int cols, bool register_a, bool transposed) {
  std::string registers, outputs;
  for (int i = 0; i < cols / 2; ++i) {
    registers += (i == 0 ? "%" : ", %") + std::to_string(i);
    outputs += std::string(i == 0 ? "" : ", ") + "\"+f\"(d[" + std::to_string(i) + "])";
  }
  const auto operand = [&](int i) { return std::string(1, '%').append(std::to_string(cols / 2 + i)); };
  const std::string type = dtype == DType::kFloat16 ? "f16" : "bf16", n = std::to_string(cols);
  std::string text = "namespace fusegrad::device {\ntemplate <>\nstruct Wgmma<" + std::string(element_name(dtype)) +
                     ", " + n + ", " + flag(register_a) + ", " + flag(transposed) +
                     "> {\n  static __device__ __forceinline__ void run(float* d, ";
  text += register_a ? "const unsigned* a" : "unsigned long long a";
  text += ", unsigned long long b, bool accumulate) {\n    asm volatile(\"{\\n.reg .pred p;\\nsetp.ne.b32 p, " +
          operand(register_a ? 5 : 2) + ", 0;\\nwgmma.mma_async.sync.aligned.m64n" + n + "k16.f32." + type + "." +
          type + " {" + registers + "}, ";
  text += register_a ? "{" + operand(0) + ", " + operand(1) + ", " + operand(2) + ", " + operand(3) + "}, " + operand(4)
                     : operand(0) + ", " + operand(1);
  text += ", p, 1, 1, ";
  text += std::string(transposed ? "1" : "0") + (register_a ? "" : ", 0") + ";\\n}\" : " + outputs + " : ";
  text += register_a ? "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b)" : "\"l\"(a), \"l\"(b)";
  return text + ", \"r\"(static_cast<int>(accumulate)));\n  }\n};\n}  // namespace fusegrad::device\n";
}

// Those of a Hopper kernel: scores are of operands in shared memory that lie alike; what is made of probabilities, in
// registers, is of another factor whose rows are the common dimension; the gradient of the queries too, from dS in
// registers, where it is by itself, else transposed, of keys and dS in shared memory.
std::string products(const FlexCase& c, const FlexPlan& plan) {
  const int head = head_cols(c, plan.tile), value = value_cols(c, plan.tile);
  if (c.kernel == FlexKernel::kForward) {
    return wgmma(c.dtype, plan.tile.cols, false, false) + wgmma(c.dtype, value, true, true);
  }
  if (c.kernel == FlexKernel::kGradQuery) {
    return wgmma(c.dtype, plan.tile.cols, false, false) + wgmma(c.dtype, head, true, true);
  }
  return wgmma(c.dtype, plan.tile.rows, false, false) + wgmma(c.dtype, value, true, true) +
         (head == value ? "" : wgmma(c.dtype, head, true, true)) +
         wgmma(c.dtype, head == 64 ? plan.tile.rows / 2 : plan.tile.rows, false, true);
}

std::string config(const FlexCase& c, const FlexPlan& plan) {
  std::string text =
      "struct Config {\n  using Element = fusegrad::device::" + std::string(element_name(c.dtype)) + ";\n";
  if (c.dtype == DType::kFloat32) text = "struct Config {\n  using Element = float;\n";
  const auto mod = [](const FlexMod& m, const char* name) {
    return m.text.empty() ? std::string("fusegrad::device::NoMod") : "::" + std::string(name);
  };
  text += "  using ScoreMod = " + mod(c.score_mod, "ScoreMod") + ";\n  using MaskMod = " + mod(c.mask_mod, "MaskMod") +
          ";\n";
  if (c.kernel != FlexKernel::kForward) {
    text += std::string("  using Derivative = ") +
            (has_derivative(c) ? "::Derivative" : "fusegrad::device::NoDerivative") + ";\n";
    text += "  struct Schemes {\n    static constexpr char kScheme[] = {" + list(plan.schemes) +
            "};\n    static constexpr int kTable[] = {" + list(plan.tables) + "};\n  };\n";
  }
  const auto number = [&](const char* name, int value) {
    text += std::string("  static constexpr int ") + name + " = " + std::to_string(value) + ";\n";
  };
  const auto choice = [&](const char* name, bool value) {
    text += std::string("  static constexpr bool ") + name + " = " + flag(value) + ";\n";
  };
  number("kHead", head_cols(c, plan.tile));
  number("kValue", value_cols(c, plan.tile));
  number("kRows", plan.tile.rows);
  number("kCols", plan.tile.cols);
  number("kWarps", warps_with_keys(c, plan.tile));
  if (plan.tile.family == FlexFamily::kHopper) number("kGroups", computing_warps(plan.tile) / 4);
  number("kShare", plan.tile.share);
  number("kStages", plan.tile.stages);
  number("kGradientStages", plan.tile.gradient_stages);
  number("kQueryStages", plan.tile.query_stages);
  number("kKeyStages", plan.tile.key_stages);
  number("kParts", plan.tile.parts);
  choice("kBlocks", c.blocks);
  choice("kMixed", mixed(c, plan.tile));
  choice("kSplit", c.dtype == DType::kFloat32 && c.split);
  choice("kMaskAlone", masks_alone(c));
  choice("kDropout", c.dropout);
  choice("kMostDropped", c.most_dropped);
  if (c.kernel == FlexKernel::kForward) {
    number("kLineBytes", plan.tile.line_bytes);
    choice("kUnscaled", c.unscaled);
    choice("kFirstMaximum", first_maximum(c));
    choice("kMaxScores", c.max_scores);
    choice("kOutLow", c.out_low);
  } else {
    choice("kGradQuery", adds_grad_query(c, plan.tile));
    choice("kStoresBoxes", stores_boxes(c, plan.tile));
    choice("kGradKey", c.grad_key);
    choice("kGradValue", c.grad_value);
    choice("kGradScores", c.grad_query || c.grad_key || !plan.schemes.empty());
    choice("kMaxGradient", c.max_gradient);
    choice("kFixedPoint", c.fixed_point);
    choice("kPartialSums", c.partial_sums);
  }
  return text + "};\n";
}

// What NVRTC compiles in about a minute: kernels have a score_mod once for each of a thread's pairs. Without a bound it
// may take hours, or end the process.
constexpr int64_t kMostOperations = 2048, kMostContributions = 32;
void check_size(const FlexCase& c) {
  if (c.score_mod.text.empty()) return;
  const auto operations = [](const score_mod::Graph& graph) {
    return std::count_if(graph.nodes().begin(), graph.nodes().end(), [](const auto& n) { return !n.operands.empty(); });
  };
  int64_t count = operations(*score_mod::cached_graph(c.score_mod.text)), contributions = 0;
  if (has_derivative(c)) {
    const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
    count += operations(*derivative);
    contributions = static_cast<int64_t>(derivative->contributions().size());
  }
  TORCH_CHECK_VALUE(count <= kMostOperations,
                    "flex_attention: on a GPU a score_mod and its derivative must have at most ", kMostOperations,
                    " operations, but got ", count, "; reductions over vectors are loops, which count once");
  TORCH_CHECK_VALUE(contributions <= kMostContributions,
                    "flex_attention: on a GPU a score_mod must read captured tensors that require gradients at no more "
                    "than ",
                    kMostContributions, " places, but got ", contributions,
                    "; a vector of a captured tensor, such as bias[h, :], counts once");
}

}  // namespace

std::string flex_id(const FlexCase& c, const FlexPlan& plan) {
  std::string id = names(c, plan.tile).program;
  const auto add = [&](auto value) { (id += ' ') += std::to_string(value); };
  add(static_cast<int>(c.dtype));
  add(head_cols(c, plan.tile));
  add(value_cols(c, plan.tile));
  for (const int v : {plan.tile.rows, plan.tile.cols, plan.tile.warps, plan.tile.share, plan.tile.stages,
                      plan.tile.gradient_stages, plan.tile.query_stages, plan.tile.key_stages, plan.tile.parts})
    add(v);
  int flags = 0;
  for (const bool v :
       {c.blocks, mixed(c, plan.tile), c.small_lengths, c.split, c.unscaled, c.max_scores, c.out_low, c.grad_query,
        c.grad_key, c.grad_value, c.max_gradient, c.fixed_point, c.partial_sums, c.score_mod.small_scalars,
        c.mask_mod.small_scalars, c.score_mod.small_buffers, c.mask_mod.small_buffers, c.dropout, c.most_dropped}) {
    flags = flags * 2 + (v ? 1 : 0);
  }
  add(flags);
  if (c.kernel != FlexKernel::kForward) {
    for (const bool v : c.wants_grad) id += v ? '1' : '0';
    (id += ' ') += plan.schemes;
    for (const int v : plan.tables) add(v);
  }
  for (const FlexMod* mod : {&c.score_mod, &c.mask_mod}) {
    id += '\n';
    for (const auto dtype : mod->dtypes) add(static_cast<int>(dtype));
    (id += ' ') += mod->text;
  }
  return id;
}

jit::KernelProgram flex_program(const FlexCase& c, const FlexPlan& plan, const std::string& architecture) {
  check_size(c);
  const Names name = names(c, plan.tile);
  const bool hopper = plan.tile.family == FlexFamily::kHopper;
  const bool backward = c.kernel == FlexKernel::kBackward;
  std::string source = c.dtype == DType::kFloat32 ? "" : "#define FUSEGRAD_FAST_MATH\n";
  // Of each pair's own reads none are equal.
  const bool own = c.kernel == FlexKernel::kForward && reads_pairs(c.score_mod);
  if (hopper) source += own ? "#define FUSEGRAD_PREDICATED_READS\n" : "#define FUSEGRAD_SHARED_READS\n";
  source += "#include \"" + std::string(name.header) + "\"\n\n";
  const auto score = c.score_mod.text.empty() ? nullptr : score_mod::cached_graph(c.score_mod.text);
  const auto render = [&](const FlexMod& mod, const score_mod::Graph& graph, const char* type) {
    score_mod::RenderOptions options;
    options.name = type;
    options.dtypes = mod.dtypes;
    if (c.small_lengths) options.lengths = {kSmallLength, kSmallLength, kSmallLength, kSmallLength};
    options.small_scalars = mod.small_scalars;
    options.small_buffers = mod.small_buffers;
    if (graph.kind() == score_mod::Kind::kDerivative) options.score_mod = score.get();
    source += score_mod::render_cuda(graph, options) + "\n";
  };
  if (!c.score_mod.text.empty()) render(c.score_mod, *score, "ScoreMod");
  if (!c.mask_mod.text.empty()) render(c.mask_mod, *score_mod::cached_graph(c.mask_mod.text), "MaskMod");
  if (has_derivative(c))
    render(c.score_mod, *score_mod::cached_derivative(c.score_mod.text, c.wants_grad), "Derivative");
  source += config(c, plan);
  if (hopper) source += products(c, plan);
  const std::string kernel = "fusegrad::device::" + std::string(name.type) + "<Config>";
  const std::string arguments = c.kernel == FlexKernel::kForward ? "Forward" : "Backward";
  source += "static_assert(" + kernel + "::kSharedBytes == " + std::to_string(plan.shared_bytes) + ");\n";
  if (backward)
    source += "struct Sums {\n  fusegrad::device::FlexSums of[Config::Derivative::kContributions + 1];\n};\n";
  source +=
      "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(32 * plan.tile.warps) +
      (hopper ? ", 1) " : ") ") + name.program + "(\n    const __grid_constant__ fusegrad::device::Flex" + arguments +
      "Arguments arguments,\n    const __grid_constant__ Config::ScoreMod::Captured score_mod,\n"
      "    const __grid_constant__ Config::MaskMod::Captured mask_mod" +
      (backward ? ",\n    const __grid_constant__ Sums sums" : "") +
      (hopper ? ",\n    const __grid_constant__ fusegrad::device::Flex" + arguments + "HopperArguments more" : "") +
      ") {\n  extern __shared__ __align__(" + (hopper && backward ? "1024" : "16") + ") char shared[];\n  " + kernel +
      "(arguments, " + (backward ? "sums.of, " : "") + (hopper ? "more, " : "") + "score_mod, mask_mod, " +
      (backward ? "shared" : "fusegrad::device::shared_address(shared)") + ").run();\n}\n";
  std::string text(c.score_mod.text);
  if (!c.mask_mod.text.empty()) (text += text.empty() ? "" : "\n") += c.mask_mod.text;
  return {{name.program, source, architecture, {}, text}, name.program, plan.shared_bytes, false};
}

}  // namespace fusegrad::cuda
