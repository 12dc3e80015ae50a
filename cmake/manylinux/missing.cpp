// What glibc 2.28 and the libstdc++ of GCC 8 do not have at all, for this library alone (the archive's symbols are not
// exported). The members of the compiler's libstdc++.a that CMakeLists.txt names have the rest.
#include <pthread.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <new>
#include <sstream>
#include <string>

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
template string basic_stringbuf<char>::str() const&;
template basic_ostringstream<char>::basic_ostringstream();
template basic_stringstream<char>::basic_stringstream();
}  // namespace std

// What the member of libstdc++.a for exception_ptr calls; libstdc++ does not export it.
namespace __cxxabiv1 {
[[noreturn]] void __terminate(std::terminate_handler handler) noexcept {
  handler();
  std::abort();
}
}  // namespace __cxxabiv1

extern "C" {

// A process of Python has threads, or may have them at any time.
char __libc_single_threaded = 0;

int __fxstat(int version, int file, struct stat* result);
int __fxstatat(int version, int folder, const char* path, struct stat* result, int flags);
#if defined(__x86_64__)
constexpr int kStatVersion = 1;
#else
constexpr int kStatVersion = 0;
#endif
int fstat(int file, struct stat* result) noexcept { return __fxstat(kStatVersion, file, result); }
int fstatat(int folder, const char* path, struct stat* result, int flags) noexcept {
  return __fxstatat(kStatVersion, folder, path, result, flags);
}

// Waits until a time of another clock than the condition's: as long from now, by the condition's.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  timespec now{}, there{};
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &there) != 0) return errno;
  const long long left = (until->tv_sec - now.tv_sec) * 1000000000LL + (until->tv_nsec - now.tv_nsec);
  const long long end = there.tv_sec * 1000000000LL + there.tv_nsec + (left > 0 ? left : 0);
  const timespec limit{.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
  return pthread_cond_timedwait(condition, mutex, &limit);
}
}
