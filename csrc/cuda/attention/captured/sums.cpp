#include "cuda/attention/captured/sums.h"

#include <algorithm>
#include <bit>

#include "common/error.h"
#include "cuda/attention/captured/convert.h"
#include "cuda/attention/captured/fixed_point.h"
#include "score_mod/cache.h"

namespace fusegrad::cuda {
namespace {

using device::Scheme;

std::string of_buffer(const char* what, size_t i) { return std::string(what) + " of buffer " + std::to_string(i); }

}  // namespace

BufferSums::BufferSums(const Asked& asked, const KernelFacts& facts, int64_t ctas, Lifetime lifetime, CallPlan& plan)
    : shape_(plan.shape), sums_(asked.score_mod.buffers.size()) {
  if (asked.score_mod.text.empty()) return;
  derivative_ = score_mod::cached_derivative(asked.score_mod.text, facts.wants_grad);
  const size_t count = derivative_->contributions().size();
  Scratch& scratch = plan.scratch;
  const int64_t heads = shape_.query_heads(), pairs = heads * shape_.queries * shape_.keys;
  const bool all_partial = facts.kernel == FlexKernel::kGradBuffers;
  // How many partial sums the kernel stores of a contribution.
  const auto partial_sums = [&](size_t k) -> int64_t {
    if (all_partial) return ctas * facts.tile.rows * facts.tile.cols;
    if (facts.schemes[k] == Scheme::kSmallTable) return ctas * facts.tables[k];
    if (!device::sums_over_queries(facts.schemes[k])) return 0;
    return heads * facts.tile.share() * tiles_in(shape_.keys, facts.tile.cols) * facts.tile.cols;
  };
  partial_.resize(count);
  std::vector<bool> fixed(sums_.size(), facts.fixed_point), stored(sums_.size(), false);
  int64_t most_partial = 0;
  for (size_t k = 0; k < count; ++k) {
    const int64_t partial = facts.partial_sums ? partial_sums(k) : 0;
    if (partial == 0) continue;
    const std::string name = "partial sums " + std::to_string(k);
    partial_[k] = {all_partial ? scratch.add(name, 4 * partial, lifetime) : scratch.add_zeros(name, 4 * partial),
                   scratch.add("their elements " + std::to_string(k), 8 * partial, lifetime), partial};
    fixed[buffer_of(k)] = true;
    most_partial = std::max(most_partial, partial);
  }
  for (size_t k = 0; k < count; ++k) {
    if (!device::is_stored(facts.schemes[k])) continue;
    stored[buffer_of(k)] = true;
    if (facts.schemes[k] == Scheme::kStoredTiles) tiles_ = static_cast<int>(buffer_of(k));
  }
  for (size_t i = 0; i < sums_.size(); ++i) {
    Sum& sum = sums_[i];
    sum.wanted = facts.wants_grad[i];
    if (!sum.wanted) continue;
    sum.dtype = asked.gradient_dtypes[i];
    sum.elements = elements_of(asked.score_mod.buffers[i]);
    if (stored[i]) {
      sum.stored = true;
      sum.zeros = fixed[i] = false;
      // TMA stores tiles at multiples of 16 bytes.
      sum.in_gradient = tiles_ != static_cast<int>(i) ||
                        (asked.aligned_buffer_gradients[i] && shape_.keys * element_bytes(sum.dtype) % 16 == 0);
      if (!sum.in_gradient)
        sum.region = scratch.add(of_buffer("gradient", i), sum.elements * element_bytes(sum.dtype), lifetime);
      continue;
    }
    sum.fixed = fixed[i];
    sum.in_gradient = !sum.fixed && sum.dtype == score_mod::DType::kFloat32;
    if (!sum.in_gradient) sum.region = scratch.add_zeros(of_buffer("sum", i), sum.elements * (sum.fixed ? 8 : 4));
    if (sum.fixed && sum.dtype != score_mod::DType::kFloat32)
      sum.floats = scratch.add(of_buffer("rounded sum", i), 4 * sum.elements, lifetime);
  }
  if (std::find(fixed.begin(), fixed.end(), true) != fixed.end())
    largest_ = scratch.add_zeros("largest contributions", 4 * static_cast<int64_t>(sums_.size()));
  // So that no sum overflows.
  const int64_t each = facts.fixed_point ? pairs : most_partial;
  int64_t places = 0;
  for (size_t k = 0; k < count; ++k)
    places += derivative_->values(derivative_->open_axes(derivative_->contributions()[k]));
  fixed_bits_ = 62 - static_cast<int>(std::bit_width(static_cast<uint64_t>(places) * static_cast<uint64_t>(each)));
  if (facts.fixed_point) fixed_bits_ = std::min(fixed_bits_, device::kFlexFixedBits);
  FUSEGRAD_CHECK(ValueError, !facts.fixed_point || 2 * fixed_bits_ >= device::kFlexFixedBits,
                 "flex_attention: with deterministic=True B * H * M * N must be below 2^45, but got ", pairs);
}

void* BufferSums::data_of(size_t i, const Run<FlexBackwardCall>& r) const {
  return sums_[i].in_gradient ? r.call.buffers[i].data : r.at(sums_[i].region);
}

void BufferSums::prepare(const Run<FlexBackwardCall>& r) const {
  for (size_t i = 0; i < sums_.size(); ++i) {
    if (sums_[i].wanted && sums_[i].in_gradient && sums_[i].zeros)
      flex_fill_zeros(data_of(i, r), 4 * sums_[i].elements, r.stream());
  }
}

std::vector<device::FlexSums> BufferSums::arguments(const Run<FlexBackwardCall>& r) const {
  std::vector<device::FlexSums> result(contributions() + 1);
  auto* largest = r.at<float>(largest_);
  for (size_t k = 0; k < contributions(); ++k) {
    const Partial& partial = partial_[k];
    const size_t i = buffer_of(k);
    result[k] = partial.sums != kNoRegion
                    ? device::FlexSums{r.at(partial.sums), nullptr, r.at<long long>(partial.elements)}
                    : device::FlexSums{data_of(i, r), largest == nullptr ? nullptr : largest + i, nullptr};
  }
  return result;
}

TensorView BufferSums::tiles(const Run<FlexBackwardCall>& r) const {
  if (tiles_ < 0) return {};
  const auto i = static_cast<size_t>(tiles_);
  const FlexShape& n = shape_;
  const DType dtype = sums_[i].dtype == score_mod::DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
  return {data_of(i, r),
          dtype,
          {n.batches, n.heads, n.queries, n.keys},
          {n.heads * n.queries * n.keys, n.queries * n.keys, n.keys, 1}};
}

bool BufferSums::finishes() const {
  return std::any_of(sums_.begin(), sums_.end(), [](const Sum& sum) { return sum.wanted && !sum.in_gradient; });
}

std::vector<Region> BufferSums::regions() const {
  std::vector<Region> found;
  const auto add = [&](Region region) {
    if (region != kNoRegion) found.push_back(region);
  };
  for (const Partial& partial : partial_) {
    add(partial.sums);
    add(partial.elements);
  }
  for (const Sum& sum : sums_) {
    add(sum.region);
    add(sum.floats);
  }
  add(largest_);
  return found;
}

void BufferSums::finish(const Run<FlexBackwardCall>& r) const {
  add_partial_sums(r);
  for (size_t i = 0; i < sums_.size(); ++i) {
    const Sum& sum = sums_[i];
    if (!sum.wanted || sum.in_gradient) continue;
    void* gradient = r.call.buffers[i].data;
    if (sum.stored) {
      flex_copy_bytes(r.at(sum.region), gradient, sum.elements * element_bytes(sum.dtype), r.stream());
      continue;
    }
    const float* floats = r.at<float>(sum.region);
    if (sum.fixed) {
      float* rounded = sum.floats == kNoRegion ? static_cast<float*>(gradient) : r.at<float>(sum.floats);
      flex_fixed_to_float(r.at<int64_t>(sum.region), r.at<float>(largest_) + i, fixed_bits_, sum.elements, rounded,
                          r.stream());
      if (sum.floats == kNoRegion) continue;
      floats = rounded;
    }
    flex_convert(floats, gradient, sum.dtype, sum.elements, r.stream());
  }
}

void BufferSums::add_partial_sums(const Run<FlexBackwardCall>& r) const {
  for (const bool add : {false, true}) {
    for (size_t k = 0; k < contributions(); ++k) {
      const Partial& partial = partial_[k];
      if (partial.sums == kNoRegion) continue;
      const auto* sums = r.at<float>(partial.sums);
      float* largest = r.at<float>(largest_) + buffer_of(k);
      if (add) {
        flex_add_partial_sums(sums, r.at<int64_t>(partial.elements), partial.count, largest, fixed_bits_,
                              r.at<int64_t>(sums_[buffer_of(k)].region), r.stream());
      } else {
        flex_largest(sums, partial.count, largest, r.stream());
      }
    }
  }
}

}  // namespace fusegrad::cuda
