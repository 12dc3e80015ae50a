// What the compositions of the losses share; see pytorch/autograd/composite.h.
#pragma once

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <vector>

#include "pytorch/autograd/composite.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/autograd/transforms.h"
#include "pytorch/ops/check.h"
#include "pytorch/rows/collectives.h"

namespace fusegrad::composite {

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();

/// Whether a check may read the values: they are those of a plain tensor.
inline bool is_readable(const at::Tensor& tensor) {
  return !is_transformed({&tensor}) && !is_traced(tensor) && !tensor.is_meta();
}

inline at::Tensor with_softcap(const at::Tensor& logits, double softcap) {
  return softcap == 0.0 ? logits : (logits / softcap).tanh() * softcap;
}

/// The rows' exponentials. A backward through the tangents of PyTorch's own fails: forward mode writes over what it
/// needs.
struct Exponentials {
  at::Tensor away, sum;  ///< from the row's largest value, and the sum of the exponentials of that
  at::Tensor largest;

  explicit Exponentials(const at::Tensor& x) {
    largest = x._fw_primal(/*level=*/0).detach().amax(1, /*keepdim=*/true);
    largest = largest.masked_fill(largest.abs().eq(kInfinity), 0);
    away = x - largest;
    sum = away.exp().sum(1, /*keepdim=*/true);
  }
};
inline bool moves(const at::Tensor& x) { return x._fw_grad(/*level=*/0).defined(); }
inline at::Tensor log_softmax(const at::Tensor& x) {
  if (!moves(x)) return x.log_softmax(1);
  const Exponentials e(x);
  return e.away - e.sum.log();
}
inline at::Tensor logsumexp(const at::Tensor& x, bool keepdim = false) {
  if (!moves(x)) return x.logsumexp(1, keepdim);
  const Exponentials e(x);
  const auto lse = e.largest + e.sum.log();
  return keepdim ? lse : lse.squeeze(1);
}

/// [N, 1]: the largest value of a row over all processes' parts, a constant, finite.
inline at::Tensor largest_of_rows(const at::Tensor& part, const Shards& shards) {
  const auto values = part._fw_primal(/*level=*/0).detach();
  const auto mine = shards.size() == 0 ? at::full({values.size(0)}, -kInfinity, values.options()) : values.amax(1);
  const auto largest = gather_parts(mine, shards).amax(0);
  return largest.masked_fill(largest.abs().eq(kInfinity), 0).unsqueeze(1);
}

/// [N]: of each row the value at a column of the whole vocabulary, 0 where that is in another process's part.
inline at::Tensor own_column(const at::Tensor& rows, const at::Tensor& index, const Shards& shards) {
  if (shards.size() == 0) return rows.sum(1);
  const auto column = columns_of(index, shards, -1);
  return rows.gather(1, column.clamp_min(0).unsqueeze(1)).squeeze(1).masked_fill(column.lt(0), 0);
}

/// A row's loss, NaN with its gradients where the processes were given what differs.
inline at::Tensor unless_different(const at::Tensor& loss, const OptionalTensor& different) {
  return different ? loss * at::ones_like(loss.detach()).masked_fill(*different, kNaN) : loss;
}

/// Products in the input's dtype, to which the head is rounded.
inline at::Tensor linear_logits(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias) {
  const auto dtype = input.scalar_type();
  return at::linear(input, weight.to(dtype), bias ? OptionalTensor(bias->to(dtype)) : std::nullopt);
}

/// Class indices [N], some of which say that a row is ignored. A row with an index outside [0, V) is NaN.
struct Labels {
  at::Tensor valid, wrong;
  at::Tensor index;  ///< in [0, V) everywhere

  Labels(const at::Tensor& labels, int64_t ignore_index, int64_t vocab) {
    const auto all = labels.to(at::kLong);
    valid = all.ne(ignore_index);
    const auto inside = all.ge(0).logical_and(all.lt(vocab));
    wrong = valid.logical_and(inside.logical_not());
    index = all.masked_fill(valid.logical_and(inside).logical_not(), 0);
  }

  /// An ignored row counts for nothing, also where it is infinite or NaN.
  at::Tensor without_ignored(const at::Tensor& rows) const {
    return at::where(valid.unsqueeze(1), rows, 0);  // one pass, where masked_fill would copy first
  }
  /// [N, V] at the labels.
  at::Tensor column(const at::Tensor& rows) const { return rows.gather(1, index.unsqueeze(1)).squeeze(1); }
  /// [N], with the values of ignored and wrong rows.
  at::Tensor of_rows(const at::Tensor& values) const {
    return values.masked_fill(wrong, kNaN).masked_fill(valid.logical_not(), 0);
  }
};

/// Whether cross_entropy_rows and jsd_soft are there for such logits.
inline bool has_row_kernels(const at::Tensor& logits) {
  const bool on_device = logits.is_cpu() || (logits.is_cuda() && logits.scalar_type() != at::kDouble);
  return on_device && logits.sym_size(1) != 0;
}

/// The labels that these ops get. The CPU's kernels do not take wrong ones: where these cannot be looked for, they are
/// ignored, and the rows are NaN afterwards.
struct LabelsOfKernels {
  OptionalTensor labels;
  at::Tensor wrong;

