// The kernels of create_block_mask: from the op's arguments to plain ones.
#include <torch/library.h>

#ifdef FUSEGRAD_WITH_CUDA
#include <ATen/DeviceGuard.h>

#include "cuda/attention/mask/block_states.h"
#include "pytorch/gpu.h"
#endif
#include "attention/block_states.h"
#include "pytorch/attention/block_tables.h"
#include "pytorch/attention/flex_attention.h"
#include "pytorch/host.h"
#include "pytorch/ops/check.h"
#include "pytorch/ops/faults.h"
#include "pytorch/score_mod/tensors.h"
#include "score_mod/cache.h"

namespace fusegrad {
namespace {

using at::Tensor;
using SymSizes = c10::SymIntArrayRef;

constexpr const char* kOp = "create_block_mask";
// Keys by rows of queries, partial and full, then queries by columns; each num_blocks and indices.
using Lists = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Size>
void check_sizes(c10::ArrayRef<Size> sizes, at::IntArrayRef block_size) {
  FUSEGRAD_CHECK_VALUE(sizes.size() == 4 && sizes[0] >= 1 && sizes[1] >= 1 && sizes[2] >= 0 && sizes[3] >= 0, kOp,
                       "lengths must be at least 0, B and H at least 1, but got B, H, M, N = ", sizes);
  FUSEGRAD_CHECK_VALUE(block_size.size() == 2 && block_size[0] > 0 && block_size[1] > 0, kOp,
                       "block_size must be two positive numbers, but got ", block_size);
  constexpr int64_t kMost = int64_t{1} << 30;
  FUSEGRAD_CHECK_VALUE(block_size[0] <= kMost && block_size[1] <= kMost, kOp,
                       "block_size must be at most 2^30, but got ", block_size);
}

// [B, H, lines] and [B, H, lines, length].
std::pair<Tensor, Tensor> empty_list(const Tensor& like, const c10::SymInt& b, const c10::SymInt& h,
                                     const c10::SymInt& lines, const c10::SymInt& length) {
  const auto options = like.options().dtype(at::kInt).requires_grad(false);
  return {at::empty_symint({b, h, lines}, options), at::empty_symint({b, h, lines, length}, options)};
}

std::shared_ptr<const score_mod::Graph> checked_graph(const Tensor& like, std::string_view text,
                                                      at::TensorList buffers) {
  std::shared_ptr<const score_mod::Graph> graph;
  try {
    graph = score_mod::cached_graph(text);
  } catch (const score_mod::GraphError& error) {
    FUSEGRAD_CHECK_VALUE(false, kOp, "mask_mod must be a text of the score_mod language, but got ", error.what());
  }
  FUSEGRAD_CHECK_VALUE(graph->kind() == score_mod::Kind::kMaskMod, kOp, "mask_mod must be a mask_mod, but got a ",
                       score_mod::kind_name(graph->kind()));
  for (const Tensor& buffer : buffers) {
    check_dense(kOp, "a captured tensor", buffer);
    FUSEGRAD_CHECK_VALUE(buffer.device() == like.device(), kOp, "mask_mod must capture tensors on the mask's device ",
                         like.device(), ", but got one on ", buffer.device());
  }
  score_mod::check_precision(kOp, "mask_mod", *graph, buffers, !like.is_cuda());
  return graph;
}

// A device's functions.
struct Cpu {
  static void states(const BlockMaskProgram& program, BlockState* states) {
    const std::string error = cpu::block_states(torch_host(), program, states);
    TORCH_CHECK_INDEX(error.empty(), kOp, ": mask_mod: ", error);
  }
  static void list(const Tensor& states, bool by_column, BlockState state, const BlockList& list) {
    cpu::block_list(torch_host(), reinterpret_cast<const BlockState*>(states.const_data_ptr<uint8_t>()),
                    states.size(0) * states.size(1), states.size(2), states.size(3), by_column, state, list);
  }
};
#ifdef FUSEGRAD_WITH_CUDA
struct Cuda {
  static void states(const BlockMaskProgram& program, BlockState* states) {
    cuda::block_states(program, states, gpu::current_stream());
  }
  static void list(const Tensor& states, bool by_column, BlockState state, const BlockList& list) {
    const Tensor lines = by_column ? states.transpose(2, 3).contiguous() : states;
    cuda::block_list(reinterpret_cast<const BlockState*>(lines.const_data_ptr<uint8_t>()),
                     lines.size(0) * lines.size(1), lines.size(2), lines.size(3), state, list, gpu::current_stream());
  }
};
#endif

template <class Device>
Lists lists_of(const Tensor& states, int64_t batches, int64_t heads) {
  const auto listed = [&](bool by_column, BlockState state) {
    auto [count, index] = empty_list(states, states.size(0), states.size(1), states.size(by_column ? 3 : 2),
                                     states.size(by_column ? 2 : 3));
    if (count.numel() > 0) {
      Device::list(states, by_column, state, {count.mutable_data_ptr<int32_t>(), index.mutable_data_ptr<int32_t>()});
    }
    // A mask that asks neither the batch nor the head is made once.
    const auto copied = [&](const Tensor& t) {
      std::vector<int64_t> sizes = t.sizes().vec();
      sizes[0] = batches;
      sizes[1] = heads;
      return t.expand(sizes).contiguous();
    };
    return std::pair(copied(count), copied(index));
  };
  const auto [kv_count, kv_index] = listed(false, BlockState::kPartial);
  const auto [full_kv_count, full_kv_index] = listed(false, BlockState::kFull);
  const auto [q_count, q_index] = listed(true, BlockState::kPartial);
  const auto [full_q_count, full_q_index] = listed(true, BlockState::kFull);
  return {kv_count, kv_index, full_kv_count, full_kv_index, q_count, q_index, full_q_count, full_q_index};
}

template <class Device>
Lists create(const Tensor& like, std::string_view text, at::TensorList buffers, at::ArrayRef<double> floats,
             at::IntArrayRef ints, SymSizes sym_sizes, at::IntArrayRef block_size) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(sym_sizes);
  check_sizes(sizes, block_size);
  const auto graph = checked_graph(like, text, buffers);
  std::vector<at::Scalar> scalars;
  try {
    scalars = score_mod::scalars_of(*graph, floats, ints);
    const score_mod::CapturedTensors captured(buffers, scalars);
    score_mod::check_captured(*graph, captured.buffers(), captured.scalars());
  } catch (const score_mod::GraphError& error) {
    FUSEGRAD_CHECK_VALUE(false, kOp, "mask_mod's ", error.what());
  }
  const score_mod::CapturedTensors captured(buffers, scalars);
  const std::array block{block_size[0], block_size[1]}, lengths{sizes[2], sizes[3]};
  const auto bounds = score_mod::cached_block_bounds(text, block, captured.buffers());
  const auto on = score_mod::dependences(*graph)[static_cast<size_t>(graph->result())].on();
  const auto made_for = [&](score_mod::Variable v, int64_t size) {
    return (on & score_mod::set_of(v)) != 0 ? size : 1;
  };

