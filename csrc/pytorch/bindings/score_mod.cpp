// Part of fusegrad._C: the language's functions on texts. Evaluation is an op, see ops.cpp.
#include "pytorch/bindings/score_mod.h"

#include <optional>

#include "score_mod/derivative.h"
#include "score_mod/kernel_size.h"
#include "score_mod/render_cuda.h"
#include "score_mod/scatter_plan.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"

namespace py = fusegrad::python;

namespace fusegrad::score_mod {
namespace {

auto primitives() {
  std::vector<std::tuple<std::string, int, int>> rows;
  for (const Primitive& p : kPrimitives) {
    rows.emplace_back(p.name, p.arity, static_cast<int>(p.rule));
  }
  return rows;
}

std::string canonical_text(const std::string& text) {
  const Graph graph = parse(text);
  verify(graph);
  return print(graph);
}

std::string forward(const std::string& text) { return print(simplify(lowered(parse(text)))); }

std::string simplified(const std::string& text) { return print(simplify(parse(text))); }

auto compacted(const std::string& text) {
  const Compact result = compact(simplify(parse(text)));
  return std::make_tuple(print(result.graph), result.buffers, result.scalars);
}

std::string derivative(const std::string& text, const std::vector<bool>& wants_grad) {
  return print(differentiate(parse(text), wants_grad));
}

std::string tangent_text(const std::string& text, const std::vector<bool>& has_tangent) {
  return print(tangent(parse(text), has_tangent));
}
std::string curvature_text(const std::string& text) { return print(curvature(parse(text))); }

std::string explanation(const std::string& text, const std::vector<bool>& wants_grad) {
  return explain(text, wants_grad);
}

// [(buffer, class, exclusive, reason)], one for each contribution of the derivative.
auto scatter_plan(const std::string& text, const std::vector<bool>& wants_grad, const std::vector<int64_t>& elements) {
  const Graph graph = differentiate(parse(text), wants_grad);
  const auto plan = plan_scatter(graph, elements);
  std::vector<std::tuple<int, std::string, bool, std::string>> rows;
  for (size_t k = 0; k < plan.size(); ++k) {
    rows.emplace_back(graph.contributions()[k].buffer, std::string(1, static_cast<char>(plan[k].scheme)),
                      plan[k].exclusive, plan[k].reason);
  }
  return rows;
}

std::string cuda_source(const std::string& text, const std::vector<std::string>& dtypes, const std::string& name) {
  RenderOptions options;
  options.name = name;
  for (const std::string& dtype : dtypes) options.dtypes.push_back(dtype_named(dtype));
  return render_cuda(lowered(parse(text)), options);
}

}  // namespace

DType dtype_named(const std::string& name) {
  constexpr const char* kNames[] = {"float64", "float32", "bfloat16", "float16", "int64",
                                    "int32",   "int16",   "int8",     "uint8",   "bool"};
  const auto* found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) throw GraphError("unknown dtype '" + name + "'");
  return static_cast<DType>(found - std::begin(kNames));
}

void bind(py::Module m) {
  bind_graph(m);
  bind_blocks(m);
  m.def("primitives", &primitives, "The table: (name, arity, type rule) of every primitive.");
  m.def("canonical", &canonical_text, py::arg("text"),
        "The canonical text; ValueError with line:column if it is wrong.");
  m.def("simplify", &simplified, py::arg("text"), "The canonical text of the simplified graph.");
  m.def(
      "forward", &forward, py::arg("text"),
      "The canonical text of what is evaluated: the simplified graph without derivatives of its own and detachments.");
  m.def("compact", &compacted, py::arg("text"),
        "(the canonical text of the simplified graph with only what it uses declared, in the order of first use; the "
        "buffers' and the scalars' indices before). What a tracer hands on.");
  m.def("derivative", &derivative, py::arg("text"), py::arg("wants_grad"),
        "The text of a score_mod's derivative; wants_grad has a bool for each buffer.");
  m.def("tangent", &tangent_text, py::arg("text"), py::arg("has_tangent"),
        "The text of a score_mod's tangent; has_tangent has a bool for each buffer.");
  m.def("curvature", &curvature_text, py::arg("text"),
        "The text of a derivative whose result is `grad` times the score_mod's second derivative by `score`.");
  m.def("explain", &explanation, py::arg("text"), py::arg("wants_grad"),
        "The simplified graph, its derivative, and how each captured gradient is summed, and why.");
  m.def("scatter_plan", &scatter_plan, py::arg("text"), py::arg("wants_grad"),
        py::arg("elements") = std::vector<int64_t>{},
        "[(buffer, class, exclusive, reason)] for each contribution; elements: of each buffer, -1 where unknown.");
  m.def(
      "check_kernel_size",
      [](const std::string& text, const std::optional<std::vector<bool>>& wants_grad) {
        check_kernel_size(text, wants_grad ? &*wants_grad : nullptr);
      },
      py::arg("text"), py::arg("wants_grad"),
      "Raises ValueError where a kernel of the score_mod, with wants_grad and its derivative, would be too large.");
  m.def("render_cuda", &cuda_source, py::arg("text"), py::arg("dtypes"), py::arg("name") = "ScoreMod",
        "The CUDA struct of a graph; dtypes: of each buffer, such as 'bfloat16'.");
}

}  // namespace fusegrad::score_mod