  LabelsOfKernels(const at::Tensor& logits, const OptionalTensor& given, const std::optional<Labels>& read,
                  int64_t ignore_index)
      : labels(given) {
    if (!given || !logits.is_cpu() || is_readable(*given)) return;
    wrong = read->wrong;
    labels = given->masked_fill(wrong, ignore_index);
  }
  /// The last dimension of `values` is the rows'.
  at::Tensor checked(const at::Tensor& values) const {
    return wrong.defined() ? values.masked_fill(wrong, kNaN) : values;
  }
};

/// By what the forward divided; see RowScales. It is infinite where no row is kept, whose gradients are 0.
inline at::Tensor scale_of(const at::Tensor& scales, int64_t i) { return scales[i].nan_to_num(0, 0, 0) * scales[2]; }

/// What `chunks`, an op that computes the rows of a linear loss in chunks, gives, or `whole`, all at once: in a process
/// without the Python package, which implements that op, in a compiler's graph, and beside saved-tensor hooks, which
/// torch.func does not take. Chunks keep their inputs alone, and are computed again for each derivative.
template <class Call, class Values>
Values in_chunks(const Op<Call, Values>& chunks, Values (*whole)(const Call&), const Call& call,
                 at::ArrayRef<const at::Tensor*> tensors) {
  const bool traced = std::any_of(tensors.begin(), tensors.end(), [](const auto* t) { return is_traced(*t); });
  if (traced || saved_tensor_hooks_active() || !chunks.is_composite()) return whole(call);
  const AboveTransforms above;
  return chunks.composite(call);
}

struct Input {
  at::Tensor* tensor;  ///< null: not there
  bool wanted;
};
inline Input input_of(OptionalTensor& tensor, bool wanted) { return {tensor ? &*tensor : nullptr, wanted}; }

constexpr c10::DispatchKeySet kBatchedKeys({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});

/// What differentiate() takes: each wanted tensor is replaced by an alias of it, which comes back. By the tensors
/// themselves the engine would go on through their own graphs, where one of them depends on another (tied weights).
/// One that is in no graph would have a gradient of 0, whatever depends on it.
inline std::vector<at::Tensor> aliases(c10::ArrayRef<Input> inputs) {
  std::vector<at::Tensor> result;
  for (const auto& input : inputs) {
    const bool wanted = input.wanted && input.tensor != nullptr;
    if (wanted) *input.tensor = at::alias(*input.tensor);
    TORCH_INTERNAL_ASSERT(!wanted || input.tensor->requires_grad(), "a gradient is wanted of what is in no graph");
    result.push_back(wanted ? *input.tensor : at::Tensor());
  }
  return result;
}

/// The gradients of those `inputs` that are defined, 0 where nothing depends on them; `graph`: as a graph. An output
/// that does not require grad depends on none of them, unless it is a batch, whose graph is that of what is in it.
inline std::vector<at::Tensor> differentiate(const std::vector<at::Tensor>& outputs,
                                             const std::vector<at::Tensor>& upstream,
                                             const std::vector<at::Tensor>& inputs, bool graph = true) {
  std::vector<at::Tensor> wanted, result(inputs.size());
  for (const auto& input : inputs) {
    if (input.defined()) wanted.push_back(input);
  }
  if (wanted.empty()) return result;
  std::vector<at::Tensor> recorded, of_recorded;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) {
      TORCH_CHECK_NOT_IMPLEMENTED(!outputs[i].key_set().has_any(kBatchedKeys),
                                  "a derivative of this order must not be batched by torch.vmap or vectorized, but is; "
                                  "use torch.func's transforms throughout");
      continue;
    }
    recorded.push_back(outputs[i]);
    of_recorded.push_back(upstream[i]);
  }
  auto gradients = std::vector<at::Tensor>(wanted.size());
  if (!recorded.empty()) {
    gradients =
        torch::autograd::grad(recorded, wanted, of_recorded, /*retain_graph=*/true, graph, /*allow_unused=*/true);
  }
  for (size_t i = 0, next = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    const auto& gradient = gradients[next++];
    result[i] = gradient.defined() ? gradient : at::zeros_like(inputs[i]);
  }
  return result;
}

/// The gradients of `inputs`, each where wanted, of what `formula()` gives of them, a list as `upstream` is, whose
/// tensors may be undefined: a graph where gradients are enabled. Also within torch.func.
template <class Formula>
std::vector<at::Tensor> pulled(const Formula& formula, c10::ArrayRef<at::Tensor> upstream,
                               c10::ArrayRef<Input> inputs) {
  const bool again = at::GradMode::is_enabled();
  std::vector<at::Tensor> given(upstream.begin(), upstream.end());
  for (const auto& input : inputs) {
    if (input.tensor != nullptr) given.push_back(*input.tensor);
  }
  std::optional<ReverseLevel> level;
  if (within_functorch(given)) level.emplace(again);
  const at::AutoGradMode enabled(true);
  std::vector<at::Tensor> variables;
  if (level) {
    for (const auto& input : inputs) {
      const bool wanted = input.wanted && input.tensor != nullptr;
      if (wanted) *input.tensor = level->variable(*input.tensor);
      variables.push_back(wanted ? *input.tensor : at::Tensor());
    }
  } else {
    variables = aliases(inputs);
  }
  std::vector<at::Tensor> outputs, of_outputs;
  const auto results = formula();
  for (size_t i = 0; i < results.size(); ++i) {
    // A level's variables are what all batches are within: what is none of it depends on none.
    if (!upstream[i].defined() || (level && !results[i].requires_grad())) continue;
    outputs.push_back(results[i]);
    of_outputs.push_back(upstream[i]);
  }
  auto found = differentiate(outputs, of_outputs, variables, again);
  for (auto& g : found) {
    if (level && g.defined()) g = level->outside(g);
  }
  return found;
}

}  // namespace fusegrad::composite
