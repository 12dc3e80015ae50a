// Where a composite op calls Python under function transforms (torch.func, torch.vmap).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace fusegrad {

/// While a composite op runs under a transform, that transform has taken the call: ops called now are its own, and an
/// autograd Function in Python, which the transform has to take whole, cannot be applied. Here the thread is as it was
/// when the op was called, so that it can. Without transforms nothing changes.
class AboveTransforms {
 public:
  AboveTransforms();
  ~AboveTransforms();
  AboveTransforms(const AboveTransforms&) = delete;
  AboveTransforms& operator=(const AboveTransforms&) = delete;

 private:
  std::optional<c10::impl::LocalDispatchKeySet> saved_;  // those of the transform that has taken the call
  std::optional<c10::impl::ForceDispatchKeyGuard> guard_;
};

/// The number of the innermost transform, which has taken the call.
int64_t running_level();

/// A transform is active, or one of the tensors comes from one.
bool within_functorch(at::ArrayRef<at::Tensor> tensors);

/// A level of reverse mode, as torch.func.vjp makes one: what is differentiated here is a variable of this level alone,
/// whether or not it requires grad in those outside. A backward of torch.func's gets tensors of levels that have ended
/// and of batches, whose own graphs ops called now do not see. `graph_outside`: what is computed is recorded there.
class ReverseLevel {
 public:
  explicit ReverseLevel(bool graph_outside);
  ~ReverseLevel();
  ReverseLevel(const ReverseLevel&) = delete;
  ReverseLevel& operator=(const ReverseLevel&) = delete;

  at::Tensor variable(at::Tensor tensor) const;
  at::Tensor outside(const at::Tensor& tensor) const;

 private:
  int64_t level_;
};

}  // namespace fusegrad
