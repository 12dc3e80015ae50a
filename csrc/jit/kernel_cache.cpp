#include "jit/kernel_cache.h"

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "common/error.h"
#include "jit/compile.h"
#include "jit/front_end.h"

namespace fusegrad::jit {
namespace {

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using Kernels = std::unordered_map<std::string, std::unique_ptr<Kernel>, Hash, std::equal_to<>>;

// One for each context. Never destroyed: the driver may be gone by then.
struct Loaded {
  std::shared_mutex mutex;
  std::mutex loading;
  std::unordered_map<uint64_t, Kernels> contexts;

  const Kernel* find(uint64_t context, std::string_view id) {
    const std::shared_lock lock(mutex);
    const auto kernels = contexts.find(context);
    if (kernels == contexts.end()) return nullptr;
    const auto found = kernels->second.find(id);
    return found == kernels->second.end() ? nullptr : found->second.get();
  }
};
Loaded& loaded() {
  static auto& instance = *new Loaded;
  return instance;
}

std::unique_ptr<Kernel> load(const KernelProgram& made, const std::string& cubin) {
  const Driver& driver = Driver::get();
  const char* name = made.program.name.c_str();
  auto kernel = std::make_unique<Kernel>();
  kernel->name = made.program.name;
  kernel->function = driver.function(driver.load(cubin, name), made.entry.c_str(), name);
  if (made.dynamic_shared_bytes > 0) driver.allow_shared(kernel->function, made.dynamic_shared_bytes, name);
  if (made.large_clusters) driver.allow_large_clusters(kernel->function, name);
  kernel->attributes = driver.attributes(kernel->function, name);
  return kernel;
}

std::unique_ptr<Kernel> load_or_make_room(const KernelProgram& made, const std::string& cubin) {
  try {
    return load(made, cubin);
  } catch (const OutOfDeviceMemory&) {
    if (!release_memory()) throw;
  }
  return load(made, cubin);
}

}  // namespace

std::string current_architecture() {
  Driver::get().current_context();
  const int capability = Driver::get().compute_capability();
  return std::to_string(capability) + (capability == 90 ? "a" : "");
}

int current_multiprocessors() {
  Driver::get().current_context();
  return Driver::get().multiprocessors();
}

const Kernel& kernel(std::string_view id, const std::function<KernelProgram(const std::string&)>& make) {
  Loaded& all = loaded();
  const uint64_t context = Driver::get().current_context();
  if (const Kernel* known = all.find(context, id)) return *known;
  const KernelProgram made = make(current_architecture());
  const Cubin cubin = compile(made.program);
  // One thread loads at a time; another may have loaded this one meanwhile.
  const std::lock_guard loading(all.loading);
  if (const Kernel* known = all.find(context, id)) return *known;
  std::unique_ptr<Kernel> fresh = load_or_make_room(made, *cubin);
  const std::unique_lock lock(all.mutex);
  return *(all.contexts[context][std::string(id)] = std::move(fresh));
}

}  // namespace fusegrad::jit
