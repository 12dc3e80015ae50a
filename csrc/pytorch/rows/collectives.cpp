#include "pytorch/rows/collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <vector>

namespace fusegrad {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Boxed: the types of the parameters differ between versions of PyTorch.
Tensor functional(const char* name, std::vector<c10::IValue> arguments) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(op.has_value(), "a sharded vocabulary: PyTorch must have torch.distributed, but was built without ",
              name);
  op->callBoxed(arguments);
  return arguments.front().toTensor();
}

Tensor wait(const Tensor& values) { return functional("_c10d_functional::wait_tensor", {values}); }

struct SumOfParts : torch::autograd::Function<SumOfParts> {
  static Tensor forward(AutogradContext* ctx, const Tensor& values, const std::string& group) {
    at::AutoDispatchBelowAutograd guard;
    ctx->set_materialize_grads(false);
    return wait(functional("_c10d_functional::all_reduce", {values.contiguous(), "sum", group}));
  }
  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& grads) { return {grads[0], Tensor()}; }
};

}  // namespace

Tensor gather_parts(const Tensor& values, const Shards& shards) {
  std::vector<int64_t> sizes(values.sizes().begin(), values.sizes().end());
  sizes.insert(sizes.begin(), shards.world());
  if (shards.world() == 1 || values.numel() == 0) return values.expand(sizes);
  const auto all =
      functional("_c10d_functional::all_gather_into_tensor", {values.contiguous(), shards.world(), shards.group});
  return wait(all).view(sizes);
}

void start_sum(const Tensor& values, const Shards& shards) {
  if (shards.world() == 1) return;
  functional("_c10d_functional::all_reduce_", {values, "sum", shards.group});
}

void finish_sum(const Tensor& values, const Shards& shards) {
  if (shards.world() != 1) wait(values);
}

Tensor sum_of_parts(const Tensor& values, const Shards& shards) {
  return shards.world() == 1 ? values : SumOfParts::apply(values, shards.group);
}

Tensor owned_by(const Tensor& index, const Shards& shards) {
  std::vector<Tensor> owned;
  for (int64_t r = 0; r < shards.world(); ++r) {
    owned.push_back(index.ge(shards.start(r)).logical_and_(index.lt(shards.stop(r))));
  }
  return at::stack(owned);
}

Tensor columns_of(const Tensor& index, const Shards& shards, int64_t other) {
  const auto there = index.ge(shards.start()).logical_and_(index.lt(shards.stop(shards.rank)));
  return (index - shards.start()).masked_fill_(there.logical_not_(), other);
}

}  // namespace fusegrad
