// A CUDA driver without a GPU, which notes what it is asked: fake_cuda.cpp is built as a library of the driver's name.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace fusegrad::testing {

struct FakeCuda {
  std::mutex mutex;
  std::atomic<uint64_t> context{1};  // the identifier of the current one
  int capability = 90;
  int shared_bytes = 232448;                   // that a CTA may have
  int static_shared_bytes = 1024;              // of every kernel
  std::string failing;                         // the function that fails from now on
  CUresult status = CUDA_ERROR_INVALID_VALUE;  // with which it does
  std::vector<std::string> modules;            // cubins loaded
  std::vector<std::string> functions;          // names asked for
  int relaxed_loads = 0;                       // while captures are not disturbed
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::vector<std::pair<CUfunction_attribute, int>> set;
  CUlaunchConfig launched{};
  std::vector<CUlaunchAttribute> attributes;
  int argument = 0;  // the first parameter of the last launch, an int
  std::vector<uint64_t> map_strides;
};

}  // namespace fusegrad::testing

extern "C" fusegrad::testing::FakeCuda* fake_cuda();
