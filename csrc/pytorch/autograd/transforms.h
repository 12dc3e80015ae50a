// Where a composite op calls Python under function transforms (torch.func, torch.vmap).
#pragma once

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

}  // namespace fusegrad
