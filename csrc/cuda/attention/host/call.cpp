#include "cuda/attention/host/call.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>

#include <algorithm>
#include <array>
#include <bit>

#include "cuda/attention/host/program.h"
#include "jit/compile.h"
#include "pytorch/rows/job.h"
#include "score_mod/cache.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/render_cuda.h"
#include "score_mod/tensors.h"

namespace fusegrad::cuda {

using at::Tensor;
using device::FlexTensor;

namespace {

int as_int(int64_t n) {
  TORCH_CHECK_VALUE(n <= INT32_MAX / 2, "flex_attention: lengths and heads must be below 2^30, but got ", n);
  return static_cast<int>(n);
}

std::vector<int64_t> prepare(FlexMod& mod, const ScoreMod& from) {
  if (from.text.empty()) return {0};
  mod.text = from.text;
  const score_mod::CapturedTensors captured(from.buffers, from.scalars);
  for (const auto& b : captured.buffers()) {
    mod.dtypes.push_back(b.dtype);
    int64_t last = 0, elements = 1;
    for (size_t d = 0; d < b.sizes.size(); ++d) {
      last += (b.sizes[d] - 1) * b.strides[d];
      elements *= b.sizes[d];
    }
    mod.small_buffers &= last <= INT32_MAX && elements <= INT32_MAX;
  }
  constexpr int64_t kSmall = int64_t{1} << 30;
  for (const auto& s : captured.scalars()) {
    mod.small_scalars &= s.type == score_mod::Type::kFloat || (s.i >= -kSmall && s.i <= kSmall);
  }
  return score_mod::pack_captured(*score_mod::cached_graph(from.text), captured.buffers(), captured.scalars());
}

device::TensorMap encoded(const Tensor& t, const jit::TensorMapShape& shape) {
  return std::bit_cast<device::TensorMap>(
      jit::Driver::get().tensor_map(t.const_data_ptr(), shape, "flex_attention's Hopper kernels"));
}

// Boxes of a tensor's rows as the Hopper kernels copy them, of the columns in the 128 bytes that are swizzled.
device::TensorMap map_of(const Tensor& t, int rows) {
  jit::TensorMapShape shape;
  shape.dtype = t.scalar_type() == at::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  shape.rank = 4;
  for (int d = 0; d < 4; ++d) {
    shape.sizes[d] = static_cast<uint64_t>(t.size(3 - d));
    // A stride that is never taken must be valid too.
    const int64_t stride = t.size(3 - d) == 1 ? 8 : t.stride(3 - d);
    shape.stride_bytes[d] = static_cast<uint64_t>(stride * t.element_size());
  }
  shape.box = {64, static_cast<uint32_t>(rows), 1, 1};
  return encoded(t, shape);
}

}  // namespace

bool has_aligned_rows(const Tensor& t) {
  const int64_t vector = 16 / t.element_size();
  const auto fits = [&](int64_t d) { return t.size(d) == 1 || t.stride(d) % vector == 0; };
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && (t.stride(3) == 1 || t.size(3) == 1) && fits(0) &&
         fits(1) && fits(2) && t.size(3) % vector == 0;
}

Tensor new_aligned_rows(const Tensor& t, bool zeros_beyond) {
  const int64_t vector = 16 / t.element_size(), size = t.size(3), cols = (size + vector - 1) / vector * vector;
  const std::array sizes{t.size(0), t.size(1), t.size(2), cols};
  const Tensor wide = zeros_beyond && cols > size ? at::zeros(sizes, t.options()) : at::empty(sizes, t.options());
  return wide.narrow(3, 0, size);
}

Tensor with_aligned_rows(const Tensor& t) {
  if (has_aligned_rows(t)) return t;
  const Tensor part = new_aligned_rows(t, true);
  part.copy_(t);
  return part;
}

FlexTensor view(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return {};
  return {const_cast<void*>(t.const_data_ptr()), t.size(0) == 1 ? 0 : t.stride(0), t.stride(1), t.stride(2),
          t.stride(3)};
}

void check_ctas(int64_t ctas) {
  TORCH_CHECK_VALUE(ctas <= INT32_MAX, "flex_attention: B * H * tiles must be below 2^31, but got ", ctas);
}

FlexCall::FlexCall(const Tensor& query, const Tensor& key, const Tensor& value, const FlexScores& scores)
    : query_(with_aligned_rows(query)),
      key_(with_aligned_rows(key)),
      value_(with_aligned_rows(value)),
      scores_(scores),
      stream_(at::cuda::getCurrentCUDAStream()) {
  case_.dtype = to_dtype(query.scalar_type());
  case_.head_size = as_int(query.size(3));
  case_.value_size = as_int(value.size(3));
  case_.split = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) !=
                at::Float32Precision::TF32;
  score_words_ = prepare(case_.score_mod, scores.score_mod);
  mask_words_ = prepare(case_.mask_mod, scores.mask_mod);
  case_.blocks = !scores.kv_blocks.empty();
  case_.block_size = scores.block_size;
  for (const int64_t n : {query.size(0) * query.size(1), query.size(2), key.size(2)}) {
    case_.small_lengths &= as_int(n) <= kSmallLength;
  }
  if (scores.dropout_seed.defined()) {
    case_.dropout = true;
    case_.most_dropped = drops_most(scores.dropout_p);
  }
  if (case_.blocks) take_blocks();
}

