#include "pytorch/bindings/cuda.h"

#include <map>
#include <optional>
#include <stdexcept>

#include "cuda/attention/backward/backward.h"
#include "cuda/attention/forward/segments.h"
#include "cuda/attention/mask/block_states.h"
#include "cuda/attention/plan/call_plan.h"
#include "cuda/attention/plan/plan.h"
#include "cuda/attention/plan/program.h"
#include "pytorch/bindings/jit.h"
#include "pytorch/bindings/score_mod.h"
#include "score_mod/cache.h"
#include "score_mod/render_cuda.h"

namespace py = fusegrad::python;

namespace fusegrad::cuda {

// A captured tensor: dtype, sizes, strides, and whether it begins at a multiple of 16 bytes.
struct CapturedFields {
  std::string dtype;
  std::vector<int64_t> sizes, strides;
  bool aligned;
};

}  // namespace fusegrad::cuda

namespace fusegrad::python {

template <>
inline constexpr const char* kHeldAs<cuda::FlexCase> = "fusegrad._C.flex.case";

template <>
struct Convert<cuda::CapturedFields> {
  static cuda::CapturedFields from(PyObject* given) {
    const auto items = items_of(given, 4);
    return {Convert<std::string>::from(items[0].get()), Convert<std::vector<int64_t>>::from(items[1].get()),
            Convert<std::vector<int64_t>>::from(items[2].get()), Convert<bool>::from(items[3].get())};
  }
};
/// A float, or an integer or bool.
template <>
struct Convert<score_mod::Value> {
  static score_mod::Value from(PyObject* given) {
    if (PyFloat_Check(given) != 0) return {score_mod::Type::kFloat, Convert<double>::from(given), 0};
    return {score_mod::Type::kInt, 0, Convert<int64_t>::from(given)};
  }
};

}  // namespace fusegrad::python

