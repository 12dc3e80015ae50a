#include "fusegrad/flex_attention.h"

#include <ATen/Context.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "attention/flex_attention.h"
#include "pytorch/attention/flex_attention.h"
#include "pytorch/autograd/autograd.h"
#include "pytorch/autograd/inplace.h"
#include "pytorch/ops/arguments.h"
#include "pytorch/ops/check.h"
#include "pytorch/ops/faults.h"
#include "pytorch/score_mod/tensors.h"
#include "score_mod/cache.h"

namespace fusegrad {
namespace {

using at::Tensor;
using at::TensorList;
using Floats = at::ArrayRef<double>;
using Ints = at::IntArrayRef;
using FlexTuple = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kOp = "flex_attention";

// What cannot be cast is for check_heads to refuse, 8-bit floats among it: they have a scale.
Tensor as_autocast_wants(const Tensor& t) {
  if (!t.defined() || !t.is_floating_point() || t.scalar_type() == at::kDouble) return t;
  if (c10::isFloat8Type(t.scalar_type())) return t;
  const auto dtype = autocast_dtype(t);
  return dtype.has_value() ? t.to(*dtype) : t;
}

void check_heads(const Tensor& query, const Tensor& key, const Tensor& value, bool enable_gqa) {
  check_floating(kOp, "query", query);
  check_dense(kOp, "key", key);
  check_dense(kOp, "value", value);
  const auto check_dim = [](const char* name, const char* shape, const Tensor& t) {
    FUSEGRAD_CHECK_VALUE(t.dim() == 4, kOp, name, " must have shape ", shape, ", but got ", t.sym_sizes());
  };
  check_dim("query", "[B, H, M, D]", query);
  check_dim("key", "[B, Hkv, N, D]", key);
  check_dim("value", "[B, Hkv, N, E]", value);
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"key", key}, {"value", value}}) {
    FUSEGRAD_CHECK_VALUE(t.device() == query.device(), kOp, name, " must be on the query's device ", query.device(),
                         ", but got ", t.device());
    FUSEGRAD_CHECK_TYPE(t.scalar_type() == query.scalar_type(), kOp, name, " must have the query's dtype ",
                        query.scalar_type(), ", but got ", t.scalar_type(), ": take ", name, ".to(query.dtype)",
                        c10::isFloat8Type(t.scalar_type()) ? ", times the scale that it was quantized with" : "");
  }
  FUSEGRAD_CHECK_VALUE(query.sym_size(3) >= 1, kOp, "query must have a head size D of at least 1, but got ",
                       query.sym_sizes());
  FUSEGRAD_CHECK_VALUE(key.sym_size(3) == query.sym_size(3), kOp, "key must have the query's head size ",
                       query.sym_size(3), ", but got ", key.sym_size(3));
  FUSEGRAD_CHECK_VALUE(key.sym_sizes().slice(0, 3) == value.sym_sizes().slice(0, 3), kOp,
                       "value must have the key's batch, heads and length ", key.sym_sizes().slice(0, 3), ", but got ",
                       value.sym_sizes().slice(0, 3));
  if (query.is_cuda()) {
    for (const auto& [name, t, most] :
         {std::tuple<const char*, const Tensor&, int64_t>{"query", query, kMostHeadOnCuda},
          {"value", value, kMostValueOnCuda}}) {
      TORCH_CHECK_NOT_IMPLEMENTED(t.sym_size(3) <= most, kOp, ": ", name, " must have a head size of at most ", most,
                                  " on CUDA, but got ", t.sym_size(3));
    }
  }
  FUSEGRAD_CHECK_VALUE(key.sym_size(0) == query.sym_size(0) || key.sym_size(0) == 1, kOp,
                       "key must have the query's batch size ", query.sym_size(0), " or 1, but got ", key.sym_size(0));
  const auto heads = query.sym_size(1), key_heads = key.sym_size(1);
  if (enable_gqa) {
    FUSEGRAD_CHECK_VALUE(key_heads > 0 && heads % key_heads == 0, kOp,
                         "query must have a multiple of the key's heads with enable_gqa, but got ", heads, " and ",
                         key_heads);
  } else {
    FUSEGRAD_CHECK_VALUE(key_heads == heads, kOp, "key must have the query's heads ", heads,
                         " unless enable_gqa is set, but got ", key_heads);
  }
}

