#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>

#include "score_mod/text.h"

namespace fusegrad::score_mod {
namespace {

struct Token {
  std::string_view text;  // empty: the end of the line
  int column;
};

// What a stranger wrote, safe to show.
std::string shown(std::string_view text) {
  if (text.empty()) return "the end of the line";
  std::string result = "'";
  for (const char c : text.substr(0, 24)) result += c >= 32 && c < 127 ? c : '?';
  return result + (text.size() > 24 ? "...'" : "'");
}

template <class Number>
std::optional<Number> number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

class Parser {
  [[noreturn]] void fail(int column, const std::string& message) const { throw ParseError(line_, column, message); }

  // Rules that the graph checks get the position of what broke them.
  template <class Function>
  auto checked(int column, Function&& function) const {
    try {
      return function();
    } catch (const ParseError&) {
      throw;
    } catch (const GraphError& error) {
      fail(column, error.what());
    }
  }

 public:
  explicit Parser(std::string_view text) : rest_(text) {}

  Graph parse() {
    if (rest_.size() > kMaxTextBytes) {
      fail(1, "expected at most " + std::to_string(kMaxTextBytes) + " bytes, but got " + std::to_string(rest_.size()));
    }
    if (!next_line()) {
      line_ = 1;
      fail(1, "expected 'score_mod 1', 'mask_mod 1' or 'derivative 1', but got nothing");
    }
    Graph graph = header();
    while (true) {
      if (!next_line()) {
        line_ += 1;
        fail(1, "expected a statement or 'return', but got the end of the text");
      }
      const Token first = next();
      if (first.text == "buffer" || first.text == "scalar") {
        if (!values_.empty()) fail(first.column, "expected declarations before the first statement");
        declaration(graph, first);
      } else if (first.text == "return") {
        const Token at = peek();
        const NodeId value = operand(graph);
        checked(at.column, [&] {
          graph.set_result(value);
          check_customs(graph);
        });
        end_of_line();
        break;
      } else {
        statement(graph, first);
      }
    }
    while (next_line()) {
      const Token first = next();
      if (graph.kind() != Kind::kDerivative) fail(first.column, "expected the end of the text after 'return'");
      expect(first, "scatter");
      scatter(graph, first);
    }
    checked(1, [&] { check_steps(graph); });
    return graph;
  }

 private:
  // Moves to the next line that has a token.
  bool next_line() {
    while (!rest_.empty()) {
      ++line_;
      const size_t end = rest_.find_first_of("\n;");
      line_text_ = rest_.substr(0, end);
      rest_ = end == std::string_view::npos ? std::string_view() : rest_.substr(end + 1);
      line_text_ = line_text_.substr(0, line_text_.find('#'));
      position_ = 0;
      if (!peek().text.empty()) return true;
    }
    return false;
  }

  Token peek() {
    const size_t begin = std::min(line_text_.find_first_not_of(" \t\r", position_), line_text_.size());
    const size_t end = std::min(line_text_.find_first_of(" \t\r", begin), line_text_.size());
    return {line_text_.substr(begin, end - begin), static_cast<int>(begin) + 1};
  }
  Token next() {
    const Token token = peek();
    position_ = static_cast<size_t>(token.column) - 1 + token.text.size();
    return token;
  }
  void expect(const Token& token, std::string_view text) const {
    if (token.text != text) {
      fail(token.column, "expected '" + std::string(text) + "', but got " + shown(token.text));
    }
  }
  void end_of_line() {
    const Token token = next();
    if (!token.text.empty()) fail(token.column, "expected the end of the line, but got " + shown(token.text));
  }

  Graph header() {
    const Token first = next();
    for (const Kind kind : {Kind::kScoreMod, Kind::kMaskMod, Kind::kDerivative, Kind::kTangent}) {
      if (first.text != kind_name(kind)) continue;
      const Token version = next();
      if (version.text != "1") fail(version.column, "expected version '1', but got " + shown(version.text));
      end_of_line();
      return Graph(kind);
    }
    fail(first.column, "expected 'score_mod', 'mask_mod', 'derivative' or 'tangent', but got " + shown(first.text));
  }

  // "@3" after '@'; what does not count from 0 upwards is refused by the callers.
  int index(const Token& token, char sign, const char* what) const {
    std::optional<int> value;
    if (token.text.size() > 1 && token.text[0] == sign && token.text[1] != '-')
      value = number<int>(token.text.substr(1));
    if (!value) {
      fail(token.column, std::string("expected ") + what + " such as '" + sign + "0', but got " + shown(token.text));
    }
    return *value;
  }

  Type type() {
    const Token token = next();
    for (const Type t : {Type::kBool, Type::kInt, Type::kFloat}) {
      if (token.text == type_name(t)) return t;
    }
    fail(token.column, "expected 'bool', 'i64' or 'f', but got " + shown(token.text));
  }

  void declaration(Graph& graph, const Token& first) {
    const bool buffer = first.text == "buffer";
    const Token name = next();
    const char sign = buffer ? '@' : '$';
    const int id = index(name, sign, buffer ? "a buffer" : "a scalar");
    const auto count = static_cast<int>(buffer ? graph.buffers().size() : graph.scalars().size());
    if (id != count) {
      fail(name.column, std::string("expected '") + sign + std::to_string(count) + "', but got " + shown(name.text));
    }
    const Type t = type();
    if (buffer) {
      const Token token = next();
      const auto rank = number<int>(token.text);
      if (!rank) fail(token.column, "expected a rank, but got " + shown(token.text));
      checked(token.column, [&] { graph.add_buffer(t, *rank); });
    } else {
      checked(first.column, [&] { graph.add_scalar(t); });
    }
    end_of_line();
  }

