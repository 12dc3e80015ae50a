// What the core was built for and with.
#pragma once

namespace fusegrad {

struct Build {
  const char* version;       // of fusegrad
  bool cuda;                 // are the CUDA kernels in it?
  const char* cuda_version;  // "13.0", or empty
  const char* cuda_archs;    // "80 90a", or empty
  const char* cuda_status;   // a sentence: with which CUDA, or why there is none
  const char* compiler;      // of the host code
};

const Build& build();

}  // namespace fusegrad
