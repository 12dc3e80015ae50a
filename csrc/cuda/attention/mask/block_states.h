// Block masks on CUDA: attention/block_states.h.
#pragma once

#include "attention/block_states.h"
#include "cuda/attention/device/arguments.cuh"
#include "jit/kernel_cache.h"

namespace fusegrad::cuda {

/// Everything but what is launched: the kernel of a mask_mod and its bounds. Other values of what is captured, other
/// lengths and other lists need no other one. `id` determines it.
struct BlockStatesKernel {
  explicit BlockStatesKernel(const BlockMaskProgram& program);
  jit::KernelProgram make(const std::string& architecture) const;

  std::string id;

 private:
  std::string source_, text_;
};

/// As cpu::block_states, but that a read out of range gives 0, false or NaN.
void block_states(const BlockMaskProgram& program, BlockState* states, void* stream);

/// As cpu::block_list, by rows. Compiled ahead of time.
void block_list(const BlockState* states, int64_t heads, int64_t rows, int64_t cols, BlockState state,
                const BlockList& list, void* stream);

}  // namespace fusegrad::cuda
