#include "pytorch/host.h"

#include <ATen/Parallel.h>

#include "common/sleef.h"

// libtorch_cpu exports them; no header of torch's declares them.
#define FUSEGRAD_DECLARE(name, instructions, Vector, Lane, function) extern "C" Vector Sleef_##name(Vector);
FUSEGRAD_SLEEF(FUSEGRAD_DECLARE)

namespace fusegrad {
namespace {

constexpr cpu::VectorMath kSleef = {
#define FUSEGRAD_ADDRESS(name, ...) Sleef_##name,
    FUSEGRAD_SLEEF(FUSEGRAD_ADDRESS)
#undef FUSEGRAD_ADDRESS
};

void parallel_for(void* /*context*/, int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                  void* closure) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(closure, begin, end); });
}
int64_t threads(void* /*context*/) { return at::get_num_threads(); }

constexpr cpu::Host kHost{parallel_for, threads, nullptr};

const bool set = [] {
  cpu::exchange_vector_math(&kSleef);
  return true;
}();

}  // namespace

const cpu::Host& torch_host() { return kHost; }

}  // namespace fusegrad
