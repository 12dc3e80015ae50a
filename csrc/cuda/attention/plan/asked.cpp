#include "cuda/attention/plan/asked.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "jit/kernel_cache.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {
namespace {

using score_mod::Value;

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

AskedMod asked_of(const CapturedMod& mod) {
  AskedMod asked{std::string(mod.text), {}, score_mod::small_scalars(mod.scalars), {}};
  asked.buffers.reserve(mod.buffers.size());
  for (const auto& b : mod.buffers) {
    asked.buffers.push_back(
        {b.dtype, {b.sizes.begin(), b.sizes.end()}, {b.strides.begin(), b.strides.end()}, is_aligned(b.data)});
  }
  return asked;
}

// The scalars that a backward's plan depends on: numbers of batches in a group are integers.
std::vector<Value> integers_of(const CapturedMod& mod) {
  std::vector<Value> integers;
  for (const Value& x : mod.scalars) integers.push_back(x.type == score_mod::Type::kFloat ? Value{} : x);
  return integers;
}

// What all directions have in common.
Asked asked_of(FlexDirection direction, const FlexArguments& of) {
  Asked asked;
  asked.direction = direction;
  asked.dtype = of.query.dtype;
  const auto &q = of.query.sizes, &k = of.key.sizes;
  asked.shape = {q[0], q[1], q[2], k[0], k[1], k[2], q[3], of.value.sizes[3]};
  asked.score_mod = asked_of(of.score_mod);
  asked.mask_mod = asked_of(of.mask_mod);
  asked.mask_mod.scalars.assign(of.mask_mod.scalars.begin(), of.mask_mod.scalars.end());
  if (of.block_mask) {
    const auto& m = of.block_mask;
    asked.mask = BlockMaskShape{m.block_size,
                                tiles_in(q[2], m.block_size[0]),
                                tiles_in(k[2], m.block_size[1]),
                                m.partial.columns,
                                m.full.columns,
                                m.heads,
                                m.batches};
  }
  asked.positive_scale = of.scale > 0;
  asked.dropout = of.dropout;
  asked.full_float32 = of.full_float32;
  asked.forced = forced_changes();
  return asked;
}

void add_operand(Asked& asked, FlexOperand operand, const TensorView& t) {
  asked.there[operand] = t.data != nullptr;
  asked.aligned[operand] = has_aligned_rows(t);
}

void add_operands(Asked& asked, const FlexArguments& of) {
  add_operand(asked, kQuery, of.query);
  add_operand(asked, kKey, of.key);
  add_operand(asked, kValue, of.value);
}

}  // namespace

const Gpu& Gpu::current() {
  thread_local Gpu known;
  if (const uint64_t context = jit::Driver::get().current_context(); context != known.context) {
    known = {jit::current_architecture(), jit::current_multiprocessors(), context};
  }
  return known;
}

bool has_aligned_rows(const TensorView& t) {
  const int64_t vector = 16 / element_bytes(t.dtype);
  const auto fits = [&](size_t d) { return t.sizes[d] == 1 || t.strides[d] % vector == 0; };
  return is_aligned(t.data) && (t.strides[3] == 1 || t.sizes[3] == 1) && fits(0) && fits(1) && fits(2) &&
         t.sizes[3] % vector == 0;
}

int64_t elements_of(const AskedBuffer& buffer) {
  return std::accumulate(buffer.sizes.begin(), buffer.sizes.end(), int64_t{1}, std::multiplies<>());
}

Asked asked_of(const FlexForwardCall& call) {
  Asked asked = asked_of(FlexDirection::kForward, call.of);
  add_operands(asked, call.of);
  asked.max_scores = call.results.max_scores != nullptr;
  asked.out_low = call.results.out_low.data != nullptr;
  asked.batch_invariant = call.batch_invariant;
  return asked;
}

Asked asked_of(const FlexBackwardCall& call) {
  Asked asked = asked_of(FlexDirection::kBackward, call.of);
  add_operands(asked, call.of);
  add_operand(asked, kGradOut, call.grad_out);
  asked.score_mod.scalars = integers_of(call.of.score_mod);
  asked.needs_grad = {call.needs_query, call.needs_key, call.needs_value};
  asked.needs_grad.insert(asked.needs_grad.end(), call.needs_buffers.begin(), call.needs_buffers.end());
  asked.aligned_gradients = {has_aligned_rows(call.query), has_aligned_rows(call.key), has_aligned_rows(call.value)};
  for (const BufferGradient& b : call.buffers) {
    asked.gradient_dtypes.push_back(b.dtype);
    asked.aligned_buffer_gradients.push_back(is_aligned(b.data));
  }
  asked.deterministic = call.deterministic;
  asked.inplace = call.begin_writing != nullptr;
  asked.max_gradient = call.grad_max_scores != nullptr;
  return asked;
}

Asked backward_after(const Asked& forward, const FlexForwardCall& call) {
  Asked asked = forward;
  asked.direction = FlexDirection::kBackward;
  asked.max_scores = asked.out_low = asked.batch_invariant = false;
  asked.there[kGradOut] = asked.aligned[kGradOut] = true;
  asked.score_mod.scalars = integers_of(call.of.score_mod);
  asked.needs_grad = call.needs_grad;
  asked.aligned_gradients = {asked.aligned[kQuery], asked.aligned[kKey], asked.aligned[kValue]};
  for (const AskedBuffer& b : asked.score_mod.buffers) asked.gradient_dtypes.push_back(b.dtype);
  asked.aligned_buffer_gradients.assign(asked.score_mod.buffers.size(), true);
  asked.deterministic = call.deterministic;
  return asked;
}

Asked asked_of(const FlexTangentCall& call) {
  Asked asked = asked_of(FlexDirection::kTangents, call.of);
  add_operands(asked, call.of);
  add_operand(asked, kQueryTangent, call.query);
  add_operand(asked, kKeyTangent, call.key);
  add_operand(asked, kValueTangent, call.value);
  asked.out_low = call.results.out_low.data != nullptr;
  asked.buffer_tangents = call.has_tangent;
  asked.small_tangent_buffers = score_mod::small_buffers(call.buffers);
  return asked;
}

Asked asked_of(const FlexPairTangentsCall& call) {
  Asked asked = asked_of(FlexDirection::kPairTangents, call.of);
  add_operands(asked, call.of);
  add_operand(asked, kGradOut, call.grad_out);
  add_operand(asked, kQueryTangent, call.query);
  add_operand(asked, kKeyTangent, call.key);
  add_operand(asked, kValueTangent, call.value);
  add_operand(asked, kGradOutTangent, call.grad_out_tangent);
  asked.head_count = call.head_count;
  asked.row_count = call.row_count;
  return asked;
}

size_t AskedHash::operator()(const Asked& asked) const {
  size_t hash = std::hash<std::string>()(asked.score_mod.text);
  const auto add = [&](uint64_t x) { hash = (hash ^ x) * 0x9E3779B97F4A7C15U + (hash >> 29); };
  add(std::hash<std::string>()(asked.mask_mod.text));
  const FlexShape& n = asked.shape;
  for (const int64_t x : {n.batches, n.heads, n.queries, n.key_batches, n.key_heads, n.keys, n.head_size, n.value_size})
    add(static_cast<uint64_t>(x));
  add(static_cast<uint64_t>(asked.direction) << 8 | static_cast<uint64_t>(asked.dtype));
  for (const AskedBuffer& b : asked.score_mod.buffers) {
    for (const int64_t size : b.sizes) add(static_cast<uint64_t>(size));
  }
  return hash;
}

}  // namespace fusegrad::cuda
