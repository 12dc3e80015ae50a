#include "attention/cpu/buffer_sums.h"

#include <algorithm>

#include "attention/cpu/attention_kernels.h"
#include "score_mod/cache.h"
#include "score_mod/index_analysis.h"

namespace fusegrad::cpu {
namespace {

using score_mod::VariableSet;

// Elements of a small buffer.
constexpr int64_t kSmall = int64_t{1} << 16;
// Sums for every lane of a large buffer take at most this much, or four times the buffer.
constexpr int64_t kSumBytes = int64_t{256} << 20;
// Float32 would be rounded too often where so many values are added to each element.
constexpr double kCrowded = 256;
constexpr int64_t kBlock = 512;  // elements that are rounded at a time

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

// How many values are added to an element of each buffer, on average; none of those that each pair has a place for.
std::vector<double> additions(const score_mod::Graph& derivative, const score_mod::Lengths& lengths,
                              const std::vector<BufferGradient>& gradients) {
  const auto dependence = score_mod::dependences(derivative);
  const double pairs = static_cast<double>(lengths.b * lengths.h) * static_cast<double>(lengths.q * lengths.kv);
  std::vector<double> result(gradients.size(), 0);
  for (const auto& c : derivative.contributions()) {
    VariableSet on = 0;
    bool diagonal = true;
    for (const auto index : c.indices) {
      on |= dependence[index].on();
      diagonal = diagonal && dependence[index].diagonal();
    }
    if ((on & score_mod::kPairSet) == score_mod::kPairSet && !diagonal) continue;
    const auto buffer = static_cast<size_t>(c.buffer);
    const auto count = static_cast<double>(std::max<int64_t>(gradients[buffer].count, 1));
    result[buffer] += pairs * static_cast<double>(derivative.values(derivative.open_axes(c))) / count;
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

// Zeros, first touched by several threads.
template <class T>
void fill_zero(const Host& host, T* data, int64_t count) {
  ask_for_huge_pages(data, static_cast<size_t>(count) * sizeof(T));
  parallel_for(host, count, 1 << 15, [&](int64_t begin, int64_t end) { std::fill(data + begin, data + end, T(0)); });
}

// gradient[at + i] = values[i], rounded once.
template <class T>
void store(const BufferGradient& gradient, int64_t at, const T* values, int64_t count) {
  const auto put = [&](auto zero) {
    using Out = decltype(zero);
    std::transform(values, values + count, static_cast<Out*>(gradient.data) + at,
                   [](T value) { return static_cast<Out>(value); });
  };
  if (gradient.dtype == score_mod::DType::kFloat64) return put(double{});
  if (gradient.dtype == score_mod::DType::kFloat32) return put(float{});
  float rounded[kBlock];
  std::transform(values, values + count, rounded, [](T value) { return static_cast<float>(value); });
  const auto dtype = gradient.dtype == score_mod::DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  const Matrix out{static_cast<uint16_t*>(gradient.data) + at, dtype, count, 1};
  attention_kernels<float>().unpack(out, rounded, count, 1, count, nullptr, 1.f);
}

}  // namespace

template <class T>
BufferSums<T>::BufferSums(const Host& host, const FlexBackwardCall& call, const score_mod::Lengths& lengths,
                          int64_t key_batches, int64_t key_heads, int64_t key_blocks)
    : host_(host), sums_(call.needs_buffers.size()) {
  const auto& wanted = call.needs_buffers;
  if (std::none_of(wanted.begin(), wanted.end(), [](bool w) { return w; })) return;
  const auto derivative = score_mod::cached_derivative(call.of.score_mod.text, wanted);
  const auto agreed = agreeing(*derivative, lengths);
  const auto added = additions(*derivative, lengths, call.buffers);
  const auto large = [&](size_t i) { return sums_[i].wanted && !sums_[i].small; };
  for (size_t i = 0; i < sums_.size(); ++i) {
    sums_[i].wanted = wanted[i];
    sums_[i].gradient = call.buffers[i];
    sums_[i].small = call.buffers[i].count <= kSmall;
    sums_[i].in_double = sums_[i].small || (std::is_same_v<T, float> && added[i] >= kCrowded);
  }
  const auto all_allow = [&](LaneCut cut) {
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (large(i) && !allows(agreed[i], cut)) return false;
    }
    return true;
  };
  // How many lanes may have sums of their own of a buffer.
  const auto lanes_of = [&](size_t i) {
    const int64_t bytes = sums_[i].in_double ? int64_t{sizeof(double)} : int64_t{sizeof(T)};
    return std::max<int64_t>(kSumBytes / (call.buffers[i].count * bytes), 4);
  };
  // The finest cut that all large buffers allow, of those that give every thread some work.
  const int64_t threads = cpu::threads(host);
  int64_t own_lanes = threads;
  for (size_t i = 0; i < sums_.size(); ++i) {
    if (large(i)) own_lanes = std::min(own_lanes, lanes_of(i));
  }
  if (!all_allow(LaneCut::kAnywhere)) {
    if (key_batches * key_heads >= threads && all_allow(LaneCut::kHeads)) {
      cut_ = LaneCut::kHeads;
    } else if (key_batches >= threads && all_allow(LaneCut::kBatches)) {
      cut_ = LaneCut::kBatches;
    } else if (key_blocks >= own_lanes && all_allow(LaneCut::kKeys)) {
      cut_ = LaneCut::kKeys;
    }
  }
  for (size_t i = 0; i < sums_.size(); ++i) {
    sums_[i].shared = large(i) && allows(agreed[i], cut_);
    if (large(i) && !sums_[i].shared) most_lanes_ = std::min(most_lanes_, lanes_of(i));
  }
}

template <class T>
void BufferSums<T>::prepare(size_t lanes) {
  constexpr auto kAcc = std::is_same_v<T, double> ? score_mod::DType::kFloat64 : score_mod::DType::kFloat32;
  for (auto& s : sums_) {
    if (!s.wanted) continue;
    s.lanes = s.shared ? 1 : static_cast<int64_t>(lanes);
    const int64_t count = s.lanes * s.gradient.count;
    if (s.in_double) {
      s.wide = Scratch<double>(count);
      fill_zero(host_, s.wide.data(), count);
      continue;
    }
    const bool in_place = s.shared && s.gradient.dtype == kAcc;
    if (!in_place) s.own = Scratch<T>(count);
    s.sums = in_place ? static_cast<T*>(s.gradient.data) : s.own.data();
    fill_zero(host_, s.sums, count);
  }
}

template <class T>
std::vector<score_mod::GradientSink<T>> BufferSums<T>::lane_sinks(size_t lane) const {
  std::vector<score_mod::GradientSink<T>> sinks;
  for (const auto& s : sums_) {
    score_mod::GradientSink<T> sink;
    if (s.wanted) {
      const int64_t at = s.shared ? 0 : static_cast<int64_t>(lane) * s.gradient.count;
      if (s.in_double) {
        sink.wide_sum = s.wide.data() + at;
      } else {
        sink.sum = s.sums + at;
      }
    }
    sinks.push_back(sink);
  }
  return sinks;
}

template <class T>
template <class Acc>
void BufferSums<T>::add_lanes(const Sum& sum, const Acc* sums) const {
  parallel_for(host_, sum.gradient.count, 1 << 13, [&](int64_t first, int64_t last) {
    Acc total[kBlock];
    for (int64_t begin = first; begin < last; begin += kBlock) {
      const int64_t count = std::min(kBlock, last - begin);
      std::copy_n(sums + begin, count, total);
      for (int64_t lane = 1; lane < sum.lanes; ++lane) {
        const Acc* one = sums + lane * sum.gradient.count + begin;
        for (int64_t i = 0; i < count; ++i) total[i] += one[i];
      }
      store(sum.gradient, begin, total, count);
    }
  });
}

template <class T>
void BufferSums<T>::finish() {
  for (auto& s : sums_) {
    if (!s.wanted || s.sums == s.gradient.data) continue;
    if (s.in_double) {
      add_lanes(s, s.wide.data());
    } else {
      add_lanes(s, s.sums);
    }
    s.wide = {};
    s.own = {};
  }
}

template class BufferSums<float>;
template class BufferSums<double>;

}  // namespace fusegrad::cpu
