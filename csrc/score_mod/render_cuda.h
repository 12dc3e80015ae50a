// CUDA source of a graph and of its derivative. The text is made of the table's spellings and of generated names; of
// the user's text only numbers reach it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "score_mod/evaluate_cpu.h"
#include "score_mod/graph.h"

namespace fusegrad::score_mod {

/// How the text is specialised.
struct RenderOptions {
  std::string name = "ScoreMod";  ///< of the struct; an identifier that the caller chose, not the user
  std::vector<DType> dtypes;      ///< of each buffer
  /// Exclusive bounds of the indices: what stays below 2^31 under them is computed in 32 bits.
  Lengths lengths;
};

/// A struct that needs csrc/cuda/device/score_mod.cuh before it and nothing else:
///
///   struct <name> {
///     struct Captured {...};   // PODs of 8 bytes each, filled by pack_captured
///     // of a score_mod; `valid` is false for pairs that take no part, which read nothing
///     static __device__ float apply(const Captured&, float score, int b, int h, int q_idx, int kv_idx, bool valid);
///     // of a mask_mod
///     static __device__ bool apply(const Captured&, int b, int h, int q_idx, int kv_idx, bool valid);
///     // of a derivative: returns d score; contribution k goes into value[k]. Zeros where not valid.
///     static constexpr int kContributions = ...;
///     static __device__ float apply(const Captured&, float score, float grad, int b, int h, int q_idx, int kv_idx,
///                                   bool valid, float* value);
///     // The place of contribution k in its buffer's dense row-major gradient; -1: nowhere.
///     static __device__ long long offset_<k>(const Captured&, float score, int b, int h, int q_idx, int kv_idx,
///                                            bool valid);
///     // Read by templates: the contribution's buffer, and its class, 'A' to 'G', and whether it is exclusive.
///     static constexpr int kBuffer[]; static constexpr char kClass[]; static constexpr bool kExclusive[];
///   };
///
/// A read out of range gives NaN (0 for integers, false for bools); its contribution goes nowhere.
std::string render_cuda(const Graph& graph, const RenderOptions& options);

/// The words of `Captured`: for each buffer its address, sizes and strides (in elements), then the scalars, floats as
/// the bits of a double.
std::vector<int64_t> pack_captured(const Graph& graph, std::span<const Buffer> buffers, std::span<const Value> scalars);

}  // namespace fusegrad::score_mod
