#include "score_mod/block_bounds.h"

#include <algorithm>
#include <optional>

#include "common/recent.h"
#include "score_mod/cache.h"
#include "score_mod/ranges.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"

namespace fusegrad::score_mod {
namespace {

// Above these the bounds know nothing: kernels with them would take too long to compile.
constexpr size_t kMostNodes = 8192, kMostBuffers = 32;
// Up to kShort elements a dimension is a kRange beside any other; of longer ones only one is. Up to kFine, in a tensor
// of up to kFineElements, the parts are single elements, else kCoarse ones.
constexpr int64_t kShort = 64, kFine = 4096, kFineElements = int64_t{1} << 20, kCoarse = 64;

int64_t elements(const Buffer& buffer) {
  int64_t count = 1;
  for (const int64_t size : buffer.sizes) count *= size;
  return count;
}

class Bounds {
 public:
  Bounds(const Graph& mask, std::array<int64_t, 2> block_size, std::span<const Buffer> buffers)
      : mask_(mask), block_size_(block_size), captured_(buffers), graph_(Kind::kMaskMod), ranges_(graph_) {
    std::vector<Interval> bounds;
    for (const Buffer& b : buffers) bounds.push_back(interval_of(b.dtype));
    values_ = intervals(mask, {}, bounds);
    for (const Type type : mask.scalars()) graph_.add_scalar(type);
    unsafe_ = graph_.constant(false);
  }

  BlockBounds make() {
    queries_ = indices(Input::kQ, scalar({BoundsScalar::Content::kQueries}), block_size_[0]);
    keys_ = indices(Input::kKv, scalar({BoundsScalar::Content::kKeys}), block_size_[1]);
    std::vector<Range> found;
    for (NodeId id = 0; id < static_cast<NodeId>(mask_.nodes().size()); ++id) found.push_back(range_of(id, found));
    const Range result = found[static_cast<size_t>(mask_.result())];
    const NodeId open = both(Op::kOr, ranges_.wild(), unsafe_), held = invert(open);
    const NodeId some = result.nothing() ? graph_.constant(true) : result.high;
    const NodeId all = result.nothing() ? graph_.constant(false) : result.low;
    NodeId whole = held;
    for (const auto& [input, length, size] :
         {std::tuple(Input::kQ, 0, block_size_[0]), {Input::kKv, 1, block_size_[1]}}) {
      const NodeId end = graph_.apply(Op::kMul, {plus_one(graph_.input(input)), ranges_.integer(size)});
      whole = both(Op::kAnd, whole, graph_.apply(Op::kLe, {end, lengths_[static_cast<size_t>(length)]}));
    }
    return {with(both(Op::kOr, some, open)),
            with(both(Op::kAnd, all, whole)),
            with(invert(unsafe_)),
            buffers_,
            scalars_,
            {}};
  }

 private:
  NodeId both(Op op, NodeId a, NodeId b) { return graph_.apply(op, {a, b}); }
  NodeId invert(NodeId x) { return graph_.apply(Op::kNot, {x}); }
  NodeId plus_one(NodeId x) { return graph_.apply(Op::kAdd, {x, ranges_.integer(1)}); }
  Graph with(NodeId result) {
    Graph graph = graph_;
    graph.set_result(result);
    return simplify(graph);
  }

  NodeId scalar(const BoundsScalar& what) {
    const auto known = std::ranges::find(scalars_, what);
    const auto index = static_cast<int>(mask_.scalars().size() + static_cast<size_t>(known - scalars_.begin()));
    if (known == scalars_.end()) {
      graph_.add_scalar(Type::kInt);
      scalars_.push_back(what);
    }
    return graph_.scalar(index);
  }

  int buffer(const BoundsBuffer& what, Type type, int rank) {
    const auto known = std::ranges::find(buffers_, what);
    const auto index = static_cast<int>(known - buffers_.begin());
    if (known == buffers_.end()) {
      graph_.add_buffer(type, rank);
      buffers_.push_back(what);
    }
    return index;
  }

