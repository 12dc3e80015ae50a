#include "pytorch/attention/outputs.h"

#include <algorithm>

#include "pytorch/ops/check.h"

namespace fusegrad {

using at::Tensor;

Tensor empty_attention_output(const Tensor& query, const Tensor& value, at::ScalarType dtype) {
  // From the innermost dimension outwards; of equal strides the later dimension first.
  std::array<int64_t, 4> order{3, 2, 1, 0};
  const auto strides = query.sym_strides();
  std::stable_sort(order.begin() + 1, order.end(), [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  const std::array<c10::SymInt, 4> sizes{query.sym_size(0), query.sym_size(1), query.sym_size(2), value.sym_size(3)};
  std::array<c10::SymInt, 4> out_strides;
  c10::SymInt stride = 1;
  for (const int64_t d : order) {
    out_strides[static_cast<size_t>(d)] = stride;
    stride = stride * sizes[static_cast<size_t>(d)];
  }
  return at::empty_strided_symint(sizes, out_strides, query.options().dtype(dtype).requires_grad(false));
}

FlexOutputs empty_flex_outputs(const Tensor& query, const Tensor& value, int64_t aux) {
  const auto acc = query.options().dtype(acc_type(query.scalar_type())).requires_grad(false);
  const auto row_values = [&] {
    return at::empty_symint({query.sym_size(0), query.sym_size(1), query.sym_size(2)}, acc);
  };
  const auto wanted = [&](bool is) { return is ? row_values() : at::empty({0}, acc); };
  const bool max_scores = (aux & kFlexMaxScores) != 0, low = (aux & kFlexLow) != 0;
  const bool rounds = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  return {empty_attention_output(query, value, query.scalar_type()),
          row_values(),
          wanted(max_scores),
          wanted(max_scores),
          low && rounds ? empty_attention_output(query, value, at::kChar) : at::empty({0}, acc.dtype(at::kChar)),
          wanted(low)};
}

FlexGradients empty_flex_gradients(const Tensor& query, const Tensor& key, const Tensor& value, at::TensorList buffers,
                                   const std::vector<bool>& needs_grad, bool inplace) {
  const auto like = [&](const Tensor& t, bool wanted) {
    return wanted && !inplace ? at::empty_like(t) : at::empty({0}, t.options().requires_grad(false));
  };
  FlexGradients result{like(query, needs_grad[0]), like(key, needs_grad[1]), like(value, needs_grad[2]), {}};
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto options = buffers[i].options().requires_grad(false);
    result.buffers.push_back(needs_grad[3 + i] ? at::empty_symint(buffers[i].sym_sizes(), options)
                                               : at::empty({0}, options));
  }
  return result;
}

}  // namespace fusegrad
