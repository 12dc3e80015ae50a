// common/host.h in XLA's processes: its pool of threads, and what the machine has.
#include "jax/host.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#include "common/host.h"

namespace fusegrad::cpu {
namespace {

// One parallel_for. Threads take ranges until none is left; the caller is one of them, and waits only for ranges that
// others have begun: handlers run on the pool's own threads, and waiting for a task that no thread is free to begin
// would never end. Whoever comes late finds nothing, and must not touch `function`.
class Ranges {
 public:
  Ranges(int64_t count, int64_t size, const std::function<void(int64_t, int64_t)>& function)
      : count_(count), size_(size), ranges_((count + size - 1) / size), function_(function) {}

  void run() {
    for (int64_t i = next_++; i < ranges_; i = next_++) {
      std::exception_ptr error;
      try {
        function_(i * size_, std::min(count_, (i + 1) * size_));
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      if (error != nullptr) error_ = error;
      if (++done_ == ranges_) all_done_.notify_one();
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [&] { return done_ == ranges_; });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  const int64_t count_, size_, ranges_;
  const std::function<void(int64_t, int64_t)>& function_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t done_ = 0;
  std::exception_ptr error_;
};

}  // namespace

InstructionSet instruction_set() {
  __builtin_cpu_init();
  const auto avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const auto avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  return !avx2 ? InstructionSet::kDefault : avx512 ? InstructionSet::kAvx512 : InstructionSet::kAvx2;
}

void parallel_for(void* stream, int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& function) {
  if (count <= 0) return;
  auto& pool = *static_cast<jax::HostStream*>(stream)->pool;
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t size = std::max(grain, (count + threads - 1) / threads);
  if (size >= count) return function(0, count);
  const auto ranges = std::make_shared<Ranges>(count, size, function);
  for (int64_t i = 1; i < (count + size - 1) / size; ++i) {
    try {
      pool.Schedule([ranges] { ranges->run(); });
    } catch (const std::bad_alloc&) {
      break;  // this thread runs what no other takes; what was scheduled must not outlive `function`
    }
  }
  ranges->run();
  ranges->wait();
}

}  // namespace fusegrad::cpu
