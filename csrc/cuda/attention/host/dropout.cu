#include "cuda/attention/host/dropout.h"

#include <algorithm>

#include "cuda/attention/device/dropout.cuh"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kWarp = 32, kBlock = 16;

template <bool kMost>
struct Config {
  static constexpr bool kDropout = true, kMostDropped = kMost;
};

// One warp per block of 16 queries by 16 keys.
template <bool kMost>
__global__ void __launch_bounds__(kWarp)
    mask_kernel(device::FlexDropout dropout, bool* mask, int64_t blocks, int queries, int keys) {
  const int row_blocks = (queries + kBlock - 1) / kBlock, col_blocks = (keys + kBlock - 1) / kBlock;
  const int lane = static_cast<int>(threadIdx.x);
  for (int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
    const int64_t head = i / (int64_t{row_blocks} * col_blocks);
    const int rest = static_cast<int>(i % (int64_t{row_blocks} * col_blocks));
    const int q = rest / col_blocks * kBlock, kv = rest % col_blocks * kBlock;
    device::FlexDropoutHead<Config<kMost>> of_head;
    of_head.begin(dropout, static_cast<int>(head));
    const auto pairs = of_head.template pairs<false>(dropout, q, kv, lane);
    for (int n = 0; n < 2; ++n) {
      for (int r = 0; r < 2; ++r) {
        bool kept[2];
        pairs.keeps(n, r, kept[0], kept[1]);
        const int at_q = q + r * 8 + lane / 4, at_kv = kv + n * 8 + lane % 4 * 2;
        for (int e = 0; e < 2; ++e) {
          if (at_q < queries && at_kv + e < keys) mask[(head * queries + at_q) * keys + at_kv + e] = kept[e];
        }
      }
    }
  }
}

}  // namespace

void flex_dropout_mask(const device::FlexDropout& dropout, bool most, bool* mask, int64_t heads, int64_t queries,
                       int64_t keys, void* stream) {
  const int64_t blocks = heads * ((queries + kBlock - 1) / kBlock) * ((keys + kBlock - 1) / kBlock);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 20));
  const auto kernel = most ? mask_kernel<true> : mask_kernel<false>;
  kernel<<<grid, kWarp, 0, static_cast<cudaStream_t>(stream)>>>(dropout, mask, blocks, static_cast<int>(queries),
                                                                static_cast<int>(keys));
  check(cudaGetLastError(), "flex_attention_dropout_mask");
}

}  // namespace fusegrad::cuda
