// Writes the rendered CUDA source of all examples, as C++ for the host, for test_score_mod_rendered.cpp.
#include <cstdio>
#include <fstream>
#include <sstream>

#include "pytorch/score_mod/tensors.h"
#include "rendered_score_mods.h"
#include "score_mod/derivative.h"
#include "score_mod/render_cuda.h"

namespace {

using namespace fusegrad;
using namespace fusegrad::score_mod;

// The names of CUDA that the device header and the structs use.
constexpr const char* kCudaNames = R"(
#include <math.h>
#include <string.h>
#include "rendered_score_mods.h"
#define __device__
#define __forceinline__ inline
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
inline float __int_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
inline float __uint_as_float(unsigned x) { return __int_as_float(x); }
inline double __longlong_as_double(long long x) { double d; memcpy(&d, &x, 8); return d; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline long long __float2ll_rz(float x) {
  return x >= 0x1p63f ? 0x7FFFFFFFFFFFFFFFll : x < -0x1p63f ? -0x7FFFFFFFFFFFFFFFll - 1 : static_cast<long long>(x);
}
inline float half_to_float(unsigned short bits) { return static_cast<float>(c10::Half(bits, c10::Half::from_bits())); }
)";

std::string rendered(const Graph& graph, const ScoreMod& mod, const std::string& name) {
  RenderOptions options;
  options.name = name;
  for (const at::Tensor& buffer : mod.buffers) options.dtypes.push_back(dtype_of(buffer));
  return render_cuda(graph, options);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s DEVICE_HEADER OUTPUT\n", argv[0]);
    return 2;
  }
  std::ofstream out(argv[2]);
  std::ostringstream header;
  header << std::ifstream(argv[1]).rdbuf();
  out << kCudaNames << header.str() << "\nnamespace {\n";
  const auto examples = rendered_examples();
  const auto masks = mask_mod_examples();
  std::string table, mask_table;
  for (size_t i = 0; i < examples.size(); ++i) {
    const ScoreMod& mod = examples[i].mod;
    const std::string forward = "Forward" + std::to_string(i), backward = "Backward" + std::to_string(i);
    const Graph graph = parse(mod.text);
    const Graph derivative = differentiate(graph, std::vector<bool>(mod.buffers.size(), true));
    out << rendered(graph, mod, forward) << rendered(derivative, mod, backward);
    out << "float derive" << i << "(const void* c, float score, float grad, int b, int h, int q, int kv, bool valid, "
        << "float* value, long long* offset) {\n  const auto& captured = *static_cast<const " << backward
        << "::Captured*>(c);\n";
    bool vectors = false;
    for (size_t k = 0; k < derivative.contributions().size(); ++k) {
      if (derivative.open_axes(derivative.contributions()[k]) != 0) {
        vectors = true;
        out << "  offset[" << k << "] = -1;\n";
        continue;
      }
      out << "  offset[" << k << "] = " << backward << "::offset_" << k << "(captured, score, b, h, q, kv, valid);\n";
    }
    out << "  return " << backward << "::apply(captured, score, grad, b, h, q, kv, valid, value);\n}\n";
    out << "struct Put" << i << " {\n  double* const* sums;\n  template <int k>\n  void put(const float (&value)[1], "
        << "const long long (&place)[1]) const {\n    if (place[0] >= 0) sums[" << backward
        << "::kContribution[k].buffer][place[0]] += value[0];\n  }\n};\n";
    out << "void scatter" << i
        << "([[maybe_unused]] const void* c, [[maybe_unused]] float score, [[maybe_unused]] float "
        << "grad, [[maybe_unused]] int b, [[maybe_unused]] int h, [[maybe_unused]] int q, [[maybe_unused]] int kv, "
        << "[[maybe_unused]] bool valid, [[maybe_unused]] double* const* sums) {\n";
    if (vectors) {
      out << "  " << backward << "::scatter<1>(*static_cast<const " << backward
          << "::Captured*>(c), &score, &grad, b, h, &q, &kv, &valid, Put" << i << "{sums});\n";
    }
    out << "}\n";
    table += "    {[](const void* c, float score, int b, int h, int q, int kv, bool valid) {\n       return " +
             forward + "::apply(*static_cast<const " + forward +
             "::Captured*>(c), score, b, h, q, kv, valid);\n     },\n     derive" + std::to_string(i) + ", scatter" +
             std::to_string(i) + "},\n";
  }
  for (size_t i = 0; i < masks.size(); ++i) {
    const std::string name = "Mask" + std::to_string(i);
    out << rendered(parse(masks[i].mod.text), masks[i].mod, name);
    mask_table += "    {[](const void* c, int b, int h, int q, int kv, bool valid) {\n      return " + name +
                  "::apply(*static_cast<const " + name + "::Captured*>(c), b, h, q, kv, valid);\n    }},\n";
  }
  out << "}  // namespace\nnamespace fusegrad {\nconst RenderedScoreMod kRenderedScoreMods[] = {\n"
      << table << "};\nconst RenderedMaskMod kRenderedMaskMods[] = {\n"
      << mask_table << "};\n}  // namespace fusegrad\n";
  return out.good() ? 0 : 1;
}
