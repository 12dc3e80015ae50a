// Part of fusegrad._C: which blocks a mask_mod lists, for front ends without an op of their own for it.
#include "attention/block_states.h"
#include "pytorch/bindings/score_mod.h"
#include "score_mod/cache.h"
#include "score_mod/index_analysis.h"
#include "score_mod/text.h"

namespace py = fusegrad::python;

namespace fusegrad::score_mod {
namespace {

using Sizes = std::vector<int64_t>;
/// (address, (dtype, sizes)), dense.
using Given = std::pair<int64_t, std::pair<std::string, Sizes>>;

/// Views of what was given, which must outlive them.
class Buffers {
 public:
  explicit Buffers(const std::vector<Given>& given) : strides_(given.size()) {
    for (size_t i = 0; i < given.size(); ++i) {
      const auto& [address, of] = given[i];
      strides_[i].assign(of.second.size(), 1);
      for (size_t d = of.second.size(); d-- > 1;) strides_[i][d - 1] = strides_[i][d] * of.second[d];
      const auto* data = reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
      buffers_.push_back({data, dtype_named(of.first), of.second, strides_[i]});
    }
  }
  operator std::span<const Buffer>() const { return buffers_; }

 private:
  std::vector<Sizes> strides_;
  std::vector<Buffer> buffers_;
};

// What the bounds read, [(what it holds, the buffer that it is made of, how each index is taken, elements of a part,
// dimension)]; the texts of which blocks are listed and which are full; their scalars, [(what it is, buffer,
// dimension)].
auto bounds(const std::string& text, std::array<int64_t, 2> block, const std::vector<Given>& given) {
  constexpr const char* kContents[] = {"values", "table", "logarithms"};
  constexpr const char* kAxes[] = {"each", "part", "range", "whole"};
  constexpr const char* kScalars[] = {"queries", "keys", "size"};
  const Buffers buffers(given);
  const auto made = cached_block_bounds(text, block, buffers);
  std::vector<std::tuple<std::string, int, std::vector<std::string>, Sizes, int>> rows;
  for (const BoundsBuffer& b : made->buffers) {
    std::vector<std::string> axes;
    for (const TableAxis axis : b.axes) axes.emplace_back(kAxes[static_cast<int>(axis)]);
    rows.emplace_back(kContents[static_cast<int>(b.content)], b.source, axes, b.parts, b.dimension);
  }
  std::vector<std::tuple<std::string, int, int>> scalars;
  for (const BoundsScalar& s : made->scalars)
    scalars.emplace_back(kScalars[static_cast<int>(s.content)], s.buffer, s.dimension);
  return std::make_tuple(rows, std::vector<std::string>{print(made->listed), print(made->full)}, scalars);
}

// On this thread alone.
constexpr cpu::Host kHost = {
    [](void* /*context*/, int64_t count, int64_t /*grain*/, void (*body)(void*, int64_t, int64_t), void* closure) {
      if (count > 0) body(closure, 0, count);
    },
    [](void* /*context*/) { return int64_t{1}; }, nullptr};

// (batches, heads, the states of [batches, heads, rows, columns]); 1 of what the mask_mod does not ask.
auto states(const std::string& text, std::array<int64_t, 2> block, std::array<int64_t, 4> sizes,
            const std::vector<Given>& given, const std::vector<Given>& given_bounds) {
  const Buffers buffers(given), of_bounds(given_bounds);
  const auto graph = cached_graph(text);
  check_captured(*graph, buffers, {});
  const auto bounds = cached_block_bounds(text, block, buffers);
  std::vector<Value> scalars;
  for (const BoundsScalar& s : bounds->scalars) {
    const bool size = s.content == BoundsScalar::Content::kSize;
    const int64_t value = size ? given[static_cast<size_t>(s.buffer)].second.second[static_cast<size_t>(s.dimension)]
                               : sizes[s.content == BoundsScalar::Content::kQueries ? 2 : 3];
    scalars.push_back({Type::kInt, 0, value});
  }
  check_captured(bounds->listed, of_bounds, scalars);
  const auto on = dependences(*graph)[static_cast<size_t>(graph->result())].on();
  BlockMaskProgram program{*graph, *bounds, buffers, of_bounds, {}, scalars, block, {sizes[2], sizes[3]}};
  if ((on & set_of(kVarB)) != 0) program.batches = sizes[0];
  if ((on & set_of(kVarH)) != 0) program.heads = sizes[1];
  std::string found(static_cast<size_t>(program.batches * program.heads * program.rows() * program.cols()), '\0');
  std::string error;
  {
    const py::Released released;
    error = cpu::block_states(kHost, program, reinterpret_cast<BlockState*>(found.data()));
  }
  if (!error.empty()) throw std::out_of_range(error);
  return std::make_tuple(program.batches, program.heads, py::Bytes{found});
}

}  // namespace

void bind_blocks(py::Module m) {
  m.def("block_bounds", &bounds, py::arg("text"), py::arg("block"), py::arg("buffers"),
        "The bounds of a mask_mod, see csrc/score_mod/block_bounds.h: what they read, the texts of which blocks are "
        "listed and which are full, and their scalars. buffers: [(address, (dtype, sizes))].");
  m.def("block_states", &states, py::arg("text"), py::arg("block"), py::arg("sizes"), py::arg("buffers"),
        py::arg("bounds"),
        "(batches, heads, states) of the blocks: 0 of none, 1 of some, 2 of all pairs; IndexError of a read out of "
        "range. bounds: what block_bounds names.");
}

}  // namespace fusegrad::score_mod
