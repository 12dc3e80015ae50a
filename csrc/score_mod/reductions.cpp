// What is made of sums, extrema and products over an axis: fusegrad/reductions.h.
#include <fusegrad/reductions.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace fusegrad {
namespace {

using E = const Expression&;

// The place of the first element that is the extremum, or NaN.
Expression first_place(int64_t extent, const Element& element, const Expression& extremum) {
  return amin_over(extent, [&](E i) {
    const Expression x = element(i);
    return where(x == extremum || x != x, i, extent - 1);
  });
}

// A number that exp(x - it) cannot overflow with, and without infinities of its own.
Expression finite_maximum(int64_t extent, const Element& element) {
  const Expression most = amax_over(extent, element);
  return detach(where(abs(most) == INFINITY, 0.0, most));
}

// How many elements come before that at place i.
Expression rank(int64_t extent, const Element& element, bool descending, E i) {
  const Expression x = element(i);
  return sum_over(extent, [&](E j) {
    const Expression y = element(j);
    const Expression x_nan = x != x, y_nan = y != y;
    const Expression before = descending ? y > x || (y_nan && !x_nan) : y < x || (x_nan && !y_nan);
    return to_int(before || ((y == x || (x_nan && y_nan)) && j < i));
  });
}

// For the element that comes at a place in the order, what `of` has at its own place.
Element in_order(int64_t extent, const Element& element, bool descending, const Element& of) {
  return [=](E place) {
    return sum_over(extent, [&](E i) { return where(rank(extent, element, descending, i) == place, of(i), 0); });
  };
}

}  // namespace

Expression mean_over(int64_t extent, const Element& element) {
  return sum_over(extent, element) / static_cast<double>(extent);
}

Expression var_over(int64_t extent, const Element& element, double correction) {
  const Expression mean = mean_over(extent, element);
  const Expression squares = sum_over(extent, [&](E i) { return square(element(i) - mean); });
  return squares / std::max(static_cast<double>(extent) - correction, 0.0);
}

Expression std_over(int64_t extent, const Element& element, double correction) {
  // For equal values the gradient is 0, in a derivative of the derivative too.
  const Expression variance = var_over(extent, element, correction), zero = variance == 0.0;
  return where(zero, 0.0, sqrt(where(zero, 1.0, variance)));
}

Expression logsumexp_over(int64_t extent, const Element& element) {
  const Expression most = finite_maximum(extent, element);
  return log(sum_over(extent, [&](E i) { return exp(element(i) - most); })) + most;
}

Expression any_over(int64_t extent, const Element& element) {
  return to_bool(amax_over(extent, [&](E i) { return to_bool(element(i)); }));
}
Expression all_over(int64_t extent, const Element& element) {
  return to_bool(amin_over(extent, [&](E i) { return to_bool(element(i)); }));
}

Expression argmax_over(int64_t extent, const Element& element) {
  return first_place(extent, element, amax_over(extent, element));
}
Expression argmin_over(int64_t extent, const Element& element) {
  return first_place(extent, element, amin_over(extent, element));
}

Expression kthvalue_over(int64_t extent, int64_t k, const Element& element) {
  if (k < 1 || k > extent) {
    throw std::invalid_argument("kthvalue_over: k must be 1 to " + std::to_string(extent) + ", but got " +
                                std::to_string(k));
  }
  return sort(extent, element)(k - 1);
}

Expression median_over(int64_t extent, const Element& element) {
  const Expression nan = any_over(extent, [&](E i) {
    const Expression x = element(i);
    return x != x;
  });
  return where(nan, NAN, kthvalue_over(extent, (extent + 1) / 2, element));
}

Expression bucketize(const Expression& x, int64_t extent, const Element& boundary, bool right) {
  // A NaN is beyond all boundaries.
  return sum_over(extent, [&](E i) { return to_int(right ? !(boundary(i) > x) : !(boundary(i) >= x)); });
}

Element softmax(int64_t extent, const Element& element) {
  const Expression most = detach(amax_over(extent, element));
  const Expression total = sum_over(extent, [&](E i) { return exp(element(i) - most); });
  return [=](E i) { return exp(element(i) - most) / total; };
}

Element layer_norm(int64_t extent, const Element& element, double eps) {
  const Expression mean = mean_over(extent, element), scale = rsqrt(var_over(extent, element, 0) + eps);
  return [=](E i) { return (element(i) - mean) * scale; };
}

Element cumsum(int64_t extent, const Element& element) {
  return [=](E place) { return sum_over(extent, [&](E i) { return where(i <= place, element(i), 0); }); };
}
Element cumprod(int64_t extent, const Element& element) {
  return [=](E place) { return prod_over(extent, [&](E i) { return where(i <= place, element(i), 1); }); };
}

Element sort(int64_t extent, const Element& element, bool descending) {
  return in_order(extent, element, descending, element);
}
Element argsort(int64_t extent, const Element& element, bool descending) {
  return in_order(extent, element, descending, [](E i) { return i; });
}

}  // namespace fusegrad
