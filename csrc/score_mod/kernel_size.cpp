#include "score_mod/kernel_size.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "score_mod/cache.h"

namespace fusegrad::score_mod {
namespace {

constexpr int64_t kMostOperations = 2048, kMostContributions = 32;

int64_t operations(const Graph& graph) {
  return std::count_if(graph.nodes().begin(), graph.nodes().end(), [](const Node& n) { return !n.operands.empty(); });
}

}  // namespace

void check_kernel_size(std::string_view text, const std::vector<bool>* wants_grad) {
  int64_t count = operations(*cached_graph(text)), contributions = 0;
  if (wants_grad != nullptr) {
    const auto derivative = cached_derivative(text, *wants_grad);
    count += operations(*derivative);
    contributions = static_cast<int64_t>(derivative->contributions().size());
  }
  if (count > kMostOperations) {
    throw GraphError("flex_attention: on a GPU a score_mod and its derivative must have at most " +
                     std::to_string(kMostOperations) + " operations, but got " + std::to_string(count) +
                     "; reductions over vectors are loops, which count once");
  }
  if (contributions > kMostContributions) {
    throw GraphError(
        "flex_attention: on a GPU a score_mod must read captured tensors that require gradients at no "
        "more than " +
        std::to_string(kMostContributions) + " places, but got " + std::to_string(contributions) +
        "; a vector of a captured tensor, such as bias[h, :], counts once");
  }
}

}  // namespace fusegrad::score_mod
