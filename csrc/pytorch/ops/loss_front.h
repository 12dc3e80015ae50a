// The ops of a loss, and how C++'s callers get to them: NAME, NAME_, which may write over its input, and both over a
// vocabulary that processes share.
#pragma once

#include <torch/library.h>

#include <string>

#include "pytorch/ops/faults.h"
#include "pytorch/ops/front.h"
#include "pytorch/ops/shards.h"

namespace fusegrad {

template <OpName kOp, class Call, LossTuple (*kRun)(const Call&, const Shards&, bool inplace)>
struct LossOps {
  template <bool kInplace>
  static LossTuple whole(const Call& call) {
    return kRun(call, {}, kInplace);
  }
  template <bool kInplace>
  static LossTuple sharded(const Sharded<Call>& call) {
    return kRun(call.call, call.shards, kInplace);
  }
  static void implement(torch::Library& m) {
    const std::string name = kOp.text;
    m.impl(name.c_str(), named_kernel<kOp, unpacked<whole<false>>()>());
    m.impl((name + "_").c_str(), named_kernel<kOp, unpacked<whole<true>>()>());
    m.impl((name + "_sharded").c_str(), named_kernel<kOp, unpacked<sharded<false>>()>());
    m.impl((name + "_sharded_").c_str(), named_kernel<kOp, unpacked<sharded<true>>()>());
  }
};

/// By the op that the call's options ask for. `input` is where a normalizer that is a number goes.
template <OpName kOp, class Call, class AuxValues>
auto call_loss(Call call, const at::Tensor& input, const AuxValues& aux) {
  static const auto name = std::string("fusegrad::") + kOp.text;
  static const Twins<Call, LossTuple> whole(name);
  static const Twins<Sharded<Call>, LossTuple> sharded(name + "_sharded");
  call.aux = aux_bits(aux);
  put_on_device(kOp.text, call.options.normalizer(), input);
  const auto shards = shards_of(call.options.vocab_parallel());
  const bool inplace = call.options.inplace();
  return from_front(shards ? sharded({call, shards}, inplace) : whole(call, inplace), aux);
}

}  // namespace fusegrad
