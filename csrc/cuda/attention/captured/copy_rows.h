// Copies of tensors whose rows, along the last dimension, lie as kernels cannot read them 16 bytes at a time, and back.
// Compiled ahead of time.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace fusegrad::cuda {

/// The most dimensions of a tensor that is copied.
inline constexpr int kMostCopied = 16;

/// A tensor that has rows at one side: dense along the last dimension, each beginning at a multiple of 16 bytes with
/// room for a multiple of 16 bytes. Strides in elements. The other side lies anyhow.
struct FlexRowsCopy {
  const void* from;
  void* to;
  int rank;
  std::array<int64_t, kMostCopied> sizes, from_strides, to_strides;
};
/// Copies elements of 2 or 4 bytes into rows, which are filled up with zeros, or from rows.
void flex_copy_into_rows(const FlexRowsCopy& copy, int64_t element_bytes, void* stream);
void flex_copy_from_rows(const FlexRowsCopy& copy, int64_t element_bytes, void* stream);

/// A copy of a captured tensor for boxes. Dimensions that are expanded, but for the last, are copied once.
class BoxCopy {
 public:
  BoxCopy(std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t element_bytes);

  int64_t elements() const;  ///< that are copied
  int64_t bytes() const;     ///< of the copy
  /// The copy's, as a tensor of the same sizes.
  std::vector<int64_t> strides() const;
  void run(const void* from, void* to, void* stream) const;

 private:
  bool run_fast(const void* from, void* to, void* stream) const;

  std::vector<int64_t> sizes_, strides_, to_;
  std::vector<bool> expanded_;
  int64_t element_bytes_;
};

}  // namespace fusegrad::cuda
