#include "cuda/attention/host/dropout.h"

#include <algorithm>

#include "cuda/attention/device/dropout.cuh"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kWarp = 32, kBlock = 32;

struct Config {
  static constexpr bool kDropout = true;
};

// One warp per block of 32 queries by 32 keys.
__global__ void __launch_bounds__(kWarp)
    mask_kernel(device::FlexDropout dropout, bool* mask, int64_t blocks, int queries, int keys) {
  const int row_blocks = (queries + kBlock - 1) / kBlock, col_blocks = (keys + kBlock - 1) / kBlock;
  const int lane = static_cast<int>(threadIdx.x);
  for (int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
    const int64_t head = i / (int64_t{row_blocks} * col_blocks);
    const int rest = static_cast<int>(i % (int64_t{row_blocks} * col_blocks));
    const int row = rest / col_blocks, col = rest % col_blocks;
    device::FlexDropoutHead<Config> of_head;
    of_head.begin(dropout, static_cast<int>(head));
    const unsigned kept =
        of_head.template block<false>(dropout, static_cast<unsigned>(row), static_cast<unsigned>(col), lane);
    for (int bit = 0; bit < 32; ++bit) {
      const int q = row * kBlock + bit / 8 % 2 * 16 + bit % 2 * 8 + lane / 4;
      const int kv = col * kBlock + bit / 4 % 2 * 16 + bit / 2 % 2 * 8 + lane % 4 * 2 + bit / 16;
      if (q < queries && kv < keys) mask[(head * queries + q) * keys + kv] = (kept >> bit & 1) != 0;
    }
  }
}

}  // namespace

void flex_dropout_mask(const device::FlexDropout& dropout, bool* mask, int64_t heads, int64_t queries, int64_t keys,
                       void* stream) {
  const int64_t blocks = heads * ((queries + kBlock - 1) / kBlock) * ((keys + kBlock - 1) / kBlock);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 20));
  mask_kernel<<<grid, kWarp, 0, static_cast<cudaStream_t>(stream)>>>(dropout, mask, blocks, static_cast<int>(queries),
                                                                     static_cast<int>(keys));
  check(cudaGetLastError(), "flex_attention_dropout_mask");
}

}  // namespace fusegrad::cuda
