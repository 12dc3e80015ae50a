// Calls of flex_attention as the families take them: views of tensors, and what keeps their memory.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "attention/flex_attention.h"
#include "pytorch/attention/flex_attention.h"
#include "pytorch/score_mod/tensors.h"

namespace fusegrad {

TensorView view_of(const at::Tensor& t);
/// Of low parts, where there are any.
TensorView low_view_of(const at::Tensor& t);
void* data_of(const at::Tensor& t);
FlexResults results_of(const FlexOutputs& outputs);

/// FlexArguments. On CUDA the seed of dropout stays on the device.
class FlexViews {
 public:
  FlexViews(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const FlexScores& scores);

  const FlexArguments& call() const { return call_; }

 private:
  const score_mod::CapturedTensors score_mod_, mask_mod_;
  std::vector<at::Tensor> lists_;
  FlexArguments call_;
};

/// FlexBackwardCall. `begin_writing`: of a backward in place.
class FlexBackwardViews {
 public:
  FlexBackwardViews(const FlexUpstream& upstream, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const FlexOutputs& saved, const FlexScores& scores, bool deterministic,
                    const std::vector<bool>& needs_grad, const FlexGradients& grads, void (*begin_writing)());

  const FlexBackwardCall& call() const { return call_; }
  /// After the call: copies the buffers' gradients that were not contiguous.
  void finish() const;

 private:
  void* dense(const at::Tensor& t);

  const FlexViews views_;
  std::vector<at::Tensor> kept_, buffers_;
  const std::vector<at::Tensor>& grads_;
  FlexBackwardCall call_;
};

/// FlexTangentCall. `outputs`, `tangents_of_outputs`: written.
class FlexTangentViews {
 public:
  FlexTangentViews(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const FlexInputTangents& tangents, const FlexScores& scores, const FlexOutputs& outputs,
                   const FlexOutputs& tangents_of_outputs);

  const FlexTangentCall& call() const { return call_; }

 private:
  const FlexViews views_;
  const score_mod::CapturedTensors captured_;
  FlexTangentCall call_;
};

/// FlexBackwardCall::begin_writing of a backward in place.
void begin_overwriting_inputs();

/// Where there are no outputs or no keys, writes what a backward gives, and returns true.
bool backward_of_nothing(const FlexOutputs& saved, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const FlexGradients& grads, void (*begin_writing)());

}  // namespace fusegrad
