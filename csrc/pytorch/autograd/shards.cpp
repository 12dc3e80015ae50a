// The derivatives of shards_sum and shards_use, of every order and in both modes: both are linear, and each is the
// other's transpose, where what is summed up is each process's own and the sum is the same in all.
#include <torch/library.h>

#include "pytorch/autograd/row_nodes.h"

namespace fusegrad {
namespace row_ops {

/// An op of one tensor that is linear in it.
template <class Call, class Transpose>
struct LinearOp {
  static constexpr const char* kName = "a sharded vocabulary";
  static constexpr size_t kConstants = 0;
  static variable_list differentiable(const Call& call) { return {call.values}; }
  static variable_list gradients(const Call& call, const variable_list&, const variable_list& upstream,
                                 const std::vector<bool>& /*wanted*/) {
    return {RowOp<Transpose>::run({upstream[0], call.shards})};
  }
};

template <>
struct RowOp<ShardsSum> : LinearOp<ShardsSum, ShardsUse> {
  static constexpr const char* kNode = "ShardsSumBackward";
  static Tensor run(const ShardsSum& call) {
    static const Op<ShardsSum, Tensor> op("fusegrad::shards_sum");
    return op(call);
  }
};

template <>
struct RowOp<ShardsUse> : LinearOp<ShardsUse, ShardsSum> {
  static constexpr const char* kNode = "ShardsUseBackward";
  static Tensor run(const ShardsUse& call) {
    static const Op<ShardsUse, Tensor> op("fusegrad::shards_use");
    return op(call);
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
