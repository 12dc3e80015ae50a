#include "cuda/attention/plan/run.h"

#include <algorithm>
#include <limits>

#include "common/error.h"
#include "cuda/attention/captured/convert.h"
#include "cuda/attention/captured/places.h"
#include "cuda/attention/plan/program.h"
#include "cuda/attention/plan/steps.h"
#include "score_mod/pair_reads.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {
namespace {

device::TensorMap encoded(const void* data, const jit::TensorMapShape& shape) {
  return std::bit_cast<device::TensorMap>(
      jit::Driver::get().tensor_map(data, shape, "flex_attention's Hopper kernels"));
}

unsigned next_number() {
  static std::atomic<unsigned> runs = 0;
  return ++runs;
}

std::vector<int64_t> words_of(const std::shared_ptr<const score_mod::Graph>& graph,
                              std::span<const score_mod::Buffer> buffers, std::span<const score_mod::Value> scalars) {
  if (graph == nullptr) return {0};
  return score_mod::pack_captured(*graph, buffers, scalars);
}

}  // namespace

device::FlexTensor tensor_of(const TensorView& t) {
  if (t.data == nullptr) return {};
  return {t.data, t.sizes[0] == 1 ? 0 : t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
}

device::FlexDropout dropout_of(const FlexArguments& call) {
  static_assert(sizeof(long long) == sizeof(int64_t));
  const FlexDropoutRule rule(call.dropout_p);
  device::FlexDropout dropout{.seed = reinterpret_cast<const long long*>(call.dropout_seed_data),
                              .above = {},
                              .rest = static_cast<unsigned>(rule.threshold),
                              .scale = static_cast<float>(rule.scale)};
  for (int i = 0; i < 8; ++i) dropout.above[i] = (rule.threshold >> (39 - i) & 1) != 0 ? 0 : ~0u;
  return dropout;
}

TensorView columns_of(const TensorView& t, int64_t first, int64_t count) {
  if (t.data == nullptr) return t;
  TensorView part = t;
  part.data = static_cast<std::byte*>(t.data) + first * t.strides[3] * element_bytes(t.dtype);
  part.sizes[3] = count;
  return part;
}

FlexRowsCopy rows_copy(const TensorView& from, const TensorView& to) {
  FlexRowsCopy copy{from.data, to.data, 4, {}, {}, {}};
  std::copy(from.sizes.begin(), from.sizes.end(), copy.sizes.begin());
  std::copy(from.strides.begin(), from.strides.end(), copy.from_strides.begin());
  std::copy(to.strides.begin(), to.strides.end(), copy.to_strides.begin());
  return copy;
}

device::TensorMap boxes_of(const TensorView& t, int rows, int cols) {
  if (t.data == nullptr) return {};
  return encoded(t.data, box_map(t.dtype, {t.sizes, t.strides}, rows, cols));
}

device::TensorMap rows_map(const void* rows, int64_t count, int box) { return encoded(rows, row_map(count, box)); }

PlanRun::PlanRun(const CallPlan& plan, const FlexArguments& of, void* scratch, CUstream_st* stream)
    : plan_(plan),
      of_(of),
      scratch_(static_cast<std::byte*>(scratch)),
      stream_(stream),
      number_(next_number()),
      query_(operand(kQuery, of.query)),
      key_(operand(kKey, of.key)),
      value_(operand(kValue, of.value)),
      buffers_(of.score_mod.buffers.begin(), of.score_mod.buffers.end()) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (plan.buffers[i] == kNoRegion) continue;
    buffers_[i].data = at(plan.buffers[i]);
    if (plan.places[i]) buffers_[i].dtype = plan.places[i]->dtype;
    buffers_[i].strides = plan.box_strides[i];
  }
  score_words_ = words_of(plan.score_mod, buffers_, of.score_mod.scalars);
  mask_words_ = words_of(plan.mask_mod, of.mask_mod.buffers, of.mask_mod.scalars);
}

TensorView PlanRun::operand(FlexOperand operand, const TensorView& given) const {
  const Region region = plan_.operands[operand];
  if (region == kNoRegion) return given;
  return {at(region), given.dtype, given.sizes, aligned_strides(given.sizes, given.dtype)};
}

void PlanRun::copy_operand(FlexOperand which, const TensorView& given) const {
  flex_copy_into_rows(rows_copy(given, operand(which, given)), element_bytes(given.dtype), stream_);
}

void PlanRun::copy_buffer(size_t i) const {
  const score_mod::Buffer& from = of_.score_mod.buffers[i];
  BoxCopy(from.sizes, from.strides, element_bytes(from.dtype)).run(from.data, at(plan_.buffers[i]), stream_);
}

