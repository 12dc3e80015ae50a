// Part of fusegrad._C: the kernels of flex attention, for tests without a GPU.
#pragma once

#include <pybind11/pybind11.h>

namespace fusegrad::cuda {

void bind(pybind11::module_& m);

}  // namespace fusegrad::cuda
