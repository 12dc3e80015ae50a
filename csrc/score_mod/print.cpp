#include <charconv>
#include <cmath>

#include "score_mod/text.h"

namespace fusegrad::score_mod {
namespace {

// The shortest text that reads back as the same number, and as a float.
std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char digits[40];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  std::string text(digits, end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string constant_text(const Value& value) {
  if (value.type == Type::kFloat) return float_text(value.f);
  if (value.type == Type::kInt) return std::to_string(value.i);
  return value.i != 0 ? "true" : "false";
}

std::string operation(const Node& node) {
  if (node.op == Op::kLoad) return "load @" + std::to_string(node.payload);
  if (node.op == Op::kCustom) return "custom ^" + std::to_string(node.payload);
  if (node.op == Op::kBackward) return "backward";
  return std::string(primitive(node.op).name);
}

}  // namespace

std::string print(const Graph& original) {
  const Graph graph = canonical(original);
  std::string text(kind_name(graph.kind()));
  text += " 1\n";
  for (size_t i = 0; i < graph.buffers().size(); ++i) {
    const auto [type, rank] = graph.buffers()[i];
    text += "buffer @" + std::to_string(i) + " " + std::string(type_name(type)) + " " + std::to_string(rank) + "\n";
  }
  for (size_t i = 0; i < graph.scalars().size(); ++i) {
    text += "scalar $" + std::to_string(i) + " " + std::string(type_name(graph.scalars()[i])) + "\n";
  }

  std::vector<std::string> name(graph.nodes().size());
  const auto append = [&](const std::vector<NodeId>& operands) {
    for (const NodeId operand : operands) text += " " + name[operand];
  };
  int statements = 0;
  for (NodeId id = 0; id < static_cast<NodeId>(graph.nodes().size()); ++id) {
    const Node& node = graph[id];
    if (node.op == Op::kConstant) {
      name[id] = constant_text(graph.value(id));
    } else if (node.op == Op::kInput) {
      name[id] = input_name(static_cast<Input>(node.payload));
    } else if (node.op == Op::kScalar) {
      name[id] = "$" + std::to_string(node.payload);
    } else if (node.op == Op::kUpstream) {
      name[id] = "^" + std::to_string(node.payload);
    } else {
      name[id] = "%" + std::to_string(statements++);
      text += name[id] + " = ";
      text += node.op == Op::kAxis    ? "axis " + std::to_string(graph.axes()[static_cast<size_t>(node.payload)])
              : is_reduction(node.op) ? std::string(reduction_name(node.op))
                                      : operation(node);
      append(node.operands);
      text += "\n";
    }
  }
  if (graph.result() >= 0) text += "return " + name[graph.result()] + "\n";
  for (const Contribution& c : graph.contributions()) {
    text += "scatter " + name[c.value] + " @" + std::to_string(c.buffer);
    append(c.indices);
    text += "\n";
  }
  return text;
}

}  // namespace fusegrad::score_mod
