#include "attention/block_states.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "score_mod/evaluate_cpu.h"

namespace fusegrad::cpu {
namespace {

using score_mod::MaskEvaluator;
using score_mod::MaskProgram;
using score_mod::Tile;

constexpr int64_t kTileRows = 64, kTileCols = 256;

/// One thread's evaluators.
class Decider {
 public:
  struct Programs {
    MaskProgram mask_mod, listed, full, safe;
  };
  Decider(const Programs& programs, const BlockMaskProgram& call)
      : call_(call),
        mask_mod_(programs.mask_mod, kTileRows, kTileCols),
        listed_(programs.listed, 1, kTileCols),
        full_(programs.full, 1, kTileCols),
        safe_(programs.safe, 1, 1),
        pairs_(kTileRows * kTileCols) {}

  /// A row of blocks. False: error() says what is out of range.
  bool row(int64_t b, int64_t h, int64_t row, BlockState* states) {
    const int64_t cols = call_.cols();
    std::array<uint8_t, kTileCols> some{}, all{};
    for (int64_t first = 0; first < cols; first += kTileCols) {
      const Tile tile{b, h, row, first, 1, std::min(kTileCols, cols - first)};
      if (!listed_.mask_mod(tile, {some.data(), kTileCols})) return fail(listed_);
      if (!full_.mask_mod(tile, {all.data(), kTileCols})) return fail(full_);
      for (int64_t i = 0; i < tile.cols; ++i) {
        BlockState& state = states[first + i];
        const auto at = static_cast<size_t>(i);
        state = some[at] == 0 ? BlockState::kNone : all[at] != 0 ? BlockState::kFull : BlockState::kPartial;
        if (state == BlockState::kPartial && !block(b, h, row, first + i, state)) return false;
      }
    }
    return true;
  }

  const std::string& error() const { return error_; }

 private:
  bool fail(const MaskEvaluator& evaluator) {
    error_ = evaluator.out_of_range().message();
    return false;
  }

  // By its pairs. One pair that takes part and one that does not decide, but where a pair may read out of range all of
  // them are asked. The outermost rows come first: they often differ.
  bool block(int64_t b, int64_t h, int64_t row, int64_t col, BlockState& state) {
    const std::array begin{row * call_.block_size[0], col * call_.block_size[1]};
    const std::array end{std::min(begin[0] + call_.block_size[0], call_.lengths[0]),
                         std::min(begin[1] + call_.block_size[1], call_.lengths[1])};
    uint8_t safe = 0;
    if (!safe_.mask_mod({b, h, row, col, 1, 1}, {&safe, 1})) return fail(safe_);
    some_ = false;
    all_ = begin[0] + call_.block_size[0] == end[0] && begin[1] + call_.block_size[1] == end[1];
    const auto open = [&] { return safe == 0 || !some_ || all_; };
    const auto ask = [&](int64_t first, int64_t last) {
      for (int64_t q = first; q < last && open(); q += kTileRows) {
        for (int64_t kv = begin[1]; kv < end[1] && open(); kv += kTileCols) {
          const Tile tile{b, h, q, kv, std::min(kTileRows, last - q), std::min(kTileCols, end[1] - kv)};
          if (!mask_mod_.mask_mod(tile, {pairs_.data(), tile.cols})) return fail(mask_mod_);
          const auto stop = pairs_.begin() + tile.rows * tile.cols;
          some_ = some_ || std::find(pairs_.begin(), stop, uint8_t{1}) != stop;
          all_ = all_ && std::find(pairs_.begin(), stop, uint8_t{0}) == stop;
        }
      }
      return true;
    };
    if (!ask(begin[0], begin[0] + 1)) return false;
    if (end[0] - begin[0] > 1 && !ask(end[0] - 1, end[0])) return false;
    if (!ask(begin[0] + 1, end[0] - 1)) return false;
    state = !some_ ? BlockState::kNone : all_ ? BlockState::kFull : BlockState::kPartial;
    return true;
  }

  const BlockMaskProgram& call_;
  MaskEvaluator mask_mod_, listed_, full_, safe_;
  std::vector<uint8_t> pairs_;
  bool some_ = false, all_ = false;
  std::string error_;
};

}  // namespace

std::string block_states(const Host& host, const BlockMaskProgram& call, BlockState* states) {
  const int64_t rows = call.rows(), cols = call.cols();
  const auto of_bounds = [&](const score_mod::Graph& graph) {
    // Rounding is monotone in one precision: bounds are computed in that of the values.
    return MaskProgram(graph, {call.batches, call.heads, rows, cols}, call.bounds_buffers, call.bounds_scalars,
                       score_mod::computes_in_float64(call.buffers));
  };
  const Decider::Programs programs{
      {call.mask_mod, {call.batches, call.heads, call.lengths[0], call.lengths[1]}, call.buffers, call.scalars},
      of_bounds(call.bounds.listed),
      of_bounds(call.bounds.full),
      of_bounds(call.bounds.safe)};
  std::mutex mutex;
  std::string error;
  parallel_for(host, call.batches * call.heads * rows, 1, [&](int64_t begin, int64_t end) {
    Decider decider(programs, call);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / rows;
      if (decider.row(head / call.heads, head % call.heads, i % rows, states + i * cols)) continue;
      const std::lock_guard lock(mutex);
      error = decider.error();
      return;
    }
  });
  return error;
}

void block_list(const Host& host, const BlockState* states, int64_t heads, int64_t rows, int64_t cols, bool by_column,
                BlockState state, const BlockList& list) {
  // Lists give a block's place in its line. By columns a thread has several, side by side in memory.
  const int64_t lines = by_column ? cols : rows, length = by_column ? rows : cols;
  const int64_t width = by_column ? 64 : 1, chunks = ceil_div(lines, width);
  parallel_for(host, heads * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t head = chunk / chunks, first = chunk % chunks * width, last = std::min(first + width, lines);
      const BlockState* from = states + head * rows * cols;
      const auto is_listed = [&](int64_t line, int64_t i) {
        return from[by_column ? i * cols + line : line * cols + i] == state;
      };
      int32_t* counts = list.count + head * lines;
      std::fill(counts + first, counts + last, 0);
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t line = first; line < last; ++line) counts[line] += is_listed(line, i) ? 1 : 0;
      }
      std::array<int64_t, 64> listed{}, others{};
      for (int64_t line = first; line < last; ++line) others[static_cast<size_t>(line - first)] = counts[line];
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t line = first; line < last; ++line) {
          auto& place = (is_listed(line, i) ? listed : others)[static_cast<size_t>(line - first)];
          list.index[(head * lines + line) * length + place++] = static_cast<int32_t>(i);
        }
      }
    }
  });
}

}  // namespace fusegrad::cpu
