// linear_cross_entropy_forward(_) and linear_cross_entropy_backward on the CPU and on CUDA: matrix products by
// ATen, in chunks, around the row kernels.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "rows/job.h"
#include "rows/linear_plan.h"
#include "rows/registration.h"

namespace fusegrad {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The dtype of the products. The CPU's low-precision matmuls cannot add to float32, so they run in float32 there.
at::ScalarType product_type(const Tensor& input) {
  const bool low = at::isReducedFloatingType(input.scalar_type());
  return input.is_cpu() && low ? at::kFloat : input.scalar_type();
}

/// One head: logits of chunks, and the products that carry gradients back. All tensors are in the products' dtype.
struct Head {
  Head(const Tensor& linear_weight, const OptionalTensor& linear_bias, at::ScalarType dtype)
      : weight(linear_weight.to(dtype)), bias(linear_bias.has_value() ? linear_bias->to(dtype) : Tensor()) {}

  // out = input @ weight[columns].T + bias[columns]
  void logits(const Tensor& out, const Tensor& input, int64_t column) const {
    const auto w = weight.narrow(0, column, out.size(1)).t();
    auto result = out;
    if (bias.defined()) {
      at::addmm_out(result, bias.narrow(0, column, out.size(1)), input, w);
    } else {
      at::mm_out(result, input, w);
    }
  }

  Tensor weight;
  Tensor bias;
};

// out (+)= a @ b, where a float32 out may take low-precision factors on CUDA: one rounding less, and no copy.
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, bool add) {
  auto result = out;
  if (out.scalar_type() == a.scalar_type()) {
    add ? at::addmm_out(result, out, a, b) : at::mm_out(result, a, b);
  } else {
    TORCH_INTERNAL_ASSERT(out.is_cuda() && out.scalar_type() == at::kFloat);
    add ? at::addmm_out(result, out, a, b, at::kFloat) : at::mm_out(result, a, b, at::kFloat);
  }
}

// A gradient that is added up chunk by chunk in `accumulator`, which is `result` itself where the dtypes agree.
struct Sum {
  Tensor result;
  Tensor accumulator;
  bool started = false;

  void allocate(at::IntArrayRef shape, const at::TensorOptions& options, at::ScalarType accumulate) {
    if (options.dtype() == accumulate) {
      result = accumulator = empty_result(shape, options);
    } else {
      accumulator = empty_result(shape, options.dtype(accumulate));
    }
    result_options = options;
  }
  bool wanted() const { return accumulator.defined(); }
  void add_product(const Tensor& a, const Tensor& b) {
    multiply(accumulator, a, b, started);
    started = true;
  }
  void add(const Tensor& values) {
    started ? accumulator.add_(values) : accumulator.copy_(values);
    started = true;
  }
  Tensor finish() {
    if (!wanted()) return result;
    if (!started) accumulator.zero_();
    if (!result.defined()) result = accumulator.to(result_options.dtype());
    accumulator = Tensor();
    return result;
  }

 private:
  at::TensorOptions result_options;
};

Tensor logits_buffer(int64_t rows, int64_t columns, const at::TensorOptions& options) {
  const int64_t stride = logits_row_elements(columns, static_cast<int64_t>(options.dtype().itemsize()));
  return empty_result({rows, stride}, options).narrow(1, 0, columns);
}

