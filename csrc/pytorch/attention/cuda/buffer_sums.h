// The sums of captured buffers' gradients on CUDA: where kernels add them up, and how they become gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "cuda/attention/device/arguments.cuh"
#include "cuda/attention/plan/kernel_spec.h"
#include "pytorch/attention/flex_attention.h"
#include "score_mod/graph.h"

namespace fusegrad::cuda {

/// The sums of the contributions to captured buffers.
class FlexBufferSums {
 public:
  /// Sums of what the backward by keys contributes, `facts` are that kernel's. They lie in `grads` themselves where
  /// those are dense float32 and sums are float. `ctas`: of the kernel's launch.
  FlexBufferSums(const FlexScores& scores, const KernelFacts& facts, const at::Tensor& query, const at::Tensor& key,
                 const std::vector<at::Tensor>& grads, int64_t ctas);

  size_t contributions() const { return derivative_ == nullptr ? 0 : derivative_->contributions().size(); }
  float* largest() const { return largest_.defined() ? largest_.mutable_data_ptr<float>() : nullptr; }
  int fixed_bits() const { return fixed_bits_; }
  /// What the kernel stores dS to by TMA (scheme 'T'), or undefined.
  const at::Tensor& tiles() const { return tiles_; }

  /// As the kernel takes them.
  std::vector<device::FlexSums> arguments() const;

  /// After the kernels: to the gradients.
  void finish(const std::vector<at::Tensor>& grads, void* stream) const;

 private:
  struct Partial {
    at::Tensor sums, elements;
  };

  size_t buffer_of(size_t k) const { return static_cast<size_t>(derivative_->contributions()[k].buffer); }
  void add_partial_sums(void* stream) const;

  const std::shared_ptr<const score_mod::Graph> derivative_;
  int fixed_bits_;
  std::vector<Partial> partial_;  // of each contribution
  std::vector<at::Tensor> sums_;
  at::Tensor largest_, tiles_;
};

}  // namespace fusegrad::cuda
