// Evaluates a graph on the CPU, over tiles of (query rows x key columns).
//
// A program is compiled once for a call from the graph and what is captured, and shared by all threads; each thread has
// an evaluator of its own. A tile is one (b, h) and a rectangle of pairs; `mask` says which pairs take part (1) and may
// be null: all. Pairs that do not take part read nothing out of range, give -inf as a score and 0 as a gradient.
//
// An operation runs as seldom as its operands allow: once a tile if it depends on neither q_idx nor kv_idx, once a
// column or once a row if on one of them, once a diagonal if on their difference, and else for every pair, a row of the
// tile at a time. Tiles of 64 rows and 128 to 512 columns keep the registers in the first-level cache.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>

#include "score_mod/captured.h"
#include "score_mod/index_analysis.h"

namespace fusegrad::score_mod {

struct Tile {
  int64_t b, h;
  int64_t q, kv;       ///< the first row's and the first column's index
  int64_t rows, cols;  ///< at most those the evaluator was made for
};

/// A rectangle in memory, rows `stride` elements apart and columns adjacent.
template <class T>
struct Rectangle {
  T* data = nullptr;
  int64_t stride = 0;

  T* row(int64_t r) const { return data == nullptr ? nullptr : data + r * stride; }
};

/// Where a buffer's gradient is summed up: a dense row-major array of the buffer's sizes, in the precision of the
/// scores or in float64. Both null: not wanted.
template <class T>
struct GradientSink {
  T* sum = nullptr;
  double* wide_sum = nullptr;
};

/// The first index found out of its dimension.
struct OutOfRange {
  static constexpr int kValue = 1 << 30;  ///< no buffer: an element of a value

  int buffer = -1;
  int dimension = 0;
  int64_t index = 0;
  int64_t size = 0;

  /// "index 12 is out of range for dimension 0 of captured buffer 1, which has size 8"
  std::string message() const;
};

/// Floats are T (float or double) throughout.
template <class T>
class TileProgram {
 public:
  /// `buffers` and `scalars` are those that the graph declares, in order (a scalar of the declared type; GraphError
  /// otherwise). What they point to must outlive the program.
  TileProgram(const Graph& graph, const Lengths& lengths, std::span<const Buffer> buffers,
              std::span<const Value> scalars);
  ~TileProgram();
  TileProgram(TileProgram&&) noexcept;

  /// Whether evaluators have something to keep, see TileEvaluator::keep().
  bool keeps() const;

  struct Code;
  const Code& code() const { return *code_; }

 private:
  std::unique_ptr<Code> code_;
};

/// One thread's registers. Each member returns whether all indices of pairs that take part were in range; otherwise
/// out_of_range() says which was not, the results are meaningless, and nothing was read or written out of bounds.
template <class T>
class TileEvaluator {
 public:
  TileEvaluator(const TileProgram<T>& program, int64_t max_rows, int64_t max_cols);
  ~TileEvaluator();
  TileEvaluator(TileEvaluator&&) noexcept;

  /// From now on what does not depend on b is computed once for tiles that follow each other and differ in b alone. The
  /// last of a derivative's must be followed by flush().
  void keep();
  /// Adds what backward() has not added to the sinks yet.
  void flush(std::span<const GradientSink<T>> sinks);

  /// For a score_mod. `out` may be `score`.
  bool score_mod(const Tile& tile, Rectangle<const T> score, Rectangle<const uint8_t> mask, Rectangle<T> out);

  /// For a tangent: `tangent` is that of the score, `out` that of the score_mod's result, 0 of pairs that take no part;
  /// may be `tangent`.
  bool tangent(const Tile& tile, Rectangle<const T> score, Rectangle<const T> tangent, Rectangle<const uint8_t> mask,
               Rectangle<T> out);

  /// For a mask_mod: 1 where the pair takes part.
  bool mask_mod(const Tile& tile, Rectangle<uint8_t> out);

  /// For a derivative: `grad` is the gradient by the score_mod's result, `grad_score` that by its score (may be `grad`;
  /// null if not wanted). Each contribution is summed over the tile as far as its index allows, then added to the sink
  /// of its buffer.
  bool backward(const Tile& tile, Rectangle<const T> score, Rectangle<const T> grad, Rectangle<const uint8_t> mask,
                Rectangle<T> grad_score, std::span<const GradientSink<T>> sinks);

  const OutOfRange& out_of_range() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A mask_mod's program. Floats are float32 whatever the scores are, as in PyTorch, so that lists of blocks, kernels
/// and derivatives decide the same; float64 where computes_in_float64 says so.
class MaskProgram {
 public:
  /// As TileProgram's.
  MaskProgram(const Graph& graph, const Lengths& lengths, std::span<const Buffer> buffers,
              std::span<const Value> scalars, bool in_float64);
  MaskProgram(const Graph& graph, const Lengths& lengths, std::span<const Buffer> buffers,
              std::span<const Value> scalars)
      : MaskProgram(graph, lengths, buffers, scalars, computes_in_float64(buffers)) {}

 private:
  friend class MaskEvaluator;
  std::variant<TileProgram<float>, TileProgram<double>> program_;
};

/// One thread's registers for it, as a TileEvaluator's.
class MaskEvaluator {
 public:
  MaskEvaluator(const MaskProgram& program, int64_t max_rows, int64_t max_cols);
  bool mask_mod(const Tile& tile, Rectangle<uint8_t> out);
  const OutOfRange& out_of_range() const;

 private:
  std::variant<TileEvaluator<float>, TileEvaluator<double>> evaluator_;
};

/// About the share of a head's pairs that a mask_mod without buffers allows: that of eight queries for each of four
/// keys.
double share_of_pairs(const Graph& mask_mod, std::span<const Value> scalars, int64_t queries, int64_t keys);

extern template class TileProgram<float>;
extern template class TileProgram<double>;
extern template class TileEvaluator<float>;
extern template class TileEvaluator<double>;

}  // namespace fusegrad::score_mod