// Gradients from saved statistics: the logits a block of columns at a time, so that each block of the weight's
// gradient is complete, in one product, and only the input's needs an accumulator.
LinearGradients gradients_by_columns(RowJob& job, const Head& head, const Tensor& grad_loss, const Tensor& grad_lse,
                                     const Tensor& input, int64_t columns, const at::TensorOptions& weight_options,
                                     const at::TensorOptions& bias_options, const at::TensorOptions& input_options,
                                     std::array<bool, 3> needs_grad) {
  const auto x = input.to(head.weight.scalar_type());
  const int64_t rows = x.size(0), hidden = x.size(1), vocab = head.weight.size(0);
  const auto acc = acc_type(x.scalar_type());
  LinearGradients gradients;
  Sum input_sum;
  if (needs_grad[0]) input_sum.allocate({rows, hidden}, input_options, columns >= vocab ? x.scalar_type() : acc);
  if (needs_grad[1]) gradients.weight = empty_result({vocab, hidden}, weight_options);
  if (needs_grad[2]) gradients.bias = at::empty({vocab}, bias_options);
  {
    const auto buffer = logits_buffer(rows, std::min(columns, vocab), x.options());
    for (int64_t column = 0; column < vocab; column += columns) {
      const int64_t width = std::min(columns, vocab - column);
      const auto z = buffer.narrow(1, 0, width);
      head.logits(z, x, column);
      job.gradient(grad_loss, grad_lse, z, column, z);
      if (needs_grad[0]) input_sum.add_product(z, head.weight.narrow(0, column, width));
      if (needs_grad[1]) {
        const auto block = gradients.weight.narrow(0, column, width);
        if (block.scalar_type() == x.scalar_type() || (block.is_cuda() && block.scalar_type() == at::kFloat)) {
          multiply(block, z.t(), x, /*add=*/false);
        } else {
          block.copy_(at::mm(z.t(), x));
        }
      }
      if (needs_grad[2]) gradients.bias.narrow(0, column, width).copy_(z.sum(0, /*keepdim=*/false, acc));
    }
  }
  if (needs_grad[0]) gradients.input = input_sum.finish();
  return gradients;
}

LinearGradientTuple to_tuple(const LinearGradients& gradients, const Tensor& input, const Tensor& weight,
                             const OptionalTensor& bias) {
  const auto or_empty = [](const Tensor& gradient, const Tensor& like) {
    return gradient.defined() ? gradient : at::empty({0}, like.options().requires_grad(false));
  };
  return {or_empty(gradients.input, input), or_empty(gradients.weight, weight),
          or_empty(gradients.bias, bias.value_or(input))};
}

template <bool inplace>
LinearTuple linear_cross_entropy_forward(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                                         const OptionalTensor& linear_bias, const OptionalTensor& weight,
                                         const OptionalTensor& token_weight, const OptionalTensor& normalizer,
                                         int64_t ignore_index, int64_t reduction, double label_smoothing, double z_loss,
                                         double softcap, int64_t aux, double logit_scale,
                                         std::optional<at::ScalarType> accumulate_dtype,
                                         std::optional<int64_t> workspace_mib, std::array<bool, 3> needs_grad) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(input));
  const int64_t rows = input.size(0), hidden = input.size(1), vocab = linear_weight.size(0);
  check_target_range("linear_cross_entropy", target, vocab, ignore_index);
  const auto dtype = product_type(input);
  const auto acc = acc_type(dtype);
  const LossOptions options{{}, {}, {}, ignore_index, reduction, label_smoothing, z_loss, softcap, aux};
  const bool any_gradient = needs_grad[0] || needs_grad[1] || needs_grad[2];

  LinearSizes sizes;
  sizes.rows = rows;
  sizes.hidden = hidden;
  sizes.vocab = vocab;
  sizes.element_size = static_cast<int64_t>(at::elementSize(dtype));
  sizes.cpu = input.is_cpu();
  sizes.weight_grad = needs_grad[1];
  sizes.low_precision_result = linear_weight.scalar_type() != accumulate_dtype.value_or(acc);
  const auto plan = plan_linear(sizes, budget_bytes(workspace_mib));
  const bool over_rows = any_gradient && plan.columns == 0;

  const Head head(linear_weight, linear_bias, dtype);
  RowJob job(target, weight, token_weight, options, logit_scale, rows, vocab, dtype);
  using Gradients = RowJob::Gradients;
  job.begin_forward(normalizer, !any_gradient                      ? Gradients::kNone
                                : input.scalar_type() == at::kHalf ? Gradients::kDeferred
                                                                   : Gradients::kStored);

  LinearGradients gradients;
  Sum weight_sum, bias_sum;
  if (over_rows) {
    if (needs_grad[0]) gradients.input = inplace ? input : at::empty_like(input, at::MemoryFormat::Contiguous);
    // One chunk, or the lean choice, adds up in the result itself, where a product can be written into it.
    const bool direct = linear_weight.scalar_type() == dtype && !plan.accumulator;
    if (needs_grad[1]) weight_sum.allocate({vocab, hidden}, linear_weight.options(), direct ? dtype : acc);
    if (needs_grad[2]) bias_sum.allocate({vocab}, linear_bias->options(), acc);
  }
  if (vocab != 0) {
    const auto buffer = logits_buffer(std::min(plan.rows, rows), vocab, input.options().dtype(dtype));
    for (int64_t first = 0; first < rows; first += plan.rows) {
      const int64_t count = std::min(plan.rows, rows - first);
      const auto z = buffer.narrow(0, 0, count);
      const auto x = input.narrow(0, first, count).to(dtype);
      head.logits(z, x, 0);
      job.forward(z, first, over_rows);
      if (!over_rows) continue;
      // The weight's gradient reads the input, which the input's may overwrite: first it, then the other.
      if (needs_grad[1]) weight_sum.add_product(z.t(), x);
      if (needs_grad[2]) bias_sum.add(z.sum(0, /*keepdim=*/false, acc));
      if (needs_grad[0]) {
        const auto block = gradients.input.narrow(0, first, count);
        if (block.scalar_type() == dtype) {
          multiply(block, z, head.weight, /*add=*/false);
        } else {
          block.copy_(at::mm(z, head.weight));
        }
      }
    }
  }
  auto out = job.finish_forward();
  if (over_rows) {
    gradients.weight = weight_sum.finish();
    gradients.bias = bias_sum.finish();
  } else if (any_gradient) {
    job.resume(out.lse, out.stats, out.scales);
    gradients =
        gradients_by_columns(job, head, job.unit_gradient(), Tensor(), input, plan.columns, linear_weight.options(),
                             linear_bias ? linear_bias->options() : at::TensorOptions(), input.options(), needs_grad);
    if (inplace && needs_grad[0]) input.copy_(gradients.input);
  }
  if (inplace) gradients.input = Tensor();
  return std::tuple_cat(fusegrad::to_tuple(out), to_tuple(gradients, input, linear_weight, linear_bias));
}

