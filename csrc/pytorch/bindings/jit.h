#pragma once

#include <pybind11/pybind11.h>

namespace fusegrad::jit {

/// Compilation at run time and its cache, as members of `m`.
void bind(pybind11::module_& m);

}  // namespace fusegrad::jit
