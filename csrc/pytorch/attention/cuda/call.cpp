#include "pytorch/attention/cuda/call.h"

#include <ATen/Context.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <set>

#include "attention/flex_attention.h"
#include "cuda/attention/backward/backward.h"
#include "cuda/attention/forward/few_queries.h"
#include "cuda/attention/forward/forward.h"
#include "cuda/attention/plan/program.h"
#include "jit/compile.h"
#include "pytorch/attention/cuda/aligned_rows.h"
#include "pytorch/gpu.h"
#include "pytorch/rows/job.h"
#include "pytorch/score_mod/tensors.h"
#include "score_mod/cache.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {

using at::Tensor;
using device::FlexTensor;

namespace {

int as_int(int64_t n) {
  TORCH_CHECK_VALUE(n <= INT32_MAX / 2, "flex_attention: lengths and heads must be below 2^30, but got ", n);
  return static_cast<int>(n);
}

std::vector<int64_t> prepare(FlexMod& mod, const ScoreMod& from, const std::vector<Tensor>& buffers) {
  if (from.text.empty()) return {0};
  mod.text = from.text;
  mod.dtypes.clear();
  const score_mod::CapturedTensors captured(buffers, from.scalars);
  for (const auto& b : captured.buffers()) mod.dtypes.push_back(b.dtype);
  mod.small_buffers = score_mod::small_buffers(captured.buffers());
  mod.small_scalars = score_mod::small_scalars(captured.scalars());
  return score_mod::pack_captured(*score_mod::cached_graph(from.text), captured.buffers(), captured.scalars());
}

// Of the buffers that boxes read (score_mod::box_bytes), those whose rows do not lie together or do not begin at
// multiples of 16 bytes.
std::set<size_t> boxes_elsewhere(const FlexMod& mod, const std::vector<Tensor>& buffers) {
  std::set<size_t> found;
  if (mod.dtypes.empty()) return found;
  const auto graph = score_mod::cached_graph(mod.text);
  for (const score_mod::NodeId load : score_mod::pair_reads(*graph)) {
    const auto buffer = static_cast<size_t>((*graph)[load].payload);
    if (score_mod::box_bytes(*graph, load, mod.dtypes) != 0 && !has_box_rows(buffers.at(buffer))) found.insert(buffer);
  }
  return found;
}

device::TensorMap encoded(const Tensor& t, const jit::TensorMapShape& shape) {
  return std::bit_cast<device::TensorMap>(
      jit::Driver::get().tensor_map(t.const_data_ptr(), shape, "flex_attention's Hopper kernels"));
}

device::TensorMap boxes_of(const Tensor& t, int rows, int cols = 64) {
  FlexBoxes boxes;
  for (size_t d = 0; d < 4; ++d) {
    boxes.sizes[d] = t.size(static_cast<int64_t>(d));
    boxes.strides[d] = t.stride(static_cast<int64_t>(d));
  }
  return encoded(t, box_map(to_dtype(t.scalar_type()), boxes, rows, cols));
}

// Tensor maps of the first reads of pairs whose boxes are a tensor's as they lie (score_mod::box_dimensions).
void take_maps(const FlexMod& mod, const std::vector<Tensor>& buffers, const FlexTileSize& tile,
               device::TensorMap (&maps)[device::kMostBoxMaps]) {
  const auto graph = score_mod::cached_graph(mod.text);
  const auto reads = score_mod::mapped_reads(*graph, mod.dtypes);
  for (size_t i = 0; i < static_cast<size_t>(tile.maps); ++i) {
    const score_mod::NodeId load = reads[i];
    const int dimensions = score_mod::box_dimensions(*graph, load, mod.dtypes);
    const Tensor& t = buffers.at(static_cast<size_t>((*graph)[load].payload));
    FlexBoxes boxes;
    int64_t d = 0;
    for (size_t to = 0; to < 4; ++to) {
      const bool there = to >= 2 || (dimensions >> to & 1) != 0;
      boxes.sizes[to] = there ? t.size(d) : 1;
      boxes.strides[to] = there ? t.stride(d++) : 0;
    }
    auto shape = box_map(t.scalar_type() == at::kHalf ? DType::kFloat16 : DType::kBFloat16, boxes, tile.rows, 64);
    shape.beyond = CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
    maps[i] = encoded(t, shape);
  }
}

}  // namespace

