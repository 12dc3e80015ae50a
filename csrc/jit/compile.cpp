#include "jit/compile.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "common/error.h"
#include "common/process.h"
#include "jit/cache.h"
#include "jit/headers.h"

namespace fusegrad::jit {
namespace {

std::atomic<int64_t> compilations{0}, disk_hits{0}, memory_hits{0};

// The cubins of this process. One that is still being compiled is a future that others wait for.
struct Memory {
  std::mutex mutex;
  std::map<Digest, std::shared_future<Cubin>> cubins;
};
Memory& memory() { return of_this_process<Memory>(); }

// Those that compile_ahead() began.
struct Threads {
  std::mutex mutex;
  std::vector<std::future<void>> running;
};

// Tells of a compilation that takes long: FUSEGRAD_JIT_PROGRESS seconds (2), or never ("off").
class Progress {
 public:
  explicit Progress(const Program& program) : program_(program) {
    const char* text = std::getenv("FUSEGRAD_JIT_PROGRESS");
    double seconds = 2;
    if (text != nullptr && *text != '\0') {
      char* end = nullptr;
      seconds = std::string_view(text) == "off" ? -1 : std::strtod(text, &end);
      FUSEGRAD_CHECK(ValueError, end == nullptr || (*end == '\0' && seconds >= 0),
                     "jit: FUSEGRAD_JIT_PROGRESS must be seconds, 0 or more, or 'off', but got '", text, "'");
    }
    if (seconds == 0) {
      tell();
    } else if (seconds > 0 && seconds < 1e6) {
      try {
        thread_ = std::thread([this, seconds] { watch(seconds); });
      } catch (const std::system_error&) {
        // No more threads can be had. The compilation goes on, and only tells nothing of itself.
      }
    }
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    if (thread_.joinable()) {
      {
        const std::lock_guard lock(mutex_);
        done_ = true;
      }
      changed_.notify_one();
      thread_.join();
    }
    if (!told_) return;
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin_;
    std::fprintf(stderr, "fusegrad: compiling %s for sm_%s took %.1f s\n", program_.name.c_str(),
                 program_.architecture.c_str(), taken.count());
  }

 private:
  void watch(double seconds) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done_; })) tell();
  }
  void tell() {
    told_ = true;
    std::fprintf(stderr, "fusegrad: compiling %s for sm_%s\n", program_.name.c_str(), program_.architecture.c_str());
  }

  const Program& program_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false, told_ = false;
  std::thread thread_;
};

// Compilations that threads are in. NVRTC has locks of its own, which in a child that is forked meanwhile nobody
// releases: it would wait for ever.
std::atomic<int> running{0};
std::atomic<bool> forked_meanwhile{false};

class Running {
 public:
  Running() {
    static const int failed = pthread_atfork(nullptr, nullptr, [] {
      if (running.exchange(0) != 0) forked_meanwhile = true;
    });
    FUSEGRAD_CHECK(RuntimeError, failed == 0, "jit: pthread_atfork failed");
    FUSEGRAD_CHECK(RuntimeError, !forked_meanwhile,
                   "jit: kernels must not be compiled in a process that was forked while another thread of its parent "
                   "compiled one: fork earlier or later, or start the process anew (multiprocessing's 'spawn')");
    ++running;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() { --running; }
};

std::string file_stem(const Program& program, const Digest& key) {
  return program.name + "-sm_" + program.architecture + "-" + hex(key).substr(0, 16);
}

// The source with its headers, and NVRTC's flags. nvcc refuses it: static arrays are not in its device code.
std::string whole_source(const Program& program) {
  std::string text = "// " + program.name + ", by NVRTC with";
  for (const std::string& flag : all_flags(program)) text += " " + flag;
  text += '\n';
  for (size_t at = 0; at < program.score_mod.size();) {
    const size_t end = std::min(program.score_mod.find('\n', at), program.score_mod.size());
    text += "//   " + program.score_mod.substr(at, end - at) + "\n";
    at = end + 1;
  }
  return text + self_contained(program.source);
}

// FUSEGRAD_JIT_DUMP=folder: what is loaded and where it came from, for people and for profilers.
void dump(const Program& program, const Digest& key, const std::string& cubin, const std::string& log) {
  const char* folder = std::getenv("FUSEGRAD_JIT_DUMP");
  if (folder == nullptr || *folder == '\0') return;
  make_folders(folder);  // the files tell where that fails
  const std::string stem = std::string(folder) + "/" + file_stem(program, key);
  const std::pair<const char*, const std::string> files[] = {
      {".cu", whole_source(program)}, {".cubin", cubin}, {".log", log}};
  for (const auto& [suffix, text] : files) {
    if (text.empty()) continue;  // a cubin from the disk has no log
    std::ofstream file(stem + suffix, std::ios::binary);
    file << text << std::flush;
    FUSEGRAD_CHECK(RuntimeError, file.good(), "jit: FUSEGRAD_JIT_DUMP must name a folder that can be written, but ",
                   stem, suffix, " cannot be");
  }
}

Cubin get(const Program& program, const Digest& key) {
  const DiskCache disk = DiskCache::from_environment();
  if (auto stored = disk.load(key, program.architecture)) {
    ++disk_hits;
    dump(program, key, *stored, "");
    return std::make_shared<const std::string>(*std::move(stored));
  }
  Compiled compiled = compile_uncached(program);
  disk.store(key, program.architecture, compiled.cubin);
  dump(program, key, compiled.cubin, compiled.log);
  return std::make_shared<const std::string>(std::move(compiled.cubin));
}

}  // namespace

