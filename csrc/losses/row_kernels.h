// What a device has to offer for the losses: kernels over rows of logits and a product, as plain functions of raw
// pointers, 64-bit sizes and a stream, so that front ends other than ATen can call them too.
//
// Letters: N rows, V columns (the vocabulary). `acc` is float for float32, bfloat16 and float16 logits, and
// double for float64: every per-row value and every scale is stored as acc.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "losses/product.h"

namespace fusegrad {

/// What a row is compared with. Row n has coefficients a[c] >= 0 with sum A, its cross entropy is
/// A * lse - sum_c a[c] * z[c], and the gradient of that by z[c] is A * softmax(z)[c] - a[c].
///
/// Class indices, no class weights or no smoothing ("sparse"):
///   w = class_weight ? class_weight[y] : 1,   a[c] = (1 - e) * w * [c == y] + e / V,   A = w
///   (with class weights e is 0 here)
/// Otherwise ("dense": probabilities, or class weights together with smoothing):
///   a[c] = class_weight[c] * ((1 - e) * t[c] + e / V)                                  for probabilities t
///   a[c] = (1 - e) * class_weight[y] * [c == y] + (e / V) * class_weight[c]            for indices
///   A    = sum_c a[c], computed by the forward kernel and stored in `mass`
/// A coefficient of 0 contributes 0, also where z is -inf.
struct RowTargets {
  const void* index = nullptr;  // [N] class indices, int32 or int64; null for probabilities
  bool index_is_int32 = false;
  const void* probability = nullptr;   // [N, V] row-major, innermost stride 1; null for indices
  bool probability_is_acc = false;     // dtype acc; otherwise the dtype of the logits
  int64_t probability_stride = 0;      // elements between rows
  const void* class_weight = nullptr;  // [V] acc; null: all 1
  const void* token_weight = nullptr;  // [N] acc; null: all 1
  int64_t ignore_index = -100;         // rows with this index are ignored: loss 0, gradient 0
  double smoothing = 0.0;              // e
  bool dense = false;
};

/// z = cap * tanh(scale * x / cap); without a cap (0), z = scale * x. x are the stored logits. Where a kernel's
/// arguments have a row_scale, it is a factor of a row's scale.
struct LogitTransform {
  double scale = 1.0;
  double cap = 0.0;
};

/// Forward over whole rows; optionally writes the gradient in the same pass over memory.
///
/// For a kept row, with m = max z, l = sum exp(z - m), lse = m + log l:
///   cross entropy  ce   = A * log l - sum_c a[c] * (z[c] - m)      (exact for large offsets)
///   loss[n]        = token_weight[n] * (scales[0] * ce + scales[1] * z_loss * lse^2)
///   grad[n, c]     = token_weight[n] * (scales[0] * (A * p[c] - a[c]) + scales[1] * 2 * z_loss * lse * p[c])
///                    * dz/dx,   p = exp(z - lse)
/// An ignored row: loss 0, gradient 0 (written). An index outside [0, V): loss and gradient NaN, nothing is
/// read or written out of bounds (the CPU kernels never meet one: it is refused before).
struct RowForward {
  int64_t rows = 0;
  int64_t cols = 0;
  const void* logits = nullptr;  // [N, V], innermost stride 1
  int64_t logits_stride = 0;
  void* grad = nullptr;  // [N, V] in the dtype of the logits, or null: not wanted. May be `logits` itself.
  int64_t grad_stride = 0;
  RowTargets targets;
  LogitTransform transform;
  const void* row_scale = nullptr;  // [N] acc; null: all 1
  double z_loss = 0.0;
  const void* scales = nullptr;  // [2] acc on the device: cross entropy's, z-loss's; null: both 1
  // A row's outputs must not depend on the number of rows, nor on which others are wanted.
  bool alone = false;
  bool lse_of_ignored = false;  // lse wanted for ignored rows too; otherwise they need not be read (lse 0)
  // Outputs, [N], any may be null. acc but for predicted, which is int64. At ignored rows predicted is -1, lse
  // is the row's own (if lse_of_ignored), all others are 0.
  void* loss = nullptr;
  void* lse = nullptr;
  void* lse_low = nullptr;         // what rounding took from lse: (m - lse) + log l
  void* mass = nullptr;            // A, dense targets only
  void* z_loss_term = nullptr;     // z_loss * lse^2, unscaled
  void* predicted = nullptr;       // the first index of the row's maximum
  void* token_log_prob = nullptr;  // z[y] - lse; indices only
  void* entropy = nullptr;         // H = lse - sum_c p[c] * z[c]
  void* entropy_low = nullptr;     // what rounding took from entropy
  // Null all three or none; entropy is not null then. They are what the gradient of a factor of z is made of.
  void* mean = nullptr;      // sum_c p[c] * z[c]; of ignored rows too, as lse
  void* variance = nullptr;  // sum_c p[c] * (z[c] - mean)^2
  void* slope = nullptr;     // sum_c (A * p[c] - a[c]) * z[c]
};

/// Gradient from saved statistics: element-wise over a block of columns [col_offset, col_offset + cols) of a
/// vocabulary of `vocab` columns.
///   grad[n, c] = (g[n] * token_weight[n] * (scales[0] * (A * p[c] - a[c]) + scales[1] * 2 * z_loss * lse * p[c])
///                 + grad_log_prob[n] * ([c == y] - p[c]) - grad_entropy[n] * p[c] * (log p[c] + H)
///                 + grad_lse[n] * p[c]) * dz/dx
/// of which ignored rows have the last part only, and not even that without `lse_of_ignored`. log p[c] + H is taken as
/// z[c] less the row's mean of z, which is lse
/// - H: exact for large offsets, and where p is nearly flat. class_weight and index count in the whole vocabulary,
/// logits, grad and probability start at the block's first column.
struct RowGradient {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t vocab = 0;
  int64_t col_offset = 0;
  const void* logits = nullptr;
  int64_t logits_stride = 0;
  void* grad = nullptr;  // may be `logits` itself
  int64_t grad_stride = 0;
  RowTargets targets;
  LogitTransform transform;
  const void* row_scale = nullptr;  // [N] acc; null: all 1
  double z_loss = 0.0;
  const void* scales = nullptr;     // [2] acc, or null
  const void* lse = nullptr;        // [N] acc
  const void* lse_low = nullptr;    // [N] acc: p = exp((z - lse) - lse_low), exact for large offsets
  const void* mass = nullptr;       // [N] acc, dense targets only
  const void* grad_loss = nullptr;  // [N] or one value (stride 0), acc; null: zero
  int64_t grad_loss_stride = 0;
  const void* grad_lse = nullptr;  // [N] acc, or null: zero
  int64_t grad_lse_stride = 0;
  bool lse_of_ignored = true;           // without it ignored rows are not read
  const void* grad_log_prob = nullptr;  // [N] acc, or null: zero; indices only
  const void* grad_entropy = nullptr;   // [N] acc, or null: zero
  const void* entropy = nullptr;        // [N] acc, where grad_entropy is not null
  const void* entropy_low = nullptr;
};

/// What a row's outputs are made of, by segments of the vocabulary (losses/product.h): of `segments` segments, the
/// first of which begins at column `col_offset` of `vocab`. A segment's state depends on its columns alone.
/// RowForward's class_weight and index count in the whole vocabulary, logits start at the first segment. Its outputs
/// are not written, but say what is wanted.
struct RowPart : RowForward {
  int64_t vocab = 0;
  int64_t col_offset = 0;
  int64_t segment = 0;  // columns
  int64_t segments = 0;
  void* states = nullptr;  // [segments, N, RowKernels::row_states] acc
};

/// RowForward's outputs from the states of all segments.
struct RowWhole : RowForward {
  int64_t vocab = 0;
  const void* states = nullptr;  // [kVocabSegments, N, RowKernels::row_states] acc
};

/// One pointer for each value of a row that is differentiated: cross entropy, lse, entropy, and the target's
/// log-probability (indices only); [N] acc, null: zero, or not wanted.
template <class Pointer>
struct RowValues {
  Pointer cross_entropy = nullptr, lse = nullptr, entropy = nullptr, log_prob = nullptr;
};

/// Tangents of these values, and of their gradient, for a tangent of the logits. With a dot for a tangent, p = exp(z -
/// lse), m = sum p * z = lse - H, and sums over a row's columns c:
///   lse.            = sum p * z.
///   m.              = sum p * (z - m) * z. + lse.
///   cross entropy.  = A * lse. - sum a * z.
///   H.              = lse. - m.
///   log_prob.       = z.[y] - lse.
/// The gradient, of upstream gradients B of the cross entropy, C of lse, D of the entropy and E of log_prob, by z:
///   g[c]  = p[c] * (k - D * (z[c] - m)) - B * a[c] + E * [c == y],       k = A * B + C - E
///   g.[c] = p[c] * ((z.[c] - lse.) * (k - D * (z[c] - m)) + k. - D * (z.[c] - m.) - D. * (z[c] - m))
///           - B. * a[c] + E. * [c == y]
/// and by the logits x, of which z is a function: (g dz/dx). = g. * dz/dx + g * d2z/dx2 * x., z. = dz/dx * x.
///
/// A column with p = 0 or a = 0 adds nothing to the sum that has it as a factor, whatever its logit or tangent. Ignored
/// rows have lse alone, with `lse_of_ignored`; otherwise they are not read and all is 0. A row with an index outside
/// [0, V) is NaN throughout.
struct RowTangents {
  int64_t rows = 0;
  int64_t cols = 0;
  const void* logits = nullptr;  // [N, V], innermost stride 1
  int64_t logits_stride = 0;
  const void* tangent = nullptr;  // [N, V] in the dtype of the logits
  int64_t tangent_stride = 0;
  RowTargets targets;    // the token weights are not used
  double softcap = 0.0;  // 0: none
  bool lse_of_ignored = false;
  const void* lse = nullptr;  // [N] acc, as RowForward made them
  const void* lse_low = nullptr;
  const void* mass = nullptr;     // dense targets only
  const void* entropy = nullptr;  // where an upstream gradient of it, or its tangent is not null
  const void* entropy_low = nullptr;
  RowValues<const void*> upstream, upstream_tangent;
  RowValues<void*> values;       // the tangents of the row's values
  void* grad_tangent = nullptr;  // [N, V] in the dtype of the logits, or null: not wanted. Not over the inputs.
  int64_t grad_tangent_stride = 0;
};

/// The scales of reduction 'mean': out[0] = 1 / D, out[1] = 1 / K, out[2] = the factor left for later, out[3] = D.
///   K = number of kept rows, D = sum of class_weight over the kept rows (N for probabilities);
///   a normalizer (one acc value) replaces both.
/// `defer`: float16 gradients would underflow, so out = {1, D / K, 1 / D}; otherwise out[2] = 1.
/// Where no row is kept, what would be a factor 1 / 0 of a gradient is 0 in out[2], inf in out[0] and out[1].
/// With `mean_loss`: mean_loss = (sum_n loss[n]) / D in a fixed order of summation, NaN where D is 0: one launch less
/// than a RowSum, where the rows' losses do not need the scales.
struct RowScales {
  int64_t rows = 0;
  int64_t cols = 0;  // indices outside [0, cols) count as kept with weight 1, and are not used to read
  RowTargets targets;
  const void* normalizer = nullptr;
  double values_per_row = 1.0;  // D and K are multiplied by it: V for a mean over all values of a row
  bool defer = false;
  void* out = nullptr;         // [4] acc
  const void* loss = nullptr;  // [N] acc
  void* mean_loss = nullptr;   // one acc value, or null
};

/// out = (sum_n loss[n]) * (factor ? factor[0] : 1): one value, in a fixed order of summation.
/// Where nan_if_zero[0] is 0 the result is NaN: the mean of no rows.
struct RowSum {
  int64_t rows = 0;
  const void* loss = nullptr;         // [N] acc
  const void* factor = nullptr;       // one acc value
  const void* nan_if_zero = nullptr;  // one acc value; null: never
  void* out = nullptr;                // one acc value
};

/// out[n, c] = in[n, c] * scale[n * scale_stride] * (factor ? factor[0] : 1), computed in acc, rounded once.
/// Where in == out, rows whose whole factor is exactly 1 are neither read nor written.
struct RowScaling {
  int64_t rows = 0;
  int64_t cols = 0;
  const void* in = nullptr;
  int64_t in_stride = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  const void* scale = nullptr;  // acc: one value (stride 0) or one a row (stride 1); null: 1
  int64_t scale_stride = 0;
  const void* factor = nullptr;
};

/// The generalised Jensen-Shannon divergence between rows of a student's and a teacher's logits, with labels' cross
/// entropy mixed in, and its gradients in the same pass over memory.
///
/// z = cap * tanh(scale * x / cap) (see LogitTransform) for each; q = softmax(z_student / T_student) and
/// p = softmax(z_teacher / T_teacher), or with `log_probs` q = exp(x_student), p = exp(x_teacher) as they are.
///   0 < b < 1   m = (1 - b) q + b p,  soft = (1 - b) * KL(q | m) + b * KL(p | m)
///   b = 0       soft = KL(p | q),     b = 1  soft = KL(q | p);        KL(x | y) = sum_c x[c] * (log x[c] - log y[c])
///   hard        = cross entropy of softmax(z_student) (no temperature) at the label
///   loss[n]     = token_weight[n] * scales[0] * (soft_weight * soft + hard_weight * hard)
///   grad_*[n,c] = upstream[n] * d loss[n] / d x_*[n, c]
/// 0 * log 0 = 0 throughout: x -inf in either or both leaves what is finite finite. Ignored rows: loss 0, gradients 0.
///
/// By logits, before the factor dz/dx / T:
///   0 < b < 1   d soft / d student = (1 - b) * q * (log q - log m - KL(q | m)), teacher: b * p * (log p - log m - KL(p
///   | m)) b = 0       student: q - p, teacher: p * (log p - log q - soft);  b = 1  student: q * (log q - log p -
///   soft), teacher: p - q
/// By log-probabilities, which are independent of each other:
///   0 < b < 1   student: (1 - b) * q * (log q - log m), teacher: b * p * (log p - log m)
///   b = 0       student: -p, teacher: p * (log p - log q + 1);  b = 1  student: q * (log q - log p + 1), teacher: -q
///
/// A top-k teacher has K columns a row, `teacher_index`, whose log-probabilities `teacher` holds; all other columns are
/// one bucket: q_tail = 1 - sum of q over them, and p_tail = exp(tail) where that is given, else max(1 - sum of p, sum
/// of p * (u * |log p| + u_acc)), the resolution of the sum; or, renormalised, p / sum of p and p_tail = 0. An index of
/// -1 pads. The sums are over these K + 1; where p_tail = 0 its column counts only as q_tail does. The same formulas
/// with log q_tail; columns outside the K have d soft / dz = q[c] / q_tail * (d soft / dz of the tail).
struct RowJsd {
  int64_t rows = 0;
  int64_t cols = 0;
  const void* student = nullptr;  // [N, V], innermost stride 1
  int64_t student_stride = 0;
  const void* teacher = nullptr;  // [N, V] of the student's dtype, innermost stride 1; top-k: [N, K] acc
  int64_t teacher_stride = 0;
  const void* teacher_index = nullptr;  // top-k: [N, K] int64, contiguous, distinct in a row but for -1; null: dense
  int64_t topk = 0;                     // K
  void* topk_logits = nullptr;          // top-k on CUDA: [N, K] float of scratch
  const void* tail = nullptr;           // top-k: [N] acc, log p_tail; null: what is missing to 1
  double roundoff = 0.0;                // top-k: u, half the spacing of numbers at 1, in which log p was stored
  double acc_roundoff = 0.0;            // u_acc: in which log p was computed
  bool partial = false;                 // log_probs: columns of longer rows, whose divergence may be negative
  bool renormalize = false;
  bool log_probs = false;  // not with a top-k teacher, a hard part, transforms or temperatures
  LogitTransform student_transform;
  LogitTransform teacher_transform;
  double student_temperature = 1.0;
  double teacher_temperature = 1.0;
  double beta = 0.5;
  double soft_weight = 1.0;
  double hard_weight = 0.0;
  const void* label = nullptr;  // [N] int32 or int64; null: every row counts (and hard_weight is 0)
  bool label_is_int32 = false;
  int64_t ignore_index = -100;
  const void* token_weight = nullptr;  // [N] acc; null: all 1
  const void* scales = nullptr;        // one acc value; null: 1
  const void* upstream = nullptr;      // acc: one value (stride 0) or one a row (stride 1); null: 1
  int64_t upstream_stride = 0;
  void* grad_student = nullptr;  // [N, V] in the student's dtype, or null: not wanted. May be `student` itself.
  int64_t grad_student_stride = 0;
  void* grad_teacher = nullptr;  // the same for the teacher's logits; null for a top-k teacher
  int64_t grad_teacher_stride = 0;
  // Outputs, [N] acc, any may be null. 0 at ignored rows.
  void* loss = nullptr;
  void* soft = nullptr;  // unweighted
  void* hard = nullptr;
};

/// Tangents of the soft part of a divergence, `soft`, and of its gradients, `grad_student` and `grad_teacher`, for
/// tangents of both sides. For the rest of RowJsd these take part: both sides, their transforms and temperatures, beta,
/// log_probs, the labels and ignore_index, and `upstream`, the gradient of each row's soft part. No top-k teacher.
///
/// With a dot for a tangent, q., p. those of log q and log p (of logits: q. = z. - sum q z.), and sums over a row's
/// columns:
///   soft.          = sum q h q. + sum p k p. + s sum (n q - p) q. + t sum (n p - q) p.
///   by log q       : g  = q (h - A) + s (n q - p)
///                    g. = q ((h - A) q. - A.) + (1 - s) r (q. - p.) + s (n q q. - p p.)
///   by log p       : the same with q and p, h and k, A and B, s and t changed for each other
///   A = sum q h,  A. = sum (q h q. + (1 - s) r (q. - p.)),  B and B. likewise; all 0 for log-probabilities
///   0 < b < 1   h = (1 - b) log(q / m), k = b log(p / m), r = (1 - b) b q p / m; s = t = 0
///   b = 0       h = 0, k = log(p / q) + 1 - n, r = p; s = 1, t = 0;    b = 1  h = log(q / p) + 1 - n, k = 0, r = q; s
///   = 0, t = 1
/// n is 0 for log-probabilities, else 1. By x it is g dz/dx / T, see RowTangents for its tangent.
struct RowJsdTangents : RowJsd {
  const void* student_tangent = nullptr;  // [N, V] in the student's dtype; null: 0, not on CUDA
  int64_t student_tangent_stride = 0;
  const void* teacher_tangent = nullptr;  // null: 0
  int64_t teacher_tangent_stride = 0;
  const void* upstream_tangent = nullptr;  // [N] acc, or null: 0
};

/// A device's kernels. `stream` is a cudaStream_t on CUDA, a const cpu::Host* (common/host.h) on the CPU. Errors are
/// exceptions of the standard library.
struct RowKernels {
  void (*forward)(const RowForward&, DType, void* stream);
  void (*gradient)(const RowGradient&, DType, void* stream);
  void (*scales)(const RowScales&, DType, void* stream);
  void (*sum)(const RowSum&, DType, void* stream);
  void (*scaling)(const RowScaling&, DType, void* stream);
  void (*jsd)(const RowJsd&, DType, void* stream);
  void (*tangents)(const RowTangents&, DType, void* stream);
  void (*jsd_tangents)(const RowJsdTangents&, DType, void* stream);
  // Those of rows that are the same in every call.
  void (*part)(const RowPart&, DType, void* stream);
  void (*whole)(const RowWhole&, DType, void* stream);
  int64_t row_states;  // acc values of a row's state
  void (*product)(const Product&, DType, void* stream);
  // Whether it takes matrices of this dtype with so many hidden features; null: all.
  bool (*product_takes)(DType, int64_t hidden) = nullptr;
  int64_t (*product_workspace)(const Product&) = nullptr;  // bytes; null: none
};

extern const RowKernels kCpuRowKernels;
extern const RowKernels kCudaRowKernels;

}  // namespace fusegrad
