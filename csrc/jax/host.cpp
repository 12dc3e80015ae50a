// XLA's pool of threads as the kernels take it.
#include "jax/host.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

namespace fusegrad::jax {
namespace {

using Body = void (*)(void* closure, int64_t begin, int64_t end);

// One parallel_for. Threads take ranges until none is left; the caller is one of them, and waits only for ranges that
// others have begun: handlers run on the pool's own threads, and waiting for a task that no thread is free to begin
// would never end. Whoever comes late finds nothing, and must not touch `closure`.
class Ranges {
 public:
  Ranges(int64_t count, int64_t size, Body body, void* closure)
      : count_(count), size_(size), ranges_((count + size - 1) / size), body_(body), closure_(closure) {}

  void run() {
    for (int64_t i = next_++; i < ranges_; i = next_++) {
      std::exception_ptr error;
      try {
        body_(closure_, i * size_, std::min(count_, (i + 1) * size_));
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
  const Body body_;
  void* const closure_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t done_ = 0;
  std::exception_ptr error_;
};

int64_t threads(void* context) {
  return std::max<int64_t>(1, static_cast<xla::ffi::ThreadPool*>(context)->num_threads());
}

void parallel_for(void* context, int64_t count, int64_t grain, Body body, void* closure) {
  if (count <= 0) return;
  auto& pool = *static_cast<xla::ffi::ThreadPool*>(context);
  const int64_t most = threads(context), size = std::max(grain, (count + most - 1) / most);
  if (size >= count) return body(closure, 0, count);
  const auto ranges = std::make_shared<Ranges>(count, size, body, closure);
  for (int64_t i = 1; i < (count + size - 1) / size; ++i) {
    try {
      pool.Schedule([ranges] { ranges->run(); });
    } catch (const std::bad_alloc&) {
      break;  // this thread runs what no other takes; what was scheduled must not outlive `closure`
    }
  }
  ranges->run();
  ranges->wait();
}

}  // namespace

cpu::Host host_of(xla::ffi::ThreadPool& pool) { return {parallel_for, threads, &pool}; }

}  // namespace fusegrad::jax
