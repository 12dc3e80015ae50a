// Kernels compiled at run time, run on a GPU; without one: that the missing driver is named.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <dlfcn.h>

#include "common.h"
#include "common/error.h"
#include "jit/kernel_cache.h"

namespace fusegrad::jit {
namespace {

KernelProgram made(const std::string& source, const std::string& architecture, int shared_bytes = 0) {
  return {{"probe", source, architecture, {}, ""}, "probe", shared_bytes, false};
}

constexpr const char* kAdd =
    "extern \"C\" __global__ void probe(float* x, float y) { x[blockIdx.x * blockDim.x + threadIdx.x] += y; }";

void add(const at::Tensor& x, float y) {
  const Kernel& k = kernel("add", [](const std::string& architecture) { return made(kAdd, architecture); });
  float* data = x.data_ptr<float>();
  void* arguments[] = {&data, &y};
  Launch how;
  how.grid[0] = static_cast<unsigned>(x.numel() / 32);
  how.block[0] = 32;
  how.stream = at::cuda::getCurrentCUDAStream();
  k.launch(how, arguments);
}

TEST(JitCuda, MissingDriverIsNamed) {
  if (void* driver = dlopen("libcuda.so.1", RTLD_LAZY); driver != nullptr) GTEST_SKIP() << "there is a driver";
  try {
    Driver::get();
    FAIL() << "there is no driver";
  } catch (const RuntimeError& error) {
    EXPECT_NE(std::string(error.what())
                  .find("jit: kernels run on a GPU, whose driver must be installed, but was not "
                        "found: libcuda.so.1"),
              std::string::npos)
        << error.what();
  }
}

TEST(JitCuda, RunsOnEveryDevice) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  for (c10::DeviceIndex device = 0; device < at::cuda::device_count(); ++device) {
    const c10::cuda::CUDAGuard guard(device);
    const auto x = at::arange(64, at::device({at::kCUDA, device}).dtype(at::kFloat));
    add(x, 2.5);
    EXPECT_TRUE(at::equal(x.cpu(), at::arange(64, at::kFloat) + 2.5)) << static_cast<int>(device);
  }
}

TEST(JitCuda, LoadsWhileAStreamIsCaptured) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  const auto x = at::zeros({32}, at::device(at::kCUDA).dtype(at::kFloat));
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const Kernel& k = kernel("captured", [](const std::string& architecture) { return made(kAdd, architecture); });
  float* data = x.data_ptr<float>();
  float y = 3;
  void* arguments[] = {&data, &y};
  Launch how;
  how.block[0] = 32;
  how.stream = at::cuda::getCurrentCUDAStream();
  k.launch(how, arguments);
  graph.capture_end();
  graph.replay();
  graph.replay();
  EXPECT_TRUE(at::equal(x.cpu(), at::full({32}, 6.0, at::kFloat)));
}

// A cluster's CTAs add up one number each, in more shared memory than a kernel has unasked.
TEST(JitCuda, ClustersAndSharedMemory) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  if (at::cuda::getCurrentDeviceProperties()->major < 9) GTEST_SKIP() << "needs clusters";
  constexpr int kShared = 100 << 10;
  const Kernel& k = kernel("clusters", [](const std::string& architecture) {
    return made(
        "#include \"cuda/device/bulk.cuh\"\n"
        "extern \"C\" __global__ void probe(unsigned* out) {\n"
        "  extern __shared__ unsigned shared[];\n"
        "  shared[25599] = 0;\n"
        "  asm volatile(\"barrier.cluster.arrive; barrier.cluster.wait;\" ::: \"memory\");\n"
        "  const unsigned there = fusegrad::device::remote_address(shared + 25599, 0);\n"
        "  asm volatile(\"red.shared::cluster.add.u32 [%0], %1;\" ::\"r\"(there), \"r\"(blockIdx.x + 1) : "
        "\"memory\");\n"
        "  asm volatile(\"barrier.cluster.arrive; barrier.cluster.wait;\" ::: \"memory\");\n"
        "  if (blockIdx.x == 0) *out = shared[25599];\n"
        "}\n",
        architecture, kShared);
  });
  EXPECT_EQ(k.attributes.max_dynamic_shared_bytes, kShared);
  EXPECT_EQ(k.attributes.local_bytes, 0);
  EXPECT_GT(k.attributes.registers, 0);
  const auto out = at::zeros({1}, at::device(at::kCUDA).dtype(at::kInt));
  int* data = out.data_ptr<int>();
  void* arguments[] = {&data};
  Launch how;
  how.grid[0] = how.cluster[0] = 8;
  how.shared_bytes = kShared;
  how.stream = at::cuda::getCurrentCUDAStream();
  k.launch(how, arguments);
  EXPECT_EQ(out.item<int>(), 36);
}

TEST(JitCuda, TensorMaps) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  if (at::cuda::getCurrentDeviceProperties()->major < 9) GTEST_SKIP() << "needs tensor maps";
  const auto x = at::zeros({4, 128, 64}, at::device(at::kCUDA).dtype(at::kBFloat16));
  TensorMapShape shape;
  shape.rank = 3;
  shape.sizes = {64, 128, 4};
  shape.stride_bytes = {0, 128, 128 * 128};
  shape.box = {64, 64, 1};
  Driver::get().tensor_map(x.data_ptr(), shape, "probe");
  shape.box[0] = 512;
  EXPECT_THROW(Driver::get().tensor_map(x.data_ptr(), shape, "probe"), RuntimeError);
}

}  // namespace
}  // namespace fusegrad::jit
