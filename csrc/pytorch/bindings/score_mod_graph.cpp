// Part of fusegrad._C: the language's graphs, as they are built and read.
#include <optional>

#include "pytorch/bindings/score_mod.h"
#include "score_mod/draft.h"
#include "score_mod/index_analysis.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"

namespace py = fusegrad::python;

namespace fusegrad::score_mod {
namespace {

/// A number as Python has it.
struct Number {
  Value value;
};

}  // namespace
}  // namespace fusegrad::score_mod

namespace fusegrad::python {

template <>
inline constexpr bool kIsClass<score_mod::Draft> = true;

template <>
struct Convert<score_mod::Number> {
  static score_mod::Number from(PyObject* given) {
    using score_mod::Type;
    if (PyBool_Check(given) != 0) return {{Type::kBool, 0, given == Py_True ? 1 : 0}};
    if (PyFloat_Check(given) != 0) return {{Type::kFloat, Convert<double>::from(given), 0}};
    const Object integer(PyNumber_Index(given));
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(integer.get(), &overflow);
    if (value == -1 && PyErr_Occurred() != nullptr) throw Raised();
    if (overflow != 0) {
      const Object text(PyObject_Str(integer.get()));
      throw score_mod::GraphError("an integer of more than 64 bits, " + Convert<std::string>::from(text.get()) +
                                  "; use a float");
    }
    return {{Type::kInt, 0, value}};
  }
  static Object to(const score_mod::Number& number) {
    const score_mod::Value& value = number.value;
    if (value.type == score_mod::Type::kFloat) return to_python(value.f);
    if (value.type == score_mod::Type::kInt) return to_python(value.i);
    return to_python(value.i != 0);
  }
};

template <>
struct Convert<score_mod::Type> {
  static score_mod::Type from(PyObject* given) {
    const int type = Convert<int>::from(given);
    if (type < 0 || type > static_cast<int>(score_mod::Type::kFloat)) raise_type_error("a type", given);
    return static_cast<score_mod::Type>(type);
  }
  static Object to(score_mod::Type type) { return to_python(static_cast<int>(type)); }
};

// By its name.
template <>
struct Convert<score_mod::Op> {
  static score_mod::Op from(PyObject* given) {
    using score_mod::Op;
    const auto name = Convert<std::string>::from(given);
    if (const auto* found = score_mod::find_primitive(name); found != nullptr) return found->op;
    for (const Op op : {Op::kSum, Op::kAmax, Op::kAmin, Op::kProd}) {
      if (name == score_mod::reduction_name(op)) return op;
    }
    throw score_mod::GraphError("expected a primitive or a reduction, but got '" + name + "'");
  }
};

template <>
struct Convert<score_mod::Input> {
  static score_mod::Input from(PyObject* given) {
    const auto name = Convert<std::string>::from(given);
    for (int i = 0; i < score_mod::kInputCount; ++i) {
      const auto input = static_cast<score_mod::Input>(i);
      if (name == score_mod::input_name(input)) return input;
    }
    throw score_mod::GraphError("expected an input, but got '" + name + "'");
  }
};

}  // namespace fusegrad::python

