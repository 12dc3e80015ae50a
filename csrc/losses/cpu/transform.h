// The transform of logits in vectors. Only for files that are compiled once per instruction set, see common/lanes.h.
#pragma once

#include "common/lanes.h"
#include "losses/row_kernels.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {

// z from stored logits, and dz/dx from z.
template <class Acc>
struct Transform {
  using Vec = at::vec::Vectorized<Acc>;
  Acc scale, cap, inverse_cap;
  bool capped;

  explicit Transform(const LogitTransform& t)
      : scale(static_cast<Acc>(t.scale)),
        cap(static_cast<Acc>(t.cap)),
        inverse_cap(t.cap == 0 ? Acc(0) : static_cast<Acc>(1 / t.cap)),
        capped(t.cap != 0) {}

  bool identity() const { return !capped && scale == Acc(1); }

  Vec operator()(const Vec& x) const {
    const auto z = x * Vec(scale);
    return capped ? (z * Vec(inverse_cap)).tanh() * Vec(cap) : z;
  }
  Vec slope(const Vec& z) const {
    if (!capped) return Vec(scale);
    const auto t = z * Vec(inverse_cap);
    return (Vec(1) - t * t) * Vec(scale);
  }
  // The same arithmetic as a vector lane's, so that a single value agrees with its row.
  Acc one(Acc x) const {
    if (!capped) return x * scale;
    Acc lane[Vec::size()];
    (*this)(Vec(x)).store(lane);
    return lane[0];
  }
  Acc one_slope(Acc z) const {
    if (!capped) return scale;
    const Acc t = z * inverse_cap;
    return (Acc(1) - t * t) * scale;
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