namespace fusegrad::cuda {
namespace {

FlexMod make_mod(const std::string& text, const std::vector<std::string>& dtypes) {
  FlexMod mod;
  mod.text = text;
  for (const auto& dtype : dtypes) mod.dtypes.push_back(score_mod::dtype_named(dtype));
  return mod;
}

DType dtype_named(const std::string& name) {
  return name == "float32" ? DType::kFloat32 : name == "float16" ? DType::kFloat16 : DType::kBFloat16;
}

FlexKernel kernel_named(const std::string& name) {
  static const std::map<std::string, FlexKernel> kernels{{"forward", FlexKernel::kForward},
                                                         {"backward", FlexKernel::kBackward},
                                                         {"grad_query", FlexKernel::kGradQuery},
                                                         {"grad_buffers", FlexKernel::kGradBuffers},
                                                         {"tangents", FlexKernel::kTangents},
                                                         {"pair_tangents", FlexKernel::kPairTangents},
                                                         {"segments", FlexKernel::kSegments},
                                                         {"merge_segments", FlexKernel::kMergeSegments},
                                                         {"pair_tangents of grad_out", FlexKernel::kPairTangents}};
  const auto found = kernels.find(name);
  if (found == kernels.end()) throw std::invalid_argument("Case: no kernel is named " + name);
  return found->second;
}

// A kernel that no plan need ask for: tests walk kernels by what they are compiled for.
FlexCase make_case(py::Fields fields) {
  FlexCase c;
  std::string kernel = "forward", dtype = "bfloat16";
  std::pair<std::string, std::vector<std::string>> score_mod, mask_mod;
  std::optional<std::array<int64_t, 2>> block_size;
  std::array<int64_t, 2> lengths{};
  std::vector<bool> wants_grad;
  bool max_scores = false, training = true, deterministic = false, needs_grad = true;
  fields.read("kernel", kernel);
  fields.read("dtype", dtype);
  fields.read("head_size", c.head_size);
  fields.read("value_size", c.value_size);
  fields.read("score_mod", score_mod);
  fields.read("mask_mod", mask_mod);
  fields.read("block_size", block_size);
  fields.read("lengths", lengths);
  fields.read("wants_grad", wants_grad);
  fields.read("elements", c.elements);
  fields.read("sizes", c.sizes);
  fields.read("max_scores", max_scores);
  fields.read("training", training);
  fields.read("deterministic", deterministic);
  fields.read("needs_grad", needs_grad);
  fields.read("tall", c.tall);
  fields.read("sums_wide", c.sums_wide);
  fields.read("stores_first", c.stores_first);
  fields.read("dropout", c.dropout);
  fields.read("few_rows", c.few_rows);
  fields.read("key_splits", c.key_splits);
  fields.read("many_batches", c.many_batches);
  fields.read("aligned_boxes", c.aligned_boxes);
  fields.read("ordered", c.ordered);
  fields.read("whole", c.whole);
  fields.read("sums_batches", c.sums_batches);
  fields.check_all_read();
  c.wide = std::max(c.head_size, c.value_size) > kMostCols;
  c.kernel = kernel_named(kernel);
  if (c.kernel == FlexKernel::kSegments) {
    c.segment_keys = segment_keys();
    c.many_segments = c.few_rows == 0;
  }
  c.grad_out_tangent = kernel == "pair_tangents of grad_out";
  c.dtype = dtype_named(dtype);
  c.score_mod = make_mod(score_mod.first, score_mod.second);
  c.mask_mod = make_mod(mask_mod.first, mask_mod.second);
  c.blocks = block_size.has_value();
  if (c.blocks) c.block_size = *block_size;
  const bool results = c.kernel == FlexKernel::kForward || c.kernel == FlexKernel::kTangents ||
                       c.kernel == FlexKernel::kSegments || c.kernel == FlexKernel::kMergeSegments;
  c.unscaled = results && c.score_mod.text.empty();
  if (c.dtype != DType::kFloat32 && lengths[0] > 0 && lengths[1] > 0) {
    c.most_queries = most_of(lengths[0]);
    c.most_keys = most_of(lengths[1]);
  }
  c.max_scores = max_scores && c.kernel == FlexKernel::kForward;
  c.out_low = training && results && c.dtype != DType::kFloat32;
  if (c.kernel == FlexKernel::kTangents)
    c.tangents_of = {needs_grad, needs_grad, needs_grad, wants_grad, c.score_mod.small_buffers};
  if (results) return c;
  c.wants_grad = wants_grad;
  if (c.kernel == FlexKernel::kPairTangents) c.wants_grad.assign(wants_grad.size(), false);
  if (c.kernel == FlexKernel::kPairTangents) return c;
  const bool of_buffers = c.kernel == FlexKernel::kGradBuffers;
  c.grad_query = needs_grad && !of_buffers && (c.kernel == FlexKernel::kGradQuery) == deterministic;
  c.grad_key = c.grad_value = needs_grad && c.kernel == FlexKernel::kBackward;
  c.max_gradient = max_scores;
  c.partial_sums = of_buffers;
  if (!deterministic || !c.wants_buffers() || of_buffers) return c;
  c.partial_sums = ordered_launches(c, 2, 1, 1, 2, "80") != 0;
  c.fixed_point = !c.partial_sums;
  if (c.partial_sums && c.kernel == FlexKernel::kGradQuery) c.wants_grad.assign(wants_grad.size(), false);
  return c;
}

AskedMod asked_mod(const std::string& text, const std::vector<CapturedFields>& buffers,
                   const std::vector<score_mod::Value>& scalars) {
  AskedMod mod;
  mod.text = text;
  for (const CapturedFields& b : buffers)
    mod.buffers.push_back({score_mod::dtype_named(b.dtype), b.sizes, b.strides, b.aligned});
  mod.scalars = scalars;
  mod.small_scalars = score_mod::small_scalars(scalars);
  return mod;
}

// What a call asks, as fusegrad.compile describes it.
std::pair<std::string, Asked> make_asked(py::Fields fields) {
  Asked asked;
  std::string direction = "forward", dtype = "bfloat16", score_mod, mask_mod;
  std::array<int64_t, 8> shape{};
  std::vector<CapturedFields> score_buffers, mask_buffers;
  std::vector<score_mod::Value> score_scalars, mask_scalars;
  std::optional<std::array<int64_t, 2>> block_size;
  bool grad_out_tangent = false, training = true;
  fields.read("direction", direction);
  fields.read("dtype", dtype);
  fields.read("shape", shape);
  fields.read("score_mod", score_mod);
  fields.read("score_mod_buffers", score_buffers);
  fields.read("score_mod_scalars", score_scalars);
  fields.read("mask_mod", mask_mod);
  fields.read("mask_mod_buffers", mask_buffers);
  fields.read("mask_mod_scalars", mask_scalars);
  fields.read("block_size", block_size);
  fields.read("needs_grad", asked.needs_grad);
  fields.read("buffer_tangents", asked.buffer_tangents);
  fields.read("deterministic", asked.deterministic);
  fields.read("dropout", asked.dropout);
  fields.read("full_float32", asked.full_float32);
  fields.read("max_scores", asked.max_scores);
  fields.read("batch_invariant", asked.batch_invariant);
  fields.read("training", training);
  fields.read("grad_out_tangent", grad_out_tangent);
  fields.check_all_read();
  asked.dtype = dtype_named(dtype);
  asked.shape = {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7]};
  asked.score_mod = asked_mod(score_mod, score_buffers, score_scalars);
  asked.mask_mod = asked_mod(mask_mod, mask_buffers, mask_scalars);
  if (block_size) {
    const auto [rows, cols] = std::array{tiles_in(shape[2], (*block_size)[0]), tiles_in(shape[5], (*block_size)[1])};
    asked.mask = BlockMaskShape{*block_size, rows, cols, cols, cols, 1, 1};
  }
  asked.there.fill(true);
  asked.aligned.fill(true);
  asked.there[kGradOutTangent] = grad_out_tangent;
  asked.aligned_gradients.fill(true);
  asked.aligned_buffer_gradients.assign(asked.score_mod.buffers.size(), true);
  for (const AskedBuffer& b : asked.score_mod.buffers) asked.gradient_dtypes.push_back(b.dtype);
  asked.out_low = training && asked.dtype != DType::kFloat32;
  asked.max_gradient = asked.max_scores;
  asked.head_count = asked.shape.query_heads();
  asked.row_count = asked.shape.queries;
  asked.forced = forced_changes();
  return {direction, asked};
}

// A plan in words, and the programs of its steps.
template <class Call>
std::tuple<std::string, std::vector<jit::Program>> shown(const std::string& name, const Plan<Call>& plan,
                                                         const std::string& architecture) {
  std::vector<jit::Program> programs;
  for (const auto& program : programs_of(plan))
    programs.push_back(flex_program(program->launch.spec, architecture).program);
  return {printed(name.c_str(), plan), std::move(programs)};
}

std::tuple<std::string, std::vector<jit::Program>> make_plan(py::Fields fields, const std::string& architecture,
                                                             int64_t multiprocessors) {
  const auto [direction, asked] = make_asked(std::move(fields));
  const Gpu gpu{architecture, multiprocessors, 0};
  if (direction == "forward") return shown(direction, plan_forward(asked, gpu), architecture);
  if (direction == "backward") return shown(direction, plan_backward(asked, gpu), architecture);
  if (direction == "tangents") return shown(direction, plan_tangents(asked, gpu), architecture);
  if (direction == "pair_tangents") return shown(direction, plan_pair_tangents(asked, gpu), architecture);
  throw std::invalid_argument("plan: no direction is named " + direction);
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
  m.def("case", &make_case, py::arg("fields"),
        "A kernel by what it is compiled for, a dict of fields; see csrc/cuda/attention/plan/case.h.");
  m.def("current_architecture", &jit::current_architecture, "What kernels are compiled for on the current device.");
  m.def("call_plan", &make_plan, py::arg("fields"), py::arg("architecture"), py::arg("multiprocessors"),
        "The plan of a call, a dict of fields, in words, and the programs that it runs; see "
        "csrc/cuda/attention/plan/asked.h.");
  m.def(
      "kernel_plan",
      [](const FlexCase& c, const std::string& architecture) {
        const KernelSpec spec = plan_kernel(c, architecture);
        const FlexTile& tile = spec.tile();
        py::Dict result;
        result["family"] = spec.facts().hopper() ? "hopper" : spec.facts().few() ? "few" : "portable";
        result["tile"] = std::make_tuple(tile.rows, tile.cols, tile.warps, tile.share(), tile.stages);
        result["schemes"] = letters(spec.facts().schemes);
        result["key_splits"] = spec.facts().key_splits;
        result["shared_bytes"] = spec.facts().shared_bytes;
        return result;
      },
      py::arg("case"), py::arg("architecture"),
      "{family: 'portable', 'hopper' or 'few', tile: (rows, cols, warps, share, stages), schemes, key_splits, "
      "shared_bytes}.");
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
  m.def(
      "force_segment_keys", &force_segment_keys, py::arg("keys"),
      "For tests and benchmarks: batch_invariant's segments have so many keys, a multiple of 128; 0: the usual ones.");
  m.def("force_whole", &force_flex_whole, py::arg("whole"),
        "For tests: 1: a backward's CTA takes all keys of a head wherever it can; 0: nowhere; -1: where it pays.");
  m.def(
      "force_scheme",
      [](const std::string& scheme) {
        force_flex_scheme(scheme.empty() ? std::nullopt : std::optional(static_cast<device::Scheme>(scheme[0])));
      },
      py::arg("scheme"), "For tests: 'A' to 'G' for contributions for which it is right; '': the planner's choice.");
}

}  // namespace fusegrad::cuda