  // q_idx or kv_idx over a block.
  Range indices(Input input, NodeId length, int64_t size) {
    lengths_[input == Input::kQ ? 0 : 1] = length;
    const NodeId first = graph_.apply(Op::kMul, {graph_.input(input), ranges_.integer(size)});
    const NodeId last = graph_.apply(Op::kAdd, {first, ranges_.integer(size - 1)});
    const NodeId end = graph_.apply(Op::kSub, {length, ranges_.integer(1)});
    return {first, ranges_.min(last, end), {0, Lengths{}.q}};
  }

  Range range_of(NodeId id, const std::vector<Range>& found) {
    const Node& node = mask_[id];
    const auto of = [&](NodeId operand) { return found[static_cast<size_t>(operand)]; };
    switch (node.op) {
      case Op::kConstant:
        return ranges_.constant(mask_.value(id));
      case Op::kInput: {
        const auto input = static_cast<Input>(node.payload);
        if (input == Input::kQ) return queries_;
        if (input == Input::kKv) return keys_;
        return {graph_.input(input), graph_.input(input), {0, Lengths{}.b}};
      }
      case Op::kScalar: {
        const NodeId value = graph_.scalar(static_cast<int>(node.payload));
        return node.type == Type::kFloat ? ranges_.floats(value, value) : Range{value, value, {}};
      }
      case Op::kAxis:
        return {ranges_.integer(0), ranges_.integer(values_[static_cast<size_t>(id)].high),
                values_[static_cast<size_t>(id)]};
      case Op::kLoad: {
        std::vector<Range> index;
        for (const NodeId operand : node.operands) index.push_back(of(operand));
        return read(static_cast<int>(node.payload), node.type, index);
      }
      default:
        break;
    }
    if (is_reduction(node.op)) {
      return ranges_.reduce(node.op, node.type, of(node.operands[1]),
                            mask_.axes()[static_cast<size_t>(mask_[node.operands[0]].payload)]);
    }
    std::vector<Range> x;
    for (const NodeId operand : node.operands) x.push_back(of(operand));
    return ranges_.apply(node.op, mask_.type(node.operands.back()), node.type, values_[static_cast<size_t>(id)], x);
  }

  // An index within its dimension, a negative one from the end; whether all of them are there goes to unsafe_.
  Range within(const Range& index, NodeId size) {
    const NodeId last = graph_.apply(Op::kSub, {size, ranges_.integer(1)}), zero = ranges_.integer(0);
    const auto clamped = [&](NodeId i) { return graph_.apply(Op::kClamp, {i, zero, last}); };
    const auto fails = [&](Op op, NodeId i, NodeId bound) {
      unsafe_ = both(Op::kOr, unsafe_, graph_.apply(op, {i, bound}));
    };
    if (index.nothing()) {
      unsafe_ = graph_.constant(true);
      return {zero, last, {}};
    }
    fails(Op::kGe, index.high, size);
    if (index.known.low >= 0) return {clamped(index.low), clamped(index.high), index.known};
    fails(Op::kLt, index.low, graph_.apply(Op::kNeg, {size}));
    const NodeId low_below = graph_.apply(Op::kLt, {index.low, zero});
    const NodeId high_below = graph_.apply(Op::kLt, {index.high, zero});
    const auto wrapped = [&](NodeId i) { return clamped(graph_.apply(Op::kAdd, {clamp_size(i, size), size})); };
    const auto choose = [&](NodeId condition, NodeId a, NodeId b) {
      return graph_.apply(Op::kWhere, {condition, a, b});
    };
    const NodeId low = choose(high_below, wrapped(index.low), choose(low_below, zero, clamped(index.low)));
    const NodeId high = choose(high_below, wrapped(index.high), choose(low_below, last, clamped(index.high)));
    return {low, high, {0, Lengths{}.q}};
  }
  NodeId clamp_size(NodeId i, NodeId size) {
    return graph_.apply(Op::kClamp, {i, graph_.apply(Op::kNeg, {size}), size});
  }

