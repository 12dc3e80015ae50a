#include "fusegrad/check_targets.h"

#include <atomic>

namespace fusegrad {
namespace {

std::atomic<bool> check_targets{false};

}  // namespace

void set_check_targets(bool enabled) { check_targets = enabled; }
bool check_targets_enabled() { return check_targets; }

}  // namespace fusegrad
