#include "score_mod/cache.h"

#include <list>
#include <mutex>
#include <string>
#include <unordered_map>

#include "common/process.h"
#include "score_mod/derivative.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"

namespace fusegrad::score_mod {
namespace {

constexpr size_t kMaxEntries = 512;
constexpr size_t kMaxBytes = size_t{1} << 24;

// The least recently used goes first.
class Cache {
 public:
  template <class Make>
  std::shared_ptr<const Graph> get(std::string key, Make&& make) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = by_key_.find(key);
      if (found != by_key_.end()) {
        entries_.splice(entries_.begin(), entries_, found->second);
        return found->second->graph;
      }
    }
    // Without the lock: two threads may make the same graph, and one of the two is dropped.
    auto graph = std::make_shared<const Graph>(make());
    const std::lock_guard lock(mutex_);
    if (by_key_.find(key) != by_key_.end()) return graph;
    std::list<Entry> fresh;
    fresh.push_front({std::move(key), graph});
    by_key_.emplace(fresh.front().key, fresh.begin());
    bytes_ += fresh.front().key.size();
    entries_.splice(entries_.begin(), fresh);  // from here on nothing throws
    while (entries_.size() > kMaxEntries || (bytes_ > kMaxBytes && entries_.size() > 1)) {
      bytes_ -= entries_.back().key.size();
      by_key_.erase(entries_.back().key);
      entries_.pop_back();
    }
    return graph;
  }

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<const Graph> graph;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;
  std::unordered_map<std::string_view, std::list<Entry>::iterator> by_key_;
  size_t bytes_ = 0;
};

Cache& cache() { return of_this_process<Cache>(); }

// What is made of a text, with a choice for each of its buffers.
std::string key_of(std::string_view text, char what, const std::vector<bool>& chosen) {
  std::string key(text);
  key.push_back('\0');  // no text holds one
  key.push_back(what);
  for (const bool one : chosen) key.push_back(one ? '1' : '0');
  return key;
}

}  // namespace

std::shared_ptr<const Graph> cached_graph(std::string_view text) {
  return cache().get(std::string(text), [&] { return simplify(lowered(parse(text))); });
}

std::shared_ptr<const Graph> cached_derivative(std::string_view text, const std::vector<bool>& wants_grad) {
  return cache().get(key_of(text, 'd', wants_grad), [&] { return differentiate(parse(text), wants_grad); });
}

std::shared_ptr<const Graph> cached_tangent(std::string_view text, const std::vector<bool>& has_tangent) {
  return cache().get(key_of(text, 't', has_tangent), [&] { return tangent(parse(text), has_tangent); });
}

std::shared_ptr<const Graph> cached_curvature(std::string_view text) {
  return cache().get(key_of(text, 'c', {}), [&] { return curvature(parse(text)); });
}

}  // namespace fusegrad::score_mod
