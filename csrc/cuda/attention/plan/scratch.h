// The scratch memory of a call: named regions of one allocation.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fusegrad::cuda {

/// A region of the scratch memory by its number; kNoRegion: there is none.
using Region = int;
inline constexpr Region kNoRegion = -1;

/// The bytes that lie behind each region where writes beyond regions are found (FUSEGRAD_CHECK_SCRATCH=1), else 0.
int64_t scratch_gap();

class Scratch {
 public:
  struct Part {
    std::string name;
    int64_t bytes = 0, offset = 0;
    bool zeros = false;  ///< before the first step
    int64_t room = 0;    ///< bytes until the next region begins
  };

  Region add(std::string name, int64_t bytes, bool zeros = false) {
    parts_.push_back({std::move(name), bytes, 0, zeros});
    return static_cast<Region>(parts_.size()) - 1;
  }
  Region add_zeros(std::string name, int64_t bytes) { return add(std::move(name), bytes, true); }

  /// Gives each region its place, those of zeros first, so that one fill makes them. After the last add. `gap`: bytes
  /// behind each that belong to none.
  void lay_out(int64_t gap = scratch_gap()) {
    constexpr int64_t kAlignment = 256;
    checked_ = gap > 0;
    for (const bool zeros : {true, false}) {
      for (Part& part : parts_) {
        if (part.zeros != zeros) continue;
        part.offset = bytes_;
        part.room = (part.bytes + gap + kAlignment - 1) / kAlignment * kAlignment;
        bytes_ += part.room;
      }
      if (zeros) zero_bytes_ = bytes_;
    }
  }
  /// Whether there are gaps, which no step may write.
  bool checked() const { return checked_; }

  const std::vector<Part>& parts() const { return parts_; }
  const Part& operator[](Region region) const { return parts_[static_cast<size_t>(region)]; }
  /// All regions take so many; the memory begins at a multiple of 256 bytes.
  int64_t bytes() const { return bytes_; }
  int64_t zero_bytes() const { return zero_bytes_; }

 private:
  std::vector<Part> parts_;
  int64_t bytes_ = 0, zero_bytes_ = 0;
  bool checked_ = false;
};

}  // namespace fusegrad::cuda
