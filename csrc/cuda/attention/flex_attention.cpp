#include "cuda/attention/flex_attention.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "attention/flex_attention.h"
#include "common/error.h"
#include "common/process.h"

namespace fusegrad::cuda {
namespace {

struct Key {
  Asked asked;
  Gpu gpu;

  bool operator==(const Key&) const = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const { return AskedHash()(key.asked) ^ key.gpu.context; }
};

template <class Call>
class Known {
 public:
  using Kept = std::shared_ptr<const Plan<Call>>;

  Kept find(const Key& key) {
    const std::shared_lock lock(mutex_);
    const auto found = plans_.find(key);
    return found == plans_.end() ? nullptr : found->second;
  }
  Kept keep(Key key, Kept plan) {
    // Lengths that change from call to call make many: all go at once, and those that are used come back.
    constexpr size_t kMost = 1024;
    const std::unique_lock lock(mutex_);
    if (plans_.size() >= kMost) plans_.clear();
    return plans_.try_emplace(std::move(key), std::move(plan)).first->second;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<Key, Kept, KeyHash> plans_;
};

void check_head_sizes(const FlexShape& shape) {
  const auto check = [](const char* name, int64_t size, int64_t most) {
    FUSEGRAD_CHECK(NotImplementedError, size <= most, "flex_attention: ", name, " must have a head size of at most ",
                   most, " on CUDA, but got ", size);
  };
  check("query", shape.head_size, kMostHeadOnCuda);
  check("value", shape.value_size, kMostValueOnCuda);
}

bool prints_plans() {
  const char* value = std::getenv("FUSEGRAD_PRINT_PLANS");
  return value != nullptr && std::string_view(value) == "1";
}

template <class Call, class Make>
std::shared_ptr<const Plan<Call>> known_or_made(const char* name, const Call& call, const Make& make) {
  auto& known = of_this_process<Known<Call>>();
  Key key{asked_of(call), Gpu::current()};
  if (auto plan = known.find(key)) return plan;
  check_head_sizes(key.asked.shape);
  auto plan = std::make_shared<const Plan<Call>>(make(key.asked, key.gpu));
  if (prints_plans()) std::fputs(printed(name, *plan).c_str(), stderr);
  return known.keep(std::move(key), std::move(plan));
}

}  // namespace

std::shared_ptr<const Plan<FlexForwardCall>> plan_of(const FlexForwardCall& call) {
  return known_or_made("flex_attention", call, plan_forward);
}
std::shared_ptr<const Plan<FlexBackwardCall>> plan_of(const FlexBackwardCall& call) {
  return known_or_made("flex_attention's backward", call, plan_backward);
}
std::shared_ptr<const Plan<FlexTangentCall>> plan_of(const FlexTangentCall& call) {
  return known_or_made("flex_attention's forward mode", call, plan_tangents);
}
std::shared_ptr<const Plan<FlexPairTangentsCall>> plan_of(const FlexPairTangentsCall& call) {
  return known_or_made("flex_attention's second derivatives", call, plan_pair_tangents);
}

}  // namespace fusegrad::cuda
