#include "score_mod/render_cuda.h"
namespace fusegrad::score_mod {
std::string render_cuda(const Graph&, const RenderOptions&) { return ""; }
}  // namespace fusegrad::score_mod
