#include "cuda/attention/mask/block_states.h"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Arguments {
  const unsigned char* states;
  int cols;
  unsigned char state;
  int *count, *index;
};

// A CTA for each row: once to count, once to write.
__global__ void __launch_bounds__(kThreads) block_list_kernel(const __grid_constant__ Arguments a) {
  __shared__ int warps[kWarps];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const unsigned char* states = a.states + static_cast<int64_t>(blockIdx.x) * a.cols;
  int* index = a.index + static_cast<int64_t>(blockIdx.x) * a.cols;
  int listed = 0;
  for (int col = thread; col < a.cols; col += kThreads) listed += states[col] == a.state ? 1 : 0;
  for (int step = 16; step > 0; step /= 2) listed += __shfl_xor_sync(~0u, listed, step);
  if (lane == 0) warps[warp] = listed;
  __syncthreads();
  int total = 0;
  for (const int n : warps) total += n;
  if (thread == 0) a.count[blockIdx.x] = total;
  int before = 0;  // listed ones of the columns before
  for (int first = 0; first < a.cols; first += kThreads) {
    const int col = first + thread;
    const bool is_listed = col < a.cols && states[col] == a.state;
    const unsigned votes = __ballot_sync(~0u, is_listed);
    __syncthreads();
    if (lane == 0) warps[warp] = __popc(votes);
    __syncthreads();
    int place = before + __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += warps[w];
      before += warps[w];
    }
    if (col < a.cols) index[is_listed ? place : total + col - place] = col;
  }
}

}  // namespace

void block_list(const BlockState* states, int64_t heads, int64_t rows, int64_t cols, BlockState state,
                const BlockList& list, void* stream) {
  if (heads * rows == 0) return;
  const Arguments arguments{reinterpret_cast<const unsigned char*>(states), static_cast<int>(cols),
                            static_cast<unsigned char>(state), list.count, list.index};
  launch("block_list", block_list_kernel, {.blocks = heads * rows, .threads = kThreads}, stream, arguments);
}

}  // namespace fusegrad::cuda
