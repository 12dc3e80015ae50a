// The device headers that kernels compiled at run time include, embedded in the library by embed.cmake.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "jit/sha256.h"

namespace fusegrad::jit {

struct Header {
  const char* name;  // as it is included: "cuda/device/score_mod.cuh"
  const char* text;
};

std::span<const Header> headers();

/// Over the names and texts of the headers that a source includes, and of those that they include.
Digest headers_digest(std::string_view source);

/// The source with each included header put in place of its first #include: one file, for any CUDA compiler.
std::string self_contained(std::string_view source);

}  // namespace fusegrad::jit
