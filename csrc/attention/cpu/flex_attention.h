// What the forward and the backward of flex_attention on the CPU share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>

#include "attention/cpu/attention_kernels.h"
#include "attention/cpu/block_map.h"
#include "pytorch/attention/flex_attention.h"
#include "pytorch/rows/job.h"
#include "score_mod/cache.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/tensors.h"

namespace fusegrad::cpu {

/// Queries of a tile of scores, and its most keys: a tile and what is multiplied with it stay in the second-level
/// cache.
inline constexpr int64_t kTileRows = 64;
inline constexpr int64_t kTileCols = 256;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t tiles_in(int64_t n, int64_t size) { return (n + size - 1) / size; }

/// Memory that is not initialised, aligned to cache lines: pages that nothing needs are never touched.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(
            ::operator new(static_cast<size_t>(count) * sizeof(T) + kAlignment, std::align_val_t{kAlignment}))) {}
  T* data() const { return data_.get(); }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  static constexpr size_t kAlignment = 64;
  struct Delete {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<T, Delete> data_;
};

/// Tensors [B, H, rows, cols] by heads.
struct HeadView {
  explicit HeadView(const at::Tensor& t)
      : data(static_cast<char*>(const_cast<void*>(t.const_data_ptr()))),
        dtype(to_dtype(t.scalar_type())),
        bytes(t.element_size()),
        batch_stride(t.size(0) == 1 ? 0 : t.stride(0)),
        head_stride(t.stride(1)),
        row_stride(t.stride(2)),
        col_stride(t.stride(3)) {}

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
  FlexProblem(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const FlexScores& scores)
      : batches(query.size(0)),
        heads(query.size(1)),
        queries(query.size(2)),
        keys(key.size(2)),
        key_batches(key.size(0)),
        key_heads(key.size(1)),
        head_size(query.size(3)),
        value_size(value.size(3)),
        scale(static_cast<T>(scores.scale)),
        query(query),
        key(key),
        value(value),
        blocks(scores, queries, keys),
        score_tensors(scores.score_mod.buffers, scores.score_mod.scalars),
        mask_tensors(scores.mask_mod.buffers, scores.mask_mod.scalars) {
    if (!scores.score_mod.text.empty()) {
      score_program.emplace(*score_mod::cached_graph(scores.score_mod.text), lengths(), score_tensors.buffers(),
                            score_tensors.scalars());
    }
    if (!scores.mask_mod.text.empty()) {
      mask_program.emplace(*score_mod::cached_graph(scores.mask_mod.text), lengths(), mask_tensors.buffers(),
                           mask_tensors.scalars());
    }
    if (scores.dropout_seed.defined()) {
      dropout.emplace(scores.dropout_p);
      dropout_seed = static_cast<uint64_t>(scores.dropout_seed.item<int64_t>());
    }
  }

  score_mod::Lengths lengths() const { return {batches, heads, queries, keys}; }
  int64_t group() const { return heads / key_heads; }
  /// Columns of a matrix as products leave it.
  int64_t padded_head() const { return round_up(head_size, kernels.panel); }
  int64_t padded_value() const { return round_up(value_size, kernels.panel); }
  /// Of a query head.
  HeadDropout dropout_of(int64_t b, int64_t h) const;
  const score_mod::TileProgram<T>* mask() const { return mask_program ? &*mask_program : nullptr; }

  const AttentionKernels<T>& kernels = attention_kernels<T>();
  int64_t batches, heads, queries, keys, key_batches, key_heads, head_size, value_size;
  T scale;
  HeadView query, key, value;
  BlockMap blocks;
  score_mod::CapturedTensors score_tensors, mask_tensors;
  std::optional<score_mod::TileProgram<T>> score_program, mask_program;
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
void share_tasks(int64_t tasks, Worker&& worker) {
  std::atomic<int64_t> counter{0};
  const auto next = [&]() -> std::optional<int64_t> {
    const int64_t task = counter.fetch_add(1, std::memory_order_relaxed);
    return task < tasks ? std::optional<int64_t>(task) : std::nullopt;
  };
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { worker(next); });
}

FlexOutputTuple flex_attention_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const FlexScores& scores, int64_t aux);
/// Writes into `grads`, or in place the first three over the inputs. Always deterministic.
void flex_attention_backward(const FlexUpstream& upstream, const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const FlexOutputs& saved, const FlexScores& scores,
                             bool deterministic, const std::vector<bool>& needs_grad, const FlexGradients& grads,
                             bool inplace);
/// Writes which pairs are kept into `mask`, bool [B, H, M, N], contiguous.
void flex_attention_dropout_mask(const at::Tensor& seed, double p, const at::Tensor& mask);

}  // namespace fusegrad::cpu
