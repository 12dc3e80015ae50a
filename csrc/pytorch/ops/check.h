// Checks of arguments, shared by the ops. Every message reads `op: what must hold, but got <what came>`.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string_view>
#include <vector>

#include "fusegrad/check_targets.h"

#define FUSEGRAD_CHECK_VALUE(condition, op, ...) TORCH_CHECK_VALUE(condition, op, ": ", __VA_ARGS__)
#define FUSEGRAD_CHECK_TYPE(condition, op, ...) TORCH_CHECK_TYPE(condition, op, ": ", __VA_ARGS__)

namespace fusegrad {

/// The dtype of everything that is accumulated: float64 for float64, else float32.
inline at::ScalarType acc_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

/// The dtype of the linear losses' products. The CPU's low-precision matmuls cannot add to float32, so they run in
/// float32 there.
inline at::ScalarType product_type(const at::Tensor& input) {
  const bool low = at::isReducedFloatingType(input.scalar_type());
  return input.device().is_cpu() && low ? at::kFloat : input.scalar_type();
}

/// 'none', 'mean' or 'sum' as at::Reduction.
int64_t parse_reduction(const char* op, std::string_view reduction);

/// A tensor, and one with strides.
void check_dense(const char* op, const char* name, const at::Tensor& tensor);

/// A floating dtype that the kernels of the tensor's device have; the device itself.
void check_floating(const char* op, const char* name, const at::Tensor& tensor);

void check_same_device(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& input);

/// A constant: no gradient can flow to it, and to drop one silently would be wrong.
void check_no_grad(const char* op, const char* name, const at::Tensor& tensor);

/// One linear head: input [..., H], weight [V, H], bias [V], under the names that the op gives them.
void check_linear(const char* op, const char* input_name, const at::Tensor& input, const char* weight_name,
                  const at::Tensor& weight, const char* bias_name, const std::optional<at::Tensor>& bias);

/// The linear losses' budget, and the dtype in which the gradient of `weight` adds up.
void check_budget(const char* op, const char* weight_name, const at::Tensor& weight,
                  std::optional<at::ScalarType> accumulate_dtype, std::optional<int64_t> workspace_mib);

/// A number a row, of `row_shape`, as [N] acc; a normalizer as 0-d acc. Both are constants.
std::optional<at::Tensor> make_row_value(const char* op, const char* name, const at::Tensor& input,
                                         const std::optional<at::Tensor>& value, c10::SymIntArrayRef row_shape,
                                         at::ScalarType acc);
std::optional<at::Tensor> make_normalizer(const char* op, const at::Tensor& input,
                                          const std::optional<at::Tensor>& normalizer, at::ScalarType acc);

/// [..., C] as [N, C], also where C is 0.
at::Tensor as_rows(const at::Tensor& tensor);

/// Rule 15: on the CPU, an index outside [0, V) that is not ignore_index raises IndexError with its position. On
/// the GPU only where set_check_targets(true) asks for it.
void check_target_range(const char* op, const at::Tensor& target, int64_t vocab, int64_t ignore_index,
                        const char* name = "target");

}  // namespace fusegrad
