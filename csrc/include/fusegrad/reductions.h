// Reductions over an axis, in score_mods and mask_mods: dot products of captured vectors, small networks.
#pragma once

#include <cstdint>
#include <functional>

#include "fusegrad/expression.h"

namespace fusegrad {

/// What a vector has at a place, from 0. It is called several times, and `i` must not be used outside of it.
using Element = std::function<Expression(Expression i)>;

/// The sum, the maximum, the minimum or the product of element(i) for i from 0 to `extent`, without that (at least 1):
/// a loop in the kernels, whose source does not grow with it. They nest.
///
///   s + 0.125 * sum_over(64, [&](Expression i) { return query(b, h, q_idx, i) * key(b, h, kv_idx, i); })
Expression sum_over(int64_t extent, const Element& element);
Expression amax_over(int64_t extent, const Element& element);
Expression amin_over(int64_t extent, const Element& element);
Expression prod_over(int64_t extent, const Element& element);

// Made of these, with the names and values of PyTorch's functions over a dimension.
Expression mean_over(int64_t extent, const Element& element);
Expression var_over(int64_t extent, const Element& element, double correction = 1);
Expression std_over(int64_t extent, const Element& element, double correction = 1);
Expression logsumexp_over(int64_t extent, const Element& element);
Expression any_over(int64_t extent, const Element& element);  ///< of bools, as all_over
Expression all_over(int64_t extent, const Element& element);
Expression argmax_over(int64_t extent, const Element& element);  ///< the first place of the maximum, an integer
Expression argmin_over(int64_t extent, const Element& element);
Expression kthvalue_over(int64_t extent, int64_t k, const Element& element);  ///< the k-th smallest, k from 1
Expression median_over(int64_t extent, const Element& element);               ///< the lower of two; NaN where one is

/// How many boundaries, in ascending order, are below x; with `right` also those equal to it.
Expression bucketize(const Expression& x, int64_t extent, const Element& boundary, bool right = false);

// Vectors made of a vector.
Element softmax(int64_t extent, const Element& element);
Element layer_norm(int64_t extent, const Element& element, double eps = 1e-5);  ///< without weight and bias
Element cumsum(int64_t extent, const Element& element);
Element cumprod(int64_t extent, const Element& element);
/// In ascending or descending order: equal ones in the order of their places, NaN the largest. An element takes
/// extent² comparisons. argsort has the places.
Element sort(int64_t extent, const Element& element, bool descending = false);
Element argsort(int64_t extent, const Element& element, bool descending = false);

}  // namespace fusegrad
