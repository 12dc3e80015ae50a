// What Python objects of torch's hold, by Python's stable ABI. torch's own headers for it need one version of Python:
// what is needed of them is declared here, and check_layout() compares it when the module is loaded.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>

#include "pytorch/bindings/python.h"

// Declared as in libtorch_python.
extern PyObject *THPVariableClass, *ParameterClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
PyObject* getTHPDtype(at::ScalarType type);
}  // namespace torch

namespace fusegrad::python {

template <class T>
struct Held {
  PyObject_HEAD T value;
};

/// A torch.Tensor's or Parameter's; null for anything else, subclasses among it.
inline const at::Tensor* tensor_of(PyObject* given) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(given));
  return type == THPVariableClass || type == ParameterClass ? &reinterpret_cast<Held<at::Tensor>*>(given)->value
                                                            : nullptr;
}

/// A torch.dtype's; null for anything else.
inline const at::ScalarType* dtype_of(PyObject* given) {
  static PyTypeObject* const type = Py_TYPE(torch::getTHPDtype(at::kFloat));
  return Py_TYPE(given) == type ? &reinterpret_cast<Held<at::ScalarType>*>(given)->value : nullptr;
}

/// Raises where an object of torch's is not what is declared here.
inline void check_layout(const at::Tensor& any) {
  const Object tensor(THPVariable_Wrap(any));
  const auto* held = tensor_of(tensor.get());
  const auto* type = dtype_of(torch::getTHPDtype(at::kHalf));
  if (held != nullptr && held->is_same(any) && type != nullptr && *type == at::kHalf) return;
  PyErr_SetString(PyExc_ImportError,
                  "fusegrad: torch.Tensor and torch.dtype must hold what they do in the torch that "
                  "fusegrad was built for, but do not: build it for this one");
  throw Raised();
}

}  // namespace fusegrad::python
