#include "cuda/attention/mask/block_states.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/attention/mask/block_states_arguments.cuh"
#include "cuda/attention/plan/kernel_spec.h"
#include "score_mod/render_cuda.h"
#include "score_mod/text.h"

namespace fusegrad::cuda {
namespace {

struct Facts {
  score_mod::RenderOptions options;
  std::string text;  // of the facts
};

Facts facts_of(const BlockMaskProgram& program, std::span<const score_mod::Buffer> buffers,
               std::span<const score_mod::Value> scalars) {
  Facts facts;
  auto& [options, text] = facts;
  options.small_buffers = score_mod::small_buffers(buffers);
  options.small_scalars = score_mod::small_scalars(scalars);
  for (const auto& b : buffers) {
    options.dtypes.push_back(b.dtype);
    text += static_cast<char>('a' + static_cast<int>(b.dtype));
  }
  const bool small = std::max(program.lengths[0], program.lengths[1]) <= kSmallLength &&
                     std::max(program.batches, program.heads) <= kSmallLength;
  if (small) options.lengths = {kSmallLength, kSmallLength, kSmallLength, kSmallLength};
  for (const bool fact : {options.small_buffers, options.small_scalars, small}) text += fact ? '1' : '0';
  return facts;
}

}  // namespace

BlockStatesKernel::BlockStatesKernel(const BlockMaskProgram& program) {
  text_ = score_mod::print(program.mask_mod);
  const Facts pairs = facts_of(program, program.buffers, program.scalars);
  const Facts blocks = facts_of(program, program.bounds_buffers, program.bounds_scalars);
  id = "flex_block_states\n" + pairs.text + "\n" + blocks.text + "\n" + text_ + program.bounds.text;
  source_ = "#include \"cuda/attention/mask/block_states.cuh\"\n\n";
  const auto render = [&](const score_mod::Graph& graph, const Facts& facts, const char* name) {
    score_mod::RenderOptions options = facts.options;
    options.name = name;
    source_ += score_mod::render_cuda(graph, options) + "\n";
  };
  render(program.mask_mod, pairs, "MaskMod");
  render(program.bounds.listed, blocks, "Listed");
  render(program.bounds.full, blocks, "Full");
  source_ +=
      "extern \"C\" __global__ void __launch_bounds__(fusegrad::device::kBlockStateThreads) flex_block_states(\n"
      "    const __grid_constant__ fusegrad::device::BlockStatesArguments arguments,\n"
      "    const __grid_constant__ MaskMod::Captured mask_mod, const __grid_constant__ Listed::Captured listed,\n"
      "    const __grid_constant__ Full::Captured full) {\n"
      "  fusegrad::device::block_states<MaskMod, Listed, Full>(arguments, mask_mod, listed, full);\n}\n";
}

jit::KernelProgram BlockStatesKernel::make(const std::string& architecture) const {
  return {{"flex_block_states", source_, architecture, {}, text_}, "flex_block_states", 0, false};
}

void block_states(const BlockMaskProgram& program, BlockState* states, void* stream) {
  const int64_t rows = program.rows(), cols = program.cols();
  const int64_t ctas =
      program.batches * program.heads * rows * ((cols + device::kBlockStateThreads - 1) / device::kBlockStateThreads);
  if (ctas == 0) return;
  if (ctas > INT32_MAX || std::max(program.lengths[0], program.lengths[1]) > INT32_MAX / 2) {
    throw std::invalid_argument("create_block_mask: lengths and heads must be below 2^30, but got " +
                                std::to_string(ctas) + " rows of blocks");
  }
  const BlockStatesKernel made(program);
  const jit::Kernel& kernel = jit::kernel(made.id, [&](const std::string& arch) { return made.make(arch); });
  const auto as_int = [](int64_t n) { return static_cast<int>(n); };
  device::BlockStatesArguments arguments{reinterpret_cast<unsigned char*>(states),
                                         as_int(program.heads),
                                         as_int(rows),
                                         as_int(cols),
                                         as_int(program.lengths[0]),
                                         as_int(program.lengths[1]),
                                         as_int(program.block_size[0]),
                                         as_int(program.block_size[1])};
  auto pairs = score_mod::pack_captured(program.mask_mod, program.buffers, program.scalars);
  auto blocks = score_mod::pack_captured(program.bounds.listed, program.bounds_buffers, program.bounds_scalars);
  void* parameters[] = {&arguments, pairs.data(), blocks.data(), blocks.data()};
  jit::Launch launch;
  launch.grid[0] = static_cast<unsigned>(ctas);
  launch.block[0] = device::kBlockStateThreads;
  launch.stream = static_cast<CUstream>(stream);
  kernel.launch(launch, parameters);
}

}  // namespace fusegrad::cuda