FlexPlan FlexCall::plan_of(const FlexCase& c) { return plan_flex(c, jit::current_architecture()); }

// A tile of 80 takes 7/6 of the time of one of 64, one of 144 11/10 of one of 128. Where the others have room for the
// next keys beside the present ones, keys cost half a tile of 64 more, or 4/5 of one of 128; with a block mask it
// depends on how many queries they have.
bool FlexCall::pays_tall() const {
  const int64_t queries = query_.size(2), keys = key_.size(2);
  const auto tile = backward_tall_tile(case_);
  if (!tile || !takes_hopper(case_, jit::current_architecture())) return false;
  const int64_t group = query_.size(1) / key_.size(1);
  if (tile->rows == 144) return 11 * group * tiles_in(queries, 144) + 8 <= 10 * group * tiles_in(queries, 128);
  if (!case_.blocks) return 7 * tiles_in(queries, 80) <= 6 * tiles_in(queries, 64);
  constexpr int64_t kLeast = 1536;
  if (queries < kLeast || !takes_direct_lists(lists_of(*tile, /*by_key=*/true))) return false;
  if (case_.mask_mod.text.empty()) return true;
  const score_mod::CapturedTensors captured({}, scores_.mask_mod.scalars);
  const double share =
      score_mod::share_of_pairs(*score_mod::cached_graph(case_.mask_mod.text), captured.scalars(), queries, keys);
  return share * static_cast<double>(queries) >= kLeast;
}

FlexTileLists FlexCall::lists_of(const FlexTileSize& tile, bool by_key) const {
  return {as_int(query_.size(2)), as_int(key_.size(2)), tile.rows, tile.cols, by_key, tile.parts, next_};
}
bool FlexCall::takes_direct_lists(const FlexTileLists& lists) const {
  return cuda::takes_direct_lists(map_, lists, case_.block_size[0], case_.block_size[1]);
}

device::FlexTiles FlexCall::tiles(const FlexTileSize& tile, bool by_key) {
  if (!case_.blocks) return {};
  device::FlexTiles t = tiles_;
  const int row_tiles = as_int(tiles_in(query_.size(2), tile.rows));
  const int col_tiles = as_int(tiles_in(key_.size(2), tile.cols));
  t.rows = by_key ? col_tiles : row_tiles;
  t.cols = by_key ? row_tiles : col_tiles;
  const auto options = query_.options().dtype(at::kInt);
  const int64_t rows = int64_t{t.batches} * t.heads * t.rows;
  const Tensor count = at::empty({rows + 1}, options);
  const Tensor list = at::empty({t.batches, t.heads, t.rows, t.cols}, options);
  t.count = count.mutable_data_ptr<int>();
  t.list = list.mutable_data_ptr<int>();
  next_ = count.mutable_data_ptr<int>() + rows;
  const FlexTileLists lists = lists_of(tile, by_key);
  int* counts = count.mutable_data_ptr<int>();
  if (takes_direct_lists(lists)) {
    flex_direct_lists(t, lists, map_, counts, list.mutable_data_ptr<int>(), stream_);
  } else {
    t.blocks = states_of_blocks();
    flex_tile_lists(t, lists, counts, list.mutable_data_ptr<int>(), stream_);
  }
  kept_.insert(kept_.end(), {count, list});
  return t;
}

