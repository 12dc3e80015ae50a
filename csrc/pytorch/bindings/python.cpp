#include "pytorch/bindings/python.h"

#include <algorithm>
#include <climits>
#include <exception>
#include <new>
#include <stdexcept>

namespace fusegrad::python {
namespace {

[[noreturn]] void raise(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  throw Raised();
}

Object borrowed(PyObject* object) {
  Py_INCREF(object);
  return Object(object);
}

// In the parameters' order behind `self`, with defaults where nothing was given.
std::vector<Object> bound(const Function& function, PyObject* self, PyObject* positional, PyObject* named) {
  const auto& arguments = function.arguments;
  const Py_ssize_t given = PyTuple_Size(positional);
  const bool rest = !arguments.empty() && arguments.back().name[0] == '*';
  const auto places = static_cast<Py_ssize_t>(arguments.size()) - (rest ? 1 : 0);
  if (given > places && !rest) {
    raise(PyExc_TypeError,
          function.name + "() takes " + std::to_string(places) + " arguments, but got " + std::to_string(given));
  }
  const size_t before = self == nullptr ? 0 : 1;
  std::vector<Object> values(before + arguments.size());
  if (self != nullptr) values[0] = borrowed(self);
  for (Py_ssize_t i = 0; i < std::min(given, places); ++i) {
    values[before + static_cast<size_t>(i)] = borrowed(PyTuple_GetItem(positional, i));
  }
  if (rest) values.back() = Object(PyTuple_GetSlice(positional, std::min(given, places), given));
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t place = 0;
  while (named != nullptr && PyDict_Next(named, &place, &key, &value) != 0) {
    const auto name = Convert<std::string>::from(key);
    size_t i = 0;
    while (i < arguments.size() && name != arguments[i].name) ++i;
    if (i == arguments.size()) raise(PyExc_TypeError, function.name + "() has no argument '" + name + "'");
    Object& at = values[before + i];
    if (at.get() != nullptr) raise(PyExc_TypeError, function.name + "() got '" + name + "' twice");
    at = borrowed(value);
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    Object& at = values[before + i];
    if (at.get() == nullptr) at = arguments[i].value;
    if (at.get() == nullptr) {
      raise(PyExc_TypeError, function.name + "() needs the argument '" + arguments[i].name + "'");
    }
  }
  return values;
}

PyObject* entered(PyObject* self, PyObject* positional, PyObject* named) {
  return called(*static_cast<const Function*>(PyCapsule_GetPointer(self, nullptr)), nullptr, positional, named);
}

}  // namespace

PyObject* called(const Function& function, PyObject* self, PyObject* positional, PyObject* named) {
  try {
    return function.call(bound(function, self, positional, named)).release();
  } catch (const Raised&) {
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void raise_type_error(const char* expected, PyObject* given) {
  PyErr_Format(PyExc_TypeError, "must be %s, but got %R", expected, given);
  throw Raised();
}

bool Convert<bool>::from(PyObject* given) {
  if (PyBool_Check(given) == 0) raise_type_error("True or False", given);
  return given == Py_True;
}

int64_t Convert<int64_t>::from(PyObject* given) {
  const long long value = PyLong_AsLongLong(given);
  if (value == -1 && PyErr_Occurred() != nullptr) throw Raised();
  return value;
}

int Convert<int>::from(PyObject* given) {
  const int64_t value = Convert<int64_t>::from(given);
  if (value < INT_MIN || value > INT_MAX) raise(PyExc_OverflowError, "must be an int of 32 bits");
  return static_cast<int>(value);
}

double Convert<double>::from(PyObject* given) {
  const double value = PyFloat_AsDouble(given);
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw Raised();
  return value;
}

std::string Convert<std::string>::from(PyObject* given) {
  if (PyUnicode_Check(given) == 0) raise_type_error("a str", given);
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(given, &size);
  if (text == nullptr) throw Raised();
  return {text, static_cast<size_t>(size)};
}

Object Convert<std::string>::to(const std::string& value) {
  return Object(PyUnicode_DecodeUTF8(value.data(), static_cast<Py_ssize_t>(value.size()), "replace"));
}

Object Convert<Bytes>::to(const Bytes& value) {
  return Object(PyBytes_FromStringAndSize(value.text.data(), static_cast<Py_ssize_t>(value.text.size())));
}

Fields::Fields(Object dict) : dict_(std::move(dict)) {
  if (PyDict_Check(dict_.get()) == 0) raise_type_error("a dict", dict_.get());
}

PyObject* Fields::find(const char* name) {
  known_.emplace_back(name);
  return PyDict_GetItemString(dict_.get(), name);
}

void Fields::check_all_read() const {
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t at = 0;
  while (PyDict_Next(dict_.get(), &at, &key, &value) != 0) {
    const std::string name = Convert<std::string>::from(key);
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    std::string names;
    for (const std::string& one : known_) names += (names.empty() ? "" : ", ") + one;
    throw std::invalid_argument("fields must be of " + names + ", but got " + name);
  }
}

std::vector<Object> items_of(PyObject* given, Py_ssize_t size) {
  if (PyList_Check(given) == 0 && PyTuple_Check(given) == 0) raise_type_error("a list or tuple", given);
  const Py_ssize_t count = PySequence_Size(given);
  if (size != -1 && count != size) raise_type_error(("of length " + std::to_string(size)).c_str(), given);
  std::vector<Object> items;
  for (Py_ssize_t i = 0; i < count; ++i) items.emplace_back(PySequence_GetItem(given, i));
  return items;
}

Module Module::submodule(const char* name, const char* doc) {
  const Object parent(PyObject_GetAttrString(module_, "__name__"));
  PyObject* made = PyImport_AddModule((Convert<std::string>::from(parent.get()) + "." + name).c_str());
  if (made == nullptr || PyModule_AddObjectRef(module_, name, made) != 0 ||
      PyObject_SetAttrString(made, "__doc__", to_python(doc).get()) != 0) {
    throw Raised();
  }
  return Module(made);
}

const Function* described(Function described) {
  auto* function = new Function(std::move(described));
  std::string signature = "(";
  for (const Argument& argument : function->arguments) {
    signature += (signature.size() > 1 ? ", " : "") + std::string(argument.name);
    if (argument.value.get() != nullptr) {
      const Object text(PyObject_Repr(argument.value.get()));
      signature += "=" + Convert<std::string>::from(text.get());
    }
  }
  function->doc = function->name + signature + ")\n--\n\n" + function->doc;
  function->method = {function->name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&entered)),
                      METH_VARARGS | METH_KEYWORDS, function->doc.c_str()};
  return function;
}

void Module::add(const Function& function) {
  const Object self(PyCapsule_New(const_cast<Function*>(&function), nullptr, nullptr));
  set(function.name.c_str(), Object(PyCFunction_New(const_cast<PyMethodDef*>(&function.method), self.get())));
}

void Module::set(const char* name, const Object& object) {
  if (PyModule_AddObjectRef(module_, name, object.get()) != 0) throw Raised();
}

}  // namespace fusegrad::python
