// Memory of the CPU's kernels.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace fusegrad {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

/// Asks for huge pages for what lies in whole ones: the first touch of hundreds of MiB in pages of 4 KiB takes eight
/// times as long. Advice: where the system has none, nothing changes.
inline void ask_for_huge_pages(void* data, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) & ~(kHugePage - 1), end = (address + bytes) & ~(kHugePage - 1);
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

namespace cpu {

/// Memory that is not initialised, aligned to cache lines: pages that nothing needs are never touched.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(
            ::operator new(static_cast<size_t>(count) * sizeof(T) + kAlignment, std::align_val_t{kAlignment}))) {}
  T* data() const { return data_.get(); }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  static constexpr size_t kAlignment = 64;
  struct Delete {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<T, Delete> data_;
};

}  // namespace cpu
}  // namespace fusegrad
