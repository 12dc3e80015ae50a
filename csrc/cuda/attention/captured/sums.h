// The sums of captured buffers' gradients: where kernels add them up, and how they become gradients.
#pragma once

#include <memory>
#include <vector>

#include "cuda/attention/plan/run.h"

namespace fusegrad::cuda {

/// The sums of the contributions that one kernel makes.
class BufferSums {
 public:
  /// Gives the sums of a kernel their regions. They lie in the gradients themselves where those are float32 and sums
  /// are float, or where each element gets one contribution, which is stored. `ctas`: of the kernel's launch.
  /// `lifetime`: from the kernel to finish().
  BufferSums(const Asked& asked, const KernelFacts& facts, int64_t ctas, Lifetime lifetime, CallPlan& plan);

  int fixed_bits() const { return fixed_bits_; }
  /// The largest magnitudes of each buffer's contributions, where sums are in fixed point.
  Region largest() const { return largest_; }
  /// Zeros the sums that lie in gradients. Before the kernel.
  void prepare(const Run<FlexBackwardCall>& r) const;
  /// As the kernel takes them.
  std::vector<device::FlexSums> arguments(const Run<FlexBackwardCall>& r) const;
  /// What the kernel stores dS to by TMA (Scheme::kStoredTiles), or no tensor.
  TensorView tiles(const Run<FlexBackwardCall>& r) const;
  /// After the kernel: to the gradients.
  void finish(const Run<FlexBackwardCall>& r) const;
  /// Whether there is anything to finish.
  bool finishes() const;
  std::vector<Region> regions() const;

 private:
  /// Partial sums of a contribution, which other kernels add up.
  struct Partial {
    Region sums = kNoRegion, elements = kNoRegion;
    int64_t count = 0;
  };
  /// The sum of a buffer's contributions.
  struct Sum {
    bool wanted = false;
    bool in_gradient = false;  ///< else in `region`
    bool zeros = true;         ///< contributions are added, not stored
    bool fixed = false;        ///< int64, in fixed point
    Region region = kNoRegion;
    Region floats = kNoRegion;  ///< of a sum in fixed point, where the gradient is not float32
    score_mod::DType dtype = score_mod::DType::kFloat32;  ///< of the gradient
    bool stored = false;                                  ///< of the gradient's dtype
    int64_t elements = 0;
  };

  size_t contributions() const { return partial_.size(); }
  size_t buffer_of(size_t k) const { return static_cast<size_t>(derivative_->contributions()[k].buffer); }
  void* data_of(size_t i, const Run<FlexBackwardCall>& r) const;
  void add_partial_sums(const Run<FlexBackwardCall>& r) const;

  std::shared_ptr<const score_mod::Graph> derivative_;
  FlexShape shape_;
  int fixed_bits_ = 0;
  std::vector<Partial> partial_;  // of each contribution
  std::vector<Sum> sums_;         // of each buffer
  int tiles_ = -1;                // whose contributions are stored tile by tile
  Region largest_ = kNoRegion;
};

}  // namespace fusegrad::cuda
