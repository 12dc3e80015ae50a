// SHA-256 (FIPS 180-4): names cache entries and checks what they hold.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace fusegrad::jit {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256& update(std::string_view bytes);
  /// The text with its length before it: fields that follow one another stay apart.
  Sha256& field(std::string_view text);
  /// Ends the sum.
  Digest digest();

 private:
  void block(const uint8_t* bytes);

  // The first 32 bits of the fractional parts of the square roots of the first eight primes.
  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> rest_{};
  uint64_t length_ = 0;  // bytes so far
};

inline Digest sha256(std::string_view bytes) { return Sha256().update(bytes).digest(); }

/// Lower case.
std::string hex(const Digest& digest);

}  // namespace fusegrad::jit
