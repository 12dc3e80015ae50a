// What the vectorised kernels share: loads and stores of any dtype, reductions, exp and log.
//
// Only for files that are compiled once per instruction set, with CPU_CAPABILITY set: everything here is in that
// namespace, so that each has copies of its own.
#pragma once

#include <cmath>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "common/dtype.h"
#include "common/vec.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {

template <class T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// kStep values of T at a time, as two vectors of Acc.
template <class T>
struct Lanes {
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;
  static constexpr int64_t kStep = 2 * Vec::size();

  Vec a, b;

  static Lanes load(const T* p) {
    if constexpr (std::is_same_v<T, Acc>) {
      return {Vec::loadu(p), Vec::loadu(p + Vec::size())};
    } else {
      const auto [a, b] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(p));
      return {a, b};
    }
  }
  // The last `count` < kStep values; the other lanes get `pad`.
  static Lanes load(const T* p, int64_t count, Acc pad) {
    alignas(64) T values[kStep];
    for (int64_t i = 0; i < kStep; ++i) values[i] = i < count ? p[i] : static_cast<T>(pad);
    return load(values);
  }
  void store(T* p) const {
    if constexpr (std::is_same_v<T, Acc>) {
      a.store(p);
      b.store(p + Vec::size());
    } else {
      at::vec::convert_from_float<T>(a, b).store(p);
    }
  }
  void store(T* p, int64_t count) const {
    alignas(64) T values[kStep];
    store(values);
    for (int64_t i = 0; i < count; ++i) p[i] = values[i];
  }
};

// function(column, count, lanes) over a row; count < kStep in the last call only, where other lanes hold `pad`.
template <class T, class Function>
inline void each_lanes(const T* row, int64_t cols, AccOf<T> pad, Function&& function) {
  constexpr int64_t kStep = Lanes<T>::kStep;
  int64_t c = 0;
  for (; c + kStep <= cols; c += kStep) function(c, kStep, Lanes<T>::load(row + c));
  if (c < cols) function(c, cols - c, Lanes<T>::load(row + c, cols - c, pad));
}

template <class Vec>
inline auto reduce_add(const Vec& v) {
  return at::vec::vec_reduce_all<typename Vec::value_type>([](const Vec& x, const Vec& y) { return x + y; }, v);
}
template <class Vec>
inline auto reduce_max(const Vec& v) {
  return at::vec::vec_reduce_all<typename Vec::value_type>(
      [](const Vec& x, const Vec& y) { return at::vec::maximum(x, y); }, v);
}

// exp of values that are at most about 0: 2^n * exp(r), n the nearest integer to x / ln 2, then the Taylor polynomial
// of degree 6 on |r| <= ln(2) / 2 (its error is below 2e-7 of the result's last place there). r misses |n| * 2e-9 of x,
// half a last place at exp(-15) = 3e-7, four at 1e-38. Below -87.3, where the result would be subnormal, 0. NaN stays
// NaN.
inline at::vec::Vectorized<float> exp_nonpositive(const at::vec::Vectorized<float>& x) {
  using Vec = at::vec::Vectorized<float>;
  // Adding it leaves n + 127, the biased exponent, in the lowest bits of the sum.
  const Vec kShift(12582912.f + 127);
  const auto shifted = at::vec::fmadd(x, Vec(1.44269504088896341f), kShift);
  const auto r = at::vec::fmadd(shifted - kShift, Vec(-0.69314718056f), x);
  auto y = at::vec::fmadd(r, Vec(1.f / 720), Vec(1.f / 120));
  y = at::vec::fmadd(y, r, Vec(1.f / 24));
  y = at::vec::fmadd(y, r, Vec(1.f / 6));
  y = at::vec::fmadd(y, r, Vec(0.5f));
  y = at::vec::fmadd(y, r, Vec(1.f));
  y = at::vec::fmadd(y, r, Vec(1.f));
  const auto power = at::vec::cast<float>(at::vec::cast<int32_t>(shifted) << at::vec::Vectorized<int32_t>(23));
  return Vec::blendv(y * power, Vec(0.f), x < Vec(-87.3f));
}
inline at::vec::Vectorized<double> exp_nonpositive(const at::vec::Vectorized<double>& x) { return x.exp(); }

