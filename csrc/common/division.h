// Whole parts of a count.
#pragma once

namespace fusegrad {

/// Parts of `size` that hold `count`.
template <class Count, class Size>
constexpr Count ceil_div(const Count& count, Size size) {
  return (count + (size - 1)) / size;
}

/// The first multiple of `size` from `count` on.
template <class Count, class Size>
constexpr Count round_up(const Count& count, Size size) {
  return ceil_div(count, size) * size;
}

}  // namespace fusegrad
