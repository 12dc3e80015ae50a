#include "pytorch/bindings/python.h"

#include <algorithm>
#include <climits>
#include <exception>
#include <new>
#include <stdexcept>

namespace fusegrad::python {
namespace {

struct Function {
  PyMethodDef method{};
  std::string name, doc;
  std::vector<Argument> arguments;
  std::function<Object(const std::vector<Object>&)> call;
};

[[noreturn]] void raise(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  throw Raised();
}

// In the parameters' order, with defaults where nothing was given.
std::vector<Object> bound(const Function& function, PyObject* positional, PyObject* named) {
  const auto borrowed = [](PyObject* object) {
    Py_INCREF(object);
    return Object(object);
  };
  const auto& arguments = function.arguments;
  const auto count = static_cast<size_t>(PyTuple_Size(positional));
  if (count > arguments.size()) {
    raise(PyExc_TypeError, function.name + "() takes " + std::to_string(arguments.size()) + " arguments, but got " +
                               std::to_string(count));
  }
  std::vector<Object> values(arguments.size());
  for (size_t i = 0; i < count; ++i) values[i] = borrowed(PyTuple_GetItem(positional, static_cast<Py_ssize_t>(i)));
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t place = 0;
  while (named != nullptr && PyDict_Next(named, &place, &key, &value) != 0) {
    const auto name = Convert<std::string>::from(key);
    size_t i = 0;
    while (i < arguments.size() && name != arguments[i].name) ++i;
    if (i == arguments.size()) raise(PyExc_TypeError, function.name + "() has no argument '" + name + "'");
    if (values[i].get() != nullptr) raise(PyExc_TypeError, function.name + "() got '" + name + "' twice");
    values[i] = borrowed(value);
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (values[i].get() == nullptr) values[i] = arguments[i].value;
    if (values[i].get() == nullptr) {
      raise(PyExc_TypeError, function.name + "() needs the argument '" + arguments[i].name + "'");
    }
  }
  return values;
}

PyObject* called(PyObject* self, PyObject* positional, PyObject* named) {
  try {
    const auto* function = static_cast<const Function*>(PyCapsule_GetPointer(self, nullptr));
    return function->call(bound(*function, positional, named)).release();
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

}  // namespace

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

void Module::add(const char* name, std::vector<Argument> arguments, const char* doc, Call call) {
  // Never freed: Python reads the method for as long as anyone has the function.
  auto* function = new Function{{}, name, name, std::move(arguments), std::move(call)};
  std::string signature = "(";
  for (const Argument& argument : function->arguments) {
    signature += (signature.size() > 1 ? ", " : "") + std::string(argument.name);
    if (argument.value.get() != nullptr) {
      const Object text(PyObject_Repr(argument.value.get()));
      signature += "=" + Convert<std::string>::from(text.get());
    }
  }
  function->doc += signature + ")\n--\n\n" + doc;
  function->method = {function->name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&called)),
                      METH_VARARGS | METH_KEYWORDS, function->doc.c_str()};
  const Object self(PyCapsule_New(function, nullptr, nullptr));
  const Object made(PyCFunction_New(&function->method, self.get()));
  if (PyModule_AddObjectRef(module_, name, made.get()) != 0) throw Raised();
}

}  // namespace fusegrad::python
