#include "pytorch/ops/check.h"

#include <atomic>
#include <cmath>

#include "fusegrad/options.h"

namespace fusegrad {
namespace {

std::atomic<bool> check_targets{false};

at::Tensor rows_as(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.to(dtype).reshape({-1}).contiguous();
}

}  // namespace

void set_check_targets(bool enabled) { check_targets = enabled; }
bool check_targets_enabled() { return check_targets; }

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

LossOptions make_loss_options(const char* op, const std::optional<at::Tensor>& weight,
                              const std::optional<at::Tensor>& token_weight,
                              const std::optional<at::Tensor>& normalizer, std::optional<int64_t> ignore_index,
                              std::string_view reduction, double label_smoothing, double z_loss,
                              std::optional<double> softcap, int64_t aux) {
  LossOptions options;
  options.weight = weight;
  options.token_weight = token_weight;
  options.normalizer = normalizer;
  options.ignore_index = ignore_index.value_or(-100);
  options.reduction = parse_reduction(op, reduction);
  FUSEGRAD_CHECK_VALUE(label_smoothing >= 0.0 && label_smoothing <= 1.0, op,
                       "label_smoothing must be in [0, 1], but got ", label_smoothing);
  options.label_smoothing = label_smoothing;
  FUSEGRAD_CHECK_VALUE(z_loss >= 0.0 && std::isfinite(z_loss), op, "z_loss must be a finite number >= 0, but got ",
                       z_loss);
  options.z_loss = z_loss;
  if (softcap.has_value()) {
    FUSEGRAD_CHECK_VALUE(*softcap > 0.0 && std::isfinite(*softcap), op,
                         "softcap must be a finite number > 0 or None, but got ", *softcap);
    options.softcap = *softcap;
  }
  FUSEGRAD_CHECK_VALUE(!normalizer.has_value() || options.reduction == at::Reduction::Mean, op,
                       "a normalizer must come with reduction 'mean', whose divisor it replaces, but got reduction '",
                       reduction, "'");
  FUSEGRAD_CHECK_VALUE(aux >= 0 && aux < 64, op, "aux must be a set of the six AuxBit bits, but got ", aux);
  options.aux = aux;
  return options;
}

RowArguments make_row_arguments(const char* op, const at::Tensor& input, const at::Tensor& target,
                                const LossOptions& options, std::vector<c10::SymInt> row_shape,
                                const c10::SymInt& vocab, int64_t class_dim, at::ScalarType logits_dtype) {
  const c10::SymIntArrayRef rows_ref(row_shape);
  const auto acc = acc_type(logits_dtype);
  RowArguments rows;
  check_dense(op, "target", target);
  check_same_device(op, "target", target, input);
  rows.probabilities = target.is_floating_point();
  if (rows.probabilities) {
    std::vector<c10::SymInt> expected(row_shape);
    expected.insert(expected.begin() + class_dim, vocab);
    FUSEGRAD_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(expected), op,
                         "a target of class probabilities must have the shape of the logits ",
                         c10::SymIntArrayRef(expected), ", but got ", target.sym_sizes());
    FUSEGRAD_CHECK_VALUE((options.aux & (kAuxTokenAccuracy | kAuxTokenLogProb)) == 0, op,
                         "token_accuracy and token_log_prob must come with class indices, but got a target of "
                         "class probabilities");
    FUSEGRAD_CHECK_VALUE(options.ignore_index < 0, op, "an ignore_index >= 0 must come with class indices, but got ",
                         options.ignore_index, " and a target of class probabilities, none of which it can leave out");
    const auto dtype = target.scalar_type() == logits_dtype ? logits_dtype : acc;
    rows.target = target.to(dtype).movedim(class_dim, -1).reshape_symint({-1, vocab}).contiguous();
  } else {
    const auto dtype = target.scalar_type();
    FUSEGRAD_CHECK_TYPE(
        dtype == at::kLong || dtype == at::kInt || dtype == at::kByte, op,
        "target must be int64, int32 or uint8 class indices or floating-point class probabilities, but got ", dtype);
    const auto shape = target.sym_sizes();
    // Where classes come second, [B, S, V] with [B, S] is meant for rows of V.
    const bool classes_last = class_dim == 1 && input.dim() > 2 && shape == input.sym_sizes().slice(0, input.dim() - 1);
    FUSEGRAD_CHECK_VALUE(shape == rows_ref, op, "a target of class indices must have shape ", rows_ref, ", but got ",
                         shape,
                         classes_last ? ": the classes are the input's dimension 1; where they are its last, flatten "
                                        "both, input.flatten(0, -2) and target.flatten(), or transpose the input, "
                                        "input.movedim(-1, 1)"
                                      : "");
    rows.target = (target.dim() == 1 ? target : target.reshape({-1})).contiguous();
    if (dtype == at::kByte) rows.target = rows.target.to(at::kLong);
  }
  if (options.weight.has_value()) {
    const auto& weight = *options.weight;
    check_dense(op, "weight", weight);
    FUSEGRAD_CHECK_TYPE(weight.is_floating_point(), op, "weight must be floating-point, but got ",
                        weight.scalar_type());
    FUSEGRAD_CHECK_VALUE(weight.dim() == 1 && weight.sym_size(0) == vocab, op, "weight must have shape [", vocab,
                         "], but got ", weight.sym_sizes());
    check_same_device(op, "weight", weight, input);
    check_no_grad(op, "weight", weight);
    rows.weight = weight.to(acc).contiguous();
  }
  rows.token_weight = make_row_value(op, "token_weight", input, options.token_weight, rows_ref, acc);
  rows.normalizer = make_normalizer(op, input, options.normalizer, acc);
  rows.row_shape = std::move(row_shape);
  return rows;
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

}  // namespace fusegrad
