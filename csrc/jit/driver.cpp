#include "jit/driver.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "common/error.h"

namespace fusegrad::jit {
namespace {

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  FUSEGRAD_CHECK(RuntimeError, function != nullptr, "jit: the CUDA driver must be of CUDA 12 or later, but has no ",
                 name);
}

}  // namespace

bool capturing(CUstream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t failed = cudaStreamIsCapturing(stream, &status);
  FUSEGRAD_CHECK(RuntimeError, failed == cudaSuccess,
                 "jit: the stream's state was not found: ", cudaGetErrorString(failed));
  return status != cudaStreamCaptureStatusNone;
}

const Driver& Driver::get() {
  static const Driver driver;
  return driver;
}

Driver::Driver() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    fail<RuntimeError>("jit: kernels run on a GPU, whose driver must be installed, but was not found: ",
                       why == nullptr ? "libcuda.so.1" : why);
  }
  find(library, "cuInit", call_.init);
  find(library, "cuGetErrorName", call_.error_name);
  find(library, "cuGetErrorString", call_.error_string);
  find(library, "cuCtxGetCurrent", call_.context);
  find(library, "cuCtxGetId", call_.context_id);
  find(library, "cuCtxGetDevice", call_.device);
  find(library, "cuDeviceGetAttribute", call_.device_attribute);
  find(library, "cuThreadExchangeStreamCaptureMode", call_.capture_mode);
  find(library, "cuModuleLoadData", call_.load);
  find(library, "cuModuleGetFunction", call_.function);
  find(library, "cuFuncGetAttribute", call_.attribute);
  find(library, "cuFuncSetAttribute", call_.set_attribute);
  find(library, "cuLaunchKernelEx", call_.launch);
  find(library, "cuTensorMapEncodeTiled", call_.encode_tiled);
  check(call_.init(0), "cuInit", "jit");
}

void Driver::check(CUresult status, const char* function, const char* what) const {
  if (status == CUDA_SUCCESS) return;
  const char *name = nullptr, *words = nullptr;
  call_.error_name(status, &name);
  call_.error_string(status, &words);
  const std::string message = std::string(what) + ": " + function +
                              " failed: " + (name == nullptr ? "an unknown error" : name) + ": " +
                              (words == nullptr ? std::to_string(status) : words);
  FUSEGRAD_CHECK(OutOfDeviceMemory, status != CUDA_ERROR_OUT_OF_MEMORY, message);
  throw RuntimeError(message);
}

uint64_t Driver::current_context() const {
  CUcontext context = nullptr;
  check(call_.context(&context), "cuCtxGetCurrent", "jit");
  if (context == nullptr) {
    // Makes device 0's primary context current: a front end that wanted another device has made its context current.
    const cudaError_t status = cudaFree(nullptr);
    FUSEGRAD_CHECK(RuntimeError, status == cudaSuccess,
                   "jit: the device's context was not made: ", cudaGetErrorString(status));
    check(call_.context(&context), "cuCtxGetCurrent", "jit");
  }
  unsigned long long id = 0;
  check(call_.context_id(context, &id), "cuCtxGetId", "jit");
  return id;
}

int Driver::compute_capability() const {
  CUdevice device = 0;
  int major = 0, minor = 0;
  check(call_.device(&device), "cuCtxGetDevice", "jit");
  check(call_.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "cuDeviceGetAttribute",
        "jit");
  check(call_.device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "cuDeviceGetAttribute",
        "jit");
  return 10 * major + minor;
}

int Driver::multiprocessors() const {
  CUdevice device = 0;
  int count = 0;
  check(call_.device(&device), "cuCtxGetDevice", "jit");
  check(call_.device_attribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device), "cuDeviceGetAttribute",
        "jit");
  return count;
}

CUmodule Driver::load(const std::string& cubin, const char* what) const {
  // Loading allocates, which a stream that is being captured forbids to its thread otherwise.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  check(call_.capture_mode(&mode), "cuThreadExchangeStreamCaptureMode", what);
  CUmodule module = nullptr;
  const CUresult status = call_.load(&module, cubin.data());
  check(call_.capture_mode(&mode), "cuThreadExchangeStreamCaptureMode", what);
  check(status, "cuModuleLoadData", what);
  return module;
}

CUfunction Driver::function(CUmodule module, const char* entry, const char* what) const {
  CUfunction found = nullptr;
  check(call_.function(&found, module, entry), "cuModuleGetFunction", what);
  return found;
}

FunctionAttributes Driver::attributes(CUfunction function, const char* what) const {
  const auto get = [&](CUfunction_attribute attribute) {
    int value = 0;
    check(call_.attribute(&value, attribute, function), "cuFuncGetAttribute", what);
    return value;
  };
  return {.registers = get(CU_FUNC_ATTRIBUTE_NUM_REGS),
          .local_bytes = get(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
          .static_shared_bytes = get(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
          .max_dynamic_shared_bytes = get(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES),
          .max_threads = get(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)};
}

void Driver::allow_shared(CUfunction function, int bytes, const char* what) const {
  CUdevice device = 0;
  int most = 0, fixed = 0;
  check(call_.device(&device), "cuCtxGetDevice", what);
  check(call_.device_attribute(&most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device),
        "cuDeviceGetAttribute", what);
  check(call_.attribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), "cuFuncGetAttribute", what);
  FUSEGRAD_CHECK(RuntimeError, bytes + fixed <= most, what, ": a CTA's shared memory must be at most the GPU's ", most,
                 " bytes, but got ", bytes + fixed);
  check(call_.set_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes), "cuFuncSetAttribute",
        what);
}

void Driver::allow_large_clusters(CUfunction function, const char* what) const {
  check(call_.set_attribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1), "cuFuncSetAttribute",
        what);
}

void Driver::launch(CUfunction function, const Launch& launch, void** arguments, const char* what) const {
  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config = {};
  config.gridDimX = launch.grid[0];
  config.gridDimY = launch.grid[1];
  config.gridDimZ = launch.grid[2];
  config.blockDimX = launch.block[0];
  config.blockDimY = launch.block[1];
  config.blockDimZ = launch.block[2];
  config.sharedMemBytes = static_cast<unsigned>(launch.shared_bytes);
  config.hStream = launch.stream;
  config.attrs = attributes;
  // GPUs without clusters know no such attribute.
  if (launch.cluster != std::array<unsigned, 3>{1, 1, 1}) {
    CUlaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim.x = launch.cluster[0];
    cluster.value.clusterDim.y = launch.cluster[1];
    cluster.value.clusterDim.z = launch.cluster[2];
  }
  if (launch.programmatic) {
    CUlaunchAttribute& programmatic = attributes[config.numAttrs++];
    programmatic.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    programmatic.value.programmaticStreamSerializationAllowed = 1;
  }
  check(call_.launch(&config, function, arguments, nullptr), "cuLaunchKernelEx", what);
}

CUtensorMap Driver::tensor_map(const void* data, const TensorMapShape& shape, const char* what) const {
  constexpr std::array<uint32_t, 5> kDense{1, 1, 1, 1, 1};
  CUtensorMap map = {};
  check(call_.encode_tiled(&map, shape.dtype, static_cast<cuuint32_t>(shape.rank), const_cast<void*>(data),
                           shape.sizes.data(), shape.stride_bytes.data() + 1, shape.box.data(), kDense.data(),
                           CU_TENSOR_MAP_INTERLEAVE_NONE, shape.swizzle, shape.l2, shape.beyond),
        "cuTensorMapEncodeTiled", what);
  return map;
}

}  // namespace fusegrad::jit
