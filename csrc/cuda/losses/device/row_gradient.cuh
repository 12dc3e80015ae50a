// The gradient of cross entropy from a row's saved statistics: element-wise over blocks of columns.
//
//   grad = (p[c] * (P - E * (z[c] - mean)) - Q * a[c] + L * [c == y]) * dz/dx
//
// p[c] is e^(z[c] - lse), mean is lse - entropy; E and L are the upstream gradients of entropy and log_prob, Q that of
// the loss, P all that multiplies the probability.
#pragma once

#include <cstdint>

#include "cuda/losses/device/blocks.cuh"
#include "cuda/losses/device/target.cuh"
#include "cuda/losses/host/row_kernels.h"

namespace fusegrad::device {

/// What is compiled in.
enum class Part {
  kPlain,    // class indices, no smoothing, no softcap, one scale, no entropy
  kEntropy,  // class indices, no smoothing, no softcap; logits of 16 bits
  kAll,
};

/// p[c] * (P - E * (z[c] - lse)) + at_target * [c == y] for one vector of logits; P, E and at_target have the slope.
template <class T, bool kEntropy, int kWidth>
__device__ Pack<T, kWidth> simple_gradient(const Pack<T, kWidth>& logits, float scale, float lse, float low, float P,
                                           float E, float at_target, int at) {
  float x[kWidth];
  unpack(logits, x);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (sizeof(T) == 2) {
      const float d = fmaf(x[i], scale, -lse), share = exp2_fast(fmaf(d, kLog2E, -low * kLog2E));
      // 0 * inf where the logit is -inf; a NaN is in the share.
      x[i] = share * (kEntropy ? fmaf(-E, fmaxf(d, kVanishes), P) : P);
    } else {
      x[i] = probability<T>(x[i] * scale, lse, low) * P;
    }
  }
  // A branch for the vector, not a comparison for each value: one vector of the row takes it.
  if (at >= 0 && at < kWidth) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i == at) x[i] += at_target;
    }
  }
  return packed<T, kWidth>(x);
}

template <class T, Part kPart, int kWidth>
__global__ void __launch_bounds__(kBlockThreads, kPart == Part::kAll       ? 2
                                                 : kPart == Part::kEntropy ? 6
                                                                           : 4)
    gradient_kernel(const __grid_constant__ RowGradient p, const __grid_constant__ Constants constants,
                    const Blocks blocks) {
  const int column = static_cast<int>(p.col_offset), first = blocks.vector(), distance = blocks.threads_per_row;
  const auto* scales = static_cast<const float*>(p.scales);
  for (int64_t row = blocks.row(); row < p.rows; row += blocks.row_step()) {
    const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
    T* grad = static_cast<T*>(p.grad) + row * p.grad_stride;
    const RowVectors<T, kWidth> vectors(logits, p.cols, blocks.align);
    const RowTarget<T> target(p.targets, constants, row, p.vocab);
    if (!target.in_range || (!target.kept && (p.grad_lse == nullptr || !p.lse_of_ignored))) {
      const auto fill = filled<T, kWidth>(static_cast<T>(target.in_range ? 0.f : not_a_number()));
      for (int j = 0; j < kBlockVectors; ++j) {
        const int v = first + j * distance;
        if (v < vectors.count) vectors.store(grad, v, fill);
      }
      continue;
    }
    Batch<T, kWidth> batch(vectors, logits, first, distance);

    const auto at_row = [row](const void* values) {
      return values != nullptr ? static_cast<const float*>(values)[row] : 0.f;
    };
    auto logits_by = static_cast<const LogitConstants&>(constants);
    if (kPart != Part::kPlain && p.row_scale != nullptr) logits_by.scale *= at_row(p.row_scale);
    const float lse = static_cast<const float*>(p.lse)[row], low = at_row(p.lse_low);
    const float L = target.kept ? at_row(p.grad_log_prob) : 0.f, E = target.kept ? at_row(p.grad_entropy) : 0.f;
    [[maybe_unused]] float mean = 0.f, mean_low = 0.f;
    if (kPart == Part::kAll && E != 0.f) {
      const double exact = (static_cast<double>(lse) + static_cast<double>(low)) -
                           (static_cast<double>(at_row(p.entropy)) + static_cast<double>(at_row(p.entropy_low)));
      mean = static_cast<float>(exact);
      mean_low = static_cast<float>(exact - static_cast<double>(mean));
    }
    float P = -L, Q = 0.f;
    if (target.kept && p.grad_loss != nullptr) {
      const float upstream = static_cast<const float*>(p.grad_loss)[row * p.grad_loss_stride] * target.token_weight;
      const float mass =
          p.targets.dense ? static_cast<const float*>(p.mass)[row] : target.sparse_mass(constants, p.vocab);
      Q = scales != nullptr ? upstream * scales[0] : upstream;
      P = fmaf(Q, mass, -L);
      if (constants.z_loss != 0.f) {
        P = fmaf((scales != nullptr ? upstream * scales[1] : upstream) * 2.f * constants.z_loss, lse, P);
      }
    }
    if (p.grad_lse != nullptr) P += static_cast<const float*>(p.grad_lse)[row * p.grad_lse_stride];
    const int index = target.index >= column ? target.index - column : -1;
    if constexpr (kPart != Part::kAll) {
      static_assert(sizeof(T) == 2 || kPart == Part::kPlain);
      constexpr bool kEntropy = kPart == Part::kEntropy;
      const float scale = logits_by.scale, at_target = fmaf(-Q, target.at_index, L) * scale;
      // z - mean is z - lse + entropy, whose rounding 16 bits cannot see.
      if (kEntropy && E != 0.f) P = fmaf(-E, at_row(p.entropy) + (at_row(p.entropy_low) - low), P);
#pragma unroll
      for (int j = 0; j < kBlockVectors; ++j) {
        const int at = index - vectors.column(first + j * distance);
        batch.packs[j] = simple_gradient<T, kEntropy>(batch.packs[j], scale, lse, low, P * scale, E * scale, at_target,
                                                      index < 0 ? -1 : at);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kBlockVectors; ++j) {
        const int c = vectors.column(first + j * distance);
        float x[kWidth], slope[kWidth], a[kWidth];
        unpack(batch.packs[j], x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          slope[i] = logits_by.scale;
          a[i] = constants.uniform;
          if (constants.cap != 0.f) {
            const auto z = Logit::capped<T>(logits_by, x[i]);
            slope[i] *= z.slope;
            x[i] = z.x;
          } else {
            x[i] *= logits_by.scale;
          }
          const float share = probability<T>(x[i], lse, low);
          if (E != 0.f && share != 0.f) {  // 0 * inf where the logit is -inf
            x[i] = share * fmaf(-E, (x[i] - mean) - mean_low, P);
          } else {
            x[i] = P * share;
          }
        }
        if (p.targets.dense) target.coefficients(constants, c, vectors.cols, column, a);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) x[i] = fmaf(-Q, a[i], x[i]);
        // A branch for the vector, not a comparison for each value: one vector of the row takes it.
        if (const int at = index - c; index >= 0 && at >= 0 && at < kWidth) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            if (i == at) x[i] = fmaf(-Q, target.at_index, x[i]) + L;
          }
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) x[i] *= slope[i];
        batch.packs[j] = packed<T, kWidth>(x);
      }
    }
    batch.store(vectors, grad, first, distance);
  }
}

}  // namespace fusegrad::device
