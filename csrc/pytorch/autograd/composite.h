// The losses as compositions of differentiable ops: of PyTorch's own, for what the row kernels have no derivative of,
// and of cross_entropy_rows (row_values.cpp) and jsd_soft (jsd_soft.cpp), whose derivatives are kernels of their own.
// Function transforms (torch.func, torch.vmap) and forward-mode tangents take them whole; a backward that is itself
// differentiated (create_graph=True) takes its gradients from them. Rows are computed in acc, those of logits at once:
// the memory is that of some [N, V] tensors in acc. Those of the linear losses are computed in chunks, see in_chunks().
#pragma once

#include "pytorch/autograd/autograd.h"

namespace fusegrad::composite {

/// As autograd::cross_entropy. All that is returned is differentiable, the row of aux.z_loss too. A row with an index
/// outside [0, V) is NaN where its values cannot be read (wrapped by a transform).
RowOutputs cross_entropy(const char* op, const CrossEntropyForward& call);

/// As autograd::linear_cross_entropy.
RowOutputs linear_cross_entropy(const char* op, const LinearCrossEntropyForward& call);

/// As autograd::jsd and autograd::linear_jsd, the rows of soft_loss and hard_loss too. A row whose label or a column of
/// whose top-k teacher is outside [0, V) is NaN where these cannot be read; the sums of log-probabilities are checked
/// where they can.
JsdOutputs jsd(const char* op, const JsdForward& call);
JsdOutputs linear_jsd(const char* op, const LinearJsdForward& call);

/// The op jsd_soft by PyTorch's ops alone, for derivatives above its second ones.
at::Tensor jsd_soft(const JsdSoft& call);

/// The gradients of logits and target, each where wanted, as a graph.
std::array<at::Tensor, 2> cross_entropy_gradients(CrossEntropyBackward call, std::array<bool, 2> wanted);

/// Those of input, weight, bias and row scale.
std::array<at::Tensor, 4> linear_cross_entropy_gradients(LinearCrossEntropyBackward call, std::array<bool, 4> wanted);

/// Those of student and teacher.
std::array<at::Tensor, 2> jsd_gradients(JsdBackward call, std::array<bool, 2> wanted);

/// Those of input, weight and bias, where the call needs them.
LinearGradients linear_jsd_gradients(LinearJsdBackward call);

}  // namespace fusegrad::composite