// The text, and that what is captured is what it declares.
ScoreMod check_mod(const char* name, score_mod::Kind kind, std::string_view text, TensorList buffers, Floats floats,
                   Ints ints, const Tensor& query) {
  if (text.empty()) {
    FUSEGRAD_CHECK_VALUE(buffers.empty() && floats.empty() && ints.empty(), kOp, name,
                         " must have a text where it captures something, but got an empty one");
    return {};
  }
  std::shared_ptr<const score_mod::Graph> graph;
  try {
    graph = score_mod::cached_graph(text);
  } catch (const score_mod::GraphError& error) {
    FUSEGRAD_CHECK_VALUE(false, kOp, name, " must be a text of the score_mod language, but got ", error.what());
  }
  FUSEGRAD_CHECK_VALUE(graph->kind() == kind, kOp, name, " must be a ", score_mod::kind_name(kind), ", but got a ",
                       score_mod::kind_name(graph->kind()));
  const auto& declared = graph->buffers();
  FUSEGRAD_CHECK_VALUE(buffers.size() == declared.size(), kOp, name, " must come with the ", declared.size(),
                       " buffers that it declares, but got ", buffers.size());
  for (size_t i = 0; i < declared.size(); ++i) {
    const auto& buffer = buffers[i];
    const std::string what = std::string(name) + "'s buffer @" + std::to_string(i);
    check_dense(kOp, what.c_str(), buffer);
    FUSEGRAD_CHECK_VALUE(buffer.device() == query.device(), kOp, what, " must be on the query's device ",
                         query.device(), ", but got ", buffer.device());
    const auto type = score_mod::type_of(score_mod::dtype_of(buffer));
    FUSEGRAD_CHECK_TYPE(type == declared[i].type, kOp, what, " must hold ", score_mod::type_name(declared[i].type),
                        ", as the text says, but got ", buffer.scalar_type());
    FUSEGRAD_CHECK_VALUE(buffer.dim() == declared[i].rank, kOp, what, " must have ", declared[i].rank,
                         " dimensions, as the text says, but got ", buffer.dim());
  }
  score_mod::check_precision(kOp, name, *graph, buffers,
                             kind == score_mod::Kind::kMaskMod ? !query.is_cuda() : query.scalar_type() == at::kDouble);
  try {
    return {std::string(text), buffers.vec(), score_mod::scalars_of(*graph, floats, ints)};
  } catch (const score_mod::GraphError& error) {
    FUSEGRAD_CHECK_VALUE(false, kOp, name, "'s ", error.what());
  }
}

// [.., rows] and [.., rows, columns] with leading dimensions that stand for the query's; as [B or 1, H or 1, ...]. Of
// lists for more batches, heads or rows than there are, the first count, as in PyTorch.
std::vector<Tensor> check_blocks(TensorList lists, at::IntArrayRef block_size, const Tensor& query) {
  constexpr const char* name = "kv_blocks";
  FUSEGRAD_CHECK_VALUE(lists.size() == 2 || lists.size() == 4, kOp, name,
                       " must be num_blocks and indices of the partial and perhaps of the full blocks, but got ",
                       lists.size(), " tensors");
  FUSEGRAD_CHECK_VALUE(block_size.size() == 2 && block_size[0] > 0 && block_size[1] > 0, kOp,
                       "block_size must be two positive numbers, but got ", block_size);
  const auto length = query.sym_size(2);
  const int64_t block = block_size[0];
  std::vector<Tensor> result;
  const auto rows = (length + (block - 1)) / block;
  for (size_t i = 0; i < lists.size(); ++i) {
    auto list = lists[i];
    check_dense(kOp, name, list);
    const auto dtype = list.scalar_type();
    FUSEGRAD_CHECK_TYPE(dtype == at::kInt || dtype == at::kLong, kOp, name, " must hold int32 or int64, but got ",
                        dtype);
    FUSEGRAD_CHECK_VALUE(list.device() == query.device(), kOp, name, " must be on the query's device ", query.device(),
                         ", but got ", list.device(), ": take block_mask.to(query.device)");
    const int64_t dims = 3 + static_cast<int64_t>(i % 2);
    while (list.dim() < dims) list = list.unsqueeze(0);
    FUSEGRAD_CHECK_VALUE(list.dim() == dims && (list.sym_size(0) == 1 || list.sym_size(0) >= query.sym_size(0)) &&
                             (list.sym_size(1) == 1 || list.sym_size(1) >= query.sym_size(1)),
                         kOp, name, " must have the query's batch size and heads ", query.sym_sizes().slice(0, 2),
                         ", more, or 1 in their place, but got shape ", lists[i].sym_sizes());
    FUSEGRAD_CHECK_VALUE(list.sym_size(2) >= rows || length == 0, kOp, name, " must list the blocks of ", rows,
                         " rows of blocks for ", length, " indices in blocks of ", block, ", but got ",
                         list.sym_size(2));
    const std::array<c10::SymInt, 3> wanted{query.sym_size(0), query.sym_size(1), rows};
    for (int64_t d = 0; d < 3; ++d) {
      const bool one = d < 2 && list.sym_size(d) == 1;
      if (!one && list.sym_size(d) != wanted[d]) list = list.slice_symint(d, 0, wanted[d]);
    }
    FUSEGRAD_CHECK_VALUE(i == 0 || list.sym_sizes().slice(0, 3) == result[0].sym_sizes().slice(0, 3), kOp, name,
                         " must have leading dimensions in common, but got ", list.sym_sizes(), " beside ",
                         result[0].sym_sizes());
    result.push_back(list);
  }
  return result;
}

