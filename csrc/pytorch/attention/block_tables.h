// What the bounds of a mask_mod read, made from the tensors that the mask_mod captures.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <vector>

#include "score_mod/block_bounds.h"

namespace fusegrad {

/// The buffers of the bounds, each as score_mod::BoundsBuffer says, on the device of `like`. Their sizes are of the
/// order of the parts; the work is one reading of what is captured. Nothing synchronises.
std::vector<at::Tensor> block_tables(const score_mod::BlockBounds& bounds, at::TensorList captured,
                                     const at::Tensor& like);

/// The scalars of the bounds: those of the mask_mod, then lengths and sizes.
std::vector<at::Scalar> block_scalars(const score_mod::BlockBounds& bounds, at::TensorList captured,
                                      at::ArrayRef<at::Scalar> scalars, std::array<int64_t, 2> lengths);

}  // namespace fusegrad
