#pragma once

#include "jit/program.h"
#include "pytorch/bindings/python.h"

namespace fusegrad::python {

template <>
inline constexpr const char* kHeldAs<jit::Program> = "fusegrad._C.jit.Program";

}  // namespace fusegrad::python

namespace fusegrad::jit {

/// Compilation at run time and its cache, as members of `m`.
void bind(python::Module m);

}  // namespace fusegrad::jit
