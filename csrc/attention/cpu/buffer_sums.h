// Where the lanes of flex_attention's backward sum up the gradients of captured buffers.
//
// A small buffer has a sum in float64 for every lane, added up in the order of the lanes. A large one has a single sum
// if no two lanes can meet in an element, which what the indices depend on may show, and which the cut of the work into
// lanes can be chosen for; else a sum for every lane, and as few lanes as keep the memory in bounds. It is in float64
// too if many pairs meet in each element.
#pragma once

#include <limits>
#include <vector>

#include "attention/flex_attention.h"
#include "common/host.h"
#include "common/memory.h"
#include "score_mod/evaluate_cpu.h"

namespace fusegrad::cpu {

/// Between what two lanes may be cut.
enum class LaneCut {
  kAnywhere,
  kHeads,    ///< no key head belongs to two lanes
  kBatches,  ///< no batch does
  kKeys,     ///< no key index does, whatever the head
};

template <class T>
class BufferSums {
 public:
  /// For the call's gradients of captured buffers. The work consists of so many blocks of keys of so many key heads in
  /// so many batches.
  BufferSums(const Host& host, const FlexBackwardCall& call, const score_mod::Lengths& lengths, int64_t key_batches,
             int64_t key_heads, int64_t key_blocks);

  LaneCut cut() const { return cut_; }
  int64_t most_lanes() const { return most_lanes_; }

  void prepare(size_t lanes);
  std::vector<score_mod::GradientSink<T>> lane_sinks(size_t lane) const;

  /// Adds up the lanes and rounds once.
  void finish();

 private:
  struct Sum {
    BufferGradient gradient;
    bool wanted = false, small = false, shared = false;
    bool in_double = false;
    // [lanes or 1, elements], of double or T. Or T in the gradient itself.
    int64_t lanes = 1;
    Scratch<double> wide;
    Scratch<T> own;
    T* sums = nullptr;
  };
  template <class Acc>
  void add_lanes(const Sum& sum, const Acc* sums) const;

  const Host& host_;
  std::vector<Sum> sums_;
  LaneCut cut_ = LaneCut::kAnywhere;
  int64_t most_lanes_ = std::numeric_limits<int64_t>::max();
};

}  // namespace fusegrad::cpu
