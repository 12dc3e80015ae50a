// Expressions on tensors: fusegrad/score_mod.h.
#include <fusegrad/score_mod.h>

#include "pytorch/score_mod/tensors.h"
#include "score_mod/text.h"
#include "score_mod/trace.h"

namespace fusegrad {
namespace {

using score_mod::Input;
using score_mod::TraceScope;

ScoreMod finish(const TraceScope& scope, const Expression& result) {
  // The compiler chooses the order in which operands are evaluated, and so that of the trace.
  const score_mod::Compact compact = scope.finish(result);
  ScoreMod mod{score_mod::print(compact.graph), {}, {}};
  const score_mod::Trace& trace = *scope.trace();
  for (const int i : compact.buffers) mod.buffers.push_back(*static_cast<const at::Tensor*>(trace.buffers[i].get()));
  for (const int i : compact.scalars) mod.scalars.push_back(*static_cast<const at::Scalar*>(trace.scalars[i].get()));
  return mod;
}

}  // namespace

Captured::Captured(at::Tensor tensor) : tensor_(std::make_shared<at::Tensor>(std::move(tensor))) {
  score_mod::dtype_of(*tensor_);
}

Expression Captured::at(const std::vector<Expression>& indices) const {
  TORCH_CHECK_INDEX(static_cast<int64_t>(indices.size()) == tensor_->dim(), "a captured tensor of ", tensor_->dim(),
                    " dimensions expects as many indices, but got ", indices.size());
  return score_mod::load(tensor_, score_mod::type_of(score_mod::dtype_of(*tensor_)), indices);
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): at::Scalar goes by value in all of PyTorch.
CapturedNumber::CapturedNumber(at::Scalar value) : value_(std::make_shared<at::Scalar>(value)) {
  TORCH_CHECK_TYPE(!value.isComplex(), "a captured number must be real");
}

CapturedNumber::operator Expression() const {
  return score_mod::runtime_scalar(score_mod::value_of(*value_).type, value_);
}

ScoreMod trace_score_mod(const ScoreModFunction& function) {
  const TraceScope scope(score_mod::Kind::kScoreMod);
  return finish(scope, function(scope.input(Input::kScore), scope.input(Input::kB), scope.input(Input::kH),
                                scope.input(Input::kQ), scope.input(Input::kKv)));
}

ScoreMod trace_mask_mod(const MaskModFunction& function) {
  const TraceScope scope(score_mod::Kind::kMaskMod);
  return finish(
      scope, function(scope.input(Input::kB), scope.input(Input::kH), scope.input(Input::kQ), scope.input(Input::kKv)));
}

}  // namespace fusegrad