FlexTensor view(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return {};
  return {const_cast<void*>(t.const_data_ptr()), t.size(0) == 1 ? 0 : t.stride(0), t.stride(1), t.stride(2),
          t.stride(3)};
}

device::FlexDropout dropout_of(const Tensor& seed, double p) {
  static_assert(sizeof(long long) == sizeof(int64_t));
  const FlexDropoutRule rule(p);
  device::FlexDropout dropout{.seed = reinterpret_cast<const long long*>(seed.const_data_ptr<int64_t>()),
                              .above = {},
                              .rest = static_cast<unsigned>(rule.threshold),
                              .scale = static_cast<float>(rule.scale)};
  for (int i = 0; i < 8; ++i) dropout.above[i] = (rule.threshold >> (39 - i) & 1) != 0 ? 0 : ~0u;
  return dropout;
}

FlexCall::FlexCall(const Tensor& query, const Tensor& key, const Tensor& value, const FlexScores& scores)
    : query_(with_aligned_rows(query)),
      key_(with_aligned_rows(key)),
      value_(with_aligned_rows(value)),
      scores_(scores),
      score_buffers_(scores.score_mod.buffers),
      stream_(gpu::current_stream()) {
  for (const int64_t n : {query.size(0) * query.size(1), query.size(2), key.size(2)}) {
    common_.small_lengths &= as_int(n) <= kSmallLength;
  }
  shape_ = {query.size(0), query.size(1), query.size(2), key.size(0),
            key.size(1),   key.size(2),   query.size(3), value.size(3)};
  common_.dtype = to_dtype(query.scalar_type());
  common_.head_size = as_int(query.size(3));
  common_.value_size = as_int(value.size(3));
  // Lengths that decide no tile leave the program as it is.
  if (common_.dtype != DType::kFloat32) {
    common_.most_queries = most_of(shape_.queries);
    common_.most_keys = most_of(shape_.keys);
  }
  common_.split = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) !=
                  at::Float32Precision::TF32;
  take_scores();
  mask_words_ = prepare(common_.mask_mod, scores.mask_mod, scores.mask_mod.buffers);
  for (const auto& b : scores.score_mod.buffers) common_.sizes.push_back(b.sizes().vec());
  common_.blocks = !scores.kv_blocks.empty();
  constexpr int64_t kManyBatches = 8;
  common_.many_batches = common_.most_queries == 64 && common_.most_keys == 64 && shape_.batches >= kManyBatches &&
                         shape_.key_batches == shape_.batches && shape_.group() == 1;
  common_.block_size = scores.block_size;
  common_.dropout = scores.dropout_seed.defined();
  if (common_.blocks) take_blocks();
}

void FlexCall::take_scores() {
  score_words_ = prepare(common_.score_mod, scores_.score_mod, score_buffers_);
  common_.aligned_boxes = boxes_elsewhere(common_.score_mod, score_buffers_).empty();
}

void FlexCall::align_boxes() {
  if (common_.aligned_boxes) return;
  // Blocks may leave out most pairs, of whose elements copies would be in vain.
  constexpr int64_t kReadsWithBlocks = 8;
  const int64_t pairs = shape_.query_heads() * shape_.queries * shape_.keys;
  const int64_t most = common_.blocks ? pairs / kReadsWithBlocks : pairs;
  const auto elsewhere = boxes_elsewhere(common_.score_mod, score_buffers_);
  const bool pays = std::all_of(elsewhere.begin(), elsewhere.end(), [&](size_t i) {
    const Tensor& t = score_buffers_[i];
    return t.numel() > 0 && t.stride(t.dim() - 1) != 0 && without_expanded(t).numel() <= most;
  });
  if (!pays) return;
  for (const size_t i : elsewhere) score_buffers_[i] = with_box_rows(score_buffers_[i], stream_);
  take_scores();
}

int FlexCall::few_rows(bool max_scores) const {
  FlexCase c = common_;
  c.kernel = FlexKernel::kForward;
  c.max_scores = max_scores;
  return few_query_rows(c, shape_, mask_, jit::current_architecture());
}

bool FlexCall::key_splits() const { return pays_key_splits(shape_, gpu::multiprocessors()); }

double FlexCall::share_of_pairs() const {
  // What a mask_mod reads, or blocks without one, are not known here.
  if (!common_.blocks || common_.mask_mod.text.empty() || !common_.mask_mod.dtypes.empty()) return 1.0;
  const score_mod::CapturedTensors captured({}, scores_.mask_mod.scalars);
  return score_mod::share_of_pairs(*score_mod::cached_graph(common_.mask_mod.text), captured.scalars(), shape_.queries,
                                   shape_.keys);
}

