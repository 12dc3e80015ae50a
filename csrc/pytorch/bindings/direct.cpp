// fusegrad._direct: calls of the ops from Python, straight to the dispatcher. A module for each minor version of torch,
// beside its libfusegrad, and by Python's stable ABI for every Python.
//
// A call is taken here where each argument has the plain type of its field and nothing watches what PyTorch does: no
// mode (but that of torch.set_default_device), transform, tracer, subclass or tangent. For any other the result is
// None, and the op's Python function, which checks and makes messages, goes on.
#include <ATen/ATen.h>

#include <array>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "pytorch/bindings/plain.h"
#include "pytorch/ops/arguments.h"

namespace py = fusegrad::python;

namespace fusegrad {
namespace {

using at::Tensor;
using plain::is_watched;
using plain::read;
using plain::TensorFacts;
using LossTuple = std::tuple<Tensor, std::vector<Tensor>>;
using FlexTuple = std::tuple<Tensor, Tensor, Tensor>;

// same_tensor(tensor, facts): every trace's guard calls it, so that it takes its arguments as they come.
PyObject* same_tensor(PyObject* /*module*/, PyObject* const* given, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "same_tensor() takes a tensor and tensor_facts()");
    return nullptr;
  }
  const void* facts = PyCapsule_GetPointer(given[1], py::kHeldAs<TensorFacts>);
  if (facts == nullptr) return nullptr;
  return PyBool_FromLong(static_cast<const TensorFacts*>(facts)->same(given[0]) ? 1 : 0);
}

// --- flex_attention's functions ---

// What FlexMods views, as a Python function gives it: a tuple in the order of its fields.
struct Mods {
  py::Object given;  // has the texts
  std::array<std::string_view, 2> texts;
  std::array<std::vector<Tensor>, 2> buffers;
  std::array<std::vector<double>, 2> floats;
  std::array<std::vector<int64_t>, 2> ints;
  std::vector<Tensor> kv_blocks;
  std::vector<int64_t> block_size;

  bool take(py::Object found) {
    given = std::move(found);
    PyObject* tuple = given.get();
    if (PyTuple_CheckExact(tuple) == 0 || PyTuple_Size(tuple) != 10) return false;
    Py_ssize_t i = 0;
    const auto next = [&](auto& into) { return read(PyTuple_GetItem(tuple, i++), into); };
    for (size_t mod = 0; mod < 2; ++mod) {
      if (!next(texts[mod]) || !next(buffers[mod]) || !next(floats[mod]) || !next(ints[mod])) return false;
    }
    return next(kv_blocks) && next(block_size);
  }
  FlexMods views() const {
    return {texts[0], buffers[0], floats[0], ints[0], texts[1], buffers[1], floats[1], ints[1], kv_blocks, block_size};
  }
};

// --- a function ---

constexpr size_t kMostParameters = 40;

// A Python function's parameters, of which the op's arguments are some, by name. The others must be None; what shapes
// flex_attention's results is read by name too.
class Function {
 public:
  using Values = std::array<PyObject*, kMostParameters>;

  Function(std::vector<py::Object> names, size_t positional) : names_(std::move(names)), positional_(positional) {}
  virtual ~Function() = default;
  /// Null where the call is not one for here.
  virtual PyObject* call(const Values& values) const = 0;

  size_t size() const { return names_.size(); }
  size_t place_of(const char* name) const {
    for (size_t i = 0; i < names_.size(); ++i) {
      if (PyUnicode_CompareWithASCIIString(names_[i].get(), name) == 0) return i;
    }
    return kMostParameters;
  }

  /// The values in the parameters' order, null where none was given; false where that is an error.
  bool bind(PyObject* positional, PyObject* named, Values& values) const {
    const auto given = static_cast<size_t>(PyTuple_Size(positional));
    if (given > positional_) return false;
    for (size_t i = 0; i < given; ++i) values[i] = PyTuple_GetItem(positional, static_cast<Py_ssize_t>(i));
    PyObject *name = nullptr, *value = nullptr;
    Py_ssize_t at = 0;
    while (PyDict_Next(named, &at, &name, &value) != 0) {
      // Names in a program's text are interned, as these are.
      size_t i = 0;
      while (i < names_.size() && names_[i].get() != name) ++i;
      if (i == names_.size() || values[i] != nullptr) return false;
      values[i] = value;
    }
    return true;
  }

 private:
  std::vector<py::Object> names_;
  size_t positional_;
};

// The GIL is others' while the op runs.
template <class Arguments, class Result>
Result run(const Op<Arguments, Result>& op, const Arguments& arguments) {
  const py::Released released;
  return op(arguments);
}

