// Part of fusegrad._C: the kernels of flex attention, for tests without a GPU.
#pragma once

#include "pytorch/bindings/python.h"

namespace fusegrad::cuda {

void bind(python::Module m);

}  // namespace fusegrad::cuda
