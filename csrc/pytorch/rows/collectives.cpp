#include "pytorch/rows/collectives.h"

#include <ATen/DeviceGuard.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <vector>

#include "pytorch/rows/job.h"

namespace fusegrad {
namespace {

using at::Tensor;

// Boxed: the types of the parameters differ between versions of PyTorch.
Tensor functional(const char* name, std::vector<c10::IValue> arguments) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(op.has_value(), "a sharded vocabulary: PyTorch must have torch.distributed, but was built without ",
              name);
  op->callBoxed(arguments);
  return arguments.front().toTensor();
}

Tensor wait(const Tensor& values) { return functional("_c10d_functional::wait_tensor", {values}); }

Tensor shards_sum(const ShardsSum& call) {
  const BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(call.values));
  auto sum = call.values.clone(at::MemoryFormat::Contiguous);
  start_sum(sum, call.shards);
  finish_sum(sum, call.shards);
  return sum;
}
Tensor shards_use(const ShardsUse& call) { return call.values.clone(at::MemoryFormat::Contiguous); }
template <class Call>
Tensor like_values(const Call& call) {
  return at::empty_symint(call.values.sym_sizes(), call.values.options().requires_grad(false));
}

void implement_sums(torch::Library& m) {
  m.impl("shards_sum", TORCH_FN(unpacked<shards_sum>()));
  m.impl("shards_use", TORCH_FN(unpacked<shards_use>()));
}

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
  static const Op<ShardsSum, Tensor> op("fusegrad::shards_sum");
  return shards.world() == 1 ? values : op({values, shards});
}

Tensor for_own_part(const Tensor& values, const Shards& shards) {
  static const Op<ShardsUse, Tensor> op("fusegrad::shards_use");
  return shards.world() == 1 ? values : op({values, shards});
}

Tensor first_largest(const Tensor& best, const Tensor& column, const Shards& shards) {
  std::vector<Tensor> columns;
  for (int64_t r = 0; r < shards.world(); ++r) columns.push_back(column[r].to(at::kLong) + shards.start(r));
  return at::stack(columns).masked_fill(best.ne(best.amax(0)), shards.vocab()).amin(0);
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

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement_sums(m); }
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement_sums(m); }
TORCH_LIBRARY_IMPL(fusegrad, Meta, m) {
  m.impl("shards_sum", TORCH_FN(unpacked<like_values<ShardsSum>>()));
  m.impl("shards_use", TORCH_FN(unpacked<like_values<ShardsUse>>()));
}

}  // namespace fusegrad