LinearGradientTuple linear_cross_entropy_backward(
    const OptionalTensor& grad_loss, const OptionalTensor& grad_lse, const Tensor& input, const Tensor& linear_weight,
    const Tensor& target, const OptionalTensor& linear_bias, const OptionalTensor& weight, const Tensor& lse,
    const Tensor& stats, const Tensor& scales, const OptionalTensor& token_weight, int64_t ignore_index,
    double label_smoothing, double z_loss, double softcap, double logit_scale, std::optional<int64_t> workspace_mib,
    std::array<bool, 3> needs_grad) {
  BelowAutogradAndAutocast below;
  const c10::OptionalDeviceGuard device(at::device_of(input));
  const auto dtype = product_type(input);
  const LossOptions options{{}, {}, {}, ignore_index, 0, label_smoothing, z_loss, softcap, 0};
  RowJob job(target, weight, token_weight, options, logit_scale, input.size(0), linear_weight.size(0), dtype);
  job.resume(lse, stats, scales);
  LinearSizes sizes;
  sizes.rows = input.size(0);
  sizes.hidden = input.size(1);
  sizes.vocab = linear_weight.size(0);
  sizes.element_size = static_cast<int64_t>(at::elementSize(dtype));
  sizes.cpu = input.is_cpu();
  const auto gradients = gradients_by_columns(
      job, Head(linear_weight, linear_bias, dtype), grad_loss.value_or(Tensor()), grad_lse.value_or(Tensor()), input,
      plan_columns(sizes, budget_bytes(workspace_mib)), linear_weight.options(),
      linear_bias ? linear_bias->options() : at::TensorOptions(), input.options(), needs_grad);
  return to_tuple(gradients, input, linear_weight, linear_bias);
}

void implement(torch::Library& m) {
  m.impl("linear_cross_entropy_forward", TORCH_FN(linear_cross_entropy_forward<false>));
  m.impl("linear_cross_entropy_forward_", TORCH_FN(linear_cross_entropy_forward<true>));
  m.impl("linear_cross_entropy_backward", TORCH_FN(linear_cross_entropy_backward));
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement(m); }
#endif

}  // namespace fusegrad
