#include "jit/front_end.h"

#include <cstdio>
#include <mutex>
#include <utility>

namespace fusegrad::jit {
namespace {

struct FrontEnds {
  std::mutex mutex;
  std::vector<FrontEnd> all;
};
// Never destroyed: threads may outlive static objects.
FrontEnds& registered() {
  static auto& instance = *new FrontEnds;
  return instance;
}

// A copy, so that no function of a front end runs under the lock.
std::vector<FrontEnd> front_ends() {
  FrontEnds& known = registered();
  const std::lock_guard lock(known.mutex);
  return known.all;
}

}  // namespace

void add_front_end(FrontEnd front_end) {
  FrontEnds& known = registered();
  const std::lock_guard lock(known.mutex);
  known.all.push_back(std::move(front_end));
}

void warn(const std::string& message) {
  for (const FrontEnd& one : front_ends()) {
    if (one.warn != nullptr) return one.warn(message);
  }
  std::fprintf(stderr, "%s\n", message.c_str());
}

bool release_memory() {
  bool released = false;
  for (const FrontEnd& one : front_ends()) released |= one.release_memory != nullptr && one.release_memory();
  return released;
}

std::vector<std::string> package_folders() {
  std::vector<std::string> folders;
  for (const FrontEnd& one : front_ends()) {
    if (!one.packages.empty()) folders.push_back(one.packages);
  }
  return folders;
}

}  // namespace fusegrad::jit