// One number of PyTorch's generator of the query's device. It is drawn by ATen's own op, so that what PyTorch knows of
// random ops holds: compilers neither drop nor merge it, checkpoints draw it again, replays of a CUDA graph another
// one.
Tensor dropout_seed_for(const Tensor& query) {
  return at::randint(std::numeric_limits<int64_t>::max(), {}, query.options().dtype(at::kLong).requires_grad(false));
}

// What shapes the scores, checked; q, k and v are as autocast wants them.
FlexScores checked_scores(const FlexAttentionCall& call, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto& [query, key, value, mods, scale, enable_gqa, inplace, deterministic, aux, dropout_p, batch_invariant] =
      call;
  refuse_transforms(kOp, tensors_of(call));
  check_heads(q, k, v, enable_gqa);
  FlexScores scores;
  scores.score_mod = check_mod("score_mod", score_mod::Kind::kScoreMod, mods.score_mod, mods.score_mod_buffers,
                               mods.score_mod_floats, mods.score_mod_ints, query);
  scores.mask_mod = check_mod("mask_mod", score_mod::Kind::kMaskMod, mods.mask_mod, mods.mask_mod_buffers,
                              mods.mask_mod_floats, mods.mask_mod_ints, query);
  FUSEGRAD_CHECK_VALUE(scores.mask_mod.text.empty() || !mods.kv_blocks.empty(), kOp,
                       "mask_mod must come with a block mask, but got none");
  if (!mods.kv_blocks.empty()) {
    scores.kv_blocks = check_blocks(mods.kv_blocks, mods.block_size, query);
    scores.block_size = {mods.block_size[0], mods.block_size[1]};
  }
  // The head size alone as a number: size() would make one of every length, and each length a compilation.
  const int64_t head_size = query.sym_size(3).guard_int(__FILE__, __LINE__);
  scores.scale = scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(head_size));
  FUSEGRAD_CHECK_VALUE(std::isfinite(scores.scale), kOp, "scale must be a finite number, but got ", scores.scale);
  FUSEGRAD_CHECK_VALUE((aux & ~kFlexMaxScores) == 0, kOp, "aux must be 0 or 1 (max_scores), but got ", aux);
  FUSEGRAD_CHECK_VALUE(dropout_p >= 0 && dropout_p < 1, kOp, "dropout_p must be at least 0 and less than 1, but got ",
                       dropout_p);
  return scores;
}

std::tuple<std::vector<Tensor>, double> flex_attention_checked_op(const FlexAttentionCall& call) {
  const FlexScores scores = checked_scores(call, call.query, call.key, call.value);
  return {scores.kv_blocks, scores.scale};
}

