#include "pytorch/bindings/cuda.h"

#include <optional>
#include <stdexcept>

#include "cuda/attention/backward/backward.h"
#include "cuda/attention/forward/few_queries.h"
#include "cuda/attention/grad_buffers/grad_buffers.h"
#include "cuda/attention/mask/block_states.h"
#include "cuda/attention/plan/launch_plan.h"
#include "cuda/attention/plan/plan.h"
#include "cuda/attention/plan/program.h"
#include "pytorch/bindings/jit.h"
#include "pytorch/bindings/score_mod.h"
#include "score_mod/cache.h"

namespace py = fusegrad::python;

namespace fusegrad::python {

template <>
inline constexpr const char* kHeldAs<cuda::FlexCase> = "fusegrad._C.flex.Case";

}  // namespace fusegrad::python

namespace fusegrad::cuda {
namespace {

FlexMod make_mod(const std::string& text, const std::vector<std::string>& dtypes, std::array<bool, 2> small) {
  FlexMod mod;
  mod.text = text;
  mod.small_buffers = small[0];
  mod.small_scalars = small[1];
  for (const auto& dtype : dtypes) mod.dtypes.push_back(score_mod::dtype_named(dtype));
  return mod;
}

// How a deterministic backward sums, as for all lengths and architectures.
void order_sums(FlexCase& c) {
  c.partial_sums = ordered_launches(c, 2, 1, 1, 2, "80") != 0;
  c.fixed_point = !c.partial_sums;
}

FlexCase make_case(const std::string& kernel, const std::string& dtype, int head_size, int value_size,
                   const std::pair<std::string, std::vector<std::string>>& score_mod,
                   const std::pair<std::string, std::vector<std::string>>& mask_mod,
                   const std::optional<std::array<int64_t, 2>>& block_size, const std::vector<bool>& wants_grad,
                   const std::vector<int64_t>& elements, bool max_scores, bool training, bool deterministic,
                   bool needs_grad, bool split, bool tall, double dropout_p, std::array<bool, 2> score_mod_small,
                   std::array<bool, 2> mask_mod_small, int few_rows, bool key_splits, std::array<int64_t, 2> lengths,
                   bool many_batches, const std::vector<std::vector<int64_t>>& sizes, bool aligned_boxes,
                   int forward_rows, bool ordered, bool whole) {
  FlexCase c;
  c.kernel = kernel == "forward"                   ? FlexKernel::kForward
             : kernel == "backward"                ? FlexKernel::kBackward
             : kernel == "grad_query"              ? FlexKernel::kGradQuery
             : kernel == "tangents"                ? FlexKernel::kTangents
             : kernel.starts_with("pair_tangents") ? FlexKernel::kPairTangents
                                                   : FlexKernel::kGradBuffers;
  c.grad_out_tangent = kernel == "pair_tangents of grad_out";
  c.dtype = dtype == "float32" ? DType::kFloat32 : dtype == "float16" ? DType::kFloat16 : DType::kBFloat16;
  c.head_size = head_size;
  c.value_size = value_size;
  c.score_mod = make_mod(score_mod.first, score_mod.second, score_mod_small);
  c.mask_mod = make_mod(mask_mod.first, mask_mod.second, mask_mod_small);
  c.split = split;
  c.tall = tall;
  c.few_rows = few_rows;
  c.key_splits = key_splits;
  c.dropout = dropout_p > 0;
  c.blocks = block_size.has_value();
  if (c.blocks) c.block_size = *block_size;
  const bool results = c.kernel == FlexKernel::kForward || c.kernel == FlexKernel::kTangents;
  c.unscaled = results && c.score_mod.text.empty();
  if (c.dtype != DType::kFloat32 && lengths[0] > 0 && lengths[1] > 0) {
    c.most_queries = most_of(lengths[0]);
    c.most_keys = most_of(lengths[1]);
  }
  c.many_batches = many_batches;
  c.sizes = sizes;
  c.aligned_boxes = aligned_boxes;
  c.forward_rows = forward_rows;
  c.ordered = ordered;
  c.whole = whole;
  c.max_scores = max_scores && c.kernel == FlexKernel::kForward;
  c.out_low = training && results && c.dtype != DType::kFloat32;
  if (c.kernel == FlexKernel::kTangents) {
    c.tangents_of = {needs_grad, needs_grad, needs_grad, wants_grad, c.score_mod.small_buffers};
    return c;
  }
  if (c.kernel != FlexKernel::kForward) {
    c.wants_grad = wants_grad;
    c.elements = elements;
    if (c.kernel == FlexKernel::kPairTangents) {
      c.wants_grad.assign(wants_grad.size(), false);
      return c;
    }
    const bool of_buffers = c.kernel == FlexKernel::kGradBuffers;
    c.grad_query = needs_grad && !of_buffers && (c.kernel == FlexKernel::kGradQuery) == deterministic;
    c.grad_key = c.grad_value = needs_grad && c.kernel == FlexKernel::kBackward;
    c.max_gradient = max_scores;
    c.partial_sums = of_buffers;
    if (deterministic && c.wants_buffers() && !of_buffers) {
      order_sums(c);
      if (c.partial_sums && c.kernel == FlexKernel::kGradQuery) c.wants_grad.assign(wants_grad.size(), false);
    }
  }
  return c;
}

// A buffer of which kernels are compiled for the dtype and rank alone.
score_mod::Buffer described(score_mod::DType dtype, const std::vector<int64_t>& sizes) {
  return {nullptr, dtype, sizes, sizes};
}

jit::Program block_mask_program(const std::string& text, const std::vector<std::string>& dtypes,
                                const std::vector<std::vector<int64_t>>& sizes, std::array<int64_t, 2> block_size,
                                const std::string& architecture) {
  const auto graph = score_mod::cached_graph(text);
  std::vector<score_mod::Buffer> buffers, tables;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    buffers.push_back(described(score_mod::dtype_named(dtypes[i]), sizes.at(i)));
  }
  const auto bounds = score_mod::cached_block_bounds(text, block_size, buffers);
  using Content = score_mod::BoundsBuffer::Content;
  std::vector<std::vector<int64_t>> ones;
  for (const auto& declared : bounds->listed.buffers()) ones.emplace_back(static_cast<size_t>(declared.rank), 1);
  for (size_t i = 0; i < ones.size(); ++i) {
    const auto& made = bounds->buffers[i];
    const auto source = buffers.at(static_cast<size_t>(made.source)).dtype;
    tables.push_back(described(made.content == Content::kValues  ? source
                               : made.content == Content::kTable ? score_mod::table_dtype(source)
                                                                 : score_mod::DType::kInt32,
                               ones[i]));
  }
  std::vector<score_mod::Value> scalars, more;
  for (const auto type : graph->scalars()) scalars.push_back({type, 0, 0});
  for (const auto type : bounds->listed.scalars()) more.push_back({type, 0, 0});
  const BlockMaskProgram program{*graph, *bounds, buffers, tables, scalars, more, block_size, {1, 1}, 1, 1};
  return BlockStatesKernel(program).make(architecture).program;
}

std::optional<FlexFamily> family_named(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "portable") return FlexFamily::kPortable;
  if (name == "hopper") return FlexFamily::kHopper;
  throw std::invalid_argument("force_family: must be 'portable', 'hopper' or '', but got " + name);
}

}  // namespace

