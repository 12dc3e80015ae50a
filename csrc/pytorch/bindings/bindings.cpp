// fusegrad._C: what is not an op. Ops are reached through torch.ops.fusegrad and need no binding.
#include <fusegrad/build_info.h>
#include <fusegrad/check_targets.h>
#include <pybind11/pybind11.h>

#ifdef FUSEGRAD_WITH_CUDA
#include "pytorch/bindings/cuda.h"
#endif
#include "pytorch/bindings/jit.h"
#include "pytorch/bindings/score_mod.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.def(
      "build_info",
      [] {
        const fusegrad::BuildInfo& info = fusegrad::build_info();
        py::dict result;
        result["version"] = info.version;
        result["torch_version"] = info.torch_version;
        result["cuda"] = info.cuda;
        result["cuda_version"] = info.cuda_version;
        result["cuda_archs"] = info.cuda_archs;
        result["cuda_status"] = info.cuda_status;
        result["compiler"] = info.compiler;
        return result;
      },
      "What this build is for and with: versions, CUDA and why or why not, compiler.");
  m.def("set_check_targets", &fusegrad::set_check_targets, py::arg("enabled"),
        "Whether class indices out of range raise IndexError on the GPU too, which synchronises at every call (off by "
        "default). Without it such a row's loss and gradient are NaN. The CPU always raises.");
  m.def("check_targets_enabled", &fusegrad::check_targets_enabled, "Whether set_check_targets(True) is in force.");
  auto score_mod = m.def_submodule("score_mod", "The score_mod language, on canonical texts: see docs/score_mod.md.");
  fusegrad::score_mod::bind(score_mod);
  auto jit = m.def_submodule("jit", "Kernels compiled at run time: see docs/jit.md.");
  fusegrad::jit::bind(jit);
#ifdef FUSEGRAD_WITH_CUDA
  auto flex = m.def_submodule("flex", "The CUDA kernels of flex attention, without a GPU: see docs/flex_attention.md.");
  fusegrad::cuda::bind(flex);
#endif
}
