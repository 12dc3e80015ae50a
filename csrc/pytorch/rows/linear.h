// What the linear losses share: a head's products in chunks, and gradients that add up over them.
#pragma once

#include "losses/linear_plan.h"
#include "pytorch/ops/faults.h"
#include "pytorch/rows/collectives.h"
#include "pytorch/rows/job.h"
#include "pytorch/rows/registration.h"
#include "pytorch/rows/tiles.h"

namespace fusegrad {

/// One head: logits of chunks, and the products that carry gradients back. All tensors are in the products' dtype.
struct Head {
  Head(const at::Tensor& linear_weight, const std::optional<at::Tensor>& linear_bias, at::ScalarType dtype,
       const FixedProducts& fixed = {})
      : weight(fixed.tile == 0 ? linear_weight.to(dtype) : linear_weight.to(dtype).contiguous()),
        bias(linear_bias.has_value() ? linear_bias->to(dtype) : at::Tensor()) {}

  // out = input @ weight[columns].T + bias[columns].
  void logits(const at::Tensor& out, const at::Tensor& input, int64_t column, const FixedProducts& fixed = {}) const {
    const auto w = part(weight, 0, column, out.size(1));
    const auto b = bias.defined() ? part(bias, 0, column, out.size(1)) : bias;
    if (fixed) return fixed_logits(out, input, w, b, fixed);
    auto z = out;
    if (b.defined()) {
      at::addmm_out(z, b, input, w.t());
    } else {
      at::mm_out(z, input, w.t());
    }
  }

  at::Tensor weight;
  at::Tensor bias;
};

// out (+)= a @ b, where a float32 out may take low-precision factors on CUDA: one rounding less, and no copy.
inline void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool add) {
  auto result = out;
  if (out.scalar_type() == a.scalar_type()) {
    add ? at::addmm_out(result, out, a, b) : at::mm_out(result, a, b);
  } else {
    TORCH_INTERNAL_ASSERT(out.is_cuda() && out.scalar_type() == at::kFloat);
    add ? at::addmm_out(result, out, a, b, at::kFloat) : at::mm_out(result, a, b, at::kFloat);
  }
}

/// The tangents of a chunk's logits, x. W^T + x W.^T + b., into `out`; those that are undefined are 0.
inline void logits_tangent(const at::Tensor& out, const at::Tensor& x, const at::Tensor& x_moved,
                           const at::Tensor& weight, const at::Tensor& weight_moved, const at::Tensor& bias_moved) {
  if (bias_moved.defined()) {
    out.copy_(bias_moved.expand(out.sizes()));
  } else if (!weight_moved.defined() && !x_moved.defined()) {
    out.zero_();
  }
  bool add = bias_moved.defined();
  if (weight_moved.defined()) {
    multiply(out, x, weight_moved.t(), add);
    add = true;
  }
  if (x_moved.defined()) multiply(out, x_moved, weight.t(), add);
}

// What begin_overwriting() is told before a backward adds to it.
inline constexpr const char* kGradWeightInto = "grad_weight_into";

/// Raises where it is no longer what it was in the forward.
inline void check_grad_weight_into(const at::Tensor& into, const at::Tensor& weight) {
  const bool same = into.sizes() == weight.sizes() && into.is_contiguous() && into.device() == weight.device() &&
                    into.storage().nbytes() >= (into.storage_offset() + into.numel()) * into.itemsize();
  TORCH_CHECK_VALUE(same, kGradWeightInto, " must be as it was in the forward, contiguous, with memory, of shape ",
                    weight.sizes(), ", but got ", into.sizes());
}

// A gradient that is added up chunk by chunk in `accumulator`, which is `result` itself where the dtypes agree. Only
// the first `used` rows are: those of a vocabulary without its padding. The others are zero.
struct Sum {
  at::Tensor result;
  at::Tensor accumulator;
  bool started = false;

  void allocate(at::IntArrayRef shape, const at::TensorOptions& options, at::ScalarType accumulate, int64_t used_rows) {
    used = used_rows;
    if (options.dtype() == accumulate) {
      result = accumulator = empty_result(shape, options);
    } else {
      accumulator = empty_result(shape, options.dtype(accumulate));
    }
    result_options = options;
  }
  /// Adds to a tensor that is there already, and has no result.
  void add_to(const at::Tensor& tensor) {
    accumulator = result = tensor;
    used = tensor.size(0);
    started = true;
    given = true;
  }
  bool wanted() const { return accumulator.defined(); }
  void add_product(const at::Tensor& a, const at::Tensor& b) {
    if (given) begin_overwriting(kGradWeightInto);
    multiply(part(accumulator, 0, 0, used), a, b, started);
    started = true;
  }
  void add(const at::Tensor& values) {
    const auto rows = part(accumulator, 0, 0, used);
    started ? rows.add_(values) : rows.copy_(values);
    started = true;
  }
  at::Tensor finish() {
    if (given) return {};
    if (!wanted()) return result;
    const int64_t zeros_from = started ? used : 0;
    if (zeros_from < accumulator.size(0)) accumulator.slice(0, zeros_from).zero_();
    if (!result.defined()) result = accumulator.to(result_options.dtype());
    accumulator = at::Tensor();
    return result;
  }

 private:
  at::TensorOptions result_options;
  int64_t used = 0;
  bool given = false;
};

/// Rows of logits with their padding, and without it.
inline at::Tensor padded_logits(int64_t rows, int64_t columns, const at::TensorOptions& options) {
  const auto size = static_cast<int64_t>(options.dtype().itemsize());
  return empty_result({rows, logits_row_elements(columns, size)}, options);
}
inline at::Tensor logits_buffer(int64_t rows, int64_t columns, const at::TensorOptions& options) {
  return part(padded_logits(rows, columns, options), 1, 0, columns);
}

