// Sums and extrema over an axis, in score_mods and mask_mods: dot products of captured vectors, small networks.
#pragma once

#include <functional>

#include "fusegrad/expression.h"

namespace fusegrad {

/// The sum, the maximum or the minimum of element(i) for i from 0 to `extent`, without that (at least 1): a loop in the
/// kernels, whose source does not grow with it. The function runs once; `i` must not be used outside of it.
///
///   s + 0.125 * sum_over(64, [&](Expression i) { return query(b, h, q_idx, i) * key(b, h, kv_idx, i); })
Expression sum_over(int64_t extent, const std::function<Expression(Expression)>& element);
Expression amax_over(int64_t extent, const std::function<Expression(Expression)>& element);
Expression amin_over(int64_t extent, const std::function<Expression(Expression)>& element);

}  // namespace fusegrad
