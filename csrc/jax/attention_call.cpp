#include "jax/attention_call.h"

#include <bit>
#include <cstring>
#include <functional>
#include <numeric>

#include "common/error.h"
#include "score_mod/cache.h"

namespace fusegrad::jax {
namespace {

DType tensor_type(score_mod::DType dtype) {
  switch (dtype) {
    case score_mod::DType::kFloat64:
      return DType::kFloat64;
    case score_mod::DType::kFloat32:
      return DType::kFloat32;
    case score_mod::DType::kBFloat16:
      return DType::kBFloat16;
    case score_mod::DType::kFloat16:
      return DType::kFloat16;
    default:
      fail<ValueError>("flex_attention: query, key and value must be floating");
  }
}

int64_t count_of(const FlexArray& array) {
  return std::accumulate(array.sizes.begin(), array.sizes.end(), int64_t{1}, std::multiplies<>());
}

score_mod::Value value_of(score_mod::Type type, int64_t bits) {
  if (type == score_mod::Type::kFloat) return {type, std::bit_cast<double>(bits), 0};
  return {type, 0, bits};
}

}  // namespace

const FlexArray& FlexArrays::next() {
  FUSEGRAD_CHECK(ValueError, !rest_.empty(), "flex_attention: a custom call must get more arrays than it did");
  const FlexArray& first = rest_.front();
  rest_ = rest_.subspan(1);
  return first;
}

FlexCallOf::FlexCallOf(const FlexAttributes& attributes, FlexArrays& arguments, bool cpu) : attributes_(attributes) {
  of_.query = view(arguments.next());
  of_.key = view(arguments.next());
  of_.value = view(arguments.next());
  of_.score_mod = mod(attributes.score_mod, arguments, score_buffers_, score_scalars_);
  of_.mask_mod = mod(attributes.mask_mod, arguments, mask_buffers_, mask_scalars_);
  of_.scale = attributes.scale;
  FUSEGRAD_CHECK(ValueError, attributes.wanted.size() == 3 + score_buffers_.size(),
                 "flex_attention: a custom call must say what is wanted of each tensor");
  if (attributes.lists > 0) {
    const auto list = [&]() -> BlockListView {
      const FlexArray &count = arguments.next(), &index = arguments.next();
      BlockLists& lists = of_.block_mask;
      lists.batches = index.sizes[0];
      lists.heads = index.sizes[1];
      lists.rows = index.sizes[2];
      return {static_cast<const int32_t*>(count.data), static_cast<const int32_t*>(index.data), index.sizes[3]};
    };
    of_.block_mask.partial = list();
    if (attributes.lists > 2) of_.block_mask.full = list();
    of_.block_mask.block_size = {attributes.block_q, attributes.block_kv};
  }
  if (attributes.dropout_p > 0) {
    of_.dropout = true;
    of_.dropout_p = attributes.dropout_p;
    const FlexArray& seed = arguments.next();
    if (cpu) {
      std::memcpy(&of_.dropout_seed, seed.data, sizeof(of_.dropout_seed));
    } else {
      of_.dropout_seed_data = static_cast<const int64_t*>(seed.data);
    }
  }
}

TensorView FlexCallOf::view(const FlexArray& array, DType dtype) const {
  FUSEGRAD_CHECK(ValueError, array.sizes.size() == 4, "flex_attention: tensors must have four dimensions");
  const auto& n = array.sizes;
  TensorView view{array.data, dtype, {n[0], n[1], n[2], n[3]}, {}};
  if (attributes_.bshd) {
    view.sizes = {n[0], n[2], n[1], n[3]};
    view.strides = {n[1] * n[2] * n[3], n[3], n[2] * n[3], 1};
  } else {
    view.strides = {n[1] * n[2] * n[3], n[2] * n[3], n[3], 1};
  }
  return view;
}

TensorView FlexCallOf::view(const FlexArray& array) const { return view(array, tensor_type(array.dtype)); }

TensorView FlexCallOf::low_view(const FlexArray& array) const {
  FUSEGRAD_CHECK(ValueError, array.dtype == score_mod::DType::kInt8, "flex_attention: out_low must be int8");
  return view(array, DType::kInt8);
}

bool FlexCallOf::rounds() const { return of_.query.dtype == DType::kBFloat16 || of_.query.dtype == DType::kFloat16; }

score_mod::Buffer FlexCallOf::buffer(const FlexArray& array) {
  std::vector<int64_t>& strides = strides_.emplace_back(array.sizes.size(), 1);
  for (size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * array.sizes[d];
  return {array.data, array.dtype, array.sizes, strides};
}

CapturedMod FlexCallOf::mod(std::string_view text, FlexArrays& arguments, std::vector<score_mod::Buffer>& buffers,
                            std::vector<score_mod::Value>& scalars) {
  if (text.empty()) return {};
  const auto graph = score_mod::cached_graph(text);
  for (size_t i = 0; i < graph->buffers().size(); ++i) buffers.push_back(buffer(arguments.next()));
  for (const score_mod::Type type : graph->scalars()) {
    FUSEGRAD_CHECK(ValueError, next_scalar_ < attributes_.scalars.size(),
                   "flex_attention: a custom call must get the numbers that its texts declare");
    scalars.push_back(value_of(type, attributes_.scalars[next_scalar_++]));
  }
  score_mod::check_captured(*graph, buffers, scalars);
  return {text, buffers, scalars};
}

FlexForwardOf::FlexForwardOf(const FlexAttributes& attributes, FlexArrays& arguments, FlexArrays& results, bool cpu)
    : FlexCallOf(attributes, arguments, cpu) {
  FlexResults& r = call.results;
  r.out = view(results.next());
  r.lse = results.next().data;
  if (attributes.max_scores) {
    r.max_scores = results.next().data;
    r.max_ties = results.next().data;
  }
  if (attributes.low) {
    if (rounds()) r.out_low = low_view(results.next());
    r.lse_low = results.next().data;
  }
  call.of = of_;
}

FlexBackwardOf::FlexBackwardOf(const FlexAttributes& attributes, FlexArrays& arguments, FlexArrays& results, bool cpu)
    : FlexCallOf(attributes, arguments, cpu) {
  FlexResults& saved = call.saved;
  saved.out = view(arguments.next());
  saved.lse = arguments.next().data;
  if (rounds()) saved.out_low = low_view(arguments.next());
  saved.lse_low = arguments.next().data;
  if (attributes.max_scores) {
    saved.max_scores = arguments.next().data;
    saved.max_ties = arguments.next().data;
  }
  if (attributes.grad_out) call.grad_out = view(arguments.next());
  if (attributes.grad_lse) call.grad_lse = arguments.next().data;
  if (attributes.max_scores) call.grad_max_scores = arguments.next().data;
  const auto gradient = [&](size_t i, bool& wanted, TensorView& to) {
    wanted = attributes.wanted[i] != 0;
    if (wanted) to = view(results.next());
  };
  gradient(0, call.needs_query, call.query);
  gradient(1, call.needs_key, call.key);
  gradient(2, call.needs_value, call.value);
  for (size_t i = 0; i < score_buffers_.size(); ++i) {
    const bool wanted = wanted_buffers()[i] != 0;
    call.needs_buffers.push_back(wanted);
    if (wanted) {
      const FlexArray& to = results.next();
      call.buffers.push_back({to.data, to.dtype, count_of(to)});
    } else {
      call.buffers.push_back({nullptr, score_buffers_[i].dtype, 0});
    }
  }
  call.deterministic = attributes.deterministic;
  call.of = of_;
}

FlexTangentsOf::FlexTangentsOf(const FlexAttributes& attributes, FlexArrays& arguments, FlexArrays& results, bool cpu)
    : FlexCallOf(attributes, arguments, cpu) {
  TensorView* const tangents[] = {&call.query, &call.key, &call.value};
  for (size_t i = 0; i < 3; ++i) {
    if (attributes.wanted[i] != 0) *tangents[i] = view(arguments.next());
  }
  call.has_tangent.resize(score_buffers_.size());
  const size_t buffers = score_buffers_.size();
  for (size_t i = 0; i < buffers; ++i) {
    call.has_tangent[i] = wanted_buffers()[i] != 0;
    if (call.has_tangent[i]) score_buffers_.push_back(buffer(arguments.next()));
  }
  of_.score_mod.buffers = std::span(score_buffers_).first(buffers);
  call.buffers = score_buffers_;
  call.results.out = view(results.next());
  call.results.lse = results.next().data;
  call.out = view(results.next());
  call.lse = results.next().data;
  call.of = of_;
}

}  // namespace fusegrad::jax