  void statement(Graph& graph, const Token& first) {
    const int id = index(first, '%', "a declaration, a statement or 'return', a name");
    if (id != static_cast<int>(values_.size())) {
      fail(first.column, "expected '%" + std::to_string(values_.size()) + "', but got " + shown(first.text));
    }
    expect(next(), "=");
    const Token name = next();
    if (name.text == "load") {
      const Token buffer = next();
      const int b = index(buffer, '@', "a buffer");
      auto indices = operands(graph, kMaxRank);
      append(graph, buffer.column, [&] { return graph.load(b, std::move(indices)); });
      return;
    }
    if (name.text == "backward") {
      auto pairs = operands(graph, kMaxNodes);
      append(graph, name.column, [&] { return graph.backward(std::move(pairs)); });
      return;
    }
    if (name.text == "custom") {
      const Token key = next();
      const int k = index(key, '^', "an upstream");
      const auto given = operands(graph, 2);
      if (given.size() != 2) fail(name.column, "'custom' expects a value and a backward");
      append(graph, name.column, [&] { return graph.custom(k, given[0], given[1]); });
      return;
    }
    if (name.text == "axis") {
      const Token extent = next();
      const auto length = number<int64_t>(extent.text);
      if (!length) fail(extent.column, "expected the extent of an axis, but got " + shown(extent.text));
      end_of_line();
      append(graph, extent.column, [&] { return graph.axis(graph.add_axis(*length)); });
      return;
    }
    for (const Op op : {Op::kSum, Op::kAmax, Op::kAmin, Op::kProd}) {
      if (name.text != reduction_name(op)) continue;
      const auto given = operands(graph, 2);
      if (given.size() != 2) {
        fail(name.column, shown(name.text) + " expects an axis and a value, but got " + std::to_string(given.size()) +
                              (given.size() == 1 ? " operand" : " operands"));
      }
      append(graph, name.column, [&] { return graph.reduce(op, given[0], given[1]); });
      return;
    }
    const Primitive* p = find_primitive(name.text);
    if (p == nullptr) {
      fail(name.column, "expected a primitive, 'load', 'backward' or 'custom', but got " + shown(name.text));
    }
    auto given = operands(graph, p->arity);
    append(graph, name.column, [&] { return graph.apply(p->op, std::move(given)); });
  }

  template <class Function>
  void append(const Graph& graph, int column, Function&& make) {
    values_.push_back(checked(column, [&] {
      const NodeId id = make();
      check_limits(graph, id);
      return id;
    }));
  }

  void scatter(Graph& graph, const Token& first) {
    const NodeId value = operand(graph);
    const int b = index(next(), '@', "a buffer");
    auto indices = operands(graph, kMaxRank);
    if (graph.contributions().size() >= kMaxNodes) fail(first.column, "too many contributions");
    checked(first.column, [&] { graph.add_contribution({b, std::move(indices), value}); });
  }

  // Operands up to the end of the line.
  std::vector<NodeId> operands(Graph& graph, int most) {
    std::vector<NodeId> result;
    while (!peek().text.empty()) {
      if (static_cast<int>(result.size()) == most) {
        fail(peek().column, "expected at most " + std::to_string(most) + (most == 1 ? " operand" : " operands") +
                                ", but got " + shown(peek().text));
      }
      result.push_back(operand(graph));
    }
    return result;
  }

  NodeId operand(Graph& graph) {
    const Token token = next();
    const std::string_view text = token.text;
    return checked(token.column, [&]() -> NodeId {
      if (text.starts_with('%')) {
        const int id = index(token, '%', "a value");
        if (id >= static_cast<int>(values_.size())) {
          fail(token.column, "expected a value that was computed before, but got " + shown(text));
        }
        return values_[id];
      }
      if (text.starts_with('$')) return graph.scalar(index(token, '$', "a scalar"));
      if (text.starts_with('^')) return graph.upstream(index(token, '^', "an upstream"));
      if (text == "true" || text == "false") return graph.constant(text == "true");
      for (int i = 0; i < kInputCount; ++i) {
        if (text == input_name(static_cast<Input>(i))) return graph.input(static_cast<Input>(i));
      }
      return constant(graph, token);
    });
  }

  NodeId constant(Graph& graph, const Token& token) const {
    const std::string_view text = token.text;
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (text == "inf") return graph.constant(kInfinity);
    if (text == "-inf") return graph.constant(-kInfinity);
    if (text == "nan") return graph.constant(std::numeric_limits<double>::quiet_NaN());
    if (text.empty() || text.find_first_not_of("0123456789+-.e") != std::string_view::npos) {
      fail(token.column,
           "expected an operand (%value, $scalar, score, b, h, q_idx, kv_idx or a number), but got " + shown(text));
    }
    if (text.find_first_of(".e") == std::string_view::npos) {
      if (const auto value = number<int64_t>(text)) return graph.constant(*value);
    } else if (const auto value = number<double>(text)) {
      return graph.constant(*value);
    }
    fail(token.column, "expected a number that fits 64 bits, but got " + shown(text));
  }

  std::string_view rest_;
  std::string_view line_text_;
  size_t position_ = 0;
  int line_ = 0;
  std::vector<NodeId> values_;  // of the statements
};

}  // namespace

Graph parse(std::string_view text) { return Parser(text).parse(); }

}  // namespace fusegrad::score_mod
