// A call over a vocabulary that processes share, as fronts check it: each process for itself, and whether all of them
// make the same call. A difference is an error in all, and no collective waits for one that does not come.
#pragma once

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "pytorch/ops/arguments.h"
#include "pytorch/ops/check.h"

namespace fusegrad {

Shards shards_of(const std::optional<VocabParallel>& given);

/// Which tensors of a call are parts of the vocabulary, and along which dimension.
using Parts = std::vector<std::pair<std::string_view, int64_t>>;

/// A call as fields of text, for ShardsAgree.
class ToldCall {
 public:
  template <class Call>
  static ToldCall of(const Call& call, const Parts& parts) {
    ToldCall told;
    told.parts_ = &parts;
    for_each_field<Call>([&](const auto& field) { told.tell(field.name, field.of(call)); });
    return told;
  }

  void refuse_batches(const char* op) const;
  /// Raises where a part has other columns than the shards say.
  void check_parts(const char* op, const Shards& shards) const;
  /// What ShardsAgree returns.
  at::Tensor agree(const char* op, const Shards& shards, bool failed);
  bool traced() const;

 private:
  void tell(const char* name, const at::Tensor& value);
  void tell(const char* name, const OptionalTensor& value) { tell(name, value.value_or(at::Tensor())); }
  void tell(const char* name, const Normalizer& value);
  void tell(const char* name, const std::string& value) { tell_text(name, value); }
  void tell(const char* name, std::optional<at::ScalarType> value) {
    tell_text(name, value ? c10::toString(*value) : "None");
  }
  template <class T>
  void tell(const char* name, const T& value) {
    tell_text(name, default_text(value));
  }
  void tell_text(const char* name, const std::string& value) { told_ += std::string(name) + ": " + value + "\n"; }

  const Parts* parts_ = nullptr;
  std::vector<at::Tensor> given_;
  std::vector<std::string> given_names_;
  std::vector<int64_t> kinds_;
  std::string names_, told_;
};

void check_shards(const char* op, const Shards& shards);

/// What `prepare` makes of a call after its own checks, and whether the processes were given what differs, where the
/// device alone knows it. Without shards nothing is compared.
template <class Call, class Prepare>
auto prepared_by_all(const char* op, const Call& call, const Shards& shards, const Parts& parts, Prepare&& prepare)
    -> std::pair<decltype(prepare()), OptionalTensor> {
  if (!shards) return {prepare(), std::nullopt};
  check_shards(op, shards);
  auto told = ToldCall::of(call, parts);
  told.refuse_batches(op);
  if (shards.world() == 1) {
    told.check_parts(op, shards);
    return {prepare(), std::nullopt};
  }
  std::exception_ptr error;
  std::optional<decltype(prepare())> prepared;
  try {
    told.check_parts(op, shards);
    prepared.emplace(prepare());
  } catch (...) {
    if (told.traced()) throw;
    error = std::current_exception();  // told to the others before it is raised
  }
  auto different = told.agree(op, shards, error != nullptr);
  if (error) std::rethrow_exception(error);
  return {std::move(*prepared), std::move(different)};
}

}  // namespace fusegrad
