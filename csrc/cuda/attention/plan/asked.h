// What a call of flex attention asks of a GPU, as values: no data and no framework. Plans are made of it and kept by
// it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/flex_attention.h"
#include "cuda/attention/plan/case.h"
#include "cuda/attention/plan/launch_plan.h"

namespace fusegrad::cuda {

/// A GPU as far as plans depend on it.
struct Gpu {
  std::string architecture;  ///< as jit::current_architecture has it
  int64_t multiprocessors = 1;
  uint64_t context = 0;  ///< the driver's, whose kernels a plan keeps; 0: the plan is not run

  bool operator==(const Gpu&) const = default;
  /// The current device.
  static const Gpu& current();
};

/// A captured tensor without its data.
struct AskedBuffer {
  score_mod::DType dtype = score_mod::DType::kFloat32;
  std::vector<int64_t> sizes, strides;  ///< in elements
  bool aligned = true;                  ///< begins at a multiple of 16 bytes

  bool operator==(const AskedBuffer&) const = default;
  score_mod::Buffer buffer() const { return {nullptr, dtype, sizes, strides}; }
};

struct AskedMod {
  std::string text;
  std::vector<AskedBuffer> buffers;
  bool small_scalars = true;              ///< FlexMod::small_scalars
  std::vector<score_mod::Value> scalars;  ///< as far as plans depend on them: a mask_mod's, a backward's integers

  bool operator==(const AskedMod&) const = default;
};

enum class FlexDirection : uint8_t { kForward, kBackward, kTangents, kPairTangents };

/// Operands that kernels read 16 bytes at a time: rows must be dense and begin at multiples of 16 bytes.
enum FlexOperand : uint8_t {
  kQuery,
  kKey,
  kValue,
  kGradOut,
  kQueryTangent,
  kKeyTangent,
  kValueTangent,
  kGradOutTangent,
  kFlexOperands
};

struct Asked {
  FlexDirection direction = FlexDirection::kForward;
  DType dtype = DType::kBFloat16;
  FlexShape shape;
  AskedMod score_mod, mask_mod;
  std::optional<BlockMaskShape> mask;
  bool positive_scale = true, dropout = false, full_float32 = true;
  std::array<bool, kFlexOperands> there{}, aligned{};  ///< of operands: whether there is one, and lies as kernels read
  bool max_scores = false, out_low = false;            ///< forward and tangents: results that are wanted
  bool batch_invariant = false;                        ///< forward
  // backward
  std::vector<bool> needs_grad;                   ///< of query, key and value, then of the score_mod's buffers
  std::array<bool, 3> aligned_gradients{};        ///< of query, key and value: rows lie as kernels store them
  std::vector<score_mod::DType> gradient_dtypes;  ///< of buffers
  std::vector<bool> aligned_buffer_gradients;     ///< begin at a multiple of 16 bytes
  bool deterministic = false, inplace = false, max_gradient = false;
  // tangents: of the score_mod's buffers which have one, and all that its tangent reads
  std::vector<bool> buffer_tangents;
  bool small_tangent_buffers = true;
  // pair tangents
  int64_t head_count = 0, row_count = 0;
  uint64_t forced = 0;  ///< forced_changes()

  bool operator==(const Asked&) const = default;
};

struct AskedHash {
  size_t operator()(const Asked& asked) const;
};

Asked asked_of(const FlexForwardCall& call);
Asked asked_of(const FlexBackwardCall& call);
Asked asked_of(const FlexTangentCall& call);
Asked asked_of(const FlexPairTangentsCall& call);
/// The backward that may follow a forward, of gradients of the output alone, for new tensors like the inputs.
Asked backward_after(const Asked& forward, const FlexForwardCall& call);

/// Whether kernels read and store a tensor's rows, 16 bytes at a time.
bool has_aligned_rows(const TensorView& t);
int64_t elements_of(const AskedBuffer& buffer);

}  // namespace fusegrad::cuda
