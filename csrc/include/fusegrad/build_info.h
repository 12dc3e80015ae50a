// What this library was built for and with.
#pragma once

namespace fusegrad {

struct BuildInfo {
  const char* version;        // of fusegrad
  const char* torch_version;  // "2.11.0": with which the library was built; it loads with every 2.11
  bool cuda;                  // are the CUDA kernels in it?
  const char* cuda_version;   // "13.0", or empty
  const char* cuda_archs;     // "80;86;…", or empty
  const char* cuda_status;    // a sentence: with which CUDA, or why there is none
  const char* compiler;       // of the host code
};

const BuildInfo& build_info();

}  // namespace fusegrad
