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

/// All targets and transforms.
template <class T, int kWidth>
__global__ void __launch_bounds__(kBlockThreads, 2)
    gradient_kernel(const __grid_constant__ RowGradient p, const __grid_constant__ Constants constants,
                    const Blocks blocks) {
  const int column = static_cast<int>(p.col_offset), first = blocks.vector(), distance = blocks.threads_per_row;
  const auto* scales = static_cast<const float*>(p.scales);
  for (int64_t row = blocks.row(); row < p.rows; row += blocks.row_step()) {
    const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
    T* grad = static_cast<T*>(p.grad) + row * p.grad_stride;
    const RowVectors<T, kWidth> vectors(logits, p.cols, blocks.align);
    const RowTarget<T> target(p.targets, constants, row, p.vocab);
    if (!target.in_range || (!target.kept && p.grad_lse == nullptr)) {
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
    if (p.row_scale != nullptr) logits_by.scale *= at_row(p.row_scale);
    const float lse = static_cast<const float*>(p.lse)[row], low = at_row(p.lse_low);
    const float L = target.kept ? at_row(p.grad_log_prob) : 0.f, E = target.kept ? at_row(p.grad_entropy) : 0.f;
    float mean = 0.f, mean_low = 0.f;
    if (E != 0.f) {
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
    batch.store(vectors, grad, first, distance);
  }
}

/// What of a row's statistics and upstream gradients streamed_gradient_kernel reads, before anything is made of it.
template <class T, bool kEntropy>
struct RowReads {
  RowTarget<T> target;
  float lse, low, grad_loss = 0.f, grad_lse = 0.f, grad_log_prob = 0.f;
  float row_scale = 1.f, grad_entropy = 0.f, entropy = 0.f, entropy_low = 0.f;

  __device__ RowReads(const RowGradient& p, const Constants& constants, int64_t row)
      : target(p.targets, constants, row, p.vocab), lse(static_cast<const float*>(p.lse)[row]) {
    const auto read = [row](const void* values, float& value, int64_t stride = 1) {
      if (values != nullptr) value = static_cast<const float*>(values)[row * stride];
    };
    low = 0.f;
    read(p.lse_low, low);
    read(p.grad_loss, grad_loss, p.grad_loss_stride);
    read(p.grad_lse, grad_lse, p.grad_lse_stride);
    read(p.grad_log_prob, grad_log_prob);
    if constexpr (kEntropy) {
      read(p.row_scale, row_scale);
      read(p.grad_entropy, grad_entropy);
      read(p.entropy, entropy);
      read(p.entropy_low, entropy_low);
    }
  }
  /// Not so: the row's gradient is one value.
  __device__ bool computed(const RowGradient& p) const {
    return target.in_range && (target.kept || p.grad_lse != nullptr);
  }
};

/// Turns a batch of logits into their gradient. `index`: the target's column of those that the batch is from, or -1.
template <class T, bool kEntropy, int kWidth>
__device__ void make_gradient(const RowGradient& p, const Constants& constants, const RowReads<T, kEntropy>& row,
                              int index, const RowVectors<T, kWidth>& vectors, int first, int distance,
                              Batch<T, kWidth>& batch) {
  const auto* scales = static_cast<const float*>(p.scales);
  const float scale = kEntropy ? constants.scale * row.row_scale : constants.scale;
  float P = 0.f, E = 0.f, at_target = 0.f;
  if (row.target.kept) {
    const float upstream = row.grad_loss * row.target.token_weight;
    const float Q = scales != nullptr ? upstream * scales[0] : upstream;
    P = fmaf(Q, row.target.sparse_mass(constants, p.vocab), -row.grad_log_prob);
    if (constants.z_loss != 0.f && p.grad_loss != nullptr) {
      P = fmaf((scales != nullptr ? upstream * scales[1] : upstream) * 2.f * constants.z_loss, row.lse, P);
    }
    at_target = fmaf(-Q, row.target.at_index, row.grad_log_prob) * scale;
    E = row.grad_entropy;
  }
  P += row.grad_lse;
  // z - mean is z - lse + entropy, whose rounding 16 bits cannot see.
  if (kEntropy && E != 0.f) P = fmaf(-E, row.entropy + (row.entropy_low - row.low), P);
  P *= scale, E *= scale;
#pragma unroll
  for (int j = 0; j < kBlockVectors; ++j) {
    const int c = vectors.column(first + j * distance);
    float x[kWidth];
    unpack(batch.packs[j], x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if constexpr (sizeof(T) == 2) {
        const float d = fmaf(x[i], scale, -row.lse);
        const float share = exp2_fast(fmaf(d, kLog2E, -row.low * kLog2E));
        // 0 * inf where the logit is -inf; a NaN is in the share.
        x[i] = share * (kEntropy ? fmaf(-E, fmaxf(d, kVanishes), P) : P);
      } else {
        x[i] = probability<T>(x[i] * scale, row.lse, row.low) * P;
      }
    }
    // A branch for the vector, not a comparison for each value: one vector of the row takes it.
    if (const int at = index - c; index >= 0 && at >= 0 && at < kWidth) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (i == at) x[i] += at_target;
      }
    }
    batch.packs[j] = packed<T, kWidth>(x);
  }
}

/// Class indices, no smoothing, no softcap; with kEntropy 16 bits. The next row's logits are read before this one's
/// gradient is made: a CTA always has reads in flight.
template <class T, bool kEntropy, int kWidth>
__global__ void __launch_bounds__(kBlockThreads, 2)
    streamed_gradient_kernel(const __grid_constant__ RowGradient p, const __grid_constant__ Constants constants,
                             const Blocks blocks) {
  static_assert(sizeof(T) == 2 || !kEntropy);
  const int column = static_cast<int>(p.col_offset), first = blocks.vector(), distance = blocks.threads_per_row;
  const auto logits_of = [&](int64_t row) { return static_cast<const T*>(p.logits) + row * p.logits_stride; };
  const auto vectors_of = [&](int64_t row) { return RowVectors<T, kWidth>(logits_of(row), p.cols, blocks.align); };
  const auto read = [&](const RowReads<T, kEntropy>& reads, int64_t row, Batch<T, kWidth>& batch) {
    if (reads.computed(p)) batch = Batch<T, kWidth>(vectors_of(row), logits_of(row), first, distance);
  };
  int64_t row = blocks.row();
  if (row >= p.rows) return;
  RowReads<T, kEntropy> reads(p, constants, row);
  Batch<T, kWidth> batch;
  read(reads, row, batch);
  while (true) {
    const int64_t next = row + blocks.row_step();
    const RowReads<T, kEntropy> next_reads(p, constants, next < p.rows ? next : row);
    Batch<T, kWidth> next_batch;
    if (next < p.rows) read(next_reads, next, next_batch);

    T* grad = static_cast<T*>(p.grad) + row * p.grad_stride;
    const auto vectors = vectors_of(row);
    if (reads.computed(p)) {
      const int index = reads.target.index >= column ? reads.target.index - column : -1;
      make_gradient(p, constants, reads, index, vectors, first, distance, batch);
      batch.store(vectors, grad, first, distance);
    } else {
      const auto fill = filled<T, kWidth>(static_cast<T>(reads.target.in_range ? 0.f : not_a_number()));
      for (int j = 0; j < kBlockVectors; ++j) {
        const int v = first + j * distance;
        if (v < vectors.count) vectors.store(grad, v, fill);
      }
    }
    if (next >= p.rows) return;
    row = next, reads = next_reads, batch = next_batch;
  }
}

}  // namespace fusegrad::device
