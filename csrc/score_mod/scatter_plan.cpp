#include "score_mod/scatter_plan.h"

#include <algorithm>
#include <array>
#include <bit>

#include "score_mod/derivative.h"
#include "score_mod/index_analysis.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"

namespace fusegrad::score_mod {
namespace {

std::string names_of(VariableSet set) {
  constexpr std::string_view kNames[] = {"b", "h", "q_idx", "kv_idx", "score", "an axis"};
  std::string text;
  for (int v = 0; v <= kVarAxis; ++v) {
    if ((set & set_of(static_cast<Variable>(v))) == 0) continue;
    if (!text.empty()) text += ", ";
    text += kNames[v];
  }
  return text.empty() ? "nothing" : text;
}

// The class by what the indices depend on, and why.
ScatterStep classify(const Graph& graph, const Contribution& c, std::span<const Dependence> dependence,
                     VariableSet determines, int64_t elements) {
  VariableSet on = 0;
  bool diagonal = true;
  for (const NodeId index : c.indices) {
    on |= dependence[index].on();
    diagonal = diagonal && dependence[index].diagonal();
  }
  const std::string depends = "the index depends on " + names_of(on);
  if ((on & set_of(kVarLane)) == 0) {
    const VariableSet pair = on & kPairSet;
    if (pair == 0) return {ScatterClass::kInvariant, depends + ": one sum for the whole loop"};
    if (pair == set_of(kVarKv)) return {ScatterClass::kKv, depends + ": one sum a column"};
    if (pair == set_of(kVarQ)) return {ScatterClass::kQ, depends + ": one sum a row"};
    if (diagonal) {
      return {ScatterClass::kDiagonal,
              depends + ", q_idx and kv_idx through their difference only: one sum a diagonal"};
    }
    if ((determines & kPairSet) == kPairSet) {
      return {ScatterClass::kInjective, depends + ", and no two pairs of a head have the same: nothing to sum"};
    }
  }
  if (elements >= 0 && elements <= kSmallTableElements) {
    return {ScatterClass::kSmallTable,
            depends + " in no special way, but the buffer has " + std::to_string(elements) + " elements: a histogram"};
  }
  return {ScatterClass::kGeneral, depends + " in no special way: an atomic addition a pair" +
                                      (elements < 0 ? " (class F, a histogram, where the buffer has at most " +
                                                          std::to_string(kSmallTableElements) + " elements)"
                                                    : "")};
}

// Whether two diagonals may have one element: no index is a multiple of q_idx - kv_idx and something else that is the
// same for all pairs.
bool diagonals_meet(const Contribution& c, std::span<const Dependence> dependence) {
  return std::none_of(c.indices.begin(), c.indices.end(), [&](NodeId index) {
    const Dependence& d = dependence[index];
    return d.coefficient[kVarQ] != 0 && (d.rest & kPairSet) == 0;
  });
}

// ScatterStep::inputs of a contribution. grouped: an index that depends on b is a group.
std::vector<std::optional<Input>> inputs_of(const Graph& graph, const Contribution& c,
                                            std::span<const Dependence> dependence, bool grouped) {
  std::vector<std::optional<Input>> inputs;
  std::array<int, kInputCount> count{};
  for (const NodeId index : c.indices) {
    const Node& node = graph[index];
    if (node.op == Op::kConstant && node.payload == 0) {
      inputs.emplace_back(std::nullopt);
      continue;
    }
    const bool group = grouped && (dependence[index].on() & set_of(kVarB)) != 0;
    if (!group && node.op != Op::kInput) return {};
    inputs.emplace_back(group ? Input::kB : static_cast<Input>(node.payload));
    ++count[static_cast<size_t>(*inputs.back())];
  }
  const auto times = [&](Input input) { return count[static_cast<size_t>(input)]; };
  const bool each = times(Input::kH) == 1 && times(Input::kQ) == 1 && times(Input::kKv) == 1;
  return each && times(Input::kB) <= 1 ? inputs : std::vector<std::optional<Input>>{};
}

}  // namespace

std::vector<ScatterStep> plan_scatter(const Graph& derivative, std::span<const int64_t> elements) {
  const auto dependence = dependences(derivative);
  const auto interval = intervals(derivative, Lengths{});
  std::vector<ScatterStep> plan;
  for (const Contribution& c : derivative.contributions()) {
    const VariableSet determines = determined(c.indices, dependence, interval);
    const auto buffer = static_cast<size_t>(c.buffer);
    ScatterStep step =
        classify(derivative, c, dependence, determines, buffer < elements.size() ? elements[buffer] : -1);
    const auto same_buffer = [&](const Contribution& other) { return other.buffer == c.buffer; };
    const auto& all = derivative.contributions();
    step.is_vector = derivative.open_axes(c) != 0;
    VariableSet on = 0;
    for (const NodeId index : c.indices) on |= dependence[index].on();
    const bool sums_pairs =
        !step.is_vector && step.scheme >= ScatterClass::kInjective && (on & (set_of(kVarLane) | set_of(kVarAxis))) == 0;
    step.over_batches = sums_pairs && (on & set_of(kVarB)) == 0;
    if (sums_pairs) step.groups = batch_groups(derivative, c.indices, dependence);
    if (!step.is_vector && step.scheme >= ScatterClass::kSmallTable && c.indices.size() <= 32) {
      step.one_column = true;
      for (size_t k = 0; k < c.indices.size(); ++k) {
        constexpr VariableSet kOfHead = set_of(kVarB) | set_of(kVarH);
        const VariableSet of_index = dependence[c.indices[k]].on();
        if ((of_index & ~kOfHead) != 0) {
          step.column |= uint32_t{1} << k;
        } else if ((of_index & set_of(kVarB)) != 0) {
          step.one_column = false;
        }
      }
      step.has_column = step.column != 0 && static_cast<size_t>(std::popcount(step.column)) < c.indices.size();
    }
    step.repeats = step.scheme == ScatterClass::kDiagonal && diagonals_meet(c, dependence);
    if (step.repeats) step.reason += ", equal neighbours together";
    step.places = derivative.values(derivative.open_axes(c));
    if (step.is_vector) step.reason += "; for each of " + std::to_string(step.places) + " elements of a vector";
    const bool only_read = std::count_if(all.begin(), all.end(), same_buffer) == 1;
    constexpr VariableSet kHead = set_of(kVarB) | set_of(kVarH);
    step.exclusive = only_read && (determines & kHead) == kHead;
    step.once_a_batch =
        only_read && step.scheme == ScatterClass::kInjective && (determines & set_of(kVarH)) == set_of(kVarH);
    if (step.once_a_batch) step.inputs = inputs_of(derivative, c, dependence, step.groups.has_value());
    if (step.exclusive) {
      step.reason += "; exclusive: no other b or h and no other read writes there";
    } else if (!only_read) {
      step.reason += "; shared with another read of the buffer";
    } else {
      step.reason += "; shared by different " + names_of(kHead & ~determines);
    }
    plan.push_back(std::move(step));
  }
  return plan;
}

std::string explain(std::string_view text, const std::vector<bool>& wants_grad) {
  const Graph graph = simplify(parse(text));
  std::string result = print(graph);
  if (graph.kind() != Kind::kScoreMod) return result;
  const Graph derivative = differentiate(graph, wants_grad);
  result.append("\n").append(print(derivative)).append("\n");
  const auto plan = plan_scatter(derivative);
  for (size_t i = 0; i < graph.buffers().size(); ++i) {
    if (i >= wants_grad.size() || !wants_grad[i]) continue;
    const std::string name = "gradient of @" + std::to_string(i);
    bool read = false;
    for (size_t k = 0; k < plan.size(); ++k) {
      if (derivative.contributions()[k].buffer != static_cast<int>(i)) continue;
      read = true;
      result += name + ": class " + static_cast<char>(plan[k].scheme) + ": " + plan[k].reason + "\n";
    }
    if (!read) result += name + ": zero, no differentiable read of it reaches the result\n";
  }
  return result;
}

}  // namespace fusegrad::score_mod
