// The derivatives of shards_sum and shards_use, of every order and in both modes: both are linear, and each is the
// other's transpose, where what is summed up is each process's own and the sum is the same in all.
#include <torch/library.h>

#include "pytorch/autograd/row_nodes.h"
#include "pytorch/rows/collectives.h"

namespace fusegrad {
namespace row_ops {

template <>
struct RowOp<ShardsSum> {
  static constexpr const char* kName = "a sharded vocabulary";
  static constexpr const char* kNode = "ShardsSumBackward";
  static constexpr size_t kConstants = 0;
  static Tensor run(const ShardsSum& call) { return sum_of_parts(call.values, call.shards); }
  static variable_list differentiable(const ShardsSum& call) { return {call.values}; }
  static variable_list gradients(const ShardsSum& call, const variable_list&, const variable_list& upstream,
                                 const std::vector<bool>& /*wanted*/) {
    return {for_own_part(upstream[0], call.shards)};
  }
};

template <>
struct RowOp<ShardsUse> {
  static constexpr const char* kName = "a sharded vocabulary";
  static constexpr const char* kNode = "ShardsUseBackward";
  static constexpr size_t kConstants = 0;
  static Tensor run(const ShardsUse& call) { return for_own_part(call.values, call.shards); }
  static variable_list differentiable(const ShardsUse& call) { return {call.values}; }
  static variable_list gradients(const ShardsUse& call, const variable_list&, const variable_list& upstream,
                                 const std::vector<bool>& /*wanted*/) {
    return {sum_of_parts(upstream[0], call.shards)};
  }
};

}  // namespace row_ops

namespace {

template <class Call>
at::Tensor linear_op(const Call& call) {
  const auto result = row_ops::recorded(call);
  if (!row_ops::has_tangent(call.values)) return result;
  auto moved = call;
  moved.values = row_ops::tangent_of(call.values);
  return row_ops::with_tangent(result, row_ops::RowOp<Call>::run(moved));
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, Autograd, m) {
  m.impl("shards_sum", TORCH_FN(unpacked<linear_op<ShardsSum>>()));
  m.impl("shards_use", TORCH_FN(unpacked<linear_op<ShardsUse>>()));
}

}  // namespace fusegrad
