// Loading and launching, with a driver that notes what it is asked: no GPU is needed, and none is used.
#include <dlfcn.h>

#include <atomic>
#include <thread>

#include "fake_cuda.h"
#include "jit/kernel_cache.h"
#include "jit_support.h"

namespace fusegrad::jit {
namespace {

using fusegrad::testing::FakeCuda;

/// The loader takes a library that is there already for another of its name.
FakeCuda& fake() {
  static FakeCuda& instance = [&]() -> FakeCuda& {
    void* library = dlopen(FUSEGRAD_TEST_FAKE_CUDA, RTLD_NOW | RTLD_GLOBAL);
    TORCH_CHECK(library != nullptr, dlerror());
    return *reinterpret_cast<FakeCuda* (*)()>(dlsym(library, "fake_cuda"))();
  }();
  return instance;
}

KernelProgram made(const std::string& architecture) {
  return {{"probe", "extern \"C\" __global__ void probe(int x, int* out) { *out = x; }", architecture, {}, ""},
          "probe",
          0,
          false};
}

class KernelCache : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      Nvrtc::get();
    } catch (const RuntimeError& error) {
      GTEST_SKIP() << error.what();
    }
    ::setenv("FUSEGRAD_CACHE_LIMIT_MIB", "0", 1);
    fake().context = ++contexts_;  // every test has one of its own
    fake().modules.clear();
    fake().functions.clear();
    fake().set.clear();
    fake().relaxed_loads = 0;
    fake().failing.clear();
  }
  static inline uint64_t contexts_ = 0;
};