/// The gradients of a head's input, weight and bias, from those of chunks of its logits. With `inplace` the input's are
/// written over the input. The weight's are added to `grad_weight_into` where that is defined, and the input's come
/// from `fixed` products. With shards the input's are summed over the processes, in acc or, where the weight's add up
/// in the products' dtype, in that, behind the weight's product and the next chunk's; those of fixed products are
/// gathered and summed in their order.
class ChunkGradients {
 public:
  ChunkGradients(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                 int64_t vocab, const LinearPlan& plan, std::array<bool, 3> needs_grad, bool inplace,
                 const at::Tensor& grad_weight_into = {}, const FixedProducts& fixed = {})
      : needs_grad_(needs_grad), inplace_(inplace), fixed_(fixed) {
    const auto product = product_type(input), acc = acc_type(product);
    if (needs_grad[0]) input_ = inplace ? input : at::empty_like(input, at::MemoryFormat::Contiguous);
    // One chunk, or the lean choice, adds up in the result itself, where a product can be written into it.
    const bool direct = weight.scalar_type() == product && !plan.accumulator;
    if (grad_weight_into.defined()) {
      weight_.add_to(grad_weight_into);
    } else if (needs_grad[1]) {
      weight_.allocate(weight.sizes(), weight.options(), direct ? product : acc, vocab);
    }
    if (needs_grad[2]) bias_.allocate(bias->sizes(), bias->options(), acc, vocab);
    if (needs_grad[0] && vocab == 0) {  // no product will write it
      if (inplace) begin_overwriting("the input");
      input_.zero_();
    }
  }

  void set_shards(const Shards& shards, std::optional<at::ScalarType> accumulate_dtype) {
    shards_ = shards;
    sum_dtype_ = accumulate_dtype;
  }

  /// `x` are rows [first, first + x.size(0)) of the input in the products' dtype, `z` the gradient of their logits.
  void add(const Head& head, const at::Tensor& x, const at::Tensor& z, int64_t first) {
    if (shards_) {
      finish_sum();
      if (needs_grad_[0]) start_sum(head, x, z, first);
    }
    // The weight's gradient reads the input, which the input's may overwrite: first it, then the other.
    if (needs_grad_[1]) weight_.add_product(z.t(), x);
    if (needs_grad_[2]) bias_.add(z.sum(0, /*keepdim=*/false, acc_type(z.scalar_type())));
    if (!needs_grad_[0] || shards_) return;
    const auto block = part(input_, 0, first, x.size(0));
    const bool direct = block.scalar_type() == z.scalar_type();
    const auto product = direct ? block : at::empty(block.sizes(), z.options());
    if (inplace_ && direct) begin_overwriting("the input");
    if (fixed_) {
      fixed_sums(product, z, head.weight, fixed_);
    } else {
      multiply(product, z, head.weight, /*add=*/false);
    }
    if (direct) return;
    if (inplace_) begin_overwriting("the input");
    block.copy_(product);
  }

  /// What other factors of the same products add to rows that add() has had: `x` and the head's weight (undefined:
  /// none), with `z` the gradient of the logits.
  void add_more(const at::Tensor& weight, const at::Tensor& x, const at::Tensor& z, int64_t first) {
    if (needs_grad_[1] && x.defined()) weight_.add_product(z.t(), x);
    if (!needs_grad_[0] || !weight.defined()) return;
    const auto block = part(input_, 0, first, z.size(0));
    if (block.scalar_type() == z.scalar_type()) {
      multiply(block, z, weight, /*add=*/true);
    } else {
      block.add_(at::mm(z, weight));
    }
  }

  LinearGradients finish() {
    finish_sum();
    return {input_, weight_.finish(), bias_.finish()};
  }

 private:
  void start_sum(const Head& head, const at::Tensor& x, const at::Tensor& z, int64_t first) {
    const auto acc = acc_type(z.scalar_type());
    first_ = first;
    if (fixed_) {
      sum_ = at::empty(x.sizes(), z.options().dtype(acc));
      fixed_sums(sum_, z, head.weight, fixed_);
      return;
    }
    sum_ = at::empty(x.sizes(), z.options().dtype(sum_dtype_ == z.scalar_type() ? z.scalar_type() : acc));
    multiply(sum_, z, head.weight, /*add=*/false);
    fusegrad::start_sum(sum_, shards_);
  }
  // In place it writes rows that the weight's product has read by then.
  void finish_sum() {
    if (!sum_.defined()) return;
    if (fixed_) {
      sum_ = sum_by_pairs(gather_parts(sum_, shards_), fixed_.nodes);
    } else {
      fusegrad::finish_sum(sum_, shards_);
    }
    if (inplace_) begin_overwriting("the input");
    part(input_, 0, first_, sum_.size(0)).copy_(sum_);
    sum_ = at::Tensor();
  }

  std::array<bool, 3> needs_grad_;
  bool inplace_;
  FixedProducts fixed_;
  at::Tensor input_;
  Sum weight_, bias_;
  Shards shards_;
  std::optional<at::ScalarType> sum_dtype_;
  at::Tensor sum_;  // the gradient of the input's rows from first_ on, on its way
  int64_t first_ = 0;
};

// The gradients as the ops return them, empty where not wanted.
inline LinearGradientTuple to_tuple(const LinearGradients& gradients, const at::Tensor& input, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias) {
  const auto or_empty = [](const at::Tensor& gradient, const at::Tensor& like) {
    return gradient.defined() ? gradient : at::empty({0}, like.options().requires_grad(false));
  };
  return {or_empty(gradients.input, input), or_empty(gradients.weight, weight),
          or_empty(gradients.bias, bias.value_or(input))};
}

}  // namespace fusegrad