namespace fusegrad::score_mod {
namespace {

Draft draft(const std::string& kind) {
  for (const Kind one : {Kind::kScoreMod, Kind::kMaskMod}) {
    if (kind == kind_name(one)) return Draft(one);
  }
  throw GraphError("expected 'score_mod' or 'mask_mod', but got '" + kind + "'");
}

// A node that a user of the graph names.
NodeId known(const Draft& draft, NodeId id) {
  if (id < 0 || id >= static_cast<NodeId>(draft.graph().nodes().size())) {
    throw std::out_of_range("the graph has no node " + std::to_string(id));
  }
  return id;
}
std::vector<NodeId> known(const Draft& draft, std::vector<NodeId> ids) {
  for (const NodeId id : ids) known(draft, id);
  return ids;
}

std::string name_of(Op op) {
  constexpr const char* kNames[] = {"constant", "input", "scalar", "load", "upstream", "backward", "custom", "axis"};
  if (is_primitive(op)) return std::string(primitive(op).name);
  return is_reduction(op) ? std::string(reduction_name(op)) : kNames[static_cast<int>(op)];
}

// (operation, type, what it is of, operands).
auto node_of(const Draft& draft, NodeId id) {
  const Graph& graph = draft.graph();
  const Node& node = graph[known(draft, id)];
  const py::Object of = node.op == Op::kConstant ? py::to_python(Number{graph.value(id)})
                        : node.op == Op::kInput  ? py::to_python(std::string(input_name(Input(node.payload))))
                        : node.op == Op::kAxis   ? py::to_python(graph.axes()[static_cast<size_t>(node.payload)])
                                                 : py::to_python(node.payload);
  return std::make_tuple(name_of(node.op), node.type, of, node.operands);
}

auto nodes_of(const Draft& draft) {
  std::vector<decltype(node_of(draft, 0))> nodes;
  for (size_t id = 0; id < draft.graph().nodes().size(); ++id) nodes.push_back(node_of(draft, static_cast<NodeId>(id)));
  return nodes;
}

auto buffers_of(const Draft& draft) {
  std::vector<std::tuple<Type, int>> buffers;
  for (const BufferDeclaration& buffer : draft.graph().buffers()) buffers.emplace_back(buffer.type, buffer.rank);
  return buffers;
}

auto axes_below(const Draft& draft, NodeId id) {
  const Graph& graph = draft.graph();
  std::vector<NodeId> axes;
  for (NodeId x = 0; x < static_cast<NodeId>(graph.nodes().size()); ++x) {
    if (graph[x].op == Op::kAxis && (graph.open_axes(id) & set_of_axis(graph[x].payload)) != 0) axes.push_back(x);
  }
  return axes;
}

auto finished(const Draft& draft, NodeId result, const std::optional<std::vector<Number>>& scalars) {
  std::vector<Value> values;
  for (const Number& scalar : scalars.value_or(std::vector<Number>())) values.push_back(scalar.value);
  const Compact made = compact(simplify(draft.graph_of(known(draft, result), scalars ? &values : nullptr)));
  return std::make_tuple(print(made.graph), made.buffers, made.scalars);
}

}  // namespace

void bind_graph(py::Module m) {
  m.def("graph", &draft, py::arg("kind"), "An empty Graph of a score_mod or a mask_mod.");
  m.def(
      "parse", [](const std::string& text) { return Draft(canonical(parse(text))); }, py::arg("text"),
      "The Graph of a text, in canonical order; ValueError with line:column if it is wrong.");
  py::Class<Draft>("Graph", "A graph of the language. Nodes are numbers; what breaks a rule is a ValueError.")
      // Declarations.
      .method<[](const Draft& g) { return std::string(kind_name(g.graph().kind())); }>("kind", "'score_mod', …")
      .method<[](Draft& g, Type type, int rank, bool active) { return g.add_buffer(type, rank, active); }>(
          "add_buffer", py::arg("type"), py::arg("rank"), py::arg("active") = false,
          "A captured tensor's number. active: whether a gradient flows to it.")
      .method<[](Draft& g, Type type) { return g.add_scalar(type); }>("add_scalar", py::arg("type"),
                                                                      "A captured number's number.")
      .method<[](const Draft& g) { return buffers_of(g); }>("buffers", "[(type, rank)]")
      .method<[](const Draft& g) { return g.graph().scalars(); }>("scalars", "The types.")
      // Nodes. What takes operands promotes them as the language does.
      .method<[](Draft& g, Input input) { return g.input(input); }>("input", py::arg("name"),
                                                                    "score, b, h, q_idx, kv_idx")
      .method<[](Draft& g, const Number& number) { return g.constant(number.value); }>("constant", py::arg("value"),
                                                                                       "A number.")
      .method<[](Draft& g, int index) { return g.scalar(index); }>("scalar", py::arg("index"), "A captured number.")
      .method<[](Draft& g, int buffer, std::vector<NodeId> indices) {
        return g.load(buffer, known(g, std::move(indices)));
      }>("load", py::arg("buffer"), py::arg("indices"), "An element of a captured tensor.")
      .method<[](Draft& g, Op op, std::vector<NodeId> operands) { return g.apply(op, known(g, std::move(operands))); }>(
          "apply", py::arg("primitive"), py::arg("*operands"), "A primitive of operands.")
      .method<[](Draft& g, NodeId id, Type type) { return g.cast(known(g, id), type); }>(
          "cast", py::arg("node"), py::arg("type"), "The node as a value of this type.")
      .method<[](Draft& g, int64_t extent, int64_t place) { return g.axis(extent, place); }>(
          "axis", py::arg("extent"), py::arg("place"), "A variable from 0 to `extent`; the same for the same place.")
      .method<[](Draft& g, Op op, NodeId axis, NodeId value) { return g.reduce(op, known(g, axis), known(g, value)); }>(
          "reduce", py::arg("reduction"), py::arg("axis"), py::arg("node"),
          "The sum, amax, amin or prod over all values of an axis.")
      .method<[](Draft& g, const Draft& from, NodeId id, std::vector<NodeId> operands) {
        return g.copy(from, known(from, id), known(g, std::move(operands)));
      }>("copy", py::arg("graph"), py::arg("node"), py::arg("operands"),
         "The other graph's node, on operands of this one. Declarations are those of the same number.")
      // Values with a derivative of their own.
      .method<[](Draft& g) { return g.upstream(); }>("upstream", "A new one: the gradient by the custom that gets it.")
      .method<[](Draft& g) { return g.backward(); }>("backward", "The number of a new one, without pairs.")
      .method<[](Draft& g, int backward, NodeId x, NodeId gradient) {
        g.add_pair(backward, known(g, x), known(g, gradient));
      }>("add_pair", py::arg("backward"), py::arg("x"), py::arg("gradient"), "What x receives.")
      .method<[](Draft& g, NodeId upstream, NodeId value, int backward) {
        return g.custom(known(g, upstream), known(g, value), backward);
      }>("custom", py::arg("upstream"), py::arg("value"), py::arg("backward"), "The value, with that backward.")
      .method<[](Draft& g, NodeId id, std::vector<NodeId> kept) {
        return g.stripped(known(g, id), known(g, std::move(kept)));
      }>("stripped", py::arg("node"), py::arg("kept") = std::vector<NodeId>(),
         "The value without derivatives of its own and detachments, but for those of the nodes that are kept.")
      .method<[](Draft& g, NodeId id, std::unordered_map<NodeId, NodeId> images) {
        for (const auto& [from, to] : images) known(g, {from, to});
        return g.substitute(known(g, id), images);
      }>("substitute", py::arg("node"), py::arg("images"), "The value with other nodes in the places of some.")
      // What is known of a node.
      .method<[](const Draft& g, NodeId id) { return g.graph().type(known(g, id)); }>("type", py::arg("node"), "")
      .method<[](const Draft& g, NodeId id) -> std::optional<Number> {
        if (!g.graph().is_constant(known(g, id))) return std::nullopt;
        return Number{g.graph().value(id)};
      }>("value", py::arg("node"), "The number, if it is a constant.")
      .method<[](const Draft& g, NodeId id) { return node_of(g, id); }>(
          "node", py::arg("node"), "(operation, type, its number, name, extent, declaration or key, operands)")
      .method<[](const Draft& g) { return nodes_of(g); }>("nodes", "All, operands first.")
      .method<[](const Draft& g) { return g.graph().result(); }>("result", "The node; -1: none.")
      .method<[](const Draft& g, NodeId id) { return axes_below(g, known(g, id)); }>(
          "open_axes", py::arg("node"), "The axes that it depends on, not those over which it was reduced.")
      .method<[](const Draft& g, NodeId id) { return g.active(known(g, id)); }>(
          "active", py::arg("node"), "Whether a gradient flows through it: from the score, or an active buffer.")
      .method<[](const Draft& g, NodeId id) { return g.on_score(known(g, id)); }>(
          "on_score", py::arg("node"), "Whether a gradient flows through it to the score.")
      .method<[](const Draft& g, NodeId id) { return g.graph().on_upstream(known(g, id)); }>(
          "on_upstream", py::arg("node"), "Whether it is computed from the gradient that a backward gets.")
      .method<[](const Draft& g, NodeId id) { return g.size(known(g, id)); }>("size", py::arg("node"),
                                                                              "How many nodes it needs.")
      .method<[](const Draft& g, NodeId result, bool simplified) {
        const Graph made = g.graph_of(known(g, result), nullptr);
        return print(simplified ? simplify(made) : made);
      }>("text", py::arg("result"), py::arg("simplified") = false,
         "The canonical text of a result's graph, with all declarations.")
      .method<[](const Draft& g, NodeId result, const std::optional<std::vector<Number>>& scalars) {
        return finished(g, result, scalars);
      }>("compact", py::arg("result"), py::arg("scalars") = py::none(),
         "(the canonical text of the simplified graph of a result with only what it uses declared, in the order of "
         "first "
         "use; the buffers' and the scalars' indices before). scalars: the numbers in their places.")
      .add(m);
  m.value("TYPES", std::vector<std::string>{"bool", "i64", "f"});
  m.value("BOOL", Type::kBool);
  m.value("INT", Type::kInt);
  m.value("FLOAT", Type::kFloat);
  m.value("MAX_RANK", kMaxRank);
  m.value("MAX_EXTENT", kMaxExtent);
  m.value("MAX_LENGTH", Lengths().q);
}

}  // namespace fusegrad::score_mod
