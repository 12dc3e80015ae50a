// The scratch memory of a call: named regions of one allocation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace fusegrad::cuda {

/// A region of the scratch memory by its number; kNoRegion: there is none.
using Region = int;
inline constexpr Region kNoRegion = -1;

/// The bytes that lie behind each region where writes beyond regions are found (FUSEGRAD_CHECK_SCRATCH=1), else 0.
int64_t scratch_gap();

/// The phases of a call, which its room counts, in which a region is in use: all, unless it says less.
struct Lifetime {
  int first = 0, last = std::numeric_limits<int>::max();

  bool operator==(const Lifetime&) const = default;
  bool meets(const Lifetime& other) const { return first <= other.last && other.first <= last; }
};

class Scratch {
 public:
  struct Part {
    std::string name;
    int64_t bytes = 0, offset = 0;
    bool zeros = false;  ///< before the first step
    int64_t room = 0;    ///< bytes from its begin that are its own
    Lifetime lifetime{};

    bool meets(const Part& other) const {
      return lifetime.meets(other.lifetime) && offset < other.offset + other.room && other.offset < offset + room;
    }
  };

  Region add(std::string name, int64_t bytes, Lifetime lifetime = {}) {
    parts_.push_back({std::move(name), bytes, 0, false, 0, lifetime});
    return static_cast<Region>(parts_.size()) - 1;
  }
  Region add_zeros(std::string name, int64_t bytes) {
    const Region region = add(std::move(name), bytes);
    parts_.back().zeros = true;
    return region;
  }

  /// Gives each region its place, those of zeros first, so that one fill makes them, and those that are not always in
  /// use last: they may lie where others do that are not in use at the same time. After the last add. `gap`: bytes
  /// behind each that belong to none; each region has a place of its own then.
  void lay_out(int64_t gap = scratch_gap()) {
    constexpr int64_t kAlignment = 256;
    checked_ = gap > 0;
    for (Part& part : parts_) {
      part.room = (part.bytes + gap + kAlignment - 1) / kAlignment * kAlignment;
      if (checked_) part.lifetime = {};
    }
    std::vector<const Part*> placed;
    const auto place = [&](Part& part) {
      part.offset = zero_bytes_;
      for (bool moved = true; moved;) {
        moved = false;
        for (const Part* other : placed) {
          if (!part.meets(*other)) continue;
          part.offset = other->offset + other->room;
          moved = true;
        }
      }
      placed.push_back(&part);
      bytes_ = std::max(bytes_, part.offset + part.room);
    };
    for (Part& part : parts_) {
      if (part.zeros) place(part);
    }
    zero_bytes_ = bytes_;
    for (const bool always : {true, false}) {
      for (Part& part : parts_) {
        if (!part.zeros && (part.lifetime == Lifetime{}) == always) place(part);
      }
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
