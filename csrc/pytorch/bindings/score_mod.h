#pragma once

#include <string>

#include "pytorch/bindings/python.h"
#include "score_mod/captured.h"

namespace fusegrad::score_mod {

/// Of "float64", "bfloat16", "int32", ...; GraphError for another name.
DType dtype_named(const std::string& name);

/// The language's functions on texts, as members of `m`.
void bind(python::Module m);
/// And its graphs.
void bind_graph(python::Module m);
/// And what a mask_mod says of blocks.
void bind_blocks(python::Module m);

}  // namespace fusegrad::score_mod
