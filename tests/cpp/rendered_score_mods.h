// The rendered CUDA source of the examples, compiled for the host: what tests/cpp/render_score_mods.cpp generates.
#pragma once

#include <cstdint>
#include <vector>

#include "score_mod_primitive_examples.h"

namespace fusegrad {

struct RenderedScoreMod {
  float (*apply)(const void* captured, float score, int b, int h, int q_idx, int kv_idx, bool valid);
  /// The gradient by the score; value and offset of each contribution are stored (offset -1 of those with axes).
  float (*derivative)(const void* captured, float score, float grad, int b, int h, int q_idx, int kv_idx, bool valid,
                      float* value, long long* offset);
  /// Adds the contributions with axes to the buffers' gradients.
  void (*scatter)(const void* captured, float score, float grad, int b, int h, int q_idx, int kv_idx, bool valid,
                  double* const* sums);
};
extern const RenderedScoreMod kRenderedScoreMods[];

struct RenderedMaskMod {
  bool (*apply)(const void* captured, int b, int h, int q_idx, int kv_idx, bool valid);
};
extern const RenderedMaskMod kRenderedMaskMods[];

/// Those of kRenderedScoreMods, in their order.
inline std::vector<ScoreModExample> rendered_examples() {
  auto examples = score_mod_examples();
  for (auto& example : score_mod_primitive_examples()) examples.push_back(std::move(example));
  return examples;
}

}  // namespace fusegrad
