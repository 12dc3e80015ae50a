// NVRTC, CUDA's compiler at run time, opened when it is first needed: PyTorch's CUDA wheels bring it, the library does
// not link it and no header of CUDA is needed. It needs no GPU.
#pragma once

#include <compare>
#include <map>
#include <string>

#include "jit/program.h"

namespace fusegrad::jit {

struct Version {
  int major = 0, minor = 0;
  auto operator<=>(const Version&) const = default;
};

struct Compiled {
  std::string cubin;  // empty where the source or a flag is wrong
  std::string log;    // the compiler's words and ptxas's report
};

class Nvrtc {
 public:
  /// Opens the library: the file that FUSEGRAD_NVRTC names, where it is set; else the wheels' beside torch, then the
  /// loader's. Throws if there is none, and tries again at the next call.
  static const Nvrtc& get();

  Version version() const { return version_; }
  const std::string& path() const { return path_; }

  /// Throws where this NVRTC does not know the architecture. Threads may call it at once. Reads no file: headers come
  /// from headers.h alone.
  Compiled compile(const Program& program) const;

 private:
  Nvrtc();

  // The functions of nvrtc.h, whose types are a pointer and enums there.
  struct Functions {
    const char* (*error_string)(int);
    int (*version)(int*, int*);
    int (*supported_count)(int*);
    int (*supported)(int*);
    int (*create)(void**, const char*, const char*, int, const char* const*, const char* const*);
    int (*destroy)(void**);
    int (*compile)(void*, int, const char* const*);
    int (*cubin_size)(void*, size_t*);
    int (*cubin)(void*, char*);
    int (*log_size)(void*, size_t*);
    int (*log)(void*, char*);
  };

  void check(int status, const char* function, const Program& program) const;
  void check_architecture(const Program& program) const;

  Functions call_{};
  Version version_;
  std::string path_;
};

/// What a kernel, or a function that was not inlined, takes.
struct Resources {
  int registers = 0;  // a thread; 0 of a function that is no kernel
  int stack_bytes = 0, spill_store_bytes = 0, spill_load_bytes = 0;
  int shared_bytes = 0;        // static
  bool products_wait = false;  // each wgmma for the one before: the compiler found reads or writes of their registers
};

/// For each function that ptxas's report in `log` names.
std::map<std::string, Resources> resources(const std::string& log);

}  // namespace fusegrad::jit
