// A call of flex attention on CUDA: its operands as kernels take them, and the launches of its plans.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cuda/attention/mask/tile_lists.h"
#include "cuda/attention/plan/launch_plan.h"
#include "cuda/attention/tangents/arguments.cuh"
#include "jit/kernel_cache.h"
#include "pytorch/attention/flex_attention.h"

namespace fusegrad::cuda {

device::FlexTensor view(const at::Tensor& t);
inline const float* data_of(const at::Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.const_data_ptr<float>() : nullptr;
}
/// Attention dropout as kernels take it; `seed` is one int64 on the device.
device::FlexDropout dropout_of(const at::Tensor& seed, double p);

/// The operands of one call and what its kernels have in common. Executes launch plans.
class FlexCall {
 public:
  FlexCall(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const FlexScores& scores);

  /// What all kernels of the call have in common.
  const FlexCase& common() const { return common_; }
  const FlexShape& shape() const { return shape_; }
  CUstream_st* stream() const { return stream_; }

  template <class Arguments>
  void fill(Arguments& a) const {
    a.query = view(query_);
    a.key = view(key_);
    a.value = view(value_);
    a.batches = static_cast<int>(shape_.batches);
    a.key_batches = static_cast<int>(shape_.key_batches);
    a.heads = static_cast<int>(shape_.heads);
    a.group = static_cast<int>(shape_.group());
    a.queries = static_cast<int>(shape_.queries);
    a.keys = static_cast<int>(shape_.keys);
    a.head_size = common_.head_size;
    a.value_size = common_.value_size;
    a.scale = static_cast<float>(scores_.scale);
  }

  /// Copies the buffers of the score_mod's boxes whose rows do not lie together at multiples of 16 bytes, if that takes
  /// less time than to read them as they lie. Comes before any use of common(), as it changes what that says.
  void align_boxes();
  /// FlexCase::few_rows of a forward.
  int few_rows(bool max_scores) const;
  /// FlexCase::key_splits.
  bool key_splits() const;
  /// Whether a backward's tall tiles take less time than others.
  bool pays_tall() const;
  /// Whether it takes less time where a backward's CTAs have all keys of a head.
  bool pays_whole(const FlexCase& c) const;
  /// FlexCase::forward_rows of a forward.
  int forward_rows(const FlexCase& c) const;
  /// About the share of pairs that a mask_mod without buffers allows; 1 where that is not known.
  double share_of_pairs() const;
  LaunchPlan plan(const FlexCase& c, int64_t launches = 1) const;

  /// The lists of tiles of a launch, and the number from which its CTAs count (null without a block mask).
  struct Lists {
    device::FlexTiles tiles{};
    int* next = nullptr;
  };
  /// What they lie in is kept until the call's end.
  Lists lists(const LaunchPlan& plan);

  /// What the forward of few queries, and the Hopper kernels, take besides.
  device::FlexForwardFewArguments few_forward(const LaunchPlan& plan) const;
  device::FlexForwardHopperArguments hopper_forward(const LaunchPlan& plan, const Lists& lists) const;
  device::FlexBackwardHopperArguments hopper_backward(const LaunchPlan& plan, const Lists& lists,
                                                      const at::Tensor& grad_out, const at::Tensor& rows,
                                                      const at::Tensor& grad_query, const at::Tensor& grad_key,
                                                      const at::Tensor& grad_value,
                                                      const at::Tensor& grad_scores) const;

  device::FlexTangentsHopperArguments hopper_tangents(const LaunchPlan& plan, const Lists& lists,
                                                      const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value) const;

  /// The kernel, compiled and loaded. `ahead`: called where it is compiled, with the architecture.
  const jit::Kernel& kernel(const KernelSpec& spec,
                            const std::function<void(const std::string&)>& ahead = nullptr) const;
  /// `more`: the kernel's further arguments.
  void launch(const LaunchPlan& plan, void* arguments, const std::vector<void*>& more,
              const std::function<void(const std::string&)>& ahead = nullptr);

 private:
  void take_scores();
  void take_blocks();
  const uint8_t* states_of_blocks();

  const at::Tensor query_, key_, value_;
  const FlexScores& scores_;
  std::vector<at::Tensor> score_buffers_;  // the score_mod's, or copies of them
  CUstream_st* const stream_;
  FlexShape shape_;
  FlexCase common_;
  std::vector<int64_t> score_words_, mask_words_;
  std::optional<BlockMaskShape> mask_;
  std::vector<at::Tensor> lists_, kept_;
  FlexBlockMap map_{};
  device::FlexTiles tiles_{};  // but for what depends on a kernel's tiles
  at::Tensor states_;
};

}  // namespace fusegrad::cuda
