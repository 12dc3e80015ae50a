#include "cuda/flex_attention.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <tuple>
#include <utility>

#include "attention/outputs.h"
#include "cuda/flex_prepare.h"
#include "cuda/flex_program.h"
#include "jit/compile.h"
#include "ops/check.h"
#include "rows/job.h"
#include "score_mod/cache.h"
#include "score_mod/render_cuda.h"
#include "score_mod/tensors.h"

namespace fusegrad::cuda {
namespace {

using at::Tensor;
using device::FlexTensor;

/// What kernels read by 16 bytes: innermost dimension dense, rows at multiples of 16 bytes; else a copy that is so.
Tensor with_aligned_rows(const Tensor& t) {
  const int64_t bytes = t.element_size(), vector = 16 / bytes;
  const auto fits = [&](int64_t d) { return t.size(d) == 1 || t.stride(d) % vector == 0; };
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && (t.stride(3) == 1 || t.size(3) == 1) && fits(0) &&
      fits(1) && fits(2) && t.size(3) % vector == 0) {
    return t;
  }
  const int64_t cols = (t.size(3) + vector - 1) / vector * vector;
  const Tensor wide = cols == t.size(3) ? at::empty({t.size(0), t.size(1), t.size(2), cols}, t.options())
                                        : at::zeros({t.size(0), t.size(1), t.size(2), cols}, t.options());
  const Tensor part = wide.narrow(3, 0, t.size(3));
  part.copy_(t);
  return part;
}

FlexTensor view(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return {};
  return {const_cast<void*>(t.const_data_ptr()), t.size(0) == 1 ? 0 : t.stride(0), t.stride(1), t.stride(2),
          t.stride(3)};
}

int as_int(int64_t n) {
  TORCH_CHECK_VALUE(n <= INT32_MAX / 2, "flex_attention: lengths and heads must be below 2^30, but got ", n);
  return static_cast<int>(n);
}

int64_t tiles_in(int64_t n, int64_t size) { return (n + size - 1) / size; }

const float* data_of(const Tensor& t) { return t.defined() && t.numel() > 0 ? t.const_data_ptr<float>() : nullptr; }

void check_ctas(int64_t ctas) {
  TORCH_CHECK_VALUE(ctas <= INT32_MAX, "flex_attention: B * H * tiles must be below 2^31, but got ", ctas);
}

/// One call: its score_mod and mask_mod as kernels take them, its block mask, its launches.
class Call {
 public:
  Call(const Tensor& query, const Tensor& key, const Tensor& value, const FlexScores& scores)
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
    // A tile of 80 takes 7/6 of the time of one of 64.
    case_.fits_80 = 7 * tiles_in(query.size(2), 80) <= 6 * tiles_in(query.size(2), 64);
    if (case_.blocks) take_blocks();
  }

  FlexCase& kernel_case() { return case_; }
  const Tensor& query() const { return query_; }
  const Tensor& key() const { return key_; }
  const Tensor& value() const { return value_; }
  CUstream stream() const { return stream_; }

  template <class Arguments>
  void fill(Arguments& a) const {
    a.query = view(query_);
    a.key = view(key_);
    a.value = view(value_);
    a.batches = static_cast<int>(query_.size(0));
    a.key_batches = static_cast<int>(key_.size(0));
    a.heads = static_cast<int>(query_.size(1));
    a.group = static_cast<int>(query_.size(1) / key_.size(1));
    a.queries = static_cast<int>(query_.size(2));
    a.keys = static_cast<int>(key_.size(2));
    a.head_size = case_.head_size;
    a.value_size = case_.value_size;
    a.scale = static_cast<float>(scores_.scale);
  }

  FlexPlan plan() const { return plan_of(case_); }
  static FlexPlan plan_of(const FlexCase& c) { return plan_flex(c, jit::current_architecture()); }

