// create_block_mask: which blocks a mask_mod excludes, lets through in part, and in full.
#include <ATen/Parallel.h>

#include <algorithm>

#include "fusegrad/flex_attention.h"
#include "pytorch/ops/check.h"
#include "score_mod/cache.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/tensors.h"

namespace fusegrad {
namespace {

using at::Tensor;

constexpr const char* kOp = "create_block_mask";
constexpr int64_t kTileRows = 64, kTileCols = 256;

struct Lists {
  Tensor count, index;
};

// Of a bool map [B, H, rows, columns] the number of columns that are set in each row, and their indices first.
Lists lists_of(const Tensor& map) {
  return {map.sum(-1, /*keepdim=*/false, at::kInt),
          map.to(at::kChar).argsort(/*stable=*/true, /*dim=*/-1, /*descending=*/true).to(at::kInt)};
}

// Whether some and whether all pairs of a block take part.
struct BlockContent {
  bool any = false, all = true;
};

BlockContent evaluate(score_mod::TileEvaluator<float>& evaluator, std::vector<uint8_t>& bytes, int64_t b, int64_t h,
                      std::array<int64_t, 2> begin, std::array<int64_t, 2> end) {
  BlockContent content;
  for (int64_t q = begin[0]; q < end[0]; q += kTileRows) {
    for (int64_t kv = begin[1]; kv < end[1]; kv += kTileCols) {
      const int64_t rows = std::min(kTileRows, end[0] - q), cols = std::min(kTileCols, end[1] - kv);
      const bool in_range = evaluator.mask_mod({b, h, q, kv, rows, cols}, {bytes.data(), cols});
      TORCH_CHECK_INDEX(in_range, kOp, ": mask_mod: ", evaluator.out_of_range().message());
      const auto last = bytes.begin() + rows * cols;
      content.any = content.any || std::find(bytes.begin(), last, uint8_t{1}) != last;
      content.all = content.all && std::find(bytes.begin(), last, uint8_t{0}) == last;
    }
  }
  return content;
}

}  // namespace

BlockMask create_block_mask(const ScoreMod& mask_mod, std::optional<int64_t> B, std::optional<int64_t> H, int64_t q_len,
                            int64_t kv_len, std::array<int64_t, 2> block_size) {
  FUSEGRAD_CHECK_VALUE(q_len >= 0 && kv_len >= 0 && B.value_or(1) > 0 && H.value_or(1) > 0, kOp,
                       "lengths must be at least 0, B and H at least 1, but got ", q_len, " and ", kv_len, ", ",
                       B.value_or(1), " and ", H.value_or(1));
  FUSEGRAD_CHECK_VALUE(block_size[0] > 0 && block_size[1] > 0, kOp, "block_size must be two positive numbers, but got ",
                       at::IntArrayRef(block_size));
  std::shared_ptr<const score_mod::Graph> graph;
  try {
    graph = score_mod::cached_graph(mask_mod.text);
  } catch (const score_mod::GraphError& error) {
    FUSEGRAD_CHECK_VALUE(false, kOp, "mask_mod must be a text of the score_mod language, but got ", error.what());
  }
  FUSEGRAD_CHECK_VALUE(graph->kind() == score_mod::Kind::kMaskMod, kOp, "mask_mod must be a mask_mod, but got a ",
                       score_mod::kind_name(graph->kind()));
  for (const auto& buffer : mask_mod.buffers) {
    FUSEGRAD_CHECK_VALUE(buffer.device().is_cpu(), kOp, "mask_mod must capture tensors on the CPU, but got one on ",
                         buffer.device());
  }
  const int64_t batches = B.value_or(1), heads = H.value_or(1);
  const int64_t rows = (q_len + block_size[0] - 1) / block_size[0], cols = (kv_len + block_size[1] - 1) / block_size[1];
  const Tensor partial = at::zeros({batches, heads, rows, cols}, at::kBool), full = at::zeros_like(partial);
  auto* is_partial = partial.mutable_data_ptr<bool>();
  auto* is_full = full.mutable_data_ptr<bool>();
  const score_mod::CapturedTensors captured(mask_mod.buffers, mask_mod.scalars);
  const score_mod::TileProgram<float> program(*graph, {batches, heads, q_len, kv_len}, captured.buffers(),
                                              captured.scalars());
  at::parallel_for(0, batches * heads * rows, 1, [&](int64_t begin, int64_t end) {
    score_mod::TileEvaluator<float> evaluator(program, kTileRows, kTileCols);
    std::vector<uint8_t> bytes(kTileRows * kTileCols);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t q = i % rows * block_size[0], head = i / rows;
      for (int64_t col = 0; col < cols; ++col) {
        const int64_t kv = col * block_size[1];
        const auto content = evaluate(evaluator, bytes, head / heads, head % heads, {q, kv},
                                      {std::min(q + block_size[0], q_len), std::min(kv + block_size[1], kv_len)});
        is_partial[i * cols + col] = content.any && !content.all;
        is_full[i * cols + col] = content.all;
      }
    }
  });
  BlockMask mask;
  const auto put = [](const Tensor& map, Tensor& count, Tensor& index) {
    auto lists = lists_of(map);
    count = std::move(lists.count);
    index = std::move(lists.index);
  };
  put(partial, mask.kv_num_blocks, mask.kv_indices);
  put(full, mask.full_kv_num_blocks, mask.full_kv_indices);
  mask.block_size = block_size;
  mask.lengths = {q_len, kv_len};
  mask.mask_mod = mask_mod;
  return mask;
}

}  // namespace fusegrad