void PlanRun::copy_places() const {
  std::vector<FlexPlaces> copies;
  for (size_t i = 0; i < plan_.places.size(); ++i) {
    if (!plan_.places[i]) continue;
    const score_mod::Buffer& from = of_.score_mod.buffers[i];
    const auto& [dtype, most, order] = *plan_.places[i];
    FlexPlaces& copy = copies.emplace_back(from.data, at(plan_.buffers[i]), from.dtype, element_bytes(dtype), most,
                                           order, static_cast<int>(from.sizes.size()));
    for (size_t d = 0; d < from.sizes.size(); ++d) {
      copy.to_strides[d] = plan_.box_strides[i][d];
      copy.from_strides[d] = from.strides[d];
      copy.sizes[d] = copied_size(from.sizes, from.strides, d);
    }
  }
  flex_copy_places(copies, stream_);
}

device::FlexTiles PlanRun::all_tiles() const {
  device::FlexTiles t{};
  if (!plan_.mask) return t;
  const BlockMaskShape& mask = *plan_.mask;
  t.batches = static_cast<int>(mask.batches);
  t.heads = static_cast<int>(mask.heads);
  t.block_rows = static_cast<int>(mask.rows);
  t.block_cols = static_cast<int>(mask.cols);
  // Blocks may be larger than any length, which is an int.
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  t.block_size_q = static_cast<int>(std::min(mask.block_size[0], kMost));
  t.block_size_kv = static_cast<int>(std::min(mask.block_size[1], kMost));
  return t;
}

device::FlexTiles PlanRun::tiles(const Program& program) const {
  const auto& lists = program.launch.lists;
  if (!lists) return {};
  device::FlexTiles t = all_tiles();
  t.rows = static_cast<int>(lists->rows);
  t.cols = static_cast<int>(lists->cols);
  t.count = at<int>(program.count);
  t.list = at<int>(program.list);
  if (!lists->direct) t.blocks = at<uint8_t>(plan_.states);
  return t;
}

int* PlanRun::next(const Program& program) const {
  const auto& lists = program.launch.lists;
  if (!lists) return nullptr;
  return at<int>(program.count) + plan_.mask->batches * plan_.mask->heads * lists->rows;
}

namespace {

FlexBlockMap map_of(const BlockLists& lists, const BlockMaskShape& mask, bool distinguish) {
  return {.partial = {lists.partial.count, lists.partial.index},
          .full = {lists.full.count, lists.full.index},
          .batches = static_cast<int>(mask.batches),
          .heads = static_cast<int>(mask.heads),
          .rows = static_cast<int>(mask.rows),
          .cols = static_cast<int>(mask.cols),
          .list_cols_partial = static_cast<int>(mask.partial_cols),
          .list_cols_full = static_cast<int>(mask.full_cols),
          .distinguish = distinguish};
}

}  // namespace

void PlanRun::make_states() const {
  flex_block_map(map_of(of_.block_mask, *plan_.mask, plan_.mask_mod != nullptr), at<uint8_t>(plan_.states), stream_);
}

void PlanRun::make_lists(const Program& program) const {
  const TileListPlan& plan = *program.launch.lists;
  const device::FlexTiles t = tiles(program);
  const FlexTileLists lists{static_cast<int>(plan_.shape.queries),
                            static_cast<int>(plan_.shape.keys),
                            plan.tile_q,
                            plan.tile_kv,
                            plan.by_key,
                            plan.parts,
                            next(program)};
  if (plan.direct) {
    flex_direct_lists(t, lists, map_of(of_.block_mask, *plan_.mask, plan_.mask_mod != nullptr), at<int>(program.count),
                      at<int>(program.list), stream_);
  } else {
    flex_tile_lists(t, lists, at<int>(program.count), at<int>(program.list), stream_);
  }
}