  /// The lists of tiles for a kernel; what they lie in is kept until the call's end.
  device::FlexTiles tiles(const FlexTileSize& tile, bool by_key) {
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
    const FlexTileLists lists{
        as_int(query_.size(2)), as_int(key_.size(2)), tile.rows, tile.cols, by_key, tile.parts, next_};
    int* counts = count.mutable_data_ptr<int>();
    if (takes_direct_lists(map_, lists, t.block_size_q, t.block_size_kv)) {
      flex_direct_lists(t, lists, map_, counts, list.mutable_data_ptr<int>(), stream_);
    } else {
      t.blocks = states_of_blocks();
      flex_tile_lists(t, lists, counts, list.mutable_data_ptr<int>(), stream_);
    }
    kept_.insert(kept_.end(), {count, list});
    return t;
  }

  /// What the Hopper forward takes besides. After tiles().
  device::FlexForwardHopperArguments hopper_forward(const FlexTileSize& tile) const {
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
  /// What the Hopper backward takes besides.
  device::FlexBackwardHopperArguments hopper_backward(const FlexTileSize& tile, const Tensor& grad_out,
                                                      const Tensor& rows) const {
    TORCH_CHECK_VALUE(rows.size(0) <= INT32_MAX, "flex_attention: B * H * M must be below 2^31, but got ",
                      rows.size(0));
    jit::TensorMapShape row_shape;
    row_shape.dtype = CU_TENSOR_MAP_DATA_TYPE_FLOAT64;  // a number of 8 bytes that is only copied
    row_shape.rank = 1;
    row_shape.sizes = {static_cast<uint64_t>(rows.size(0))};
    row_shape.box = {static_cast<uint32_t>(tile.rows)};
    row_shape.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
    // With its gradient in float32. Of the query heads that share keys all CTAs are at about the same one.
    const int64_t query_head =
        query_.size(2) * (query_.element_size() * (query_.size(3) + value_.size(3)) + int64_t{4} * query_.size(3));
    return {map_of(query_, tile.rows),
            map_of(key_, tile.cols),
            map_of(value_, tile.cols),
            map_of(grad_out, tile.rows),
            encoded(rows, row_shape),
            next_,
            section(key_.size(0) * key_.size(1), query_head),
            0,
            as_int(key_.size(0) * key_.size(1))};
  }

  /// `more`: the kernel's further arguments. `ahead`: called where the kernel is compiled, with the architecture.
  void launch(const FlexPlan& plan, void* arguments, int64_t ctas, const std::vector<void*>& more,
              const std::function<void(const std::string&)>& ahead = nullptr) {
    const jit::Kernel& kernel = jit::kernel(flex_id(case_, plan), [&](const std::string& architecture) {
      if (ahead) ahead(architecture);
      return flex_program(case_, plan, architecture);
    });
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

 private:
  /// Of so many heads those whose tiles are begun together, so that like ones of a mask end together. What they read,
  /// so many bytes a head, should stay in the L2 cache.
  int section(int64_t heads, int64_t bytes) const {
    constexpr int64_t kSectionBytes = int64_t{16} << 20;
    return case_.blocks ? static_cast<int>(std::clamp(kSectionBytes / std::max(bytes, int64_t{1}), int64_t{1}, heads))
                        : 1;
  }

  static std::vector<int64_t> prepare(FlexMod& mod, const ScoreMod& from) {
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

  // Boxes of a tensor's rows as the Hopper kernels copy them, of the columns in the 128 bytes that are swizzled.
  static device::TensorMap map_of(const Tensor& t, int rows) {
    jit::TensorMapShape shape;
    shape.dtype = t.scalar_type() == at::kFloat  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                  : t.scalar_type() == at::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    shape.rank = 4;
    for (int d = 0; d < 4; ++d) {
      shape.sizes[d] = static_cast<uint64_t>(t.size(3 - d));
      // A stride that is never taken must be valid too.
      const int64_t stride = t.size(3 - d) == 1 ? 8 : t.stride(3 - d);
      shape.stride_bytes[d] = static_cast<uint64_t>(stride * t.element_size());
    }
    shape.box = {static_cast<uint32_t>(128 / t.element_size()), static_cast<uint32_t>(rows), 1, 1};
    return encoded(t, shape);
  }
  static device::TensorMap encoded(const Tensor& t, const jit::TensorMapShape& shape) {
    return std::bit_cast<device::TensorMap>(
        jit::Driver::get().tensor_map(t.const_data_ptr(), shape, "flex_attention's Hopper kernels"));
  }

  // The block mask, its lists as kernels read them.
  void take_blocks() {
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
  const uint8_t* states_of_blocks() {
    if (!states_.defined()) {
      states_ =
          at::zeros({map_.batches, map_.heads, map_.rows, std::max(map_.cols, 1)}, query_.options().dtype(at::kByte));
      flex_block_map(map_, states_.mutable_data_ptr<uint8_t>(), stream_);
    }
    return states_.const_data_ptr<uint8_t>();
  }

  const Tensor query_, key_, value_;
  const FlexScores& scores_;
  const at::cuda::CUDAStream stream_;
  FlexCase case_;
  std::vector<int64_t> score_words_, mask_words_;
  std::vector<Tensor> lists_, kept_;
  FlexBlockMap map_{};
  device::FlexTiles tiles_{};  // but for what depends on a kernel's tiles
  Tensor states_;
  int* next_ = nullptr;
};

/// What the kernels of a backward have in common, made of what a forward's has; and in how many launches the kernel by
/// keys runs, so that sums come in one order.
std::pair<FlexCase, int64_t> backward_case(FlexCase c, const FlexScores& scores, const Tensor& key,
                                           const std::vector<bool>& needs_grad, bool deterministic) {
  c.max_scores = c.out_low = c.unscaled = false;
  c.wants_grad.assign(needs_grad.begin() + 3, needs_grad.end());
  for (const auto& b : scores.score_mod.buffers) c.elements.push_back(b.numel());
  int64_t launches = 1;
  if (deterministic && c.wants_buffers()) {
    launches =
        ordered_launches(c, key.size(0), key.size(1), key.size(2),
                         at::cuda::getCurrentDeviceProperties()->multiProcessorCount, jit::current_architecture());
  }
  c.fixed_point = launches == 0;
  c.partial_sums = deterministic && c.wants_buffers() && !c.fixed_point;
  return {std::move(c), std::max<int64_t>(launches, 1)};
}

/// The sums of the contributions to captured buffers.
class BufferSums {
 public:
  /// Of what the backward by keys adds up, whose case and plan they are. In `grads` themselves where these are dense
  /// float32 and sums are float.
  BufferSums(const FlexScores& scores, const FlexCase& c, const FlexPlan& plan, const Tensor& query, const Tensor& key,
             const std::vector<Tensor>& grads)
      : derivative_(scores.score_mod.text.empty() ? nullptr
                                                  : score_mod::cached_derivative(scores.score_mod.text, c.wants_grad)) {
    const auto floats = query.options().dtype(at::kFloat), integers = floats.dtype(at::kLong);
    const auto& buffers = scores.score_mod.buffers;
    const int64_t heads = query.size(0) * query.size(1), pairs = heads * query.size(2) * key.size(2);
    const int64_t partial = heads * plan.tile.share * tiles_in(key.size(2), plan.tile.cols) * plan.tile.cols;
    std::vector<bool> fixed(buffers.size(), c.fixed_point);
    for (size_t k = 0; k < contributions(); ++k) {
      partial_.emplace_back();
      if (!c.partial_sums || plan.schemes[k] > 'B') continue;
      partial_[k] = {at::zeros({partial}, floats), at::empty({partial}, integers)};
      fixed[buffer_of(k)] = true;
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      const bool there =
          c.wants_grad[i] && !fixed[i] && grads[i].scalar_type() == at::kFloat && grads[i].is_contiguous();
      sums_.push_back(!c.wants_grad[i] ? Tensor()
                      : there          ? grads[i].view({grads[i].numel()}).zero_()
                                       : at::zeros({buffers[i].numel()}, fixed[i] ? integers : floats));
    }
    if (std::find(fixed.begin(), fixed.end(), true) != fixed.end())
      largest_ = at::zeros({static_cast<int64_t>(buffers.size())}, floats);
    // So that no sum overflows.
    const int64_t each = c.fixed_point ? pairs : partial;
    const auto count = static_cast<uint64_t>(contributions()) * static_cast<uint64_t>(each);
    fixed_bits_ = 62 - static_cast<int>(std::bit_width(count));
    if (c.fixed_point) fixed_bits_ = std::min(fixed_bits_, device::kFlexFixedBits);
    TORCH_CHECK_VALUE(!c.fixed_point || 2 * fixed_bits_ >= device::kFlexFixedBits,
                      "flex_attention: with deterministic=True B * H * M * N must be below 2^45, but got ", pairs);
  }

  size_t contributions() const { return derivative_ == nullptr ? 0 : derivative_->contributions().size(); }
  float* largest() const { return largest_.defined() ? largest_.mutable_data_ptr<float>() : nullptr; }
  int fixed_bits() const { return fixed_bits_; }

  /// As the kernel takes them.
  std::vector<device::FlexSums> arguments() const {
    std::vector<device::FlexSums> result(contributions() + 1);
    for (size_t k = 0; k < contributions(); ++k) {
      const auto& [sums, elements] = partial_[k];
      if (sums.defined()) {
        result[k] = {sums.mutable_data_ptr(), nullptr,
                     reinterpret_cast<long long*>(elements.mutable_data_ptr<int64_t>())};
      } else {
        result[k] = {sums_[buffer_of(k)].mutable_data_ptr(), largest_.defined() ? largest() + buffer_of(k) : nullptr,
                     nullptr};
      }
    }
    return result;
  }

  void finish(const std::vector<Tensor>& grads, CUstream stream) const {
    add_partial_sums(stream);
    for (size_t i = 0; i < sums_.size(); ++i) {
      Tensor sum = sums_[i];
      if (!sum.defined()) continue;
      if (sum.scalar_type() == at::kLong) {
        const Tensor floats = at::empty(sum.sizes(), sum.options().dtype(at::kFloat));
        flex_fixed_to_float(sum.const_data_ptr<int64_t>(), largest() + i, fixed_bits_, sum.numel(),
                            floats.mutable_data_ptr<float>(), stream);
        sum = floats;
      }
      if (!sum.is_alias_of(grads[i])) grads[i].copy_(sum.view(grads[i].sizes()));
    }
  }

 private:
  struct Partial {
    Tensor sums, elements;
  };

  size_t buffer_of(size_t k) const { return static_cast<size_t>(derivative_->contributions()[k].buffer); }

  void add_partial_sums(CUstream stream) const {
    for (const bool add : {false, true}) {
      for (size_t k = 0; k < partial_.size(); ++k) {
        const auto& [sums, elements] = partial_[k];
        if (!sums.defined()) continue;
        float* largest = this->largest() + buffer_of(k);
        if (add) {
          flex_add_partial_sums(sums.const_data_ptr<float>(), elements.const_data_ptr<int64_t>(), sums.numel(), largest,
                                fixed_bits_, sums_[buffer_of(k)].mutable_data_ptr<int64_t>(), stream);
        } else {
          flex_largest(sums.const_data_ptr<float>(), sums.numel(), largest, stream);
        }
      }
    }
  }

  const std::shared_ptr<const score_mod::Graph> derivative_;
  int fixed_bits_;
  std::vector<Partial> partial_;  // of each contribution
  std::vector<Tensor> sums_;
  Tensor largest_;
};

}  // namespace

FlexOutputTuple flex_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const FlexScores& scores, int64_t aux) {
  const c10::cuda::CUDAGuard guard(query.device());
  const FlexOutputs outputs = empty_flex_outputs(query, value, aux);
  if (outputs.lse.numel() != 0 && key.numel() == 0) {
    outputs.out.zero_();
    outputs.out_low.zero_();
    outputs.lse.fill_(-INFINITY);
    outputs.max_scores.fill_(-INFINITY);
    outputs.max_ties.zero_();
  } else if (outputs.lse.numel() != 0) {
    Call call(query, key, value, scores);
    FlexCase& c = call.kernel_case();
    c.kernel = FlexKernel::kForward;
    c.max_scores = outputs.max_scores.numel() != 0;
    c.out_low = outputs.out_low.numel() != 0 && c.dtype != DType::kFloat32;
    if (!c.out_low) outputs.out_low.zero_();  // float32 loses nothing
    c.unscaled = scores.score_mod.text.empty() && scores.scale > 0;
    const FlexPlan plan = call.plan();
    device::FlexForwardArguments a{};
    call.fill(a);
    a.out = view(outputs.out);
    a.out_low = view(outputs.out_low);
    a.lse = outputs.lse.mutable_data_ptr<float>();
    if (c.max_scores) {
      a.max_scores = outputs.max_scores.mutable_data_ptr<float>();
      a.max_ties = outputs.max_ties.mutable_data_ptr<float>();
    }
    a.tiles = call.tiles(plan.tile, /*by_key=*/false);
    // As the backward has them for gradients of the output alone.
    const auto ahead = [&](const std::string& architecture) {
      if ((aux & kFlexBackward) == 0) return;
      std::vector<bool> needs_grad;
      for (const auto& t : {query, key, value}) needs_grad.push_back(t.requires_grad());
      for (const auto& t : scores.score_mod.buffers) needs_grad.push_back(t.requires_grad());
      const bool ordered = (aux & kFlexOrdered) != 0;
      const FlexCase backward = backward_case(c, scores, key, needs_grad, ordered).first;
      for (const FlexCase& next : backward_kernels(backward, needs_grad, ordered, architecture)) {
        jit::compile_ahead(flex_program(next, Call::plan_of(next), architecture).program);
      }
    };
    const int64_t row_tiles = query.size(0) * query.size(1) * tiles_in(query.size(2), plan.tile.rows);
    if (plan.tile.family == FlexFamily::kHopper) {
      // Its CTAs stay, one a multiprocessor.
      const int64_t processors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
      check_ctas(row_tiles + processors);
      auto more = call.hopper_forward(plan.tile);
      call.launch(plan, &a, std::min(row_tiles, processors), {&more}, ahead);
    } else {
      call.launch(plan, &a, row_tiles, {}, ahead);
    }
  }
  return {outputs.out, outputs.lse, outputs.max_scores, outputs.max_ties, outputs.out_low};
}

void flex_attention_backward(const FlexUpstream& upstream, const Tensor& query, const Tensor& key, const Tensor& value,
                             const FlexOutputs& saved, const FlexScores& scores, bool deterministic,
                             const std::vector<bool>& needs_grad, const FlexGradients& grads, bool inplace) {
  const c10::cuda::CUDAGuard guard(query.device());
  const Tensor grad_query = inplace ? query : grads.query, grad_key = inplace ? key : grads.key,
               grad_value = inplace ? value : grads.value;
  if (saved.lse.numel() == 0 || key.numel() == 0) {
    for (const auto& t : {grad_query, grad_key, grad_value}) t.zero_();
    for (const auto& t : grads.buffers) t.zero_();
    return;
  }
  Call call(query, key, value, scores);
  FlexCase& c = call.kernel_case();
  int64_t launches = 1;
  std::tie(c, launches) = backward_case(c, scores, key, needs_grad, deterministic);
  c.max_gradient = upstream.max_scores.defined();

  const Tensor grad_out = with_aligned_rows(upstream.out.defined() ? upstream.out : at::zeros_like(saved.out));
  const auto floats = query.options().dtype(at::kFloat);
  const int64_t row_stride = (query.size(2) + 1) / 2 * 2;
  const Tensor row_values = at::empty({query.size(0) * query.size(1) * row_stride, 2}, floats);
  const int64_t heads = query.size(0) * query.size(1);
  const auto kernels = backward_kernels(c, needs_grad, deterministic, jit::current_architecture());
  std::vector<FlexPlan> plans;
  for (const FlexCase& kernel : kernels) plans.push_back(Call::plan_of(kernel));
  const bool apart = kernels.front().kernel == FlexKernel::kGradQuery;
  const FlexTileSize& tile = plans.back().tile;
  const int64_t sum_rows = tiles_in(query.size(2), tile.rows) * tile.rows, sum_cols = tiles_in(query.size(3), 16) * 16;
  // A kernel of its own writes the queries' gradient itself, but not over what it and the next kernel read.
  Tensor query_sum, query_apart;
  if (needs_grad[0] && !apart) query_sum = at::empty({heads, sum_rows, sum_cols}, floats);
  if (needs_grad[0] && apart) query_apart = inplace ? at::empty(query.sizes(), query.options()) : grad_query;
  const Tensor lse = saved.lse.contiguous();
  const Tensor grad_lse = upstream.lse.defined() ? upstream.lse.contiguous() : Tensor();
  auto* row_data = reinterpret_cast<device::FlexRow*>(row_values.mutable_data_ptr<float>());
  flex_rows({upstream.out.defined() ? view(grad_out) : FlexTensor{}, view(saved.out), view(saved.out_low), data_of(lse),
             data_of(grad_lse), static_cast<int>(query.size(0)), static_cast<int>(query.size(1)),
             static_cast<int>(query.size(2)), c.value_size, static_cast<int>(row_stride),
             query_sum.defined() ? query_sum.mutable_data_ptr<float>() : nullptr, static_cast<int>(sum_rows),
             static_cast<int>(sum_cols)},
            row_data, c.dtype, call.stream());
  const Tensor grad_max = c.max_gradient ? (upstream.max_scores / saved.max_ties).contiguous() : Tensor();
  const Tensor max_scores = saved.max_scores.contiguous();
  const BufferSums sums(scores, c, plans.back(), query, key, grads.buffers);

  device::FlexBackwardArguments a{};
  call.fill(a);
  a.grad_out = view(grad_out);
  a.grad_query = view(query_apart);
  a.grad_key = view(grad_key);
  a.grad_value = view(grad_value);
  a.rows = row_data;
  a.row_stride = static_cast<int>(row_stride);
  a.max_scores = data_of(max_scores);
  a.grad_max = data_of(grad_max);
  a.query_sum = query_sum.defined() ? query_sum.mutable_data_ptr<float>() : nullptr;
  a.sum_rows = static_cast<int>(sum_rows);
  a.sum_cols = static_cast<int>(sum_cols);
  a.largest = sums.largest();
  a.fixed_bits = sums.fixed_bits();

  auto sum_arguments = sums.arguments();
  for (size_t i = 0; i < kernels.size(); ++i) {
    c = kernels[i];
    const bool by_key = c.kernel == FlexKernel::kBackward;
    const FlexPlan& plan = plans[i];
    a.tiles = call.tiles(plan.tile, by_key);
    int64_t ctas = by_key ? key.size(0) * key.size(1) * tiles_in(key.size(2), plan.tile.cols)
                          : heads * tiles_in(query.size(2), plan.tile.rows);
    std::vector<void*> further;
    if (by_key) further.push_back(sum_arguments.data());
    device::FlexBackwardHopperArguments more;
    if (plan.tile.family == FlexFamily::kHopper) {
      more = call.hopper_backward(plan.tile, grad_out, row_values);
      further.push_back(&more);
      // Those with keys for each warpgroup stay, one a multiprocessor.
      if (by_key && launches == 1 && plan.tile.cols == 128) {
        check_ctas(ctas);
        ctas = std::min<int64_t>(ctas, at::cuda::getCurrentDeviceProperties()->multiProcessorCount);
      }
    }
    if (!by_key || launches == 1) {
      call.launch(plan, &a, ctas, further);
      continue;
    }
    more.heads /= static_cast<int>(launches);
    for (; more.first_head < key.size(0) * key.size(1); more.first_head += more.heads)
      call.launch(plan, &a, ctas / launches, further);
  }
  if (query_sum.defined()) {
    flex_scale_query_sum({view(grad_query), a.query_sum, a.batches, a.heads, a.queries, a.head_size, a.sum_rows,
                          a.sum_cols, tile.family == FlexFamily::kHopper, a.scale},
                         c.dtype, call.stream());
  } else if (needs_grad[0] && inplace) {
    grad_query.copy_(query_apart);
  }
  sums.finish(grads.buffers, call.stream());
}

}  // namespace fusegrad::cuda
