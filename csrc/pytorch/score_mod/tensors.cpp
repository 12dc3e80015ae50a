#include "pytorch/score_mod/tensors.h"

#include <algorithm>
#include <string>

#include "pytorch/ops/check.h"
#include "score_mod/cache.h"

namespace fusegrad::score_mod {

std::vector<at::Scalar> scalars_of(const Graph& graph, at::ArrayRef<double> floats, at::IntArrayRef ints) {
  const auto& declared = graph.scalars();
  const auto of_floats = static_cast<size_t>(std::count(declared.begin(), declared.end(), Type::kFloat));
  if (floats.size() != of_floats || ints.size() != declared.size() - of_floats) {
    throw GraphError("scalars must be " + std::to_string(of_floats) + " floats and " +
                     std::to_string(declared.size() - of_floats) + " integers and bools, as the text says, but got " +
                     std::to_string(floats.size()) + " and " + std::to_string(ints.size()));
  }
  std::vector<at::Scalar> scalars;
  auto next_float = floats.begin();
  auto next_int = ints.begin();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i] == Type::kFloat) {
      scalars.emplace_back(*next_float++);
    } else if (declared[i] == Type::kInt) {
      scalars.emplace_back(*next_int++);
    } else if (*next_int == 0 || *next_int == 1) {
      scalars.emplace_back(*next_int++ == 1);
    } else {
      throw GraphError("scalar $" + std::to_string(i) + " must be a bool, 0 or 1, as the text says, but got " +
                       std::to_string(*next_int));
    }
  }
  return scalars;
}

void check_precision(const char* op, const char* name, const Graph& graph, at::TensorList buffers, bool in_float64) {
  const auto is_double = [](const at::Tensor& t) { return t.scalar_type() == at::kDouble; };
  if (in_float64 || std::none_of(buffers.begin(), buffers.end(), is_double)) return;
  std::vector<DType> dtypes;
  for (const at::Tensor& t : buffers) dtypes.push_back(dtype_of(t));
  const int found = needs_float64(graph, dtypes);
  FUSEGRAD_CHECK_TYPE(found < 0, op, name,
                      "'s captured tensors must not be float64 where they are compared, added up, "
                      "rounded to integers or taken as angles, since this ",
                      name, " computes in float32, but got buffer @", found, " of shape ",
                      buffers[static_cast<size_t>(found)].sym_sizes(),
                      ": capture integers (times in milliseconds), or the difference from a common origin as float32");
}

ScoreMod mod_of(std::string_view text, at::TensorList buffers, at::ArrayRef<double> floats, at::IntArrayRef ints) {
  if (floats.empty() && ints.empty()) return {std::string(text), buffers.vec(), {}};
  return {std::string(text), buffers.vec(), scalars_of(*cached_graph(text), floats, ints)};
}

}  // namespace fusegrad::score_mod
