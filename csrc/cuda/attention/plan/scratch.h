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

class Scratch {
 public:
  struct Part {
    std::string name;
    int64_t bytes = 0, offset = 0;
    bool zeros = false;  ///< before the first step
  };

  Region add(std::string name, int64_t bytes, bool zeros = false) {
    parts_.push_back({std::move(name), bytes, 0, zeros});
    return static_cast<Region>(parts_.size()) - 1;
  }
  Region add_zeros(std::string name, int64_t bytes) { return add(std::move(name), bytes, true); }

  /// Gives each region its place, those of zeros first, so that one fill makes them. After the last add.
  void lay_out() {
    constexpr int64_t kAlignment = 256;
    for (const bool zeros : {true, false}) {
      for (Part& part : parts_) {
        if (part.zeros != zeros) continue;
        part.offset = bytes_;
        bytes_ += (part.bytes + kAlignment - 1) / kAlignment * kAlignment;
      }
      if (zeros) zero_bytes_ = bytes_;
    }
  }

  const std::vector<Part>& parts() const { return parts_; }
  const Part& operator[](Region region) const { return parts_[static_cast<size_t>(region)]; }
  /// Of all regions; the memory begins at a multiple of 256 bytes.
  int64_t bytes() const { return bytes_; }
  int64_t zero_bytes() const { return zero_bytes_; }

 private:
  std::vector<Part> parts_;
  int64_t bytes_ = 0, zero_bytes_ = 0;
};

}  // namespace fusegrad::cuda
