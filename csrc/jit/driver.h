// The CUDA driver, opened when it is first needed: the library does not link it, so that it loads on machines without a
// GPU. Every call is checked; errors read `<kernel or what>: <function> failed: <name>: <words>`.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <string>

namespace fusegrad::jit {

/// What the driver says of a loaded kernel on its GPU.
struct FunctionAttributes {
  int registers = 0;                 // a thread
  int local_bytes = 0;               // a thread: spills and arrays that are not in registers
  int static_shared_bytes = 0;       // a CTA
  int max_dynamic_shared_bytes = 0;  // a CTA, as it is set
  int max_threads = 0;               // a CTA
};

struct Launch {
  std::array<unsigned, 3> grid{1, 1, 1};     // CTAs, a multiple of `cluster`
  std::array<unsigned, 3> block{1, 1, 1};    // threads
  std::array<unsigned, 3> cluster{1, 1, 1};  // CTAs (sm_90 and later); 1: no cluster
  int shared_bytes = 0;                      // dynamic
  bool programmatic = false;                 // may begin before the kernel before it ends (griddepcontrol.wait)
  CUstream stream = nullptr;
};

/// A tiled tensor map, innermost dimension first. Rank 1 to 5.
struct TensorMapShape {
  CUtensorMapDataType dtype = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int rank = 0;
  std::array<uint64_t, 5> sizes{};         // elements
  std::array<uint64_t, 5> stride_bytes{};  // [0] is not used: the innermost dimension is dense; multiples of 16
  std::array<uint32_t, 5> box{};           // elements, at most 256 each
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMapFloatOOBfill beyond = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;  // zeros
  CUtensorMapL2promotion l2 = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
};

/// Whether the stream is being captured into a graph.
bool capturing(CUstream stream);

class Driver {
 public:
  /// Opens libcuda.so.1. Throws where there is none, and tries again at the next call.
  static const Driver& get();

  /// The context of the calling thread's current device, which is made where there is none yet: its identifier is
  /// never used twice in a process.
  uint64_t current_context() const;
  /// That of the current context's device: 90 for sm_90.
  int compute_capability() const;
  int multiprocessors() const;

  /// Into the current context, for as long as that lives. Allowed while a stream is being captured.
  CUmodule load(const std::string& cubin, const char* what) const;
  CUfunction function(CUmodule module, const char* entry, const char* what) const;
  FunctionAttributes attributes(CUfunction function, const char* what) const;
  /// Allows launches with so much dynamic shared memory; throws where the GPU has less.
  void allow_shared(CUfunction function, int bytes, const char* what) const;
  /// Allows clusters of more than 8 CTAs.
  void allow_large_clusters(CUfunction function, const char* what) const;

  /// `arguments` are the addresses of the kernel's parameters.
  void launch(CUfunction function, const Launch& launch, void** arguments, const char* what) const;

  /// `data` is a multiple of 16.
  CUtensorMap tensor_map(const void* data, const TensorMapShape& shape, const char* what) const;

 private:
  Driver();

  void check(CUresult status, const char* function, const char* what) const;

  struct Functions {
    decltype(&cuInit) init;
    decltype(&cuGetErrorName) error_name;
    decltype(&cuGetErrorString) error_string;
    decltype(&cuCtxGetCurrent) context;
    decltype(&cuCtxGetId) context_id;
    decltype(&cuCtxGetDevice) device;
    decltype(&cuDeviceGetAttribute) device_attribute;
    decltype(&cuThreadExchangeStreamCaptureMode) capture_mode;
    decltype(&cuModuleLoadData) load;
    decltype(&cuModuleGetFunction) function;
    decltype(&cuFuncGetAttribute) attribute;
    decltype(&cuFuncSetAttribute) set_attribute;
    decltype(&cuLaunchKernelEx) launch;
    decltype(&cuTensorMapEncodeTiled) encode_tiled;
  } call_{};
};

}  // namespace fusegrad::jit
