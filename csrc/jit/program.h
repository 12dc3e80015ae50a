// A kernel to be compiled at run time.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "jit/sha256.h"

namespace fusegrad::jit {

struct Program {
  std::string name;                // for people and file names: [a-z0-9_]+, "flex_forward"
  std::string source;              // CUDA C++20 with extern "C" kernels; may include the headers of headers.h
  std::string architecture;        // "80", "90a"
  std::vector<std::string> flags;  // of NVRTC, beside those that every kernel gets
  std::string score_mod;           // the text it was made from, for errors; empty where there is none
};

/// Digits, then nothing, "a" (that architecture alone) or "f" (its family).
bool is_architecture(std::string_view text);

/// Throws where a member is not of the form above.
void check(const Program& program);

/// What every kernel is compiled with, the program's own flags, and those of FUSEGRAD_JIT_FLAGS. Loads NVRTC.
std::vector<std::string> all_flags(const Program& program);

/// Names the cubin: over library, NVRTC, architecture, flags, headers, source. Loads NVRTC.
Digest cache_key(const Program& program);

}  // namespace fusegrad::jit
