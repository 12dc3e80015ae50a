#include "common/sleef.h"

#include <atomic>
#include <cmath>

namespace fusegrad::cpu {
namespace {

#define FUSEGRAD_BY_LANES(name, instructions, Vector, Lane, function) \
  FUSEGRAD_TARGET(instructions) Vector name##_by_lanes(Vector x) {    \
    Vector result;                                                    \
    alignas(64) Lane lanes[sizeof(Vector) / sizeof(Lane)];            \
    __builtin_memcpy(lanes, &x, sizeof(x));                           \
    for (auto& lane : lanes) lane = function(lane);                   \
    __builtin_memcpy(&result, lanes, sizeof(x));                      \
    return result;                                                    \
  }
FUSEGRAD_SLEEF(FUSEGRAD_BY_LANES)

constexpr VectorMath kByLanes = {
#define FUSEGRAD_ADDRESS(name, ...) name##_by_lanes,
    FUSEGRAD_SLEEF(FUSEGRAD_ADDRESS)
#undef FUSEGRAD_ADDRESS
};

// Not thread-local: CUDA's static runtime has so much thread-local memory that the library would not load if any of it
// had to be at a fixed place, and looking it up would take as long as the functions themselves.
constinit std::atomic<const VectorMath*> current{&kByLanes};

}  // namespace

const VectorMath* exchange_vector_math(const VectorMath* math) {
  return current.exchange(math != nullptr ? math : &kByLanes);
}

#define FUSEGRAD_FORWARD(name, instructions, Vector, Lane, function)                                             \
  extern "C" FUSEGRAD_TARGET(instructions) __attribute__((visibility("hidden"))) Vector Sleef_##name(Vector x) { \
    return current.load(std::memory_order_relaxed)->name(x);                                                     \
  }
FUSEGRAD_SLEEF(FUSEGRAD_FORWARD)

}  // namespace fusegrad::cpu
