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
#include <unordered_map>
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

/// What has a type of its own in Python, with members: see Class. A type is made one by `template <> inline constexpr
/// bool kIsClass<T> = true;`.
template <class T>
inline constexpr bool kIsClass = false;

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

/// An object of a Class.
template <class T>
struct Box {
  PyObject_HEAD T* value;
  inline static PyTypeObject* type = nullptr;

  static void free(PyObject* self) {
    PyTypeObject* of = Py_TYPE(self);
    delete reinterpret_cast<Box*>(self)->value;
    reinterpret_cast<freefunc>(PyType_GetSlot(of, Py_tp_free))(self);
    Py_DECREF(of);
  }
};

template <class T>
  requires kIsClass<T>
struct Convert<T> {
  static T& from(PyObject* given) {
    if (PyObject_TypeCheck(given, Box<T>::type) == 0) raise_type_error("an object of another type", given);
    return *reinterpret_cast<Box<T>*>(given)->value;
  }
  static Object to(T value) {
    auto held = std::make_unique<T>(std::move(value));
    Object made(reinterpret_cast<allocfunc>(PyType_GetSlot(Box<T>::type, Py_tp_alloc))(Box<T>::type, 0));
    reinterpret_cast<Box<T>*>(made.get())->value = held.release();
    return made;
  }
};

template <class T>
Object to_python(T value) {
  return Convert<T>::to(std::move(value));
}

template <>
struct Convert<Object> {
  static Object from(PyObject* given) {
    Py_INCREF(given);
    return Object(given);
  }
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
template <class A, class B>
struct Convert<std::unordered_map<A, B>> {
  static std::unordered_map<A, B> from(PyObject* given) {
    if (PyDict_Check(given) == 0) raise_type_error("a dict", given);
    std::unordered_map<A, B> values;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t place = 0;
    while (PyDict_Next(given, &place, &key, &value) != 0) values[Convert<A>::from(key)] = Convert<B>::from(value);
    return values;
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

/// A parameter's name, and its default where it has one: arg("name"), arg("name") = value. The last may be "*name",
/// which takes all positional arguments that are left.
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

/// A function as Python calls it.
struct Function {
  PyMethodDef method{};
  std::string name, doc;
  std::vector<Argument> arguments;
  std::function<Object(const std::vector<Object>&)> call;
};

/// Completes it; what it gives is never freed: Python reads the method for as long as anyone has the function.
const Function* described(Function function);
/// A method's `self`; else null.
PyObject* called(const Function& function, PyObject* self, PyObject* positional, PyObject* named);

/// `more`: the function's parameters, each an arg(), then its documentation. A method's first has none.
template <bool method, class Result, class... P, class... More>
const Function* function_of(const char* name, std::function<Result(P...)> function, More... more) {
  static_assert(sizeof...(More) + (method ? 1 : 0) == sizeof...(P) + 1);
  Function made{{}, name, {}, {}, {}};
  const auto take = [&](auto& one) {
    if constexpr (std::is_same_v<std::decay_t<decltype(one)>, Argument>) {
      made.arguments.push_back(std::move(one));
    } else {
      made.doc = one;
    }
  };
  (take(more), ...);
  made.call = [function = std::move(function)](const std::vector<Object>& given) {
    return [&]<size_t... i>(std::index_sequence<i...> /*of all*/) -> Object {
      if constexpr (std::is_void_v<Result>) {
        function(Convert<std::decay_t<P>>::from(given.at(i).get())...);
        return to_python(std::nullopt);
      } else {
        return to_python<Result>(function(Convert<std::decay_t<P>>::from(given.at(i).get())...));
      }
    }(std::index_sequence_for<P...>());
  };
  return described(std::move(made));
}

class Module {
 public:
  /// Of PyModuleDef's: the module that is being imported.
  explicit Module(PyObject* module) : module_(module) {}

  Module submodule(const char* name, const char* doc);

  /// Adds `function`, with `more` of function_of.
  template <class F, class... More>
  void def(const char* name, F function, More... more) {
    add(*function_of<false>(name, std::function(std::move(function)), more...));
  }
  /// Adds a constant.
  template <class T>
  void value(const char* name, T value) {
    set(name, to_python(std::move(value)));
  }
  void set(const char* name, const Object& object);

 private:
  void add(const Function& function);

  PyObject* module_;  // lives as long as the process
};

/// A type of objects that hold a T, which functions give: Class<T>("Name", "documentation").method<f>(…)….add(module).
template <class T>
class Class {
 public:
  Class(const char* name, const char* doc) : name_(name), doc_(doc) {}

  /// `function`: a lambda of the T and of what `more` of function_of has.
  template <auto function, class... More>
  Class& method(const char* name, More... more) {
    static const Function* const made = function_of<true>(name, std::function(function), more...);
    PyMethodDef method = made->method;
    const auto enter =
        +[](PyObject* self, PyObject* positional, PyObject* named) { return called(*made, self, positional, named); };
    method.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(enter));
    methods_->push_back(method);
    return *this;
  }

  void add(Module module) {
    methods_->push_back({nullptr, nullptr, 0, nullptr});
    PyType_Slot slots[] = {{Py_tp_methods, methods_->data()},
                           {Py_tp_dealloc, reinterpret_cast<void*>(&Box<T>::free)},
                           {Py_tp_doc, const_cast<char*>(doc_)},
                           {0, nullptr}};
    const std::string name = std::string("fusegrad._C.") + name_;
    PyType_Spec spec{name.c_str(), static_cast<int>(sizeof(Box<T>)), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    Object type(PyType_FromSpec(&spec));
    module.set(name_, type);
    Box<T>::type = reinterpret_cast<PyTypeObject*>(type.release());
  }

 private:
  const char* name_;
  const char* doc_;
  std::vector<PyMethodDef>* methods_ = new std::vector<PyMethodDef>();  // never freed: Python reads them
};

}  // namespace fusegrad::python