TEST_F(KernelCache, LoadsOnceAContext) {
  int calls = 0;
  const auto make = [&](const std::string& architecture) {
    ++calls;
    EXPECT_EQ(architecture, "90a");
    return made(architecture);
  };
  const Kernel& first = kernel("a", make);
  EXPECT_EQ(&kernel("a", make), &first);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(fake().modules, std::vector<std::string>{"\x7f"
                                                     "ELF"});
  EXPECT_EQ(fake().functions, std::vector<std::string>{"probe"});
  EXPECT_EQ(first.name, "probe");
  EXPECT_EQ(first.attributes.registers, 100 + CU_FUNC_ATTRIBUTE_NUM_REGS);
  EXPECT_EQ(first.attributes.local_bytes, 100 + CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
  EXPECT_EQ(first.attributes.static_shared_bytes, 1024);
  EXPECT_EQ(first.attributes.max_threads, 100 + CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  EXPECT_EQ(fake().relaxed_loads, 1);
  EXPECT_EQ(fake().capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  EXPECT_TRUE(fake().set.empty());

  kernel("b", make);
  EXPECT_EQ(calls, 2);
  fake().context = ++contexts_;
  const Kernel& elsewhere = kernel("a", make);
  EXPECT_NE(&elsewhere, &first);
  EXPECT_EQ(fake().modules.size(), 3u);
  fake().context = contexts_ - 1;
  EXPECT_EQ(&kernel("a", make), &first);
}

TEST_F(KernelCache, ArchitectureOfTheDevice) {
  const std::pair<int, const char*> rows[] = {{80, "80"}, {86, "86"}, {90, "90a"}, {100, "100"}, {120, "120"}};
  for (const auto& [capability, architecture] : rows) {
    fake().capability = capability;
    EXPECT_EQ(current_architecture(), architecture);
  }
  fake().capability = 90;
}

TEST_F(KernelCache, ThreadsLoadOnce) {
  const int64_t before = stats().compilations;
  std::vector<const Kernel*> found(8);
  std::vector<std::thread> threads;
  const auto make = [](const std::string& architecture) {
    KernelProgram kernel = made(architecture);
    kernel.program.source += "// by threads";
    return kernel;
  };
  for (const Kernel*& k : found) threads.emplace_back([&] { k = &kernel("threads", make); });
  for (std::thread& thread : threads) thread.join();
  for (const Kernel* k : found) EXPECT_EQ(k, found[0]);
  EXPECT_EQ(fake().modules.size(), 1u);
  EXPECT_EQ(stats().compilations, before + 1);
}

TEST_F(KernelCache, SharedMemoryAndClusters) {
  const auto with = [](int shared, bool large) {
    return [=](const std::string& architecture) {
      KernelProgram kernel = made(architecture);
      kernel.dynamic_shared_bytes = shared;
      kernel.large_clusters = large;
      return kernel;
    };
  };
  kernel("shared", with(232448 - 1024, true));
  EXPECT_EQ(fake().set, (std::vector<std::pair<CUfunction_attribute, int>>{
                            {CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 232448 - 1024},
                            {CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1}}));
  EXPECT_EQ(message_of([&] { kernel("too much", with(232448, false)); }),
            "probe: a CTA's shared memory must be at most the GPU's 232448 bytes, but got 233472");
}

TEST_F(KernelCache, LaunchPassesEverything) {
  const Kernel& k = kernel("launch", made);
  int x = 42;
  int* out = nullptr;
  void* arguments[] = {&x, &out};
  Launch how;
  how.grid = {8, 2, 3};
  how.block = {128, 2, 1};
  how.shared_bytes = 512;
  how.stream = reinterpret_cast<CUstream>(0x10);
  k.launch(how, arguments);
  const CUlaunchConfig& plain = fake().launched;
  EXPECT_EQ((std::array{plain.gridDimX, plain.gridDimY, plain.gridDimZ}), how.grid);
  EXPECT_EQ((std::array{plain.blockDimX, plain.blockDimY, plain.blockDimZ}), how.block);
  EXPECT_EQ(plain.sharedMemBytes, 512u);
  EXPECT_EQ(plain.hStream, how.stream);
  EXPECT_EQ(plain.numAttrs, 0u);
  EXPECT_EQ(fake().argument, 42);

  how.cluster = {4, 2, 1};
  how.programmatic = true;
  k.launch(how, arguments);
  ASSERT_EQ(fake().attributes.size(), 2u);
  EXPECT_EQ(fake().attributes[0].id, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  EXPECT_EQ(fake().attributes[0].value.clusterDim.x, 4u);
  EXPECT_EQ(fake().attributes[0].value.clusterDim.y, 2u);
  EXPECT_EQ(fake().attributes[0].value.clusterDim.z, 1u);
  EXPECT_EQ(fake().attributes[1].id, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
  EXPECT_EQ(fake().attributes[1].value.programmaticStreamSerializationAllowed, 1);
}

TEST_F(KernelCache, TensorMapsGiveTheOuterStrides) {
  TensorMapShape shape;
  shape.rank = 3;
  shape.sizes = {64, 100, 8};
  shape.stride_bytes = {0, 128, 12800};
  shape.box = {64, 16, 1};
  alignas(16) char data[16];
  Driver::get().tensor_map(data, shape, "probe");
  EXPECT_EQ(fake().map_strides, (std::vector<uint64_t>{128, 12800}));
  fake().failing = "cuTensorMapEncodeTiled";
  EXPECT_EQ(message_of([&] { Driver::get().tensor_map(data, shape, "probe"); }),
            "probe: cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE: invalid argument");
}

TEST_F(KernelCache, WantOfMemoryKeepsItsType) {
  fake().failing = "cuModuleLoadData";
  fake().status = CUDA_ERROR_OUT_OF_MEMORY;
  EXPECT_THROW(kernel("large", made), OutOfDeviceMemory);
  fake().failing.clear();
  fake().status = CUDA_ERROR_INVALID_VALUE;
  EXPECT_NE(kernel("large", made).function, nullptr);
}

TEST_F(KernelCache, FailuresHaveNamesAndAreTriedAgain) {
  for (const char* function : {"cuModuleLoadData", "cuModuleGetFunction"}) {
    fake().failing = function;
    EXPECT_EQ(message_of([] { kernel("failing", made); }),
              "probe: " + std::string(function) + " failed: CUDA_ERROR_INVALID_VALUE: invalid argument");
    EXPECT_EQ(fake().capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  }
  fake().failing.clear();
  EXPECT_NE(kernel("failing", made).function, nullptr);
  fake().failing = "cuLaunchKernelEx";
  int x = 0;
  void* arguments[] = {&x};
  EXPECT_EQ(message_of([&] { kernel("failing", made).launch({}, arguments); }),
            "probe: cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE: invalid argument");
}

}  // namespace
}  // namespace fusegrad::jit
