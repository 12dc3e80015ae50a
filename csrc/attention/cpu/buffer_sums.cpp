#include "attention/cpu/buffer_sums.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "pytorch/rows/job.h"
#include "score_mod/cache.h"
#include "score_mod/index_analysis.h"

namespace fusegrad::cpu {
namespace {

using score_mod::VariableSet;

// Elements of a small buffer.
constexpr int64_t kSmall = int64_t{1} << 16;
// Sums for every lane of a large buffer take at most this much, or four times the buffer.
constexpr int64_t kSumBytes = int64_t{256} << 20;

// For each buffer the variables that any two pairs which meet in an element must agree in.
std::vector<VariableSet> agreeing(const score_mod::Graph& derivative, const score_mod::Lengths& lengths) {
  const auto dependence = score_mod::dependences(derivative);
  const auto interval = score_mod::intervals(derivative, lengths);
  std::vector<VariableSet> result(derivative.buffers().size(), 0);
  std::vector<int> reads(result.size(), 0);
  VariableSet single = 0;
  if (lengths.b == 1) single |= score_mod::set_of(score_mod::kVarB);
  if (lengths.h == 1) single |= score_mod::set_of(score_mod::kVarH);
  for (const auto& c : derivative.contributions()) {
    const auto buffer = static_cast<size_t>(c.buffer);
    // Two reads may meet anywhere.
    const bool only = reads[buffer]++ == 0;
    result[buffer] = only ? score_mod::determined(c.indices, dependence, interval) | single : VariableSet{0};
  }
  // A buffer without a contribution cannot be met in at all.
  for (size_t i = 0; i < result.size(); ++i) {
    if (reads[i] == 0) result[i] = static_cast<VariableSet>(~VariableSet{0});
  }
  return result;
}

VariableSet needed_for(LaneCut cut) {
  using namespace score_mod;  // NOLINT(google-build-using-namespace)
  constexpr VariableSet kHead = set_of(kVarB) | set_of(kVarH);
  switch (cut) {
    case LaneCut::kAnywhere:
      return kHead | set_of(kVarKv);
    case LaneCut::kHeads:
      return kHead;
    case LaneCut::kBatches:
      return set_of(kVarB);
    default:
      return set_of(kVarKv);
  }
}

bool allows(VariableSet agreed, LaneCut cut) { return (agreed & needed_for(cut)) == needed_for(cut); }

}  // namespace

template <class T>
BufferSums<T>::BufferSums(const ScoreMod& score_mod, const std::vector<bool>& wanted, const score_mod::Lengths& lengths,
                          int64_t key_batches, int64_t key_heads, const std::vector<at::Tensor>& gradients)
    : sums_(wanted.size()) {
  if (std::none_of(wanted.begin(), wanted.end(), [](bool w) { return w; })) return;
  const auto agreed = agreeing(*score_mod::cached_derivative(score_mod.text, wanted), lengths);
  const auto large = [&](size_t i) { return sums_[i].wanted && !sums_[i].small; };
  for (size_t i = 0; i < sums_.size(); ++i) {
    sums_[i].wanted = wanted[i];
    sums_[i].gradient = gradients[i];
    sums_[i].small = gradients[i].numel() <= kSmall;
  }
  const auto all_allow = [&](LaneCut cut) {
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (large(i) && !allows(agreed[i], cut)) return false;
    }
    return true;
  };
  // The finest cut that all large buffers allow, of those that give every thread some work.
  const int64_t threads = at::get_num_threads();
  if (!all_allow(LaneCut::kAnywhere)) {
    if (key_batches * key_heads >= threads && all_allow(LaneCut::kHeads)) {
      cut_ = LaneCut::kHeads;
    } else if (key_batches >= threads && all_allow(LaneCut::kBatches)) {
      cut_ = LaneCut::kBatches;
    } else if (all_allow(LaneCut::kKeys)) {
      cut_ = LaneCut::kKeys;
    }
  }
  for (size_t i = 0; i < sums_.size(); ++i) {
    sums_[i].shared = large(i) && allows(agreed[i], cut_);
    if (!large(i) || sums_[i].shared) continue;
    const int64_t bytes = gradients[i].numel() * int64_t{sizeof(T)};
    most_lanes_ = std::min(most_lanes_, std::max<int64_t>(kSumBytes / bytes, 4));
  }
}

template <class T>
void BufferSums<T>::prepare(size_t lanes) {
  for (auto& s : sums_) {
    if (!s.wanted) continue;
    const auto acc = s.small || std::is_same_v<T, double> ? at::kDouble : at::kFloat;
    if (s.shared && s.gradient.scalar_type() == acc) {
      s.sums = s.gradient.view({1, -1});
    } else {
      const int64_t rows = s.shared ? 1 : static_cast<int64_t>(lanes);
      s.sums = at::empty({rows, s.gradient.numel()}, s.gradient.options().dtype(acc));
    }
    ask_for_huge_pages(s.sums);
    s.sums.zero_();
  }
}

template <class T>
std::vector<score_mod::GradientSink<T>> BufferSums<T>::lane_sinks(size_t lane) const {
  std::vector<score_mod::GradientSink<T>> sinks;
  for (const auto& s : sums_) {
    score_mod::GradientSink<T> sink;
    if (s.wanted) {
      const int64_t at = s.shared ? 0 : static_cast<int64_t>(lane) * s.gradient.numel();
      if (s.small) {
        sink.wide_sum = s.sums.template mutable_data_ptr<double>() + at;
      } else {
        sink.sum = s.sums.template mutable_data_ptr<T>() + at;
      }
    }
    sinks.push_back(sink);
  }
  return sinks;
}

template <class T>
void BufferSums<T>::finish() {
  for (auto& s : sums_) {
    if (!s.wanted || s.sums.is_alias_of(s.gradient)) continue;
    ask_for_huge_pages(s.gradient);
    const at::Tensor total = s.sums.size(0) == 1 ? s.sums[0] : s.sums.sum(0);
    s.gradient.copy_(total.view(s.gradient.sizes()));
    s.sums.reset();
  }
}

template class BufferSums<float>;
template class BufferSums<double>;

}  // namespace fusegrad::cpu
