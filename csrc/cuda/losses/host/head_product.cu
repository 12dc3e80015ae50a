// Launches of the linear losses' products whose rows have the same bits in every call. Which kernel runs and how its
// tiles lie may depend on the number of rows: no element sees it (head_product.cuh).
#include "cuda/losses/device/head_product.cuh"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "common/division.h"
#include "cuda/launch.h"
#include "cuda/losses/device/head_wgmma.cuh"
#include "cuda/losses/host/row_kernels.h"
#include "jit/driver.h"

namespace fusegrad::cuda {
namespace {

namespace head = device::head;
static_assert(head::kSegments == kVocabSegments);

constexpr const char* kName = "head_product_kernel";

struct Boxes {
  int64_t cols, rows, slices = 1;  // of the tensor
  int64_t row_stride;
  int box_rows;  // of a chunk of columns
};

device::TensorMap boxes_of(const void* data, DType dtype, const Boxes& b) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || b.row_stride % 8 != 0) {
    fail("fusegrad: ", kName, ": rows must begin at multiples of 16 bytes");
  }
  jit::TensorMapShape shape;
  shape.dtype = dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  shape.rank = 4;
  const auto bytes = [](int64_t elements) { return static_cast<uint64_t>(2 * elements); };
  shape.sizes = {static_cast<uint64_t>(b.cols), static_cast<uint64_t>(b.rows), static_cast<uint64_t>(b.slices), 1, 1};
  shape.stride_bytes = {0, bytes(b.row_stride), bytes(b.rows * b.row_stride), bytes(b.slices * b.rows * b.row_stride),
                        0};
  shape.box = {device::kChunk, static_cast<uint32_t>(b.box_rows), 1, 1, 1};
  shape.l2 = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  return std::bit_cast<device::TensorMap>(jit::Driver::get().tensor_map(data, shape, kName));
}

int groups_of(const Product& p) { return p.rows <= head::Shape<1>::kRows ? 1 : 2; }

int64_t row_tiles(const Product& p) { return ceil_div(p.rows, int64_t{64} * groups_of(p)); }

// Whether CTAs have a segment of a tile each: where tiles alone are too few for all multiprocessors.
bool splits(const Product& p) {
  return p.segments != 0 && (groups_of(p) == 1 ||
                             row_tiles(p) * ceil_div(p.cols, int64_t{head::kCols}) <= current_device().multiprocessors);
}

// A tile's columns. One tile of rows reads b once, in whole waves of CTAs.
int width_of(const Product& p) {
  if (p.segments != 0 || row_tiles(p) > 1) return head::kCols;
  const int64_t ctas = current_device().multiprocessors;
  const int64_t waves = ceil_div(p.cols, head::kCols * ctas);
  return static_cast<int>(round_up(ceil_div(p.cols, waves * ctas), int64_t{8}));
}

template <class T, bool kSums, int kGroups>
void launch_product(const Product& p, DType dtype, void* stream) {
  using Shape = head::Shape<kGroups>;
  head::Params q{};
  q.rows = static_cast<int>(p.rows);
  q.cols = static_cast<int>(p.cols);
  q.terms = static_cast<int>(p.terms);
  q.width = width_of(p);
  q.segment = kSums ? static_cast<int>(p.segment) : q.terms;
  q.segments = kSums ? static_cast<int>(p.segments) : 1;
  q.used = static_cast<int>(ceil_div(int64_t{q.terms}, int64_t{q.segment}));
  q.split = splits(p);
  q.bias = p.bias;
  q.out = p.out;
  q.float_out = p.float_out;
  q.out_stride = p.out_stride;
  q.parts = static_cast<float*>(p.workspace);
  q.a = boxes_of(p.a, dtype, {.cols = p.terms, .rows = p.rows, .row_stride = p.a_stride, .box_rows = Shape::kRows});
  if constexpr (kSums) {
    q.b = boxes_of(p.b, dtype,
                   {.cols = p.cols,
                    .rows = p.segment,
                    .slices = std::max(q.used - 1, 1),
                    .row_stride = p.b_stride,
                    .box_rows = head::kDepth});
    q.last =
        boxes_of(p.b, dtype, {.cols = p.cols, .rows = p.terms, .row_stride = p.b_stride, .box_rows = head::kDepth});
  } else {
    q.b = boxes_of(p.b, dtype, {.cols = p.terms, .rows = p.cols, .row_stride = p.b_stride, .box_rows = q.width});
  }
  const int64_t ctas = std::min<int64_t>(head::items_of<kGroups>(q), current_device().multiprocessors);
  launch(kName, head::head_product_kernel<T, kSums, kGroups>, {ctas, Shape::kThreads, 1, Shape::kSharedBytes}, stream,
         q);
  if (q.split) {
    launch("add_parts_kernel", head::add_parts_kernel<T>,
           {ceil_div(p.rows * (p.cols / 4), int64_t{head::kAddThreads}), head::kAddThreads}, stream, q);
  }
}

template <class T>
void launch_product(const Product& p, DType dtype, void* stream) {
  if (p.segments != 0) {
    return groups_of(p) == 1 ? launch_product<T, true, 1>(p, dtype, stream)
                             : launch_product<T, true, 2>(p, dtype, stream);
  }
  groups_of(p) == 1 ? launch_product<T, false, 1>(p, dtype, stream) : launch_product<T, false, 2>(p, dtype, stream);
}

}  // namespace

bool product_takes(DType dtype, int64_t hidden) {
#ifdef FUSEGRAD_SM90A
  // TMA copies rows that begin at multiples of 16 bytes.
  return (dtype == DType::kBFloat16 || dtype == DType::kFloat16) && hidden > 0 && hidden % 8 == 0 &&
         current_device().compute_capability == 90;
#else
  (void)dtype, (void)hidden;
  return false;
#endif
}

int64_t product_workspace(const Product& p) {
  if (p.segments == 0) return 0;
  constexpr int64_t kFloat = sizeof(float);
  return kFloat * (splits(p) ? p.segments * p.rows * p.cols
                             : current_device().multiprocessors * int64_t{head::Shape<2>::kKeptFloats});
}

void product(const Product& p, DType dtype, void* stream) {
  if (p.rows == 0 || p.cols == 0) return;
  constexpr int64_t kMost = INT32_MAX / (2 * kVocabSegments);
  const int64_t tiles = row_tiles(p) * ceil_div(p.cols, int64_t{width_of(p)});
  if (p.rows >= INT32_MAX || p.cols >= INT32_MAX || p.terms >= INT32_MAX || tiles > kMost) {
    fail("fusegrad: ", kName, ": too many rows or columns: ", p.rows, " x ", p.terms, " x ", p.cols);
  }
  if (p.segments < 0 || p.segments > kVocabSegments || (p.segments & (p.segments - 1)) != 0) {
    fail("fusegrad: ", kName, ": a process must have 1, 2, 4, 8 or 16 segments, but has ", p.segments);
  }
  if (p.segment % kGpuSegmentUnit != 0) {
    fail("fusegrad: ", kName, ": segments must begin at multiples of ", kGpuSegmentUnit, " columns, but have ",
         p.segment);
  }
  dtype == DType::kFloat16 ? launch_product<device::Float16>(p, dtype, stream)
                           : launch_product<device::BFloat16>(p, dtype, stream);
}

}  // namespace fusegrad::cuda
