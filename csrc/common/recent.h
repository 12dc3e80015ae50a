// What was made last, kept by what it was made of.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <utility>

#include "common/process.h"

namespace fusegrad {

/// Up to kMost values by their keys, for few enough that a search through all of them takes less than making one. The
/// least recently used goes first; any thread may call it. The process's own is of_this_process<Recent<...>>().
template <class Key, class Value, size_t kMost>
class Recent {
 public:
  /// The value of a key, made by make() where it is not kept. An error of make is not kept.
  template <class Make>
  std::shared_ptr<const Value> get(Key key, const Make& make) {
    {
      const std::lock_guard lock(mutex_);
      for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
        if (!(entry->first == key)) continue;
        entries_.splice(entries_.begin(), entries_, entry);
        return entry->second;
      }
    }
    // Without the lock: two threads may make the same value, and both are kept until one goes.
    auto made = std::make_shared<const Value>(make());
    const std::lock_guard lock(mutex_);
    entries_.emplace_front(std::move(key), made);
    if (entries_.size() > kMost) entries_.pop_back();
    return made;
  }

 private:
  std::mutex mutex_;
  std::list<std::pair<Key, std::shared_ptr<const Value>>> entries_;
};

}  // namespace fusegrad
