#include "pytorch/attention/cuda/pair_projection.h"

#include <ATen/DeviceGuard.h>

#include "cuda/attention/pair_projection/pair_projection.h"
#include "pytorch/gpu.h"
#include "pytorch/rows/job.h"

namespace fusegrad::cuda {
namespace {

using at::Tensor;

constexpr size_t kVector = 16;  // bytes, at multiples of which the kernels read

struct Given {
  Tensor pair, norm_weight, norm_bias, weight, bias;

  explicit Given(const PairProjection& c)
      : pair(aligned(c.pair.contiguous(), kVector)),
        norm_weight(c.norm_weight ? c.norm_weight->contiguous() : Tensor()),
        norm_bias(c.norm_bias ? c.norm_bias->contiguous() : Tensor()),
        weight(aligned(c.projection_weight.contiguous(), kVector)),
        bias(c.projection_bias ? c.projection_bias->contiguous() : Tensor()) {}

  cuda::PairProjectionCall call(const PairProjection& c) const {
    const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
    return {.dtype = to_dtype(pair.scalar_type()),
            .batches = pair.size(0),
            .pairs = pair.size(1) * pair.size(2),
            .channels = static_cast<int>(pair.size(3)),
            .heads = static_cast<int>(weight.size(0)),
            .eps = static_cast<float>(c.eps),
            .centered = c.centered,
            .pair = data(pair),
            .norm_weight = data(norm_weight),
            .norm_bias = data(norm_bias),
            .weight = data(weight),
            .bias = data(bias)};
  }
};

}  // namespace

bool pair_projection_takes(const PairProjection& c) {
  return at::isReducedFloatingType(c.pair.scalar_type()) &&
         pair_projection_takes(to_dtype(c.pair.scalar_type()), c.pair.size(3), c.projection_weight.size(0));
}

void pair_projection(const PairProjection& c, const Tensor& out) {
  const c10::DeviceGuard device(c.pair.device());
  const Given given(c);
  pair_projection(given.call(c), out.data_ptr(), gpu::current_stream());
}

void pair_projection_backward(const PairProjectionBackward& c, const fusegrad::PairProjectionGradients& gradients) {
  const c10::DeviceGuard device(c.of.pair.device());
  const Given given(c.of);
  const auto call = given.call(c.of);
  const auto grad = c.grad.contiguous();
  cuda::PairProjectionGradients to{.grad = grad.const_data_ptr(),
                                   .pair = pointer_at(std::get<0>(gradients), 0),
                                   .norm_weight = pointer_at(std::get<1>(gradients), 0),
                                   .norm_bias = pointer_at(std::get<2>(gradients), 0),
                                   .weight = pointer_at(std::get<3>(gradients), 0),
                                   .bias = pointer_at(std::get<4>(gradients), 0)};
  Tensor parts;
  if (to.norm_weight != nullptr || to.norm_bias != nullptr || to.weight != nullptr || to.bias != nullptr) {
    parts = at::empty({pair_projection_parts(call), call.heads, call.channels + 1}, grad.options().dtype(at::kFloat));
    to.parts = parts.mutable_data_ptr<float>();
  }
  pair_projection_backward(call, to, gpu::current_stream());
}

}  // namespace fusegrad::cuda