template <class Arguments>
class OpFunction : public Function {
 public:
  OpFunction(std::vector<py::Object> names, size_t positional) : Function(std::move(names), positional) {
    readers_.resize(size());
    for_each_field<Arguments>([&](const auto& field) {
      using Value = typename std::decay_t<decltype(field)>::Value;
      const size_t place = place_of(field.name);
      if constexpr (requires(PyObject* given, Value& value) { read(given, value); }) {
        if (place == kMostParameters) return;
        constexpr bool none = std::decay_t<decltype(field)>::kKind == Kind::kNoneIsDefault;
        readers_[place] = [field](PyObject* given, Arguments& into) {
          return (none && given == Py_None) || read(given, field.of(into));
        };
      }
      // Those that have no default must come.
      constexpr auto kind = std::decay_t<decltype(field)>::kKind;
      if (kind != Kind::kOption && kind != Kind::kNoneIsDefault && place != kMostParameters) needed_.push_back(place);
    });
  }

 protected:
  bool read_all(const Values& values, Arguments& into) const {
    for (const size_t place : needed_) {
      if (values[place] == nullptr) return false;
    }
    for (size_t i = 0; i < size(); ++i) {
      if (values[i] == nullptr) continue;
      if (readers_[i] ? !readers_[i](values[i], into) : values[i] != Py_None) return false;
    }
    return true;
  }

  /// A parameter that is none of the op's fields, or is not what its field is: it need not come.
  void read_apart(size_t place, std::function<bool(PyObject*, Arguments&)> reader) {
    readers_.at(place) = std::move(reader);
    std::erase(needed_, place);
  }

 private:
  std::vector<std::function<bool(PyObject*, Arguments&)>> readers_;
  std::vector<size_t> needed_;
};

template <class Arguments>
class Loss : public OpFunction<Arguments> {
 public:
  Loss(const char* op, std::vector<py::Object> names, size_t positional)
      : OpFunction<Arguments>(std::move(names), positional), op_(std::string("fusegrad::") + op) {
    inplace_ = this->place_of("inplace");
    this->read_apart(inplace_, [](PyObject* given, Arguments& /*into*/) { return PyBool_Check(given) != 0; });
  }

  PyObject* call(const Function::Values& values) const override {
    Arguments arguments;
    if (!this->read_all(values, arguments)) return nullptr;
    auto& normalizer = arguments.options.normalizer();
    if (const auto* number = std::get_if<double>(&normalizer)) {
      const Tensor& input = std::get<0>(Arguments::fields()).of(arguments);
      normalizer = at::full({}, *number, input.options().dtype(acc_type(input.scalar_type())).requires_grad(false));
    }
    const auto& op = values[inplace_] == Py_True ? op_.mutating : op_.functional;
    return THPVariable_Wrap(std::get<0>(run(op, arguments)));
  }

 private:
  Twins<Arguments, LossTuple> op_;
  size_t inplace_;
};

template <class... Tensors>
PyObject* tuple_of(const Tensors&... tensors) {
  return py::to_python(std::make_tuple(py::Object(THPVariable_Wrap(tensors))...)).release();
}

class Flex : public OpFunction<FlexAttentionCall> {
 public:
  Flex(std::vector<py::Object> names, size_t positional, py::Object mods)
      : OpFunction(std::move(names), positional), mods_(std::move(mods)) {
    read_apart(score_mod_, [](PyObject* given, FlexAttentionCall& /*into*/) {
      return given == Py_None || PyCallable_Check(given) != 0;
    });
    read_apart(block_mask_, [](PyObject* /*given*/, FlexAttentionCall& /*into*/) { return true; });
    read_apart(return_lse_, [](PyObject* given, FlexAttentionCall& /*into*/) { return PyBool_Check(given) != 0; });
    read_apart(place_of("kernel_options"), [](PyObject* given, FlexAttentionCall& /*into*/) {
      return given == Py_None || PyDict_CheckExact(given) != 0;
    });
  }

  PyObject* call(const Values& values) const override {
    FlexAttentionCall arguments;
    if (!read_all(values, arguments)) return nullptr;
    const auto given = [&](size_t place) { return values[place] != nullptr ? values[place] : Py_None; };
    PyObject *score_mod = given(score_mod_), *block_mask = given(block_mask_);
    Mods mods;
    if (score_mod != Py_None || block_mask != Py_None) {
      py::Object found(PyObject_CallFunctionObjArgs(mods_.get(), score_mod, block_mask, values[query_], values[key_],
                                                    values[value_], nullptr));
      if (!mods.take(std::move(found))) return nullptr;
    }
    arguments.mods = mods.views();
    const auto [out, lse, max_scores] = run(op_, arguments);
    return values[return_lse_] == Py_True ? tuple_of(out, lse) : THPVariable_Wrap(out);
  }

 private:
  Op<FlexAttentionCall, FlexTuple> op_{"fusegrad::flex_attention"};
  py::Object mods_;
  size_t query_ = place_of("query"), key_ = place_of("key"), value_ = place_of("value");
  size_t score_mod_ = place_of("score_mod"), block_mask_ = place_of("block_mask"), return_lse_ = place_of("return_lse");
};

