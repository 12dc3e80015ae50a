// One call of a loss over rows: its tensors, and the device's kernels run on ranges of its rows.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "losses/row_kernels.h"
#include "pytorch/ops/dispatch.h"
#include "pytorch/rows/segments.h"

namespace fusegrad {

/// Inside a kernel: neither autograd nor autocast may touch what the kernel calls.
struct BelowAutogradAndAutocast {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

/// A device's kernels and its current stream.
struct RowDevice {
  const RowKernels* kernels;
  void* stream;
};
RowDevice row_device(const at::Device& device);

DType to_dtype(at::ScalarType dtype);

/// Where index `index` of the first dimension starts. Null for a tensor that is absent or has no elements: the kernels
/// take it as "not wanted".
void* pointer_at(const at::Tensor& tensor, int64_t index);
const void* pointer_at(const std::optional<at::Tensor>& tensor, int64_t index);
/// Where element [i, j] of a matrix is, or null as above.
void* pointer_at(const at::Tensor& matrix, int64_t i, int64_t j);

/// [first, first + count) of a dimension: the tensor itself where that is all of it. A view takes a microsecond to
/// make.
inline at::Tensor part(const at::Tensor& tensor, int64_t dim, int64_t first, int64_t count) {
  return count == tensor.size(dim) ? tensor : tensor.narrow(dim, first, count);
}

/// A contiguous tensor that begins at a multiple of so many bytes: a copy where it does not.
inline at::Tensor aligned(const at::Tensor& contiguous, size_t bytes) {
  return reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % bytes == 0 ? contiguous : contiguous.clone();
}

/// A target as the kernels read it: probabilities in the logits' dtype or in acc. Those of the inputs' dtype are
/// neither where the logits are wider: low-precision products on the CPU.
at::Tensor readable_target(const at::Tensor& target, at::ScalarType logits_dtype);

/// An upstream gradient for each row from `first` on, or one for all, as the kernels take it; left alone where there is
/// none.
void put_upstream(const at::Tensor& gradient, const void*& pointer, int64_t& stride, int64_t first = 0);

/// Rows with a dense last dimension, as the kernels read them.
at::Tensor dense_rows(const at::Tensor& matrix);

/// An empty contiguous tensor for a result. Large ones on the CPU ask for huge pages: the first touch of 4 KiB pages
/// takes longer than the kernel that writes them.
at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options);

/// Upstream gradients of a forward's outputs; an undefined one is zero.
struct Upstream {
  at::Tensor loss{}, lse{};
  at::Tensor stats{};  ///< contiguous

  template <class Backward>
  static Upstream of(const Backward& call) {
    const auto stats = call.grad_stats ? call.grad_stats->contiguous() : at::Tensor();
    return {call.grad_loss.value_or(at::Tensor()), call.grad_lse.value_or(at::Tensor()), stats};
  }
};

/// The options and tensors of one call, on rows [0, N) of V columns.
class RowJob {
 public:
  RowJob(const at::Tensor& target, const std::optional<at::Tensor>& weight,
         const std::optional<at::Tensor>& token_weight, const RowOptions& options, double logit_scale, int64_t rows,
         int64_t vocab, at::ScalarType logits_dtype);

  /// [N] acc: a factor of each row's logits beside the scale.
  void set_row_scale(const std::optional<at::Tensor>& row_scale) { row_scale_ = row_scale; }

  /// The logits of forward() and gradient() are this process's part of the columns, and so is a probability target:
  /// forward() has a collective in all processes. `different`: see CrossEntropyForward.
  void set_shards(const Shards& shards, const std::optional<at::Tensor>& different = {});

  /// Sums over a row's columns are those of segments, by pairs: see losses/product.h. For class indices.
  void set_segments(const VocabNodes& nodes) { nodes_ = nodes; }

  /// What the forward does with gradients for an upstream gradient of 1: it makes none, stores them, or stores them in
  /// float16, where they leave a factor for later, see RowScales.
  enum class Gradients { kNone, kStored, kDeferred };
  /// Allocates the outputs and computes the scales of reduction 'mean', or leaves them to finish_forward().
  void begin_forward(const std::optional<at::Tensor>& normalizer, Gradients gradients);
  /// Rows [first, first + logits.size(0)): statistics and loss; the gradient over the logits where asked for.
  void forward(const at::Tensor& logits, int64_t first, bool gradient_over_logits);
  /// Reduces the loss and hands out the outputs.
  RowOutputs finish_forward();

  /// Saved by a forward.
  void resume(const at::Tensor& lse, const at::Tensor& stats, const at::Tensor& scales);
  /// Rows [first, first + logits.size(0)), columns [column, column + logits.size(1)): the gradient from saved
  /// statistics into `grad`, which may be the logits.
  void gradient(const Upstream& upstream, const at::Tensor& logits, int64_t column, const at::Tensor& grad,
                int64_t first = 0);

  /// What resume() would be given in a forward that goes on to gradients: upstream gradient 1.
  at::Tensor unit_gradient() const;

 private:
  RowTargets targets(int64_t first_row, int64_t first_column) const;
  void* stat(int64_t row, int64_t first) const;
  void compute_scales();
  void describe(RowForward& p, const at::Tensor& logits, int64_t first) const;
  void forward_by_segments(const at::Tensor& logits, int64_t first);
  at::Tensor part_statistics(const at::Tensor& logits, int64_t first) const;
  void combine(const at::Tensor& parts, int64_t first);
  at::Tensor logits_at(const at::Tensor& logits, const at::Tensor& column, int64_t first) const;

  at::Tensor target_;
  std::optional<at::Tensor> weight_;
  std::optional<at::Tensor> token_weight_;
  std::optional<at::Tensor> row_scale_;
  RowOptions options_;
  double logit_scale_;
  int64_t rows_;
  int64_t vocab_;
  at::ScalarType dtype_;
  at::TensorOptions acc_;
  RowDevice device_;
  bool dense_;
  StatRows stat_rows_;
  std::optional<at::Tensor> normalizer_;
  bool deferred_ = false;
  bool scales_come_last_ = false;
  at::Tensor row_loss_;
  RowOutputs out_;
  VocabNodes nodes_;

  // Shards alone have these.
  Shards shards_;
  std::optional<at::Tensor> different_;
  bool soft_ = false;        // class probabilities or smoothing: every column has a coefficient
  at::Tensor kept_, owned_;  // bool, [N] and [processes, N]: rows that count; in whose part their target lies
  at::Tensor local_;         // the target as this part's kernel takes it
  at::Tensor at_index_;      // [N] acc: the coefficient of a class index
  std::optional<at::Tensor> part_weight_;
};

/// Rows of logits that are all -inf, of their lse; the CPU's kernel says NaN for that.
at::Tensor dead_rows(const at::Tensor& logits, const at::Tensor& lse);

}  // namespace fusegrad
