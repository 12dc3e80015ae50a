// What the forward and the backward of flex_attention on the CPU share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>

#include "attention/cpu/attention_kernels.h"
#include "attention/cpu/block_map.h"
#include "attention/flex_attention.h"
#include "common/division.h"
#include "common/error.h"
#include "common/host.h"
#include "common/memory.h"
#include "score_mod/cache.h"
#include "score_mod/evaluate_cpu.h"

namespace fusegrad::cpu {

/// Queries of a tile of scores, and its most keys: a tile and what is multiplied with it stay in the second-level
/// cache.
inline constexpr int64_t kTileRows = 64;
inline constexpr int64_t kTileCols = 256;

/// lse of a row whose largest score is `max` and whose exponentials relative to that sum to `sum`; `low`, if not null:
/// what rounding took from it.
template <class T>
void put_lse(T max, T sum, T* lse, T* low) {
  const bool none = max == -std::numeric_limits<T>::infinity();
  const T log_sum = none ? T(0) : std::log(sum);
  *lse = max + log_sum;
  if (low != nullptr) *low = none ? T(0) : (max - *lse) + log_sum;
}

/// Tensors [B, H, rows, cols] by heads.
struct HeadView {
  explicit HeadView(const TensorView& t)
      : data(static_cast<char*>(t.data)),
        dtype(t.dtype),
        bytes(t.dtype == DType::kFloat64   ? 8
              : t.dtype == DType::kFloat32 ? 4
              : t.dtype == DType::kInt8    ? 1
                                           : 2),
        batch_stride(t.sizes[0] == 1 ? 0 : t.strides[0]),
        head_stride(t.strides[1]),
        row_stride(t.strides[2]),
        col_stride(t.strides[3]) {}

  /// The rows of a head from `row` on. A batch of 1 stands for every b.
  Matrix at(int64_t b, int64_t h, int64_t row) const {
    return {data + bytes * (b * batch_stride + h * head_stride + row * row_stride), dtype, row_stride, col_stride};
  }

  char* data;
  DType dtype;
  int64_t bytes, batch_stride, head_stride, row_stride, col_stride;
};

/// The sizes of a call, its masks and its compiled score_mod.
template <class T>
struct FlexProblem {
  FlexProblem(const Host& host, const FlexArguments& a)
      : host(host),
        batches(a.query.sizes[0]),
        heads(a.query.sizes[1]),
        queries(a.query.sizes[2]),
        keys(a.key.sizes[2]),
        key_batches(a.key.sizes[0]),
        key_heads(a.key.sizes[1]),
        head_size(a.query.sizes[3]),
        value_size(a.value.sizes[3]),
        scale(static_cast<T>(a.scale)),
        all_pairs(!a.block_mask),
        query(a.query),
        key(a.key),
        value(a.value),
        blocks(a.block_mask, !a.mask_mod.text.empty(), queries, keys) {
    const auto compile = [&](const CapturedMod& mod, auto& program) {
      if (!mod.text.empty()) {
        program.emplace(*score_mod::cached_graph(mod.text), lengths(), mod.buffers, mod.scalars);
      }
    };
    compile(a.score_mod, score_program);
    compile(a.mask_mod, mask_program);
    if (a.dropout) dropout.emplace(a.dropout_p);
    dropout_seed = a.dropout_seed;
  }

  score_mod::Lengths lengths() const { return {batches, heads, queries, keys}; }
  int64_t group() const { return heads / key_heads; }
  /// Whether a head's pairs are one tile of so many keys, much of whose score_mod is the same in all batches: these
  /// then follow each other.
  bool keeps_pairs(int64_t tile_cols) const {
    return batches > 1 && queries <= kTileRows && keys <= tile_cols && score_program && score_program->keeps();
  }
  /// Columns of a matrix as products leave it.
  int64_t padded_head() const { return round_up(head_size, kernels.panel); }
  int64_t padded_value() const { return round_up(value_size, kernels.panel); }
  /// Dropout's of a query head.
  HeadDropout dropout_of(int64_t b, int64_t h) const;
  const score_mod::MaskProgram* mask() const { return mask_program ? &*mask_program : nullptr; }

  const Host& host;
  const AttentionKernels<T>& kernels = attention_kernels<T>();
  int64_t batches, heads, queries, keys, key_batches, key_heads, head_size, value_size;
  T scale;
  bool all_pairs;  ///< there is no block mask
  HeadView query, key, value;
  BlockMap blocks;
  std::optional<score_mod::TileProgram<T>> score_program;
  std::optional<score_mod::MaskProgram> mask_program;
  std::optional<FlexDropoutRule> dropout;
  uint64_t dropout_seed = 0;
};

HeadDropout head_dropout(const FlexDropoutRule& rule, uint64_t seed, int64_t head);
template <class T>
HeadDropout FlexProblem<T>::dropout_of(int64_t b, int64_t h) const {
  return head_dropout(*dropout, dropout_seed, b * heads + h);
}

/// worker(next) on every thread, where next() gives each of 0 … tasks - 1 to one caller, in order. Tasks must not
/// depend on who does which.
template <class Worker>
void share_tasks(const Host& host, int64_t tasks, Worker&& worker) {
  std::atomic<int64_t> counter{0};
  const auto next = [&]() -> std::optional<int64_t> {
    const int64_t task = counter.fetch_add(1, std::memory_order_relaxed);
    return task < tasks ? std::optional<int64_t>(task) : std::nullopt;
  };
  const int64_t callers = std::min<int64_t>(threads(host), tasks);
  parallel_for(host, callers, 1, [&](int64_t, int64_t) { worker(next); });
}

/// There are queries; keys may be none.
void attention_forward(const Host& host, const FlexArguments& arguments, const FlexResults& results);
/// The forward with tangents. There are queries; keys may be none.
void attention_tangents(const Host& host, const FlexTangentCall& call);
/// There are queries and keys. Always deterministic.
void attention_backward(const Host& host, const FlexBackwardCall& call);
void attention_merge(const Host& host, const FlexMergeCall& call);
/// Writes which pairs are kept into `mask`, [heads, M, N], contiguous; heads of all batches.
void attention_dropout_mask(const Host& host, uint64_t seed, double p, int64_t heads, int64_t first, int64_t queries,
                            int64_t keys, bool* mask);

}  // namespace fusegrad::cpu