Compiled compile_uncached(const Program& program) {
  check(program);
  const Nvrtc& nvrtc = Nvrtc::get();
  ++compilations;
  Compiled compiled;
  {
    const Running counted;
    const Progress progress(program);
    compiled = nvrtc.compile(program);
  }
  if (!compiled.cubin.empty()) return compiled;
  const Digest key = cache_key(program);
  dump(program, key, "", compiled.log);
  const auto kept = DiskCache::from_environment().keep_source(file_stem(program, key), whole_source(program));
  const Version v = nvrtc.version();
  const char* more = std::getenv("FUSEGRAD_JIT_FLAGS");
  const std::string whose = more == nullptr || *more == '\0'
                                ? "an error of fusegrad's own, please report it."
                                : "FUSEGRAD_JIT_FLAGS must hold flags that every kernel compiles with, but got '" +
                                      std::string(more) + "'; if it fails without them too, please report it.";
  fail<RuntimeError>(
      "jit: ", program.name, " was not compiled for sm_", program.architecture, " by NVRTC ", v.major, ".", v.minor,
      ": ", whose, "\nscore_mod: ", program.score_mod.empty() ? "none" : "\n" + program.score_mod,
      "\nsource: ", kept ? *kept : "not kept, for want of a cache folder; FUSEGRAD_JIT_DUMP=folder keeps it",
      "\nlog:\n", compiled.log);
}

Cubin compile(const Program& program) {
  check(program);
  const Digest key = cache_key(program);
  Memory& m = memory();
  std::promise<Cubin> promise;
  const std::shared_future<Cubin> own = promise.get_future().share();
  std::shared_future<Cubin> others;
  {
    const std::lock_guard lock(m.mutex);
    const auto [place, ours] = m.cubins.try_emplace(key, own);
    if (!ours) others = place->second;
  }
  if (others.valid()) {
    Cubin cubin = others.get();
    ++memory_hits;
    return cubin;
  }
  try {
    Cubin cubin = get(program, key);
    promise.set_value(cubin);
    return cubin;
  } catch (...) {
    {
      // The next caller tries again.
      const std::lock_guard lock(m.mutex);
      m.cubins.erase(key);
    }
    promise.set_exception(std::current_exception());
    throw;
  }
}

void compile_ahead(Program program) {
  // At the process's end the futures' destructors wait: a thread within NVRTC must not outlive NVRTC's own objects.
  static const struct AtEnd {
    ~AtEnd() {  // NOLINT(bugprone-exception-escape): a mutex that cannot be locked leaves nothing to do but to end
      Threads& threads = of_this_process<Threads>();
      const std::lock_guard lock(threads.mutex);
      threads.running.clear();
    }
  } at_end;
  Threads& threads = of_this_process<Threads>();
  const std::lock_guard lock(threads.mutex);
  std::erase_if(threads.running,
                [](const auto& one) { return one.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
  try {
    threads.running.push_back(std::async(std::launch::async, [program = std::move(program)] {
      try {
        compile(program);
      } catch (const std::exception&) {
        // compile() kept nothing: it is tried again, and told, where the program is asked for.
      }
    }));
  } catch (const std::system_error&) {
    // No more threads can be had: it is compiled where it is asked for.
  }
}

Stats stats() { return {compilations, disk_hits, memory_hits, rejected_entries()}; }

void forget() {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  // One that is being compiled stays: its future is what others wait for.
  std::erase_if(m.cubins, [](const auto& entry) {
    return entry.second.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  });
}

}  // namespace fusegrad::jit
