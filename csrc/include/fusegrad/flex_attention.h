// Flex attention: attention whose scores a small function shapes, with gradients for all that it captures.
#pragma once

#include <ATen/ATen.h>
#include <torch/arg.h>

#include <array>
#include <optional>

#include "fusegrad/score_mod.h"

namespace fusegrad {

/// Which blocks of queries and keys take part, as torch.nn.attention.flex_attention.BlockMask has it: of each block of
/// queries, how many blocks of keys are listed and which. Partial blocks ask mask_mod of each pair, full ones do not,
/// blocks in neither list are excluded. int32, [B or 1, H or 1, query blocks] and [.., query blocks, key blocks].
struct BlockMask {
  at::Tensor kv_num_blocks, kv_indices;
  at::Tensor full_kv_num_blocks, full_kv_indices;  ///< both or neither
  std::array<int64_t, 2> block_size{128, 128};     ///< of queries and of keys
  std::array<int64_t, 2> lengths{};                ///< queries and keys that it was made for
  ScoreMod mask_mod;                               ///< an empty text: all pairs of a listed block take part
};

/// The block mask of a mask_mod that captures tensors of the device. Without B or H it stands for all batches or heads.
/// By bounds of the mask_mod over blocks; pairs are asked where those do not say. The memory is that of the lists.
BlockMask create_block_mask(const ScoreMod& mask_mod, std::optional<int64_t> B, std::optional<int64_t> H, int64_t q_len,
                            int64_t kv_len, std::array<int64_t, 2> block_size = {128, 128},
                            at::Device device = at::kCPU);

/// Options of varlen_mask.
struct VarlenMaskOptions {
  using Window = std::array<int64_t, 2>;
  using Lengths = std::optional<std::array<int64_t, 2>>;
  /// A query sees no key beyond its own place, which is counted from the ends of both sequences.
  TORCH_ARG(bool, causal) = false;
  /// How many keys before and after its own place a query sees; -1: all.
  TORCH_ARG(Window, window) = Window { -1, -1 };
  /// For queries and keys, where they are more than the sequences'; those beyond take no part. By default the
  /// sequences' own, which a GPU has to be asked for.
  TORCH_ARG(Lengths, lengths) = std::nullopt;
  TORCH_ARG(Window, block_size) = Window { 128, 128 };
};

/// The block mask of packed sequences: a query sees keys of its own sequence alone. Sequence i has the queries
/// cu_seqlens_q[i] to cu_seqlens_q[i + 1] and the keys cu_seqlens_k[i] to cu_seqlens_k[i + 1], without the latter;
/// int32 or int64, [sequences + 1], not descending from 0 on.
BlockMask varlen_mask(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                      const VarlenMaskOptions& options = {});

/// Options of flex_attention.
struct FlexAttentionOptions {
  /// Changes each score; an empty text: none. Its floating-point buffers that require grad get gradients.
  TORCH_ARG(ScoreMod, score_mod);
  TORCH_ARG(std::optional<BlockMask>, block_mask);
  /// 1 / sqrt(D) by default.
  TORCH_ARG(std::optional<double>, scale);
  /// Query heads share key heads: H is a multiple of the keys' heads.
  TORCH_ARG(bool, enable_gqa) = false;
  /// Permission for the backward to write the gradients of query, key and value over them, where all three get one and
  /// the graph is not kept. Their version counters are raised then.
  TORCH_ARG(bool, inplace) = false;
  /// The CPU's kernels always are.
  TORCH_ARG(std::optional<bool>, deterministic);
  /// For each pair, the probability that its weight becomes 0; the other weights are divided by 1 - dropout_p. At least
  /// 0 and less than 1, taken to the nearest multiple of 2^-40 and to at most 1 - 2^-15. A call draws one number of
  /// PyTorch's generator of the query's device, by which the backward knows the pairs too.
  TORCH_ARG(double, dropout_p) = 0.0;
  /// Output and lse of a query have the same bits whatever other queries, heads and batches the call has, and however
  /// many keys that take no part for the query. A key's place in `key` counts: keys are summed in an order that begins
  /// at place 0.
  TORCH_ARG(bool, batch_invariant) = false;
};

/// What flex_attention returns beside its output: both [B, H, M], float32 (float64 for float64) and differentiable.
struct FlexAttentionOutput {
  at::Tensor out;
  at::Tensor lse;         ///< log(sum(exp(s))) over the keys that take part; -inf where there is none
  at::Tensor max_scores;  ///< the largest s
};

/// s = score_mod(scale * query key^T), out = softmax(s) value over the keys that take part; 0 where there is none.
/// A drop-in for torch.nn.attention.flex_attention.flex_attention.
///
/// query [B, H, M, D], key [B or 1, Hkv, N, D], value [B or 1, Hkv, N, E]; float32, bfloat16 or float16, on the CPU
/// float64 too; any strides. On CUDA D is at most 576 and E at most 512. Returns [B, H, M, E] in the query's dtype, its
/// dimensions in the order of the query's strides.
/// Raises c10::ValueError, c10::TypeError or c10::NotImplementedError as `flex_attention: what must hold, but got
/// <value>`, and c10::IndexError where a captured tensor is read out of range by a pair that takes part.
at::Tensor flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const FlexAttentionOptions& options = {});

/// The same, with lse and max_scores.
FlexAttentionOutput flex_attention_with_aux(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                            const FlexAttentionOptions& options = {});

}  // namespace fusegrad
