// PyTorch as the front end of kernels that are compiled at run time.
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include "jit/front_end.h"

#ifdef FUSEGRAD_WITH_CUDA
#include "pytorch/gpu.h"
#endif

namespace fusegrad {
namespace {

void warn(const std::string& message) { TORCH_WARN(message); }

#ifdef FUSEGRAD_WITH_CUDA
constexpr auto release_memory = gpu::release_memory;
#else
constexpr bool (*release_memory)() = nullptr;
#endif

// torch's libraries are in torch/lib of that folder. (No std::filesystem in this library: libtorch.so exports functions
// of its own of those names, of another version, which the loader would take.)
std::string packages() {
  Dl_info info{};
  const auto* function = reinterpret_cast<const void*>(&c10::WarningUtils::get_warning_handler);
  const std::string file = dladdr(function, &info) != 0 ? info.dli_fname : "";
  const size_t end = file.rfind('/');
  return end == std::string::npos ? std::string() : file.substr(0, end) + "/../..";
}

const bool added = [] {
  jit::add_front_end({warn, release_memory, packages()});
  return true;
}();

}  // namespace
}  // namespace fusegrad
