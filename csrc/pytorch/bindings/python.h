// Functions as members of a Python module, by Python's stable ABI: one build of the module serves Python 3.10 and
// later. A function's parameters and result are converted by their types; a type that is not here does not compile.
#pragma once

#ifndef Py_LIMITED_API
#error "Py_LIMITED_API must be defined: the module would be of one version of Python"
#endif
#include <Python.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fusegrad::python {

/// Python has set an exception, which is to be raised.
struct Raised {};

/// Owns a reference.
class Object {
 public:
  Object() = default;
  /// Takes over a new reference; raises where Python gave none.
  explicit Object(PyObject* owned) : object_(owned) {
    if (owned == nullptr) throw Raised();
  }
  Object(const Object& other) : object_(other.object_) { Py_XINCREF(object_); }
  Object(Object&& other) noexcept : object_(other.release()) {}
  Object& operator=(Object other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

/// Results that Python shall see as bytes.
struct Bytes {
  std::string text;
};

/// What Python holds without looking into it. A type is made one by `template <> inline constexpr const char*
/// kHeldAs<T> = "its name";`.
template <class T>
inline constexpr const char* kHeldAs = nullptr;

/// Lets other threads run Python while it lives.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;
  ~Released() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

[[noreturn]] void raise_type_error(const char* expected, PyObject* given);

template <class T>
struct Convert {
  static_assert(kHeldAs<T> != nullptr, "no conversion of this type");
  static T from(PyObject* given) {
    const void* held = PyCapsule_IsValid(given, kHeldAs<T>) != 0 ? PyCapsule_GetPointer(given, kHeldAs<T>) : nullptr;
    if (held == nullptr) raise_type_error(kHeldAs<T>, given);
    return *static_cast<const T*>(held);
  }
  static Object to(T value) {
    auto held = std::make_unique<T>(std::move(value));
    Object capsule(PyCapsule_New(held.get(), kHeldAs<T>, [](PyObject* capsule) {
      delete static_cast<T*>(PyCapsule_GetPointer(capsule, kHeldAs<T>));
    }));
    held.release();
    return capsule;
  }
};

template <class T>
Object to_python(T value) {
  return Convert<T>::to(std::move(value));
}

template <>
struct Convert<Object> {
  static Object to(Object value) { return value; }
};
template <>
struct Convert<bool> {
  static bool from(PyObject* given);
  static Object to(bool value) { return Object(PyBool_FromLong(value ? 1 : 0)); }
};
template <>
struct Convert<int64_t> {
  static int64_t from(PyObject* given);
  static Object to(int64_t value) { return Object(PyLong_FromLongLong(value)); }
};
template <>
struct Convert<int> {
  static int from(PyObject* given);
  static Object to(int value) { return Object(PyLong_FromLong(value)); }
};
template <>
struct Convert<uint64_t> {
  static Object to(uint64_t value) { return Object(PyLong_FromUnsignedLongLong(value)); }
};
template <>
struct Convert<double> {
  static double from(PyObject* given);
  static Object to(double value) { return Object(PyFloat_FromDouble(value)); }
};
template <>
struct Convert<std::string> {
  static std::string from(PyObject* given);
  static Object to(const std::string& value);
};
template <>
struct Convert<const char*> {
  static Object to(const char* value) { return Object(PyUnicode_FromString(value)); }
};
template <>
struct Convert<Bytes> {
  static Object to(const Bytes& value);
};
template <>
struct Convert<std::nullopt_t> {
  static Object to(std::nullopt_t /*none*/) {
    Py_INCREF(Py_None);
    return Object(Py_None);
  }
};
template <class T>
struct Convert<std::optional<T>> {
  static std::optional<T> from(PyObject* given) {
    if (given == Py_None) return std::nullopt;
    return Convert<T>::from(given);
  }
  static Object to(std::optional<T> value) {
    return value.has_value() ? to_python(std::move(*value)) : to_python(std::nullopt);
  }
};

/// The items of a list or tuple; `size`: how many there must be, where it is not -1.
std::vector<Object> items_of(PyObject* given, Py_ssize_t size = -1);

template <class T>
struct Convert<std::vector<T>> {
  static std::vector<T> from(PyObject* given) {
    std::vector<T> values;
    for (const Object& item : items_of(given)) values.push_back(Convert<T>::from(item.get()));
    return values;
  }
  static Object to(const std::vector<T>& values) {
    Object list(PyList_New(0));
    for (T value : values) {
      if (PyList_Append(list.get(), to_python(std::move(value)).get()) != 0) throw Raised();
    }
    return list;
  }
};
template <class T, size_t size>
struct Convert<std::array<T, size>> {
  static std::array<T, size> from(PyObject* given) {
    const auto items = items_of(given, size);
    std::array<T, size> values{};
    for (size_t i = 0; i < size; ++i) values[i] = Convert<T>::from(items[i].get());
    return values;
  }
  static Object to(const std::array<T, size>& values) {
    return std::apply([](auto... one) { return to_python(std::make_tuple(one...)); }, values);
  }
};
template <class A, class B>
struct Convert<std::pair<A, B>> {
  static std::pair<A, B> from(PyObject* given) {
    const auto items = items_of(given, 2);
    return {Convert<A>::from(items[0].get()), Convert<B>::from(items[1].get())};
  }
};
template <class... T>
struct Convert<std::tuple<T...>> {
  static Object to(std::tuple<T...> values) {
    Object tuple(PyTuple_New(sizeof...(T)));
    Py_ssize_t i = 0;
    const auto add = [&](Object one) {
      if (PyTuple_SetItem(tuple.get(), i++, one.release()) != 0) throw Raised();
    };
    std::apply([&](auto&... one) { (add(to_python(std::move(one))), ...); }, values);
    return tuple;
  }
};

/// Filled key by key: dict["key"] = value.
class Dict {
 public:
  class Item {
   public:
    Item(PyObject* dict, std::string key) : dict_(dict), key_(std::move(key)) {}
    template <class T>
    void operator=(T value) const {
      if (PyDict_SetItemString(dict_, key_.c_str(), to_python(std::move(value)).get()) != 0) throw Raised();
    }

   private:
    PyObject* dict_;
    std::string key_;
  };

  Dict() : dict_(PyDict_New()) {}
  Item operator[](std::string key) { return {dict_.get(), std::move(key)}; }
  const Object& object() const { return dict_; }

 private:
  Object dict_;
};
template <>
struct Convert<Dict> {
  static Object to(const Dict& value) { return value.object(); }
};

/// Reads a dict of Python's by name: what it lacks stays as it is, and a name that nobody reads raises.
class Fields {
 public:
  explicit Fields(Object dict);

  template <class T>
  void read(const char* name, T& into) {
    if (PyObject* found = find(name)) into = Convert<T>::from(found);
  }
  /// After the last read.
  void check_all_read() const;

 private:
  PyObject* find(const char* name);

  Object dict_;
  std::vector<std::string> known_;
};
template <>
struct Convert<Fields> {
  static Fields from(PyObject* given) {
    Py_INCREF(given);
    return Fields(Object(given));
  }
};

/// A parameter's name, and its default where it has one: arg("name"), arg("name") = value.
struct Argument {
  const char* name;
  Object value;
  template <class T>
  Argument operator=(T given) const {
    return {name, to_python(std::move(given))};
  }
};
inline Argument arg(const char* name) { return {name, Object()}; }
inline std::nullopt_t none() { return std::nullopt; }

class Module {
 public:
  /// Of PyModuleDef's: the module that is being imported.
  explicit Module(PyObject* module) : module_(module) {}

  Module submodule(const char* name, const char* doc);

  /// Adds `function`. `more`: its parameters, each an arg(), then its documentation.
  template <class F, class... More>
  void def(const char* name, F function, More... more) {
    static_assert(sizeof...(More) == Parameters<decltype(std::function(function))>::count + 1);
    std::vector<Argument> arguments;
    const char* doc = nullptr;
    const auto take = [&](auto& one) {
      if constexpr (std::is_same_v<std::decay_t<decltype(one)>, Argument>) {
        arguments.push_back(std::move(one));
      } else {
        doc = one;
      }
    };
    (take(more), ...);
    add(name, std::move(arguments), doc, call_of(std::function(std::move(function))));
  }

 private:
  using Call = std::function<Object(const std::vector<Object>&)>;

  template <class Function>
  struct Parameters;
  template <class Result, class... P>
  struct Parameters<std::function<Result(P...)>> {
    static constexpr size_t count = sizeof...(P);
  };

  template <class Result, class... P>
  static Call call_of(std::function<Result(P...)> function) {
    return [function = std::move(function)](const std::vector<Object>& given) {
      return [&]<size_t... i>(std::index_sequence<i...> /*of all*/) -> Object {
        if constexpr (std::is_void_v<Result>) {
          function(Convert<std::decay_t<P>>::from(given.at(i).get())...);
          return to_python(std::nullopt);
        } else {
          return to_python<Result>(function(Convert<std::decay_t<P>>::from(given.at(i).get())...));
        }
      }(std::index_sequence_for<P...>());
    };
  }

  void add(const char* name, std::vector<Argument> arguments, const char* doc, Call call);

  PyObject* module_;  // lives as long as the process
};

}  // namespace fusegrad::python