void PlanRun::take_maps(const FlexTile& tile, device::TensorMap (&maps)[device::kMostBoxMaps]) const {
  if (tile.maps() == 0) return;
  const score_mod::Graph& graph = *plan_.score_mod;
  const auto& dtypes = plan_.common.score_mod.dtypes;
  const auto reads = score_mod::mapped_reads(graph, dtypes);
  for (size_t i = 0; i < static_cast<size_t>(tile.maps()); ++i) {
    const score_mod::NodeId load = reads[i];
    const auto dimensions = *score_mod::box_dimensions(graph, load, dtypes);
    const score_mod::Buffer& buffer = buffers_[static_cast<size_t>(graph[load].payload)];
    FlexBoxes boxes;
    size_t to = 0;
    for (const int d : {dimensions.batch, dimensions.h, dimensions.q, dimensions.q + 1}) {
      boxes.sizes[to] = d < 0 ? 1 : buffer.sizes[static_cast<size_t>(d)];
      boxes.strides[to++] = d < 0 ? 0 : buffer.strides[static_cast<size_t>(d)];
    }
    // A dimension of size 0 has no place 0 to be read: the tensor has no elements.
    if (std::find(buffer.sizes.begin(), buffer.sizes.end(), 0) != buffer.sizes.end()) boxes.sizes[2] = 0;
    const DType dtype = buffer.dtype == score_mod::DType::kFloat32   ? DType::kFloat32
                        : buffer.dtype == score_mod::DType::kFloat16 ? DType::kFloat16
                                                                     : DType::kBFloat16;
    auto shape = box_map(dtype, boxes, tile.rows, 128 / element_bytes(dtype));
    shape.beyond = CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
    maps[i] = encoded(buffer.data, shape);
  }
}

device::FlexForwardHopperArguments PlanRun::hopper_forward(const Program& program, const TensorView& value) const {
  const FlexTile& tile = program.launch.spec.tile();
  device::FlexForwardHopperArguments more{boxes_of(query_, tile.rows), boxes_of(key_, tile.cols),
                                          boxes_of(value, tile.cols),  next(program),
                                          program.launch.section,      {}};
  take_maps(tile, more.boxes);
  return more;
}

const jit::Kernel& PlanRun::kernel(const Program& program, const std::function<void()>& ahead) const {
  const jit::Kernel* known = program.kernel.load(std::memory_order_acquire);
  if (known != nullptr) return *known;
  const jit::Kernel& kernel = jit::kernel(program.id, [&](const std::string& architecture) {
    if (ahead) ahead();
    return flex_program(program.launch.spec, architecture);
  });
  program.kernel.store(&kernel, std::memory_order_release);
  return kernel;
}

void PlanRun::launch(const Program& program, void* arguments, const std::vector<void*>& more,
                     const std::function<void()>& ahead) const {
  const KernelFacts& facts = program.launch.spec.facts();
  jit::Launch how;
  how.grid[0] = static_cast<unsigned>(program.launch.ctas);
  how.block[0] = static_cast<unsigned>(facts.threads());
  how.shared_bytes = facts.shared_bytes;
  how.stream = stream_;
  // Its first steps go on beside the kernel that makes its lists of tiles; of few queries, beside any.
  const bool hopper_forward =
      facts.hopper() && ((facts.kernel == FlexKernel::kForward && facts.blocks) ||
                         (facts.kernel == FlexKernel::kSegments && (facts.blocks || facts.key_splits)));
  const bool any = facts.few() || facts.kernel == FlexKernel::kMergeSegments;
  how.programmatic = hopper_forward || (any && std::stoi(Gpu::current().architecture) >= 90);
  std::vector<void*> all{arguments, score_words_.data(), mask_words_.data()};
  all.insert(all.end(), more.begin(), more.end());
  const jit::Kernel& compiled = kernel(program, ahead);
  if (flex_shared_limit_is_forced()) {
    how.shared_bytes = flex_launched_bytes(facts.shared_bytes, std::stoi(Gpu::current().architecture));
    compiled.allow_shared(how.shared_bytes);
  }
  compiled.launch(how, all.data());
}

void fill_scratch(const Scratch& scratch, void* memory, CUstream_st* stream) {
  if (!scratch.checked()) return flex_fill_zeros(memory, scratch.zero_bytes(), stream);
  // What nobody wrote is NaN, too.
  flex_fill_ones(memory, scratch.bytes(), stream);
  for (const Scratch::Part& part : scratch.parts()) {
    if (part.zeros) flex_fill_zeros(static_cast<std::byte*>(memory) + part.offset, part.bytes, stream);
  }
}

void check_scratch(const Scratch& scratch, const void* memory, const std::string& step, CUstream_st* stream) {
  for (const Scratch::Part& part : scratch.parts()) {
    const auto gap =
        flex_read(static_cast<const std::byte*>(memory) + part.offset + part.bytes, part.room - part.bytes, stream);
    const auto written = std::find_if(gap.begin(), gap.end(), [](std::byte b) { return b != std::byte{0xff}; });
    FUSEGRAD_CHECK(RuntimeError, written == gap.end(), "flex_attention: ", step, " must not write behind '", part.name,
                   "', a region of ", part.bytes, " bytes of its scratch memory, but wrote byte ",
                   written - gap.begin(), " behind it");
  }
}

}  // namespace fusegrad::cuda
