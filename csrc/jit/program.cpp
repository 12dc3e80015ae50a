#include "jit/program.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "common/error.h"
#include "jit/headers.h"
#include "jit/nvrtc.h"

namespace fusegrad::jit {
namespace {

struct NvrtcFlag {
  std::string_view text;
  Version since;
};
constexpr NvrtcFlag kNvrtcFlags[] = {
    {"--device-as-default-execution-space", {12, 0}},
    // Without what no kernel uses (textures, launches from kernels): a tenth of the time of small ones.
    {"--minimal", {12, 4}},
    // NVRTC would ask the driver, where there is one, for a cache of its own, and leave out the report.
    {"--no-cache", {12, 9}},
};

bool is_name(const std::string& text) {
  return !text.empty() && text.size() <= 64 &&
         text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos;
}

}  // namespace

bool is_architecture(std::string_view text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::string_view suffix = text.substr(digits);
  return digits >= 2 && digits <= 4 && (suffix.empty() || suffix == "a" || suffix == "f");
}

void check(const Program& program) {
  FUSEGRAD_CHECK(ValueError, is_name(program.name), "jit: a program's name must match [a-z0-9_]+, but got '",
                 program.name, "'");
  FUSEGRAD_CHECK(ValueError, is_architecture(program.architecture), "jit: ", program.name,
                 ": the architecture must be one such as '80' or '90a', but got '", program.architecture, "'");
  FUSEGRAD_CHECK(ValueError, program.source.find('\0') == std::string::npos, "jit: ", program.name,
                 ": the source must not hold a null character");
}

std::vector<std::string> all_flags(const Program& program) {
  // The report of -v names registers and spills.
  std::vector<std::string> flags{"--gpu-architecture=sm_" + program.architecture, "--std=c++20", "--ptxas-options=-v"};
  for (const NvrtcFlag& flag : kNvrtcFlags) {
    if (Nvrtc::get().version() >= flag.since) flags.emplace_back(flag.text);
  }
  flags.insert(flags.end(), program.flags.begin(), program.flags.end());
  if (const char* more = std::getenv("FUSEGRAD_JIT_FLAGS")) {
    std::istringstream words(more);
    for (std::string word; words >> word;) flags.push_back(word);
  }
  return flags;
}

Digest cache_key(const Program& program) {
  const Version nvrtc = Nvrtc::get().version();
  Sha256 sum;
  sum.field("fusegrad kernel 1").field(FUSEGRAD_VERSION);
  sum.field(std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor));
  const std::vector<std::string> flags = all_flags(program);
  sum.field(std::to_string(flags.size()));
  for (const std::string& flag : flags) sum.field(flag);
  const Digest digest = headers_digest(program.source);
  sum.field({reinterpret_cast<const char*>(digest.data()), digest.size()});
  return sum.field(program.source).digest();
}

}  // namespace fusegrad::jit
