#include "pytorch/ops/shards.h"

#include <algorithm>

#include "pytorch/autograd/inplace.h"

namespace fusegrad {

using at::Tensor;

Shards shards_of(const std::optional<VocabParallel>& given) {
  if (!given) return {};
  return {.group = given->group(), .rank = given->rank(), .bounds = given->bounds()};
}

void check_shards(const char* op, const Shards& shards) {
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (int64_t r = 0; r < shards.world(); ++r) parts.emplace_back(shards.start(r), shards.stop(r));
  std::sort(parts.begin(), parts.end());
  int64_t end = 0;
  bool whole = shards.bounds.size() % 2 == 0 && shards.rank >= 0 && shards.rank < shards.world();
  for (const auto& [start, stop] : parts) {
    whole = whole && start == end && stop >= start;
    end = stop;
  }
  FUSEGRAD_CHECK_VALUE(whole, op,
                       "vocab_parallel's bounds must be the starts and stops of all processes' parts, [0, V) without "
                       "gaps and overlaps, and its rank one of them, but got ",
                       at::IntArrayRef(shards.bounds), " and ", shards.rank);
}

void ToldCall::tell(const char* name, const Tensor& value) {
  names_ += (names_.empty() ? "" : ",") + std::string(name);
  if (!value.defined()) return kinds_.push_back(-1);
  int64_t dim = -1;
  for (const auto& [part, of] : *parts_) {
    if (part == name) dim = of;
  }
  kinds_.push_back(2 * (dim + 1) + (value.requires_grad() ? 1 : 0));
  given_.push_back(value.detach());
  given_names_.emplace_back(name);
}

void ToldCall::tell(const char* name, const Normalizer& value) {
  const auto* tensor = std::get_if<Tensor>(&value);
  tell(name, tensor != nullptr ? *tensor : Tensor());
}

void ToldCall::refuse_batches(const char* op) const {
  constexpr c10::DispatchKeySet kBatches({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  for (const auto& tensor : given_) {
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor.key_set().has_any(kBatches), op,
                                ": torch.vmap must not be applied with vocab_parallel, but it is");
  }
}

void ToldCall::check_parts(const char* op, const Shards& shards) const {
  for (size_t i = 0; i < given_.size(); ++i) {
    for (const auto& [part, dim] : *parts_) {
      if (part != given_names_[i] || given_[i].dim() <= dim) continue;
      FUSEGRAD_CHECK_VALUE(given_[i].sym_size(dim) == shards.size(), op, part,
                           " must have stop - start = ", shards.size(), " in dimension ", dim,
                           ", the part of the vocabulary that this process has, but got shape ", given_[i].sym_sizes());
    }
  }
}

bool ToldCall::traced() const { return std::any_of(given_.begin(), given_.end(), is_traced); }

Tensor ToldCall::agree(const char* op, const Shards& shards, bool failed) {
  static const Op<ShardsAgree, Tensor> agree("fusegrad::shards_agree");
  const auto autocast = autocast_dtype(given_.front());
  tell("the grad mode", at::GradMode::is_enabled());
  tell("autocast", autocast);
  at::AutoDispatchBelowAutograd below;
  return agree({.op = op,
                .who = "that share a vocabulary",
                .given = given_,
                .names = names_,
                .kinds = kinds_,
                .told = told_,
                .failed = failed,
                .shards = shards});
}

}  // namespace fusegrad
