// flex_attention as XLA's custom calls describe it: attributes, and arrays in an order.
// python/fusegrad/jax/_attention.py makes them.
//
// Arguments: query, key, value; the score_mod's buffers; the mask_mod's; of a block mask num_blocks and indices of the
// partial blocks and, if there are such, of the full ones; with dropout a seed of 8 bytes. Then,
// - of a backward: out, lse, out_low (of 16-bit types), lse_low; with a gradient of the largest scores these and how
//   many tie; the upstream gradients that there are, of out, lse and the largest scores;
// - of tangents: those that there are, of query, key, value and each buffer of the score_mod.
// Results, before the scratch memory, which is the last on CUDA and absent on the CPU:
// - of a forward: out, lse; with `max_scores` the largest scores and how many tie; with `low` out_low (of 16-bit types)
//   and lse_low;
// - of a backward: the gradients that are wanted, of query, key, value and each buffer of the score_mod;
// - of tangents: out, lse, and the tangents of both.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "attention/flex_attention.h"
#include "score_mod/captured.h"

namespace fusegrad::jax {

struct FlexAttributes {
  std::string_view score_mod, mask_mod;  ///< texts; empty: none
  double scale, dropout_p;
  bool bshd;                         ///< tensors are [B, S, H, D] in memory, not [B, H, S, D]
  int64_t lists;                     ///< 0, 2 or 4
  int64_t block_q, block_kv;         ///< of the lists
  bool max_scores, low;              ///< of a forward; of a backward: max_scores says that their gradient is there
  bool deterministic;                ///< of a backward
  bool grad_out, grad_lse;           ///< of a backward: which there are
  std::span<const int64_t> wanted;   ///< 1 or 0 of query, key, value and the score_mod's buffers
  std::span<const int64_t> scalars;  ///< one that counts for nothing, then the score_mod's and the mask_mod's, as bits
};

/// An array, dense and row-major.
struct FlexArray {
  void* data = nullptr;  ///< null: it has no elements
  score_mod::DType dtype = score_mod::DType::kFloat32;
  std::span<const int64_t> sizes;
};

/// What remains of a call's arrays.
class FlexArrays {
 public:
  explicit FlexArrays(std::span<const FlexArray> all) : rest_(all) {}
  const FlexArray& next();
  bool empty() const { return rest_.empty(); }

 private:
  std::span<const FlexArray> rest_;
};

/// Calls of the family. They refer to the attributes and to the arrays' data and sizes.
class FlexCallOf {
 protected:
  FlexCallOf(const FlexAttributes& attributes, FlexArrays& arguments, bool cpu);

  TensorView view(const FlexArray& array) const;
  TensorView low_view(const FlexArray& array) const;  ///< of int8
  std::span<const int64_t> wanted_buffers() const { return attributes_.wanted.subspan(3); }
  bool rounds() const;  ///< whether the tensors have 16 bits

  const FlexAttributes& attributes_;
  FlexArguments of_;
  std::vector<score_mod::Buffer> score_buffers_, mask_buffers_;

  score_mod::Buffer buffer(const FlexArray& array);

 private:
  CapturedMod mod(std::string_view text, FlexArrays& arguments, std::vector<score_mod::Buffer>& buffers,
                  std::vector<score_mod::Value>& scalars);
  TensorView view(const FlexArray& array, DType dtype) const;

  std::deque<std::vector<int64_t>> strides_;
  std::vector<score_mod::Value> score_scalars_, mask_scalars_;
  size_t next_scalar_ = 1;
};

class FlexForwardOf : FlexCallOf {
 public:
  FlexForwardOf(const FlexAttributes& attributes, FlexArrays& arguments, FlexArrays& results, bool cpu);
  FlexForwardCall call;
};
class FlexBackwardOf : FlexCallOf {
 public:
  FlexBackwardOf(const FlexAttributes& attributes, FlexArrays& arguments, FlexArrays& results, bool cpu);
  FlexBackwardCall call;
};
class FlexTangentsOf : FlexCallOf {
 public:
  FlexTangentsOf(const FlexAttributes& attributes, FlexArrays& arguments, FlexArrays& results, bool cpu);
  FlexTangentCall call;
};

}  // namespace fusegrad::jax