// The op flex_attention itself. Its caller passes score and mask functions as texts, the tuple "mods" in the order of
// FlexMods, and gets all three results.
class FlexOfTexts : public OpFunction<FlexAttentionCall> {
 public:
  FlexOfTexts(std::vector<py::Object> names, size_t positional) : OpFunction(std::move(names), positional) {
    read_apart(mods_, [](PyObject* /*given*/, FlexAttentionCall& /*into*/) { return true; });
  }

  PyObject* call(const Values& values) const override {
    FlexAttentionCall arguments;
    Mods mods;
    if (values[mods_] == nullptr || !read_all(values, arguments)) return nullptr;
    if (!mods.take(py::Convert<py::Object>::from(values[mods_]))) return nullptr;
    arguments.mods = mods.views();
    const auto [out, lse, max_scores] = run(op_, arguments);
    return tuple_of(out, lse, max_scores);
  }

 private:
  Op<FlexAttentionCall, FlexTuple> op_{"fusegrad::flex_attention"};
  size_t mods_ = place_of("mods");
};

std::unique_ptr<Function> make(const std::string& op, std::vector<py::Object> names, size_t positional,
                               py::Object mods) {
  if (names.size() >= kMostParameters) throw std::invalid_argument("too many parameters");
  if (op == "cross_entropy") return std::make_unique<Loss<CrossEntropyCall>>("cross_entropy", names, positional);
  if (op == "linear_cross_entropy") {
    return std::make_unique<Loss<LinearCrossEntropyCall>>("linear_cross_entropy", names, positional);
  }
  if (op == "jsd") return std::make_unique<Loss<JsdCall>>("jsd", names, positional);
  if (op == "linear_jsd") return std::make_unique<Loss<LinearJsdCall>>("linear_jsd", names, positional);
  if (op == "flex_attention") return std::make_unique<Flex>(names, positional, mods);
  if (op == "flex_attention of texts") return std::make_unique<FlexOfTexts>(names, positional);
  throw std::invalid_argument("no op " + op);
}

// given: the function's positional arguments, a tuple, and the named ones, a dict.
PyObject* enter(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || PyTuple_Check(given[0]) == 0 || PyDict_Check(given[1]) == 0) {
    PyErr_SetString(PyExc_TypeError, "direct() takes a tuple and a dict");
    return nullptr;
  }
  PyObject* result = nullptr;
  try {
    const auto* function = static_cast<const Function*>(PyCapsule_GetPointer(self, nullptr));
    Function::Values values{};
    if (!is_watched() && function->bind(given[0], given[1], values)) result = function->call(values);
  } catch (const py::Raised&) {
    return nullptr;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  if (result == nullptr && PyErr_Occurred() == nullptr) {
    Py_INCREF(Py_None);
    return Py_None;
  }
  return result;
}

py::Object bound(const std::string& op, const std::vector<std::string>& names, int64_t positional, py::Object mods) {
  std::vector<py::Object> interned;
  for (const auto& name : names) interned.emplace_back(PyUnicode_InternFromString(name.c_str()));
  static PyMethodDef method{"direct", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&enter)),
                            METH_FASTCALL, "None where the call is not one that goes straight to the dispatcher."};
  // Lives as long as the process, as the functions do.
  auto* function = make(op, std::move(interned), static_cast<size_t>(positional), std::move(mods)).release();
  const py::Object self(PyCapsule_New(function, nullptr, nullptr));
  return py::Object(PyCFunction_New(&method, self.get()));
}

void bind(py::Module m) {
  py::check_layout(at::empty({0}));
  plain::find_modes();
  m.def("tensor_facts", &TensorFacts::of, py::arg("tensor"), "What same_tensor() compares.");
  static PyMethodDef same{"same_tensor", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&same_tensor)),
                          METH_FASTCALL, "Whether a tensor is plain and of tensor_facts()."};
  m.set("same_tensor", py::Object(PyCFunction_New(&same, nullptr)));
  m.def("bound", &bound, py::arg("op"), py::arg("names"), py::arg("positional"), py::arg("mods"),
        "A Python function of the op as a function of its positional and its named arguments, a tuple and a dict. "
        "names: of the function's parameters, of which the first `positional` may come without it. mods: what finds "
        "texts for flex_attention's functions, or None.");
}

}  // namespace
}  // namespace fusegrad

PyMODINIT_FUNC PyInit__direct() {
  static PyModuleDef definition = {.m_base = PyModuleDef_HEAD_INIT,
                                   .m_name = "fusegrad._direct",
                                   .m_doc = "Calls of the ops, straight to the dispatcher.",
                                   .m_size = -1,
                                   .m_methods = nullptr,
                                   .m_slots = nullptr,
                                   .m_traverse = nullptr,
                                   .m_clear = nullptr,
                                   .m_free = nullptr};
  try {
    py::Object module(PyModule_Create(&definition));
    fusegrad::bind(py::Module(module.get()));
    return module.release();
  } catch (const py::Raised&) {
    return nullptr;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}
