// A call's arguments as the ops' fields take them, where they have the plain types of these.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fusegrad/options.h"
#include "pytorch/bindings/torch_python.h"

namespace fusegrad::plain {

using at::Tensor;

// Never released. find_modes() sets them when the module is loaded, not a function's static at the first call: the
// import could hand the GIL to a thread that waits for the static.
inline PyObject *function_mode_at = nullptr, *device_context = nullptr;

/// Must be called once, before is_watched().
inline void find_modes() {
  const auto from = [](const char* module, const char* name) {
    const python::Object found(PyImport_ImportModule(module));
    return python::Object(PyObject_GetAttrString(found.get(), name)).release();
  };
  function_mode_at = from("torch._C", "_get_function_stack_at");
  device_context = from("torch.utils._device", "DeviceContext");
}

/// Whether the first function mode is that of torch.set_default_device and `with torch.device(..)`, which only says
/// where new tensors are.
inline bool is_default_device() {
  const python::Object first(PyLong_FromLong(0));
  const python::Object mode(PyObject_CallFunctionObjArgs(function_mode_at, first.get(), nullptr));
  return reinterpret_cast<PyObject*>(Py_TYPE(mode.get())) == device_context;
}

/// Whether a call depends on more than its arguments, grad mode and autocast.
inline bool is_watched() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  auto excluded = c10::default_excluded_set;
  const auto modes = at::impl::PythonTorchFunctionTLS::stack_len();
  if (c10::InferenceMode::is_enabled()) excluded = excluded | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return !c10::default_included_set.has_all(keys.included_) || !excluded.has_all(keys.excluded_) ||
         at::impl::torch_function_all_disabled() || (modes > 0 && !(modes == 1 && is_default_device()));
}

/// A dense tensor of the CPU or a GPU that no transform has wrapped and that has no tangent; null for anything else.
inline const Tensor* plain_tensor(PyObject* given) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kPlain({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
                                        DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU,
                                        DispatchKey::AutocastCUDA});
  const Tensor* tensor = python::tensor_of(given);
  const bool plain = tensor != nullptr && kPlain.has_all(tensor->key_set()) && !tensor->_fw_grad(0).defined();
  return plain ? tensor : nullptr;
}

// --- an argument: false where it has not the type of its field ---

inline bool read(PyObject* given, Tensor& into) {
  const Tensor* tensor = plain_tensor(given);
  if (tensor != nullptr) into = *tensor;
  return tensor != nullptr;
}
inline bool read(PyObject* given, bool& into) {
  into = given == Py_True;
  return into || given == Py_False;
}
inline bool read(PyObject* given, int64_t& into) {
  if (PyLong_CheckExact(given) == 0) return false;
  int overflow = 0;
  into = PyLong_AsLongLongAndOverflow(given, &overflow);
  return overflow == 0;
}
inline bool read(PyObject* given, double& into) {
  if (PyFloat_CheckExact(given) == 0 && PyLong_CheckExact(given) == 0) return false;
  into = PyFloat_AsDouble(given);
  if (into != -1.0 || PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();  // an int that is too large
  return false;
}
inline bool read(PyObject* given, std::string_view& into) {
  if (PyUnicode_CheckExact(given) == 0) return false;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(given, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  into = {text, static_cast<size_t>(size)};
  return true;
}
inline bool read(PyObject* given, std::string& into) {
  std::string_view text;
  if (!read(given, text)) return false;
  into = text;
  return true;
}
inline bool read(PyObject* given, at::ScalarType& into) {
  const auto* type = python::dtype_of(given);
  if (type != nullptr) into = *type;
  return type != nullptr;
}
inline bool read(PyObject* given, Normalizer& into) {
  if (given == Py_None || read(given, into.emplace<Tensor>())) return true;
  // One that is too large for float32 is refused where it is for no float64.
  auto& number = into.emplace<double>();
  return read(given, number) && std::abs(number) <= std::numeric_limits<float>::max();
}
template <class T>
bool read(PyObject* given, std::optional<T>& into) {
  if (given == Py_None) {
    into.reset();
    return true;
  }
  return read(given, into.emplace());
}
template <class T>
bool read(PyObject* given, std::vector<T>& into) {
  const bool list = PyList_CheckExact(given) != 0;
  if (!list && PyTuple_CheckExact(given) == 0) return false;
  const Py_ssize_t count = list ? PyList_Size(given) : PyTuple_Size(given);
  into.resize(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = list ? PyList_GetItem(given, i) : PyTuple_GetItem(given, i);
    if (!read(item, into[static_cast<size_t>(i)])) return false;
  }
  return true;
}

// --- captured tensors ---

/// What a trace may depend on of a plain tensor that a function captures.
struct TensorFacts {
  PyTypeObject* type = nullptr;  // of torch's own, which stay; null: no tensor is the same
  at::ScalarType dtype{};
  at::Device device{at::kCPU};
  bool requires_grad = false;
  std::vector<int64_t> sizes, strides;

  static TensorFacts of(const python::Object& given) {
    const Tensor* tensor = plain_tensor(given.get());
    if (tensor == nullptr) return {};
    return {Py_TYPE(given.get()),    tensor->scalar_type(), tensor->device(),
            tensor->requires_grad(), tensor->sizes().vec(), tensor->strides().vec()};
  }
  bool same(PyObject* given) const {
    const Tensor* tensor = plain_tensor(given);
    return tensor != nullptr && Py_TYPE(given) == type && tensor->scalar_type() == dtype &&
           tensor->device() == device && tensor->requires_grad() == requires_grad && tensor->sizes() == sizes &&
           tensor->strides() == strides;
  }
};

}  // namespace fusegrad::plain

template <>
inline constexpr const char* fusegrad::python::kHeldAs<fusegrad::plain::TensorFacts> = "TensorFacts";
