// Tensors whose rows, along the last dimension, lie as kernels read and write them: dense, each beginning at a multiple
// of 16 bytes.
#pragma once

#include <ATen/core/Tensor.h>

namespace fusegrad::cuda {

/// Whether the innermost dimension is dense and rows begin at multiples of 16 bytes, as kernels read and write them.
bool has_aligned_rows(const at::Tensor& t);
/// A tensor of t's sizes with such rows, not filled. zeros_beyond: zeros from their ends to whole vectors.
at::Tensor new_aligned_rows(const at::Tensor& t, bool zeros_beyond);
/// `t`, or a copy with such rows and zeros beyond.
at::Tensor with_aligned_rows(const at::Tensor& t);

/// Whether boxes (device::PairBoxes) are copied from a buffer 16 bytes at a time: rows as above, which may end
/// anywhere, of a buffer of any rank.
bool has_box_rows(const at::Tensor& t);
/// The part of a tensor that its expanded dimensions repeat, the last dimension aside.
at::Tensor without_expanded(const at::Tensor& t);
/// A copy with such rows, expanded as `t` is.
at::Tensor with_box_rows(const at::Tensor& t, void* stream);

}  // namespace fusegrad::cuda
