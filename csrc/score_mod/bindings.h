#pragma once

#include <pybind11/pybind11.h>

namespace fusegrad::score_mod {

/// The language's functions on texts, as members of `m`.
void bind(pybind11::module_& m);

}  // namespace fusegrad::score_mod
