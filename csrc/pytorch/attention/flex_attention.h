// flex_attention below its front end: what the ops take and return, and their typed dispatcher calls.
//
// Letters: B batch, H query heads, M queries, N keys, D and E the head sizes of keys and of values. `acc` is float64
// for float64 and float32 otherwise.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "attention/flex_attention.h"
#include "fusegrad/score_mod.h"

namespace fusegrad {

/// What shapes the scores. Lists of blocks are those of PyTorch's BlockMask: none, or (num_blocks, indices) of the
/// partial blocks, or those followed by the same two of the full blocks; int32, [B or 1, H or 1, rows] and
/// [B or 1, H or 1, rows, columns].
struct FlexScores {
  ScoreMod score_mod, mask_mod;  ///< an empty text: none
  std::vector<at::Tensor> kv_blocks;
  std::array<int64_t, 2> block_size{};  ///< of queries and of keys
  double scale = 1.0;
  double dropout_p = 0.0;
  at::Tensor dropout_seed;  ///< one int64 on the query's device; undefined without dropout
};

/// out [B, H, M, E], strides in the order of the query's; lse, max_scores and max_ties (how many scores of a row equal
/// the largest) [B, H, M] acc, the latter two empty unless asked for. out_low is what rounding took from out, as
/// int8 (attention/low_part.h): the backward's sum of grad_out * out is subtracted from numbers that may equal it but
/// for a few places, so that rounding out to 16 bits would be its largest error by far. lse_low is what rounding took
/// from lse: the backward's exp(s - lse) of a row whose scores lie near -1e9 needs lse to a few places after the point.
/// Both are empty unless asked for, out_low also where out has more than 16 bits.
struct FlexOutputs {
  at::Tensor out, lse, max_scores, max_ties, out_low, lse_low;
};

/// Empty where not wanted; query, key and value empty too where they were written in place.
struct FlexGradients {
  at::Tensor query, key, value;
  std::vector<at::Tensor> buffers;
};

using FlexOutputTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using FlexGradientTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>>;

/// What the upstream gradients are; undefined where there is none.
struct FlexUpstream {
  at::Tensor out, lse, max_scores;
};

/// Tangents; undefined where there is none.
struct FlexInputTangents {
  at::Tensor query, key, value;
  std::vector<int64_t> with_tangent;  ///< the buffers of the score_mod that have one, ascending
  std::vector<at::Tensor> buffers;    ///< theirs
};
/// out, lse, their tangents, out_low and lse_low.
using FlexTangentTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Results of flex_attention_pair_tangents.
/// In the query's dtype, [head_count, row_count, 1 or 2, columns] and [head_count, row_count, 2, columns]; seen, bytes
/// [head_count / group, columns], is written with a block mask only.
struct FlexPairTangentsResults {
  at::Tensor weights, gradients, seen;
};

namespace dispatch {

FlexOutputs flex_attention_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                   const FlexScores& scores, int64_t aux);
/// needs_grad: of query, key, value, then of each buffer of the score_mod. In place, the first three lie in the inputs
/// afterwards.
FlexGradients flex_attention_backward(const FlexUpstream& upstream, const at::Tensor& query, const at::Tensor& key,
                                      const at::Tensor& value, const FlexOutputs& saved, const FlexScores& scores,
                                      bool deterministic, const std::vector<bool>& needs_grad, bool inplace);
/// The same as a graph, for create_graph=True.
FlexGradients flex_attention_backward_graph(const FlexUpstream& upstream, const at::Tensor& query,
                                            const at::Tensor& key, const at::Tensor& value, const FlexOutputs& saved,
                                            const FlexScores& scores, bool deterministic,
                                            const std::vector<bool>& needs_grad);

}  // namespace dispatch
}  // namespace fusegrad
