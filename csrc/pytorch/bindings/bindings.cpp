// fusegrad._C: what is not an op. Ops are reached through torch.ops.fusegrad and need no binding. It stands on the core
// alone: one module for every torch, and by Python's stable ABI for every Python.
#include "attention/flex_attention.h"
#include "common/build.h"
#include "fusegrad/check_targets.h"
#ifdef FUSEGRAD_WITH_CUDA
#include "cuda/attention/plan/plan.h"
#include "pytorch/bindings/cuda.h"
#endif
#include "pytorch/bindings/jit.h"
#include "pytorch/bindings/python.h"
#include "pytorch/bindings/score_mod.h"

namespace py = fusegrad::python;

namespace {

void bind(py::Module m) {
  m.def(
      "build_info",
      [] {
        const fusegrad::Build& build = fusegrad::build();
        py::Dict result;
        result["version"] = build.version;
        result["cuda"] = build.cuda;
        result["cuda_version"] = build.cuda_version;
        result["cuda_archs"] = build.cuda_archs;
        result["cuda_status"] = build.cuda_status;
        result["compiler"] = build.compiler;
        return result;
      },
      "What the kernels are built for and with: version, CUDA and why or why not, compiler.");
  m.def("set_check_targets", &fusegrad::set_check_targets, py::arg("enabled"),
        "Whether class indices out of range raise IndexError on the GPU too, which synchronises at every call (off by "
        "default). Without it such a row's loss and gradient are NaN. The CPU always raises.");
  m.def("check_targets_enabled", &fusegrad::check_targets_enabled, "Whether set_check_targets(True) is in force.");
  m.def(
      "dropout_scale", [](double p) { return fusegrad::FlexDropoutRule(p).scale; }, py::arg("dropout_p"),
      "What the weights that flex attention's dropout keeps are multiplied by.");
  m.value("FLEX_MAX_SCORES", int64_t{fusegrad::kFlexMaxScores});
  m.value("FLEX_LOW", int64_t{fusegrad::kFlexLow});
  m.value("FLEX_INVARIANT", int64_t{fusegrad::kFlexInvariant});
  m.value("FLEX_MOST_HEAD_ON_CUDA", fusegrad::kMostHeadOnCuda);
  m.value("FLEX_MOST_VALUE_ON_CUDA", fusegrad::kMostValueOnCuda);
  fusegrad::score_mod::bind(
      m.submodule("score_mod", "The score_mod language, on canonical texts: see docs/design/score_mod.md."));
  fusegrad::jit::bind(m.submodule("jit", "Kernels compiled at run time: see docs/design/jit.md."));
#ifdef FUSEGRAD_WITH_CUDA
  m.def("force_limits", &fusegrad::cuda::force_limits, py::arg("cluster"), py::arg("shared_bytes"),
        "For tests and benchmarks: plan and launch CUDA kernels as on a GPU with at most so many CTAs a cluster, which "
        "losses alone have, and bytes of shared memory a CTA, such as 1 and 101376 of sm_86, sm_89 and sm_120; 0: this "
        "GPU's own.");
  fusegrad::cuda::bind(
      m.submodule("flex", "The CUDA kernels of flex attention, without a GPU: see docs/flex_attention.md."));
#endif
}

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                   .m_name = "fusegrad._C",
                                   .m_doc = "What of fusegrad is not an op.",
                                   .m_size = -1,
                                   .m_methods = nullptr,
                                   .m_slots = nullptr,
                                   .m_traverse = nullptr,
                                   .m_clear = nullptr,
                                   .m_free = nullptr};
  try {
    py::Object module(PyModule_Create(&definition));
    bind(py::Module(module.get()));
    return module.release();
  } catch (const py::Raised&) {
    return nullptr;
  }
}
