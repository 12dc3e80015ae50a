// Losses whose softmax is over a few columns of each row, its support: as over logits that are -inf elsewhere.
#pragma once

#include "pytorch/ops/front.h"

namespace fusegrad {

/// `support` [rows, K] checked against the call, as [N, K] int64. Options without a meaning there are refused.
template <class Call>
at::Tensor make_support(const char* op, const Call& call, const RowArguments& rows);

/// The loss of the logits at the support's columns, [N, K] acc and differentiable, before the softcap.
LossTuple support_loss(const char* op, const at::Tensor& logits, const at::Tensor& support, const c10::SymInt& vocab,
                       const RowArguments& rows, const RowOptions& options);

}  // namespace fusegrad
