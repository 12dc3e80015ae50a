#include "cuda/attention/mask/dropout.h"

#include <algorithm>

#include "cuda/attention/device/dropout.cuh"
#include "cuda/launch.h"

namespace fusegrad::cuda {
namespace {

constexpr int kWarp = 32, kRows = 16, kCols = 64;

struct Config {
  static constexpr bool kDropout = true;
};

// One warp per block of pairs.
__global__ void __launch_bounds__(kWarp)
    mask_kernel(device::FlexDropout dropout, bool* mask, int64_t blocks, int first, int queries, int keys) {
  const int row_blocks = (queries + kRows - 1) / kRows, col_blocks = (keys + kCols - 1) / kCols;
  const int lane = static_cast<int>(threadIdx.x);
  for (int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
    const int64_t head = i / (int64_t{row_blocks} * col_blocks);
    const int rest = static_cast<int>(i % (int64_t{row_blocks} * col_blocks));
    const int q = rest / col_blocks * kRows, kv = rest % col_blocks * kCols;
    device::FlexDropoutHead<Config> of_head;
    of_head.begin(dropout, static_cast<int>(head));
    const auto kept = of_head.to_end(dropout, first + q, kv, lane);
    for (int n = 0; n < kCols / 8; ++n) {
      for (int r = 0; r < 2; ++r) {
        bool keeps[2];
        kept.keeps(n, r, keeps[0], keeps[1]);
        const int at_q = q + r * 8 + lane / 4, at_kv = kv + n * 8 + lane % 4 * 2;
        for (int e = 0; e < 2; ++e) {
          if (at_q < queries && at_kv + e < keys) mask[(head * queries + at_q) * keys + at_kv + e] = keeps[e];
        }
      }
    }
  }
}

}  // namespace

void flex_dropout_mask(const device::FlexDropout& dropout, bool* mask, int64_t heads, int64_t first, int64_t queries,
                       int64_t keys, void* stream) {
  const int64_t blocks = heads * ((queries + kRows - 1) / kRows) * ((keys + kCols - 1) / kCols);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 20));
  mask_kernel<<<grid, kWarp, 0, static_cast<cudaStream_t>(stream)>>>(dropout, mask, blocks, static_cast<int>(first),
                                                                     static_cast<int>(queries), static_cast<int>(keys));
  check(cudaGetLastError(), "flex_attention_dropout_mask");
}

}  // namespace fusegrad::cuda