bool FlexCall::pays_tall() const {
  return cuda::pays_tall(common_, shape_, mask_, [&] { return share_of_pairs(); }, jit::current_architecture());
}
bool FlexCall::pays_whole(const FlexCase& c) const {
  return cuda::pays_whole(c, shape_, gpu::multiprocessors(), [&] { return share_of_pairs(); });
}
int FlexCall::forward_rows(const FlexCase& c) const {
  return cuda::forward_rows(c, shape_, gpu::multiprocessors(), [&] { return share_of_pairs(); });
}

LaunchPlan FlexCall::plan(const FlexCase& c, int64_t launches) const {
  return plan_launch(plan_kernel(c, jit::current_architecture()), shape_, mask_, gpu::multiprocessors(), launches);
}

FlexCall::Lists FlexCall::lists(const LaunchPlan& plan) {
  if (!plan.lists) return {};
  Lists made{tiles_};
  device::FlexTiles& t = made.tiles;
  t.rows = as_int(plan.lists->rows);
  t.cols = as_int(plan.lists->cols);
  const auto options = query_.options().dtype(at::kInt);
  const int64_t rows = int64_t{t.batches} * t.heads * t.rows;
  const Tensor count = at::empty({rows + 1}, options);
  const Tensor list = at::empty({t.batches, t.heads, t.rows, t.cols}, options);
  t.count = count.mutable_data_ptr<int>();
  t.list = list.mutable_data_ptr<int>();
  made.next = count.mutable_data_ptr<int>() + rows;
  const FlexTileLists lists{as_int(shape_.queries), as_int(shape_.keys), plan.lists->tile_q, plan.lists->tile_kv,
                            plan.lists->by_key,     plan.lists->parts,   made.next};
  if (plan.lists->direct) {
    flex_direct_lists(t, lists, map_, count.mutable_data_ptr<int>(), list.mutable_data_ptr<int>(), stream_);
  } else {
    t.blocks = states_of_blocks();
    flex_tile_lists(t, lists, count.mutable_data_ptr<int>(), list.mutable_data_ptr<int>(), stream_);
  }
  kept_.insert(kept_.end(), {count, list});
  return made;
}

device::FlexForwardFewArguments FlexCall::few_forward(const LaunchPlan& plan) const {
  const int keys = plan.spec.tile().cols / plan.spec.tile().warps;
  return {boxes_of(key_, keys), boxes_of(value_, keys)};
}

device::FlexForwardHopperArguments FlexCall::hopper_forward(const LaunchPlan& plan, const Lists& lists) const {
  const FlexTileSize& tile = plan.spec.tile();
  device::FlexForwardHopperArguments more{boxes_of(query_, tile.rows),
                                          boxes_of(key_, tile.cols),
                                          boxes_of(value_, tile.cols),
                                          lists.next,
                                          plan.section,
                                          {}};
  if (tile.maps > 0) take_maps(common_.score_mod, score_buffers_, tile, more.boxes);
  return more;
}

device::FlexBackwardHopperArguments FlexCall::hopper_backward(const LaunchPlan& plan, const Lists& lists,
                                                              const Tensor& grad_out, const Tensor& rows,
                                                              const Tensor& grad_query, const Tensor& grad_key,
                                                              const Tensor& grad_value,
                                                              const Tensor& grad_scores) const {
  const FlexTileSize& tile = plan.spec.tile();
  const int cols = plan.spec.facts().narrow ? 32 : 64;
  const auto boxes_of_gradient = [&](const Tensor& t) {
    return plan.spec.facts().stores_boxes && t.numel() > 0 ? boxes_of(t, 64, cols) : device::TensorMap{};
  };
  const int sum_rows = tile.rows / (plan.spec.facts().head <= 64 ? plan.spec.facts().groups : 1);
  device::FlexBackwardHopperArguments more{
      boxes_of(query_, tile.rows, cols),
      boxes_of(key_, tile.cols, cols),
      boxes_of(value_, tile.cols, cols),
      boxes_of(grad_out, tile.rows, cols),
      grad_query.defined() ? boxes_of(grad_query, sum_rows, cols) : device::TensorMap{},
      boxes_of_gradient(grad_key),
      boxes_of_gradient(grad_value),
      grad_scores.defined() && grad_scores.numel() > 0 ? boxes_of(grad_scores, tile.rows) : device::TensorMap{},
      encoded(rows, row_map(rows.size(0), tile.rows)),
      lists.next,
      plan.section,
      0,
      as_int(shape_.key_batches * shape_.key_heads / plan.launches),
      {},
      nullptr,
      nullptr};
  if (tile.maps > 0) take_maps(common_.score_mod, score_buffers_, tile, more.boxes);
  return more;
}

