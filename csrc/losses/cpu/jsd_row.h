// What the divergences' kernels share. Only for files that are compiled once per instruction set, see common/lanes.h.
#pragma once

#include "common/lanes.h"
#include "losses/cpu/transform.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {

// z of a row, padded with -inf; returns the largest.
template <class T>
AccOf<T> load_row(const T* row, int64_t cols, const Transform<AccOf<T>>& transform, AccOf<T>* out) {
  using Acc = AccOf<T>;
  using Vec = at::vec::Vectorized<Acc>;
  const Vec low(-std::numeric_limits<Acc>::infinity());
  Vec max_a = low, max_b = low;
  each_lanes(row, cols, Acc(0), [&](int64_t c, int64_t count, const Lanes<T>& x) {
    auto za = transform(x.a), zb = transform(x.b);
    if (count < Lanes<T>::kStep) {
      za = Vec::set(low, za, count < Vec::size() ? count : Vec::size());
      zb = Vec::set(low, zb, count < Vec::size() ? 0 : count - Vec::size());
    }
    max_a = at::vec::maximum(max_a, za);
    max_b = at::vec::maximum(max_b, zb);
    za.store(out + c);
    zb.store(out + c + Vec::size());
  });
  return reduce_max(at::vec::maximum(max_a, max_b));
}

// What a row needs beside its logits.
template <class Acc>
struct RowConstants {
  bool kept = true;
  int64_t label = -1;
  Acc weight = 1;    // of the loss
  Acc upstream = 1;  // of the gradients, beside the weight

  RowConstants(const RowJsd& p, int64_t n) {
    if (p.label != nullptr) {
      label = p.label_is_int32 ? static_cast<const int32_t*>(p.label)[n] : static_cast<const int64_t*>(p.label)[n];
      kept = label != p.ignore_index;
    }
    if (p.token_weight != nullptr) weight = static_cast<const Acc*>(p.token_weight)[n];
    if (p.scales != nullptr) weight *= *static_cast<const Acc*>(p.scales);
    if (p.upstream != nullptr) upstream = static_cast<const Acc*>(p.upstream)[n * p.upstream_stride];
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