  Range read(int source, Type type, const std::vector<Range>& index) {
    const Buffer& from = captured_[static_cast<size_t>(source)];
    const auto rank = static_cast<int>(index.size());
    std::vector<Range> at;
    for (int d = 0; d < rank; ++d)
      at.push_back(within(index[static_cast<size_t>(d)], scalar({BoundsScalar::Content::kSize, source, d})));
    const Interval known = interval_of(from.dtype);
    if (std::ranges::all_of(index, &Range::point)) {
      std::vector<NodeId> place;
      for (const Range& r : at) place.push_back(r.low);
      const NodeId value = graph_.load(buffer({BoundsBuffer::Content::kValues, source, {}, {}}, type, rank), place);
      return type == Type::kFloat ? ranges_.floats(value, value) : Range{value, value, known};
    }
    if (rank == kMaxRank) return {-1, -1, known};  // tables have a dimension more
    return extrema(table_of(source, index, at), type, known, at);
  }

  BoundsBuffer table_of(int source, const std::vector<Range>& index, const std::vector<Range>& at) {
    const Buffer& from = captured_[static_cast<size_t>(source)];
    BoundsBuffer table{BoundsBuffer::Content::kTable, source, {}, {}};
    int ranges = 0;
    bool has_long = false;
    for (size_t d = 0; d < index.size(); ++d) {
      const auto is = [&](const Range& r) { return index[d].low == r.low && index[d].high == r.high; };
      const int64_t size = from.sizes[d];
      const bool is_long = size > kShort;
      const bool room = ranges < 3 && 2 + ranges + static_cast<int>(index.size()) <= kMaxRank;
      TableAxis axis = TableAxis::kWhole;
      int64_t part = 1;
      if (at[d].point()) {
        axis = TableAxis::kEach;
      } else if (is(queries_) || is(keys_)) {
        axis = TableAxis::kPart;
        part = block_size_[is(queries_) ? 0 : 1];
      } else if (!index[d].nothing() && room && !(is_long && has_long)) {
        axis = TableAxis::kRange;
        part = is_long && (size > kFine || elements(from) > kFineElements) ? kCoarse : 1;
        has_long |= is_long;
        ++ranges;
      }
      table.axes.push_back(axis);
      table.parts.push_back(part);
    }
    return table;
  }

  Range extrema(const BoundsBuffer& table, Type type, Interval known, const std::vector<Range>& at) {
    // For each dimension, the parts at which to look; and the levels.
    std::vector<NodeId> levels;
    std::vector<std::vector<NodeId>> parts;
    for (size_t d = 0; d < at.size(); ++d) {
      const auto part_of = [&](NodeId i) {
        return table.parts[d] == 1 ? i : graph_.apply(Op::kFloorDiv, {i, ranges_.integer(table.parts[d])});
      };
      const NodeId first = part_of(at[d].low);
      if (table.axes[d] == TableAxis::kWhole) {
        parts.push_back({ranges_.integer(0)});
      } else if (table.axes[d] != TableAxis::kRange) {
        parts.push_back({first});
      } else {
        const NodeId last = part_of(at[d].high), more = graph_.apply(Op::kSub, {last, first});
        const int logarithms =
            buffer({BoundsBuffer::Content::kLogarithms, table.source, {}, {table.parts[d]}, static_cast<int>(d)},
                   Type::kInt, 1);
        const NodeId level = graph_.load(logarithms, {more});
        const NodeId length = graph_.apply(Op::kShl, {ranges_.integer(1), level});
        levels.push_back(level);
        parts.push_back({first, graph_.apply(Op::kSub, {plus_one(last), length})});
      }
    }
    const int rank = 1 + static_cast<int>(levels.size() + parts.size());
    const int from = buffer(table, type, rank);
    const auto least = [&](int64_t which) {
      NodeId result = -1;
      for (size_t corner = 0; corner < size_t{1} << levels.size(); ++corner) {
        std::vector<NodeId> place{ranges_.integer(which)};
        place.insert(place.end(), levels.begin(), levels.end());
        size_t bit = 0;
        for (const auto& choices : parts) place.push_back(choices[choices.size() == 1 ? 0 : corner >> bit++ & 1]);
        const NodeId value = graph_.load(from, place);
        result = result < 0 ? value : graph_.apply(type == Type::kBool ? Op::kAnd : Op::kMin, {result, value});
      }
      return result;
    };
    const NodeId low = least(0), high = graph_.apply(type == Type::kFloat ? Op::kNeg : Op::kNot, {least(1)});
    return type == Type::kFloat ? ranges_.floats(low, high) : Range{low, high, known};
  }