void bind(py::Module m) {
  m.def("Case", &make_case, py::arg("kernel"), py::arg("dtype"), py::arg("head_size"), py::arg("value_size"),
        py::arg("score_mod") = std::make_tuple("", std::vector<std::string>()),
        py::arg("mask_mod") = std::make_tuple("", std::vector<std::string>()), py::arg("block_size") = py::none(),
        py::arg("wants_grad") = std::vector<bool>(), py::arg("elements") = std::vector<int64_t>(),
        py::arg("max_scores") = false, py::arg("training") = true, py::arg("deterministic") = false,
        py::arg("needs_grad") = true, py::arg("split") = true, py::arg("tall") = true, py::arg("dropout_p") = 0.0,
        py::arg("score_mod_small") = std::array<bool, 2>{true, true},
        py::arg("mask_mod_small") = std::array<bool, 2>{true, true}, py::arg("few_rows") = 0,
        py::arg("key_splits") = false, py::arg("lengths") = std::array<int64_t, 2>{0, 0},
        py::arg("many_batches") = false, py::arg("sizes") = std::vector<std::vector<int64_t>>(),
        py::arg("aligned_boxes") = true, py::arg("forward_rows") = 256, py::arg("ordered") = false,
        py::arg("whole") = false, "All that a kernel is compiled for; see csrc/cuda/attention/plan/plan.h.");
  m.def("current_architecture", &jit::current_architecture, "What kernels are compiled for on the current device.");
  m.def(
      "backward_kernels",
      [](const FlexCase& c, bool deterministic, const std::string& architecture) {
        const std::vector<bool> needs_grad(3, c.grad_key);
        std::vector<FlexCase> kernels;
        const auto add_kernels = [&](const FlexCase& asked) {
          for (auto& kernel : backward_kernels(asked, needs_grad, deterministic, architecture))
            kernels.push_back(std::move(kernel));
        };
        // Lengths decide whether gradients of pairs are stored, and whether sums will be in one order without fixed
        // point.
        const auto add = [&](const FlexCase& asked) {
          FlexCase covered = asked;
          covered.covered.assign(asked.wants_grad.size(), true);
          const bool stores =
              plan_kernel(covered, architecture).facts().schemes.find_first_of("ST") != std::string::npos;
          for (const FlexCase& one : {asked, covered}) {
            const bool is_covered = !one.covered.empty();
            if (is_covered && !stores) continue;
            const auto in_order = [&](int64_t batches, int64_t processors) {
              return ordered_launches(one, batches, 1, 1, processors, architecture) != 0;
            };
            // Sums of one batch may be in one order where those of two batches that do not fill the GPU are not.
            if (!is_covered || !asked.fixed_point || !in_order(2, 2)) add_kernels(one);
            if (asked.fixed_point && in_order(1, 1)) {
              FlexCase floats = one;
              floats.fixed_point = false;
              floats.partial_sums = true;
              add_kernels(floats);
            }
          }
        };
        add(c);
        // And how many batches there are, whether their sums are made first, and for groups of them; how many heads,
        // whether in parts.
        constexpr int64_t kMany = 512, kFew = 4, kProcessors = 128;
        std::vector<FlexCase> sums;
        const size_t scalars =
            c.score_mod.text.empty() ? 0 : score_mod::cached_graph(c.score_mod.text)->scalars().size();
        for (const auto& [heads, batches, divisor] : {std::array{int64_t{1}, kMany, int64_t{0}},
                                                      {1, kMany, kMany / kFew},
                                                      {1, kFew, 1},
                                                      {kMany * kMany, kMany, 0},
                                                      {kMany * kMany, kMany, kMany / kFew}}) {
          const std::vector<score_mod::Value> numbers(scalars, {score_mod::Type::kInt, 0, divisor});
          const auto apart =
              sums_over_batches(c, needs_grad, numbers, batches, heads, 1, 1, kProcessors, deterministic, architecture);
          if (!apart) continue;
          if (std::find(sums.begin(), sums.end(), apart->common) != sums.end()) continue;
          sums.push_back(apart->common);
          FlexCase others = c;
          apart->leave_out(others);
          others.fixed_point = others.partial_sums = false;
          if (deterministic && others.wants_buffers()) order_sums(others);
          add(others);
          kernels.push_back(apart->common);
          // Lengths decide whether a CTA's sums are stored.
          FlexCase stored = apart->common;
          stored.covered.assign(c.wants_grad.size(), !stored.partial_sums);
          if (plan_kernel(stored, architecture).facts().schemes.find('S') != std::string::npos)
            kernels.push_back(std::move(stored));
        }
        // They decide which tiles take less time, too, and layouts whether pairs are read by boxes.
        for (size_t i = 0, made = kernels.size(); i < made; ++i) {
          const FlexTileSize tile = plan_kernel(kernels[i], architecture).tile();
          for (bool FlexCase::* member : {&FlexCase::tall, &FlexCase::aligned_boxes}) {
            FlexCase other = kernels[i];
            other.*member = false;
            if (plan_kernel(other, architecture).tile() != tile) kernels.push_back(std::move(other));
          }
        }
        // And whether a CTA has all keys of a head, whose dQ needs no kernel of its own then.
        for (size_t i = 0, made = kernels.size(); i < made; ++i) {
          if (kernels[i].kernel != FlexKernel::kBackward || kernels[i].fixed_point) continue;
          FlexCase other = kernels[i];
          other.grad_query = other.whole = true;
          other.tall = false;
          if (plan_kernel(other, architecture).facts().whole) kernels.push_back(std::move(other));
        }
        return kernels;
      },
      py::arg("case"), py::arg("deterministic"), py::arg("architecture"),
      "The cases of the kernels that a backward runs, of one of kernel 'backward'.");
  m.def(
      "plan",
      [](const FlexCase& c, const std::string& architecture) {
        const KernelSpec spec = plan_kernel(c, architecture);
        const FlexTileSize& tile = spec.tile();
        py::Dict result;
        result["family"] = spec.facts().hopper() ? "hopper" : spec.facts().few() ? "few" : "portable";
        result["tile"] = std::make_tuple(tile.rows, tile.cols, tile.warps, tile.share, tile.stages);
        result["schemes"] = spec.facts().schemes;
        result["key_splits"] = spec.facts().key_splits;
        result["shared_bytes"] = spec.facts().shared_bytes;
        return result;
      },
      py::arg("case"), py::arg("architecture"),
      "{family: 'portable', 'hopper' or 'few', tile: (rows, cols, warps, share, stages), schemes, key_splits, "
      "shared_bytes}.");
  m.def("tangents_parts", &tangents_parts, py::arg("value_size"),
        "The columns of values of each kernel that forward mode runs.");
  m.def("few_query_tiles", &few_query_tiles, py::arg("head_size"), py::arg("value_size"),
        "What Case's few_rows may be, from the fewest rows on.");
  m.def(
      "program",
      [](const FlexCase& c, const std::string& architecture) {
        return flex_program(plan_kernel(c, architecture), architecture).program;
      },
      py::arg("case"), py::arg("architecture"), "The program, as fusegrad._C.jit.compile and resources take it.");
  m.def("block_mask_program", &block_mask_program, py::arg("mask_mod"), py::arg("dtypes"), py::arg("sizes"),
        py::arg("block_size"), py::arg("architecture"),
        "The program of create_block_mask for a mask_mod whose buffers have these dtypes and sizes.");
  m.def(
      "force_family", [](const std::string& family) { force_flex_family(family_named(family)); }, py::arg("family"),
      "For tests: 'portable' or 'hopper' where there are both; '': the faster one.");
  m.def("force_whole", &force_flex_whole, py::arg("whole"),
        "For tests: 1: a backward's CTA takes all keys of a head wherever it can; 0: nowhere; -1: where it pays.");
  m.def(
      "force_scheme", [](const std::string& scheme) { force_flex_scheme(scheme.empty() ? '\0' : scheme[0]); },
      py::arg("scheme"), "For tests: 'A' to 'G' for contributions for which it is right; '': the planner's choice.");
}

}  // namespace fusegrad::cuda
