// Faults on request, for a process that has this library in LD_PRELOAD: it stands before the C library's functions,
// counts their calls by code that lies in given ranges, and lets the n-th fail. faults.py drives it.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace {

// What may fail, as bits.
enum Kind { kTensor = 1, kHost = 2, kThread = 4, kFile = 8, kDevice = 16 };

struct Range {
  uintptr_t begin = 0, end = 0;
  bool has(const void* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at >= begin && at < end;
  }
};

// The callers of posix_memalign (c10's CPU allocator), and those of everything else (fusegrad's two libraries).
Range allocator, library, core;
std::atomic<int> armed{0}, error_number{0};
std::atomic<long> count{0}, nth{0};
std::atomic<bool> failed{false};

// Counts a call; whether it is the one to fail.
bool fails(Kind kind, const void* caller) {
  if ((armed.load(std::memory_order_relaxed) & kind) == 0) return false;
  if (kind == kTensor && !allocator.has(caller)) return false;
  if (kind != kTensor && kind != kDevice && !library.has(caller) && !core.has(caller)) return false;
  if (++count != nth) return false;
  failed = true;
  return true;
}

bool file_fails(const void* caller) {
  if (!fails(kFile, caller)) return false;
  errno = error_number;
  return true;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

void* allocate(size_t size, size_t alignment, const void* caller) {
  void* data = nullptr;
  if (fails(kHost, caller)) throw std::bad_alloc();
  static const auto aligned = next<int (*)(void**, size_t, size_t)>("posix_memalign");
  if (alignment == 0) {
    data = malloc(size == 0 ? 1 : size);
  } else if (aligned(&data, alignment, size) != 0) {
    data = nullptr;
  }
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

#define CALLER __builtin_return_address(0)

extern "C" {

void faults_ranges(uintptr_t allocator_begin, uintptr_t allocator_end, uintptr_t begin, uintptr_t end,
                   uintptr_t core_begin, uintptr_t core_end) {
  allocator = {allocator_begin, allocator_end};
  library = {begin, end};
  core = {core_begin, core_end};
}
// The n-th call (from 1) of a kind fails, files with `error`; n = 0: calls are only counted. kinds = 0: no more.
void faults_arm(int kinds, long n, int error) {
  armed = 0;
  count = 0;
  failed = false;
  nth = n;
  error_number = error;
  armed = kinds;
}
long faults_count() { return count; }
int faults_failed() { return failed ? 1 : 0; }
// Whether an allocation on a GPU is to fail: faults_cuda.cpp asks.
int faults_device() { return fails(kDevice, nullptr) ? 1 : 0; }

int posix_memalign(void** data, size_t alignment, size_t size) {
  static const auto real = next<int (*)(void**, size_t, size_t)>("posix_memalign");
  return fails(kTensor, CALLER) ? ENOMEM : real(data, alignment, size);
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static const auto real = next<decltype(&pthread_create)>("pthread_create");
  // std::thread's call comes from libstdc++.
  if ((armed & kThread) != 0 && ++count == nth) {
    failed = true;
    return EAGAIN;
  }
  return real(thread, attributes, run, argument);
}
int open(const char* path, int flags, ...) {
  static const auto real = next<int (*)(const char*, int, ...)>("open");
  va_list list;
  va_start(list, flags);
  const int mode = va_arg(list, int);
  va_end(list);
  return file_fails(CALLER) ? -1 : real(path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  static const auto real = next<int (*)(int, const char*, int, ...)>("openat");
  va_list list;
  va_start(list, flags);
  const int mode = va_arg(list, int);
  va_end(list);
  return file_fails(CALLER) ? -1 : real(folder, path, flags, mode);
}
int mkdir(const char* path, mode_t mode) {
  static const auto real = next<decltype(&mkdir)>("mkdir");
  return file_fails(CALLER) ? -1 : real(path, mode);
}
ssize_t read(int file, void* data, size_t size) {
  static const auto real = next<decltype(&read)>("read");
  return file_fails(CALLER) ? -1 : real(file, data, size);
}
ssize_t write(int file, const void* data, size_t size) {
  static const auto real = next<decltype(&write)>("write");
  return file_fails(CALLER) ? -1 : real(file, data, size);
}
int fsync(int file) {
  static const auto real = next<decltype(&fsync)>("fsync");
  return file_fails(CALLER) ? -1 : real(file);
}
int fstat(int file, struct stat* status) {
  static const auto real = next<decltype(&fstat)>("fstat");
  return file_fails(CALLER) ? -1 : real(file, status);
}
int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  static const auto real = next<decltype(&renameat)>("renameat");
  return file_fails(CALLER) ? -1 : real(from_folder, from, to_folder, to);
}
int unlinkat(int folder, const char* path, int flags) {
  static const auto real = next<decltype(&unlinkat)>("unlinkat");
  return file_fails(CALLER) ? -1 : real(folder, path, flags);
}

}  // extern "C"

void* operator new(size_t size) { return allocate(size, 0, CALLER); }
void* operator new[](size_t size) { return allocate(size, 0, CALLER); }
void* operator new(size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<size_t>(alignment), CALLER);
}
void* operator new[](size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<size_t>(alignment), CALLER);
}
void operator delete(void* data) noexcept { free(data); }
void operator delete[](void* data) noexcept { free(data); }
void operator delete(void* data, size_t) noexcept { free(data); }
void operator delete[](void* data, size_t) noexcept { free(data); }
void operator delete(void* data, std::align_val_t) noexcept { free(data); }
void operator delete[](void* data, std::align_val_t) noexcept { free(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { free(data); }
void operator delete[](void* data, size_t, std::align_val_t) noexcept { free(data); }