FlexTuple flex_attention_op(const FlexAttentionCall& call) {
  const auto& [query, key, value, mods, scale, enable_gqa, inplace, deterministic, aux, dropout_p, batch_invariant] =
      call;
  const auto tensors = tensors_of(call);
  refuse_transforms(kOp, tensors);
  const Tensor q = as_autocast_wants(query), k = as_autocast_wants(key), v = as_autocast_wants(value);
  FlexScores scores = checked_scores(call, q, k, v);
  bool overwrite = inplace && q.is_same(query);
  if (overwrite) {
    // All three are asked, so that what would corrupt raises whichever it is.
    for (const auto* input : {&query, &key, &value}) overwrite &= may_overwrite_strided(*input, tensors);
  }
  const bool ordered = deterministic.value_or(at::globalContext().deterministicAlgorithms());
  if (dropout_p > 0) {
    scores.dropout_p = dropout_p;
    scores.dropout_seed = dropout_seed_for(query);
  }
  const int64_t bits = aux | (batch_invariant ? int64_t{kFlexInvariant} : 0);
  auto out = autograd::flex_attention(q, k, v, scores, bits, ordered, overwrite);
  if (!out.max_scores.defined()) out.max_scores = at::empty({0}, out.lse.options().requires_grad(false));
  return {out.out, out.lse, out.max_scores};
}

FlexAttentionOutput run_flex_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const FlexAttentionOptions& options, int64_t aux) {
  static const Op<FlexAttentionCall, FlexTuple> op("fusegrad::flex_attention");
  const auto& score_mod = options.score_mod();
  const auto numbers = score_mod::numbers_of(score_mod);
  FlexAttentionCall call{.query = query,
                         .key = key,
                         .value = value,
                         .mods = {},
                         .scale = options.scale(),
                         .enable_gqa = options.enable_gqa(),
                         .inplace = options.inplace(),
                         .deterministic = options.deterministic(),
                         .aux = aux,
                         .dropout_p = options.dropout_p(),
                         .batch_invariant = options.batch_invariant()};
  auto& mods = call.mods;
  mods.score_mod = score_mod.text;
  mods.score_mod_buffers = score_mod.buffers;
  mods.score_mod_floats = numbers.floats;
  mods.score_mod_ints = numbers.ints;
  std::vector<Tensor> kv_blocks;
  score_mod::Numbers mask_numbers;
  if (options.block_mask().has_value()) {
    const BlockMask& mask = *options.block_mask();
    FUSEGRAD_CHECK_VALUE(
        query.dim() != 4 || key.dim() != 4 || (mask.lengths[0] == query.size(2) && mask.lengths[1] == key.size(2)), kOp,
        "block_mask must be made for ", query.size(2), " queries and ", key.size(2), " keys, but got one for ",
        mask.lengths[0], " and ", mask.lengths[1]);
    FUSEGRAD_CHECK_VALUE(mask.kv_num_blocks.defined(), kOp,
                         "block_mask must have kv_num_blocks, but got an undefined tensor");
    kv_blocks = {mask.kv_num_blocks, mask.kv_indices};
    if (mask.full_kv_num_blocks.defined()) {
      kv_blocks.insert(kv_blocks.end(), {mask.full_kv_num_blocks, mask.full_kv_indices});
    }
    mask_numbers = score_mod::numbers_of(mask.mask_mod);
    mods.mask_mod = mask.mask_mod.text;
    mods.mask_mod_buffers = mask.mask_mod.buffers;
    mods.mask_mod_floats = mask_numbers.floats;
    mods.mask_mod_ints = mask_numbers.ints;
    mods.kv_blocks = kv_blocks;
    mods.block_size = mask.block_size;
  }
  const auto [out, lse, max_scores] = op(call);
  return {out, lse, max_scores};
}

}  // namespace

Tensor flex_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                      const FlexAttentionOptions& options) {
  return run_flex_attention(query, key, value, options, 0).out;
}

FlexAttentionOutput flex_attention_with_aux(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const FlexAttentionOptions& options) {
  return run_flex_attention(query, key, value, options, kFlexMaxScores);
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) {
  m.impl("flex_attention", named_kernel<"flex_attention", unpacked<flex_attention_op>()>());
  m.impl("flex_attention_checked", named_kernel<"flex_attention", unpacked<flex_attention_checked_op>()>());
}

}  // namespace fusegrad
