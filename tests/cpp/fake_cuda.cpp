#include "fake_cuda.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT fusegrad::testing::FakeCuda* fake_cuda() {
  static fusegrad::testing::FakeCuda fake;
  return &fake;
}

namespace {

CUresult result_of(const char* function) {
  return fake_cuda()->failing == function ? fake_cuda()->status : CUDA_SUCCESS;
}

}  // namespace

EXPORT CUresult cuInit(unsigned) { return result_of("cuInit"); }
EXPORT CUresult cuGetErrorName(CUresult, const char** name) {
  *name = "CUDA_ERROR_INVALID_VALUE";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult, const char** words) {
  *words = "invalid argument";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(fake_cuda()->context.load());
  return result_of("cuCtxGetCurrent");
}
EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(context);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const auto& fake = *fake_cuda();
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? fake.capability / 10
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? fake.capability % 10
                                                                       : fake.shared_bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  std::swap(*mode, fake_cuda()->capture_mode);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  auto& fake = *fake_cuda();
  const std::lock_guard lock(fake.mutex);
  fake.modules.emplace_back(static_cast<const char*>(image), 4);
  fake.relaxed_loads += fake.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED;
  *module = reinterpret_cast<CUmodule>(fake.modules.size());
  return result_of("cuModuleLoadData");
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  fake_cuda()->functions.emplace_back(name);
  *function = reinterpret_cast<CUfunction>(module);
  return result_of("cuModuleGetFunction");
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? fake_cuda()->static_shared_bytes
                                                            : 100 + static_cast<int>(attribute);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  fake_cuda()->set.emplace_back(attribute, value);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void** arguments, void**) {
  auto& fake = *fake_cuda();
  fake.launched = *config;
  fake.attributes.assign(config->attrs, config->attrs + config->numAttrs);
  fake.argument = *static_cast<int*>(arguments[0]);
  return result_of("cuLaunchKernelEx");
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank, void*, const cuuint64_t*,
                                       const cuuint64_t* strides, const cuuint32_t*, const cuuint32_t*,
                                       CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  fake_cuda()->map_strides.assign(strides, strides + rank - 1);
  return result_of("cuTensorMapEncodeTiled");
}
