#include "pytorch/ops/check.h"

#include <cmath>

#include "fusegrad/options.h"

namespace fusegrad {
namespace {

at::Tensor rows_as(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.to(dtype).reshape({-1}).contiguous();
}

}  // namespace

int64_t parse_reduction(const char* op, std::string_view reduction) {
  if (reduction == "none") return at::Reduction::None;
  if (reduction == "mean") return at::Reduction::Mean;
  if (reduction == "sum") return at::Reduction::Sum;
  FUSEGRAD_CHECK_VALUE(false, op, "reduction must be 'none', 'mean' or 'sum', but got '", reduction, "'");
}

void check_dense(const char* op, const char* name, const at::Tensor& tensor) {
  FUSEGRAD_CHECK_TYPE(tensor.defined(), op, name, " must be a tensor, but got an undefined one");
  FUSEGRAD_CHECK_TYPE(!tensor.is_nested(), op, name, " must be a dense tensor, but got a nested one");
  FUSEGRAD_CHECK_TYPE(tensor.layout() == at::kStrided, op, name, " must be a dense tensor, but got layout ",
                      tensor.layout());
}

void check_floating(const char* op, const char* name, const at::Tensor& tensor) {
  check_dense(op, name, tensor);
  const auto device = tensor.device().type();
  FUSEGRAD_CHECK_VALUE(device == at::kCPU || device == at::kCUDA || device == at::kMeta, op, name,
                       " must be on the CPU or on a CUDA GPU, but got device ", tensor.device());
  const auto dtype = tensor.scalar_type();
  const bool common = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (device == at::kCUDA) {
    FUSEGRAD_CHECK_TYPE(common, op, name, " must be float32, bfloat16 or float16 on CUDA, but got ", dtype);
  } else {
    FUSEGRAD_CHECK_TYPE(common || dtype == at::kDouble, op, name,
                        " must be float64, float32, bfloat16 or float16, but got ", dtype);
  }
}

void check_same_device(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& input) {
  FUSEGRAD_CHECK_VALUE(tensor.device() == input.device(), op, name, " must be on the input's device ", input.device(),
                       ", but got ", tensor.device());
}

void check_no_grad(const char* op, const char* name, const at::Tensor& tensor) {
  FUSEGRAD_CHECK_VALUE(!tensor.requires_grad(), op, name,
                       " must not require grad, since it gets no gradient, but got a tensor that does: detach it");
}

void check_linear(const char* op, const char* input_name, const at::Tensor& input, const char* weight_name,
                  const at::Tensor& weight, const char* bias_name, const std::optional<at::Tensor>& bias) {
  check_floating(op, input_name, input);
  check_floating(op, weight_name, weight);
  FUSEGRAD_CHECK_VALUE(input.dim() >= 1, op, input_name, " must have shape [..., H], but got a 0-d tensor");
  FUSEGRAD_CHECK_VALUE(weight.dim() == 2, op, weight_name, " must have shape [V, H], but got ", weight.sym_sizes());
  FUSEGRAD_CHECK_VALUE(weight.sym_size(1) == input.sym_size(-1), op, weight_name, " must have shape [V, H] with the ",
                       input_name, "'s H = ", input.sym_size(-1), ", but got ", weight.sym_sizes());
  check_same_device(op, weight_name, weight, input);
  FUSEGRAD_CHECK_TYPE((input.scalar_type() == at::kDouble) == (weight.scalar_type() == at::kDouble), op, weight_name,
                      " must be float64 where the ", input_name, " is and only there, but got ", weight.scalar_type(),
                      " for an input of ", input.scalar_type());
  if (bias.has_value()) {
    check_floating(op, bias_name, *bias);
    FUSEGRAD_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), op, bias_name,
                         " must have shape [V] = [", weight.sym_size(0), "], but got ", bias->sym_sizes());
    check_same_device(op, bias_name, *bias, input);
  }
}

void check_budget(const char* op, const char* weight_name, const at::Tensor& weight,
                  std::optional<at::ScalarType> accumulate_dtype, std::optional<int64_t> workspace_mib) {
  if (accumulate_dtype.has_value()) {
    FUSEGRAD_CHECK_TYPE(
        *accumulate_dtype == acc_type(weight.scalar_type()) || *accumulate_dtype == weight.scalar_type(), op,
        "accumulate_dtype must be ", acc_type(weight.scalar_type()), " or ", weight_name, "'s dtype ",
        weight.scalar_type(), ", but got ", *accumulate_dtype);
  }
  FUSEGRAD_CHECK_VALUE(!workspace_mib.has_value() || *workspace_mib >= 0, op,
                       "workspace_mib must be a number of MiB >= 0 or None, but got ", workspace_mib.value_or(0));
}

std::optional<at::Tensor> make_row_value(const char* op, const char* name, const at::Tensor& input,
                                         const std::optional<at::Tensor>& value, c10::SymIntArrayRef row_shape,
                                         at::ScalarType acc) {
  if (!value.has_value()) return std::nullopt;
  check_dense(op, name, *value);
  FUSEGRAD_CHECK_TYPE(value->is_floating_point(), op, name, " must be floating-point, but got ", value->scalar_type());
  FUSEGRAD_CHECK_VALUE(value->sym_sizes() == row_shape, op, name, " must have shape ", row_shape, ", but got ",
                       value->sym_sizes());
  check_same_device(op, name, *value, input);
  check_no_grad(op, name, *value);
  return rows_as(*value, acc);
}

std::optional<at::Tensor> make_normalizer(const char* op, const at::Tensor& input,
                                          const std::optional<at::Tensor>& normalizer, at::ScalarType acc) {
  if (!normalizer.has_value()) return std::nullopt;
  check_dense(op, "normalizer", *normalizer);
  FUSEGRAD_CHECK_VALUE(normalizer->dim() == 0, op, "normalizer must be a number or a 0-d tensor, but got shape ",
                       normalizer->sym_sizes());
  check_same_device(op, "normalizer", *normalizer, input);
  check_no_grad(op, "normalizer", *normalizer);
  return normalizer->to(acc);
}

void check_target_range(const char* op, const at::Tensor& target, int64_t vocab, int64_t ignore_index,
                        const char* name) {
  if (target.is_floating_point() || target.numel() == 0) return;
  const auto refuse = [&](int64_t position, int64_t value) {
    TORCH_CHECK_INDEX(false, op, ": ", name, " must be in [0, ", vocab, ") or ignore_index (", ignore_index,
                      "), but got ", value, " at row ", position);
  };
  if (target.is_cpu()) {
    AT_DISPATCH_INDEX_TYPES(target.scalar_type(), "check_target_range", [&] {
      const index_t* values = target.const_data_ptr<index_t>();
      for (int64_t n = 0; n < target.numel(); ++n) {
        const int64_t value = values[n];
        if ((value < 0 || value >= vocab) && value != ignore_index) refuse(n, value);
      }
    });
  } else if (check_targets_enabled()) {
    const auto wrong = target.lt(0).logical_or(target.ge(vocab)).logical_and(target.ne(ignore_index));
    const auto positions = wrong.nonzero();
    if (positions.size(0) != 0) {
      const auto position = positions[0].item<int64_t>();
      refuse(position, target[position].item<int64_t>());
    }
  }
}

Tensor as_rows(const Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  c10::SymInt rows = 1;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) rows = rows * tensor.sym_size(i);
  return tensor.reshape_symint({rows, tensor.sym_size(-1)});
}

}  // namespace fusegrad