device::FlexForwardHopperArguments FlexCall::hopper_forward(const FlexTileSize& tile) const {
  const int64_t group = query_.size(1) / key_.size(1), heads = query_.size(0) * query_.size(1);
  const int64_t key_head = key_.element_size() * key_.size(2) * (key_.size(3) + value_.size(3)) / group;
  // With few rows of tiles a CTA all of them in one order, if the L2 cache holds what they read: else the last
  // section's, begun late, would take too long. And no section much smaller than others.
  constexpr int64_t kCachedBytes = int64_t{48} << 20, kFewRows = 8, kFewHeads = 4;
  const int64_t rows = heads * tiles_in(query_.size(2), tile.rows);
  int64_t together = heads;
  if (heads * key_head > kCachedBytes ||
      rows > kFewRows * at::cuda::getCurrentDeviceProperties()->multiProcessorCount) {
    together = std::min(heads, std::max<int64_t>(section(heads, key_head), kFewHeads));
    together = tiles_in(heads, tiles_in(heads, together));
  }
  return {map_of(query_, tile.rows), map_of(key_, tile.cols), map_of(value_, tile.cols), next_,
          static_cast<int>(case_.blocks ? together : 1)};
}

device::FlexBackwardHopperArguments FlexCall::hopper_backward(const FlexTileSize& tile, const Tensor& grad_out,
                                                              const Tensor& rows, const Tensor& grad_key,
                                                              const Tensor& grad_value) const {
  TORCH_CHECK_VALUE(rows.size(0) <= INT32_MAX, "flex_attention: B * H * M must be below 2^31, but got ", rows.size(0));
  jit::TensorMapShape row_shape;
  row_shape.dtype = CU_TENSOR_MAP_DATA_TYPE_FLOAT64;  // a number of 8 bytes that is only copied
  row_shape.rank = 1;
  row_shape.sizes = {static_cast<uint64_t>(rows.size(0))};
  row_shape.box = {static_cast<uint32_t>(tile.rows)};
  row_shape.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  const auto map_of_gradient = [&](const Tensor& t) {
    return stores_boxes(case_, tile) && t.numel() > 0 ? map_of(t, 64) : device::TensorMap{};
  };
  // With its gradient in float32. Of the query heads that share keys all CTAs are at about the same one.
  const int64_t query_head =
      query_.size(2) * (query_.element_size() * (query_.size(3) + value_.size(3)) + int64_t{4} * query_.size(3));
  return {map_of(query_, tile.rows),
          map_of(key_, tile.cols),
          map_of(value_, tile.cols),
          map_of(grad_out, tile.rows),
          map_of_gradient(grad_key),
          map_of_gradient(grad_value),
          encoded(rows, row_shape),
          next_,
          section(key_.size(0) * key_.size(1), query_head),
          0,
          as_int(key_.size(0) * key_.size(1))};
}

const jit::Kernel& FlexCall::kernel(const FlexPlan& plan, const std::function<void(const std::string&)>& ahead) const {
  return jit::kernel(flex_id(case_, plan), [&](const std::string& architecture) {
    if (ahead) ahead(architecture);
    return flex_program(case_, plan, architecture);
  });
}

void FlexCall::launch(const FlexPlan& plan, void* arguments, int64_t ctas, const std::vector<void*>& more,
                      const std::function<void(const std::string&)>& ahead) {
  const jit::Kernel& kernel = this->kernel(plan, ahead);
  check_ctas(ctas);
  jit::Launch how;
  how.grid[0] = static_cast<unsigned>(ctas);
  how.block[0] = static_cast<unsigned>(32 * plan.tile.warps);
  how.shared_bytes = plan.shared_bytes;
  how.stream = stream_;
  // Its first steps go on beside the kernel that makes its lists of tiles.
  how.programmatic = case_.blocks && case_.kernel == FlexKernel::kForward && plan.tile.family == FlexFamily::kHopper;
  std::vector<void*> all{arguments, score_words_.data(), mask_words_.data()};
  all.insert(all.end(), more.begin(), more.end());
  kernel.launch(how, all.data());
}

// Of so many heads those whose tiles are begun together, so that like ones of a mask end together. What they read,
// so many bytes a head, should stay in the L2 cache.
int FlexCall::section(int64_t heads, int64_t bytes) const {
  constexpr int64_t kSectionBytes = int64_t{16} << 20;
  return case_.blocks ? static_cast<int>(std::clamp(kSectionBytes / std::max(bytes, int64_t{1}), int64_t{1}, heads))
                      : 1;
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
  map_.distinguish = !case_.mask_mod.text.empty();
  tiles_.block_size_q = scores_.block_size[0];
  tiles_.block_size_kv = scores_.block_size[1];
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
