// Tensors as kernels take them; the host includes this too.
#pragma once

namespace fusegrad::device {

/// [batch, head, row, column]; strides in elements.
struct FlexTensor {
  void* data;
  long long batch_stride, head_stride, row_stride, col_stride;
};

/// A tensor map, as cuTensorMapEncodeTiled fills it.
struct alignas(64) TensorMap {
  char bytes[128];
};

}  // namespace fusegrad::device
