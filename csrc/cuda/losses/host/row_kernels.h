// The CUDA row kernels, each in the file of its name; row_reduce.cu has scales and sum, and the table of all.
#pragma once

#include "losses/row_kernels.h"

namespace fusegrad::cuda {

void row_forward(const RowForward& p, DType dtype, void* stream);
void row_gradient(const RowGradient& p, DType dtype, void* stream);
void row_scaling(const RowScaling& p, DType dtype, void* stream);
void row_scales(const RowScales& p, DType dtype, void* stream);
void row_sum(const RowSum& p, DType dtype, void* stream);
void row_jsd(const RowJsd& p, DType dtype, void* stream);
void row_tangents(const RowTangents& p, DType dtype, void* stream);
void row_jsd_tangents(const RowJsdTangents& p, DType dtype, void* stream);
void row_part(const RowPart& p, DType dtype, void* stream);
void row_whole(const RowWhole& p, DType dtype, void* stream);
constexpr int64_t kRowStates = 12;  // acc values
void product(const Product& p, DType dtype, void* stream);
bool product_takes(DType dtype, int64_t hidden);
int64_t product_workspace(const Product& p);

}  // namespace fusegrad::cuda