// log(r), r > 0, given r - 1 without cancellation too: exact to the last places also near r = 1. log(m * 2^k) with m in
// [sqrt(1/2), sqrt(2)) is k * ln 2 + f * P(f), f = m - 1, where P has degree 9 and fits log1p(f) / f to 4e-9. For r = 0
// it is about -88: finite, for products with 0.
inline at::vec::Vectorized<float> log_ratio(const at::vec::Vectorized<float>& r,
                                            const at::vec::Vectorized<float>& less_one) {
  using Vec = at::vec::Vectorized<float>;
  using Int = at::vec::Vectorized<int32_t>;
  constexpr int32_t kSqrtHalf = 0x3f3504f3;
  const auto bits = at::vec::cast<int32_t>(r);
  const auto k = (bits - Int(kSqrtHalf)) >> Int(23);
  const auto n = at::vec::convert_to_fp_of_same_size<float>(k);
  const auto mantissa = at::vec::cast<float>(bits - (k << Int(23)));
  const auto f = Vec::blendv(mantissa - Vec(1.f), less_one, n == Vec(0.f));
  auto y = at::vec::fmadd(f, Vec(-0.0763859245f), Vec(0.129141703f));
  y = at::vec::fmadd(y, f, Vec(-0.132408427f));
  y = at::vec::fmadd(y, f, Vec(0.141800787f));
  y = at::vec::fmadd(y, f, Vec(-0.166091265f));
  y = at::vec::fmadd(y, f, Vec(0.200020717f));
  y = at::vec::fmadd(y, f, Vec(-0.250015851f));
  y = at::vec::fmadd(y, f, Vec(0.33333324f));
  y = at::vec::fmadd(y, f, Vec(-0.499999883f));
  y = at::vec::fmadd(y, f, Vec(1.f));
  return at::vec::fmadd(n, Vec(0.693147181f), y * f);
}
inline at::vec::Vectorized<double> log_ratio(const at::vec::Vectorized<double>& r,
                                             const at::vec::Vectorized<double>& less_one) {
  using Vec = at::vec::Vectorized<double>;
  const auto log = at::vec::maximum(r, Vec(std::numeric_limits<double>::min())).log();
  return Vec::blendv(log, less_one.log1p(), less_one.abs() < Vec(0.5));
}

// body(column, sums) for each vector of a row of `padded` elements, a multiple of the vectors. The sums are added up
// in vectors over a block of columns and in double over blocks, so that their error does not grow with the row.
template <int kCount, class Acc, class Body>
inline void sum_row(int64_t padded, double (&totals)[kCount], Body&& body) {
  using Vec = at::vec::Vectorized<Acc>;
  constexpr int64_t kBlock = 1024;
  for (int i = 0; i < kCount; ++i) totals[i] = 0;
  for (int64_t begin = 0; begin < padded; begin += kBlock) {
    const int64_t end = begin + kBlock < padded ? begin + kBlock : padded;
    Vec sums[kCount];
    for (int i = 0; i < kCount; ++i) sums[i] = Vec(0);
    for (int64_t c = begin; c < end; c += Vec::size()) body(c, sums);
    for (int i = 0; i < kCount; ++i) totals[i] += static_cast<double>(reduce_add(sums[i]));
  }
}

// x * y where x is not 0, else 0: keeps 0 * inf out.
template <class Vec>
inline Vec product_or_zero(const Vec& x, const Vec& y) {
  return Vec::blendv(x * y, Vec(0), x == Vec(0));
}

template <class T>
void fill_zero(T* row, int64_t cols) {
  for (int64_t c = 0; c < cols; ++c) row[c] = static_cast<T>(0);
}

template <class Acc>
void put(void* out, int64_t n, Acc value) {
  if (out != nullptr) static_cast<Acc*>(out)[n] = value;
}

template <class Function>
void with_type(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(float{});
    case DType::kBFloat16:
      return function(c10::BFloat16{});
    case DType::kFloat16:
      return function(c10::Half{});
    case DType::kFloat64:
      return function(double{});
    case DType::kInt8:
      break;
  }
  throw std::logic_error("fusegrad: int8 is a dtype of low parts alone");
}

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
