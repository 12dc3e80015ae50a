#include "pytorch/attention/cuda/buffer_sums.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "cuda/attention/captured/fixed_point.h"
#include "pytorch/attention/cuda/aligned_rows.h"
#include "pytorch/attention/cuda/call.h"
#include "pytorch/ops/check.h"
#include "score_mod/cache.h"

namespace fusegrad::cuda {

using at::Tensor;

FlexBufferSums::FlexBufferSums(const FlexScores& scores, const KernelFacts& facts, const Tensor& query,
                               const Tensor& key, const std::vector<Tensor>& grads, int64_t ctas)
    : derivative_(scores.score_mod.text.empty()
                      ? nullptr
                      : score_mod::cached_derivative(scores.score_mod.text, facts.wants_grad)) {
  const auto floats = query.options().dtype(at::kFloat), integers = floats.dtype(at::kLong);
  const auto& buffers = scores.score_mod.buffers;
  const int64_t heads = query.size(0) * query.size(1), pairs = heads * query.size(2) * key.size(2);
  const bool all_partial = facts.kernel == FlexKernel::kGradBuffers;
  // How many partial sums the kernel stores of a contribution.
  const auto partial_sums = [&](size_t k) -> int64_t {
    if (all_partial) return ctas * facts.tile.rows * facts.tile.cols;
    if (facts.schemes[k] == 'F') return ctas * facts.tables[k];
    if (facts.schemes[k] > 'B') return 0;
    return heads * facts.tile.share * tiles_in(key.size(2), facts.tile.cols) * facts.tile.cols;
  };
  std::vector<bool> fixed(buffers.size(), facts.fixed_point);
  int64_t most_partial = 0;
  for (size_t k = 0; k < contributions(); ++k) {
    partial_.emplace_back();
    const int64_t partial = facts.partial_sums ? partial_sums(k) : 0;
    if (partial == 0) continue;
    partial_[k] = {all_partial ? at::empty({partial}, floats) : at::zeros({partial}, floats),
                   at::empty({partial}, integers)};
    fixed[buffer_of(k)] = true;
    most_partial = std::max(most_partial, partial);
  }
  std::vector<bool> stored(buffers.size(), false), in_tiles = stored;
  for (size_t k = 0; k < contributions(); ++k) {
    if (facts.schemes[k] == 'T') in_tiles[buffer_of(k)] = true;
    if (facts.schemes[k] == 'S' || facts.schemes[k] == 'T') stored[buffer_of(k)] = true;
  }
  // A gradient of pairs without its dimensions of size 1.
  const auto by_pairs = [&](const Tensor& t) {
    return t.view({query.size(0), query.size(1), query.size(2), key.size(2)});
  };
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (stored[i]) {
      const bool there = grads[i].is_contiguous() && (!in_tiles[i] || has_aligned_rows(by_pairs(grads[i])));
      sums_.push_back(there ? grads[i] : at::empty(grads[i].sizes(), grads[i].options()));
      if (in_tiles[i]) tiles_ = by_pairs(sums_.back());
      fixed[i] = false;
      continue;
    }
    const bool there =
        facts.wants_grad[i] && !fixed[i] && grads[i].scalar_type() == at::kFloat && grads[i].is_contiguous();
    sums_.push_back(!facts.wants_grad[i] ? Tensor()
                    : there              ? grads[i].view({grads[i].numel()}).zero_()
                                         : at::zeros({buffers[i].numel()}, fixed[i] ? integers : floats));
  }
  if (std::find(fixed.begin(), fixed.end(), true) != fixed.end())
    largest_ = at::zeros({static_cast<int64_t>(buffers.size())}, floats);
  // So that no sum overflows.
  const int64_t each = facts.fixed_point ? pairs : most_partial;
  int64_t places = 0;
  for (size_t k = 0; k < contributions(); ++k)
    places += derivative_->values(derivative_->open_axes(derivative_->contributions()[k]));
  const auto count = static_cast<uint64_t>(places) * static_cast<uint64_t>(each);
  fixed_bits_ = 62 - static_cast<int>(std::bit_width(count));
  if (facts.fixed_point) fixed_bits_ = std::min(fixed_bits_, device::kFlexFixedBits);
  TORCH_CHECK_VALUE(!facts.fixed_point || 2 * fixed_bits_ >= device::kFlexFixedBits,
                    "flex_attention: with deterministic=True B * H * M * N must be below 2^45, but got ", pairs);
}

std::vector<device::FlexSums> FlexBufferSums::arguments() const {
  std::vector<device::FlexSums> result(contributions() + 1);
  for (size_t k = 0; k < contributions(); ++k) {
    const auto& [sums, elements] = partial_[k];
    if (sums.defined()) {
      result[k] = {sums.mutable_data_ptr(), nullptr,
                   reinterpret_cast<long long*>(elements.mutable_data_ptr<int64_t>())};
    } else {
      result[k] = {sums_[buffer_of(k)].mutable_data_ptr(), largest_.defined() ? largest() + buffer_of(k) : nullptr,
                   nullptr};
    }
  }
  return result;
}

void FlexBufferSums::finish(const std::vector<Tensor>& grads, void* stream) const {
  add_partial_sums(stream);
  for (size_t i = 0; i < sums_.size(); ++i) {
    Tensor sum = sums_[i];
    if (!sum.defined()) continue;
    if (sum.scalar_type() == at::kLong) {
      const Tensor floats = at::empty(sum.sizes(), sum.options().dtype(at::kFloat));
      flex_fixed_to_float(sum.const_data_ptr<int64_t>(), largest() + i, fixed_bits_, sum.numel(),
                          floats.mutable_data_ptr<float>(), stream);
      sum = floats;
    }
    if (!sum.is_alias_of(grads[i])) grads[i].copy_(sum.view(grads[i].sizes()));
  }
}

void FlexBufferSums::add_partial_sums(void* stream) const {
  for (const bool add : {false, true}) {
    for (size_t k = 0; k < partial_.size(); ++k) {
      const auto& [sums, elements] = partial_[k];
      if (!sums.defined()) continue;
      float* largest = this->largest() + buffer_of(k);
      if (add) {
        flex_add_partial_sums(sums.const_data_ptr<float>(), elements.const_data_ptr<int64_t>(), sums.numel(), largest,
                              fixed_bits_, sums_[buffer_of(k)].mutable_data_ptr<int64_t>(), stream);
      } else {
        flex_largest(sums.const_data_ptr<float>(), sums.numel(), largest, stream);
      }
    }
  }
}

}  // namespace fusegrad::cuda