device::FlexTangentsHopperArguments FlexCall::hopper_tangents(const LaunchPlan& plan, const Lists& lists,
                                                              const Tensor& query, const Tensor& key,
                                                              const Tensor& value) const {
  const FlexTileSize& tile = plan.spec.tile();
  const auto of = [](const Tensor& t, int rows) { return t.defined() ? boxes_of(t, rows) : device::TensorMap{}; };
  const auto operands = hopper_forward(plan, lists);
  return {operands.query,     operands.key,         operands.value, of(query, tile.rows),
          of(key, tile.cols), of(value, tile.cols), lists.next,     plan.section};
}

const jit::Kernel& FlexCall::kernel(const KernelSpec& spec,
                                    const std::function<void(const std::string&)>& ahead) const {
  return jit::kernel(spec.key(), [&](const std::string& architecture) {
    if (ahead) ahead(architecture);
    return flex_program(spec, architecture);
  });
}

void FlexCall::launch(const LaunchPlan& plan, void* arguments, const std::vector<void*>& more,
                      const std::function<void(const std::string&)>& ahead) {
  const jit::Kernel& kernel = this->kernel(plan.spec, ahead);
  const KernelFacts& facts = plan.spec.facts();
  jit::Launch how;
  how.grid[0] = static_cast<unsigned>(plan.ctas);
  how.block[0] = static_cast<unsigned>(facts.threads());
  how.shared_bytes = facts.shared_bytes;
  how.stream = stream_;
  // Its first steps go on beside the kernel that makes its lists of tiles; of few queries, beside any.
  how.programmatic = facts.few() ? std::stoi(jit::current_architecture()) >= 90
                                 : facts.blocks && facts.kernel == FlexKernel::kForward && facts.hopper();
  std::vector<void*> all{arguments, score_words_.data(), mask_words_.data()};
  all.insert(all.end(), more.begin(), more.end());
  kernel.launch(how, all.data());
}

// The block mask, its lists as kernels read them.
void FlexCall::take_blocks() {
  for (const Tensor& t : scores_.kv_blocks) lists_.push_back(t.to(at::kInt).contiguous());
  map_.partial = {lists_[0].const_data_ptr<int>(), lists_[1].const_data_ptr<int>()};
  if (lists_.size() > 2) map_.full = {lists_[2].const_data_ptr<int>(), lists_[3].const_data_ptr<int>()};
  map_.batches = tiles_.batches = as_int(lists_[0].size(0));
  map_.heads = tiles_.heads = as_int(lists_[0].size(1));
  map_.rows = tiles_.block_rows = as_int(tiles_in(query_.size(2), scores_.block_size[0]));
  map_.cols = tiles_.block_cols = as_int(tiles_in(key_.size(2), scores_.block_size[1]));
  map_.list_cols_partial = as_int(lists_[1].size(3));
  map_.list_cols_full = lists_.size() > 2 ? as_int(lists_[3].size(3)) : 0;
  map_.distinguish = !common_.mask_mod.text.empty();
  mask_ =
      BlockMaskShape{scores_.block_size, map_.rows, map_.cols, map_.list_cols_partial, map_.list_cols_full, map_.heads};
  // Blocks may be larger than any length, which is an int.
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  tiles_.block_size_q = static_cast<int>(std::min(scores_.block_size[0], kMost));
  tiles_.block_size_kv = static_cast<int>(std::min(scores_.block_size[1], kMost));
}

// The state of every block of the mask, made once a call.
const uint8_t* FlexCall::states_of_blocks() {
  if (!states_.defined()) {
    states_ =
        at::zeros({map_.batches, map_.heads, map_.rows, std::max(map_.cols, 1)}, query_.options().dtype(at::kByte));
    flex_block_map(map_, states_.mutable_data_ptr<uint8_t>(), stream_);
  }
  return states_.const_data_ptr<uint8_t>();
}

}  // namespace fusegrad::cuda
