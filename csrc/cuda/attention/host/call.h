// A call of flex attention on CUDA, as its kernels take it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <string>
#include <vector>

#include "cuda/attention/host/plan.h"
#include "cuda/attention/host/tile_lists.h"
#include "jit/kernel_cache.h"
#include "pytorch/attention/flex_attention.h"

namespace fusegrad::cuda {

/// Whether the innermost dimension is dense, and rows are at multiples of 16 bytes, as kernels read and write them.
bool has_aligned_rows(const at::Tensor& t);
/// Of t's sizes, such rows, not filled; zeros_beyond: what is between their ends and whole vectors is zeros.
at::Tensor new_aligned_rows(const at::Tensor& t, bool zeros_beyond);
/// `t`, or a copy that is so, with zeros beyond.
at::Tensor with_aligned_rows(const at::Tensor& t);
device::FlexTensor view(const at::Tensor& t);
inline const float* data_of(const at::Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.const_data_ptr<float>() : nullptr;
}
inline int64_t tiles_in(int64_t n, int64_t size) { return (n + size - 1) / size; }
void check_ctas(int64_t ctas);

/// One call: its score_mod and mask_mod, its block mask, its launches.
class FlexCall {
 public:
  FlexCall(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const FlexScores& scores);

  FlexCase& kernel_case() { return case_; }
  CUstream_st* stream() const { return stream_; }

  template <class Arguments>
  void fill(Arguments& a) const {
    a.query = view(query_);
    a.key = view(key_);
    a.value = view(value_);
    a.batches = static_cast<int>(query_.size(0));
    a.key_batches = static_cast<int>(key_.size(0));
    a.heads = static_cast<int>(query_.size(1));
    a.group = static_cast<int>(query_.size(1) / key_.size(1));
    a.queries = static_cast<int>(query_.size(2));
    a.keys = static_cast<int>(key_.size(2));
    a.head_size = case_.head_size;
    a.value_size = case_.value_size;
    a.scale = static_cast<float>(scores_.scale);
  }

  FlexPlan plan() const { return plan_of(case_); }
  static FlexPlan plan_of(const FlexCase& c);

  /// Whether a backward's tall tiles take less time than others.
  bool pays_tall() const;

  /// The lists of tiles for a kernel; what they lie in is kept until the call's end.
  device::FlexTiles tiles(const FlexTileSize& tile, bool by_key);

  /// What the Hopper forward takes besides. After tiles().
  device::FlexForwardHopperArguments hopper_forward(const FlexTileSize& tile) const;
  /// What the Hopper backward takes besides. After tiles().
  device::FlexBackwardHopperArguments hopper_backward(const FlexTileSize& tile, const at::Tensor& grad_out,
                                                      const at::Tensor& rows, const at::Tensor& grad_key,
                                                      const at::Tensor& grad_value) const;

  /// The kernel of a plan, compiled and loaded. `ahead`: called where it is compiled, with the architecture.
  const jit::Kernel& kernel(const FlexPlan& plan, const std::function<void(const std::string&)>& ahead = nullptr) const;
  /// `more`: the kernel's further arguments.
  void launch(const FlexPlan& plan, void* arguments, int64_t ctas, const std::vector<void*>& more,
              const std::function<void(const std::string&)>& ahead = nullptr);

 private:
  int section(int64_t heads, int64_t bytes) const;
  FlexTileLists lists_of(const FlexTileSize& tile, bool by_key) const;
  bool takes_direct_lists(const FlexTileLists& lists) const;
  void take_blocks();
  const uint8_t* states_of_blocks();

  const at::Tensor query_, key_, value_;
  const FlexScores& scores_;
  const at::cuda::CUDAStream stream_;
  FlexCase case_;
  std::vector<int64_t> score_words_, mask_words_;
  std::vector<at::Tensor> lists_, kept_;
  FlexBlockMap map_{};
  device::FlexTiles tiles_{};  // but for what depends on a kernel's tiles
  at::Tensor states_;
  int* next_ = nullptr;
};

}  // namespace fusegrad::cuda
