// What belongs to a process, where processes fork (multiprocessing, DataLoader workers).
#pragma once

#include <pthread.h>

#include <atomic>
#include <stdexcept>

namespace fusegrad {

/// The process's object of type T. A forked child begins with a new one: in it no other thread runs, so the parent's
/// may be locked for ever, or wait for what no thread will do. Never destroyed: threads may outlive static objects.
template <class T>
T& of_this_process() {
  static std::atomic<T*> current{new T};
  static const int failed = pthread_atfork(nullptr, nullptr, [] { current = new T; });
  if (failed != 0) throw std::runtime_error("fusegrad: pthread_atfork failed");
  return *current;
}

}  // namespace fusegrad
