// Rows whose scores are all far from 0: masked by adding -1e9, say.
//
// float32 has 24 bits. Near -1e9 neighbouring numbers are 64 apart, so that an lse in one number says nothing of the
// sum of exponentials, and score * log2(e) - max * log2(e) is off by as much. Such rows subtract first: score - max is
// exact where the exponential is not 0. That is one instruction for each pair more, so kernels do it for these rows
// alone:
//   forward    a warp sees its rows' maxima, and subtracts them from the scores
//   backward   lse comes in two numbers, what rounding took from it in the second (lse_of). The kernel of row values
//              marks the row by an lse of -0, which no other row has, and says of each head, and of the whole call,
//              whether there is one: kernels test that, not rows, and subtract both numbers
// Rows that are not far get the same bits in both ways.
#pragma once

#include "cuda/attention/device/scores.cuh"

namespace fusegrad::device {

/// Rows are far where their maximum times log2(e) exceeds this in the forward of 16-bit elements. It has an error of up
/// to 2^-13 there. float subtracts always.
constexpr float kFarExponent = 2048.0f;

/// Rows are far where the magnitude of lse exceeds this in the backward: its error there is that of rounding
/// probabilities to 16 bits, or a few times that of a float.
template <class T>
constexpr float kFarLse = sizeof(T) == 4 ? 32.0f : 1024.0f;

/// lse in two numbers: the second is what rounding took from the first.
struct FlexLse {
  float lse, low;
};
/// `max`: the largest score, to be multiplied by `unit`; `log_sum`: of exponentials relative to it.
__device__ __forceinline__ FlexLse lse_of(float max, float unit, float log_sum) {
  const float product = __fmul_rn(max, unit), lse = __fadd_rn(product, log_sum);
  return {lse, fmaf(max, unit, -product) + __fadd_rn(log_sum, -__fadd_rn(lse, -product))};
}

/// Whether a row is far, by the exponent of its largest score.
__device__ __forceinline__ bool is_far_exponent(float origin) { return fabsf(origin) > kFarExponent; }

/// Called by a warp where the exponentials of a thread's rows of scores, two of each block of 16, are to be computed
/// relative to `most`, of which `origin` is the exponent: of a far row the scores are relative to it afterwards.
/// Returns whether the warp has one. The vote makes the branch uniform: one that may diverge costs short sequences a
/// tenth of their time.
template <int kBlocksM, int kBlocks>
__device__ __forceinline__ bool subtract_far(float (&s)[kBlocksM][kBlocks][4], const float (&most)[kBlocksM][2],
                                             float (&origin)[kBlocksM][2]) {
  bool found = false;
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) found |= is_far_exponent(origin[m][0]) || is_far_exponent(origin[m][1]);
  if (!__any_sync(~0u, found)) return false;
#pragma unroll
  for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is = is_far_exponent(origin[m][r]);
      const float by = is ? most[m][r] : 0.0f;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) s[m][n][e] -= by;
      }
      origin[m][r] = is ? 0.0f : origin[m][r];
    }
  }
  return true;
}
/// The same with one block of rows.
template <int kBlocks>
__device__ __forceinline__ bool subtract_far(float (&s)[kBlocks][4], const float (&most)[2], float (&origin)[2]) {
  return subtract_far(reinterpret_cast<float (&)[1][kBlocks][4]>(s), reinterpret_cast<const float (&)[1][2]>(most),
                      reinterpret_cast<float (&)[1][2]>(origin));
}

/// Whether a head, b * heads + h, has a far row.
__device__ __forceinline__ bool head_has_far(const FlexBackwardArguments& a, int head) {
  return a.far[1 + head] == a.call;
}
/// Whether the call has a far row. Read at a kernel's start, and asked behind its first loads: read where it is asked,
/// it would take a microsecond of each CTA.
class AnyFar {
 public:
  __device__ __forceinline__ explicit AnyFar(const FlexBackwardArguments& a) : call_(a.call) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(found_) : "l"(a.far));
  }
  __device__ __forceinline__ explicit operator bool() const { return found_ == call_; }

 private:
  unsigned found_;
  const unsigned& call_;
};
__device__ __forceinline__ bool is_far(const FlexRow& row) { return __float_as_uint(row.lse) == 0x80000000u; }

/// A number, or 0. Predicated: behind a branch the compiler would wait for products in flight.
__device__ __forceinline__ float load_if(bool there, const float* at) {
  float x = 0.0f;
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there ld.global.f32 %0, [%1];\n}"
               : "+f"(x)
               : "l"(at), "r"(static_cast<int>(there)));
  return x;
}

/// What is to be subtracted from the scores of query q first, 0 for rows that are not far. The `row` of a far one gets
/// the rest of its lse.
template <class Config>
__device__ __forceinline__ float take_origin(const FlexBackwardArguments& a, FlexRow& row, int b, int h, int q) {
  const bool far = is_far(row) && q < a.queries;
  const long long at = static_cast<long long>(b * a.heads + h) * a.queries + q;
  const float lse = load_if(far, a.lse + at), rest = load_if(far, a.lse_low + at);
  // Probabilities come out times dropout's scale, as of other rows.
  const float low = rest - (Config::kDropout ? logf(a.dropout.scale) : 0.0f);
  if (far) row.lse = kSame<typename Config::Element, float> ? low : low * kLog2E;
  return lse;
}

/// Where there is no score_mod: makes a score of a far row of 16-bit elements what of it is above lse, so that lse is 0
/// for it. `row` and `origin` as take_origin leaves them.
__device__ __forceinline__ void subtract_lse(float& score, float scale, const FlexRow& row, float origin) {
  score = (fmaf(score, scale, -origin) * kLog2E - row.lse) / (scale * kLog2E);
}

}  // namespace fusegrad::device
