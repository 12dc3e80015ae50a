// PyTorch as the front end of kernels that are compiled at run time.
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include "jit/front_end.h"

#ifdef FUSEGRAD_WITH_CUDA
#include <c10/core/CachingDeviceAllocator.h>

#include "jit/driver.h"
#include "pytorch/gpu.h"
#endif

namespace fusegrad {
namespace {

void warn(const std::string& message) { TORCH_WARN(message); }

#ifdef FUSEGRAD_WITH_CUDA
// torch may hold all of the GPU's memory without using it. It cannot let go of it in a capture.
bool release_memory() {
  // JAX alone may have called, in a process whose torch has no GPU or has not begun to use it.
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return false;
  if (c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount() == 0) return false;
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
  if (allocator == nullptr || !allocator->initialized() || jit::capturing(gpu::current_stream())) return false;
  allocator->emptyCache();
  return true;
}
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