  const auto tables = block_tables(*bounds, buffers, like);
  const score_mod::CapturedTensors bounds_captured(tables, block_scalars(*bounds, buffers, scalars, lengths));
  const BlockMaskProgram program{*graph,
                                 *bounds,
                                 captured.buffers(),
                                 bounds_captured.buffers(),
                                 captured.scalars(),
                                 bounds_captured.scalars(),
                                 block,
                                 lengths,
                                 made_for(score_mod::kVarB, sizes[0]),
                                 made_for(score_mod::kVarH, sizes[1])};
  const Tensor states = at::empty({program.batches, program.heads, program.rows(), program.cols()},
                                  like.options().dtype(at::kByte).requires_grad(false));
  if (states.numel() > 0) {
    Device::states(program, reinterpret_cast<BlockState*>(states.mutable_data_ptr<uint8_t>()));
  }
  return lists_of<Device>(states, sizes[0], sizes[1]);
}

#ifdef FUSEGRAD_WITH_CUDA
Lists create_on_cuda(const Tensor& like, std::string_view text, at::TensorList buffers, at::ArrayRef<double> floats,
                     at::IntArrayRef ints, SymSizes sizes, at::IntArrayRef block_size) {
  const c10::DeviceGuard guard(like.device());
  return create<Cuda>(like, text, buffers, floats, ints, sizes, block_size);
}
#endif

Lists create_meta(const Tensor& like, std::string_view /*text*/, at::TensorList /*buffers*/,
                  at::ArrayRef<double> /*floats*/, at::IntArrayRef /*ints*/, SymSizes sizes,
                  at::IntArrayRef block_size) {
  check_sizes(sizes, block_size);
  const auto rows = (sizes[2] + (block_size[0] - 1)) / block_size[0];
  const auto cols = (sizes[3] + (block_size[1] - 1)) / block_size[1];
  const auto list = [&](const c10::SymInt& lines, const c10::SymInt& length) {
    return empty_list(like, sizes[0], sizes[1], lines, length);
  };
  const auto [a, b] = list(rows, cols);
  const auto [c, d] = list(rows, cols);
  const auto [e, f] = list(cols, rows);
  const auto [g, h] = list(cols, rows);
  return {a, b, c, d, e, f, g, h};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { m.impl("create_block_mask", named_kernel<"create_block_mask", create<Cpu>>()); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) {
  m.impl("create_block_mask", named_kernel<"create_block_mask", create_on_cuda>());
}
#endif
TORCH_LIBRARY_IMPL(fusegrad, Meta, m) { m.impl("create_block_mask", TORCH_FN(create_meta)); }

}  // namespace fusegrad
