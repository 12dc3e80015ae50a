// create_block_mask and varlen_mask of the C++ front end.
#include <torch/library.h>

#include "fusegrad/flex_attention.h"
#include "pytorch/ops/check.h"
#include "pytorch/score_mod/tensors.h"

namespace fusegrad {
namespace {

using at::Tensor;

constexpr const char* kOp = "varlen_mask";

void check_ends(const char* name, const Tensor& ends) {
  check_dense(kOp, name, ends);
  FUSEGRAD_CHECK_TYPE(ends.scalar_type() == at::kInt || ends.scalar_type() == at::kLong, kOp, name,
                      " must be int32 or int64, but got ", ends.scalar_type());
  FUSEGRAD_CHECK_VALUE(ends.dim() == 1 && ends.sym_size(0) >= 2, kOp, name,
                       " must be [sequences + 1], of at least one sequence, but got ", ends.sym_sizes());
}

// For each query the first and the last key that it sees; a query beyond the sequences sees none. Relative to the key
// that a query stands at, counted from the ends of both.
std::tuple<Tensor, Tensor> varlen_keys(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, c10::SymInt queries,
                                       bool causal, int64_t left, int64_t right) {
  check_ends("cu_seqlens_q", cu_seqlens_q);
  check_ends("cu_seqlens_k", cu_seqlens_k);
  FUSEGRAD_CHECK_VALUE(cu_seqlens_k.sym_sizes() == cu_seqlens_q.sym_sizes(), kOp,
                       "cu_seqlens_k must be as long as cu_seqlens_q, ", cu_seqlens_q.sym_size(0), ", but got ",
                       cu_seqlens_k.sym_size(0));
  FUSEGRAD_CHECK_VALUE(cu_seqlens_k.device() == cu_seqlens_q.device(), kOp,
                       "cu_seqlens_k must be on the device of cu_seqlens_q, ", cu_seqlens_q.device(), ", but got ",
                       cu_seqlens_k.device());
  const Tensor ends_q = cu_seqlens_q.to(at::kLong), ends_k = cu_seqlens_k.to(at::kLong);
  const Tensor q = at::arange(std::move(queries), ends_q.options());
  const Tensor after = at::searchsorted(ends_q.slice(0, 1), q, /*out_int32=*/false, /*right=*/true);
  const Tensor sequence = after.clamp_max(ends_q.sym_size(0) - 2);
  const Tensor next = sequence + 1, end_k = ends_k.index_select(0, next);
  const Tensor own = q + end_k - ends_q.index_select(0, next);
  Tensor first = ends_k.index_select(0, sequence), last = end_k - 1;
  if (left >= 0) first = at::maximum(first, own - left);
  if (right >= 0) last = at::minimum(last, own + right);
  if (causal) last = at::minimum(last, own);
  last = at::where(after == sequence, last, -1);
  return {first.to(at::kInt), last.to(at::kInt)};
}

}  // namespace

BlockMask create_block_mask(const ScoreMod& mask_mod, std::optional<int64_t> B, std::optional<int64_t> H, int64_t q_len,
                            int64_t kv_len, std::array<int64_t, 2> block_size, at::Device device) {
  using Lists = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fusegrad::create_block_mask", "")
                             .typed<Lists(const Tensor&, std::string_view, at::TensorList, at::ArrayRef<double>,
                                          at::IntArrayRef, c10::SymIntArrayRef, at::IntArrayRef)>();
  const auto numbers = score_mod::numbers_of(mask_mod);
  const std::array<c10::SymInt, 4> sizes{B.value_or(1), H.value_or(1), q_len, kv_len};
  const auto lists =
      op.call(at::empty({0}, device), mask_mod.text, mask_mod.buffers, numbers.floats, numbers.ints, sizes, block_size);
  BlockMask mask;
  mask.kv_num_blocks = std::get<0>(lists);
  mask.kv_indices = std::get<1>(lists);
  mask.full_kv_num_blocks = std::get<2>(lists);
  mask.full_kv_indices = std::get<3>(lists);
  mask.block_size = block_size;
  mask.lengths = {q_len, kv_len};
  mask.mask_mod = mask_mod;
  return mask;
}

BlockMask varlen_mask(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const VarlenMaskOptions& options) {
  const auto [left, right] = options.window();
  const auto total = [](const Tensor& ends) { return ends.select(0, -1).item<int64_t>(); };
  const auto lengths = options.lengths();
  const int64_t queries = lengths.has_value() ? (*lengths)[0] : total(cu_seqlens_q);
  const int64_t keys = lengths.has_value() ? (*lengths)[1] : total(cu_seqlens_k);
  const auto [first_key, last_key] = varlen_keys(cu_seqlens_q, cu_seqlens_k, queries, options.causal(), left, right);
  const Captured first(first_key), last(last_key);
  const auto mod = trace_mask_mod([&](const auto& /*b*/, const auto& /*h*/, const auto& q_idx, const auto& kv_idx) {
    return kv_idx >= first[q_idx] && kv_idx <= last[q_idx];
  });
  return create_block_mask(mod, std::nullopt, std::nullopt, queries, keys, options.block_size(), cu_seqlens_q.device());
}

TORCH_LIBRARY_IMPL(fusegrad, CompositeImplicitAutograd, m) { m.impl("varlen_keys", TORCH_FN(varlen_keys)); }

}  // namespace fusegrad