  const Graph& mask_;
  const std::array<int64_t, 2> block_size_;
  const std::span<const Buffer> captured_;
  std::vector<Interval> values_;  // of the mask_mod's nodes
  Graph graph_;
  Ranges ranges_;
  Range queries_, keys_;
  std::array<NodeId, 2> lengths_{};
  NodeId unsafe_;
  std::vector<BoundsBuffer> buffers_;
  std::vector<BoundsScalar> scalars_;
};

BlockBounds nothing_known(const Graph& mask) {
  const auto always = [&](bool value) {
    Graph graph(Kind::kMaskMod);
    for (const Type type : mask.scalars()) graph.add_scalar(type);
    graph.set_result(graph.constant(value));
    return graph;
  };
  return {always(true), always(false), always(false), {}, {}, {}};
}

// What the bounds depend on besides the text: sizes by the thresholds alone.
std::string key_of(std::string_view text, std::array<int64_t, 2> block_size, std::span<const Buffer> buffers) {
  std::string key(text);
  key.push_back('\0');
  key += std::to_string(block_size[0]) + "," + std::to_string(block_size[1]);
  for (const Buffer& b : buffers) {
    ((key += ' ') += static_cast<char>('a' + static_cast<int>(b.dtype))) += elements(b) == 0              ? '0'
                                                                            : elements(b) > kFineElements ? '+'
                                                                                                          : '-';
    for (const int64_t size : b.sizes) key += size > kFine ? 'l' : size > kShort ? 'm' : 's';
  }
  return key;
}

}  // namespace

BlockBounds block_bounds(const Graph& mask_mod, std::array<int64_t, 2> block_size, std::span<const Buffer> buffers) {
  const auto made = [&]() -> std::optional<BlockBounds> {
    if (std::ranges::any_of(buffers, [](const Buffer& b) { return elements(b) == 0; })) return {};
    if (mask_mod.scalars().size() + 2 + kMaxRank * buffers.size() > kMaxScalars) return {};
    if (buffers.size() > kMostBuffers || mask_mod.nodes().size() > kMostNodes / 8) return {};
    BlockBounds bounds = Bounds(mask_mod, block_size, buffers).make();
    if (bounds.listed.nodes().size() + bounds.full.nodes().size() > kMostNodes) return {};
    if (bounds.buffers.size() > kMostBuffers) return {};
    return bounds;
  }();
  BlockBounds bounds = made ? *made : nothing_known(mask_mod);
  bounds.text = print(bounds.listed) + print(bounds.full) + print(bounds.safe);
  return bounds;
}

std::shared_ptr<const BlockBounds> cached_block_bounds(std::string_view text, std::array<int64_t, 2> block_size,
                                                       std::span<const Buffer> buffers) {
  auto& known = of_this_process<Recent<std::string, BlockBounds, 64>>();
  return known.get(key_of(text, block_size, buffers),
                   [&] { return block_bounds(*cached_graph(text), block_size, buffers); });
}

}  // namespace fusegrad::score_mod
