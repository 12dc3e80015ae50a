// Part of fusegrad._C: the cache for `python -m fusegrad cache`, compiling without a GPU for tests.
#include "pytorch/bindings/jit.h"

#include "jit/cache.h"
#include "jit/compile.h"
#include "jit/headers.h"

namespace py = fusegrad::python;

namespace fusegrad::jit {
namespace {

py::Dict usage(const DiskCache::Usage& of) {
  py::Dict result;
  result["entries"] = of.entries;
  result["bytes"] = of.bytes;
  return result;
}

py::Dict cache_info() {
  const DiskCache::Info info = DiskCache::from_environment().info();
  py::Dict result, architectures;
  for (const auto& [name, of] : info.architectures) architectures[name.c_str()] = usage(of);
  result["folder"] = info.folder;
  result["limit"] = info.limit;
  result["architectures"] = architectures;
  result["other"] = usage(info.other);
  return result;
}

py::Dict counts() {
  const Stats all = stats();
  py::Dict result;
  result["compilations"] = all.compilations;
  result["disk_hits"] = all.disk_hits;
  result["memory_hits"] = all.memory_hits;
  result["rejected"] = all.rejected;
  return result;
}

Program program(const std::string& source, const std::string& architecture, const std::string& name,
                const std::vector<std::string>& flags, const std::string& score_mod) {
  return {name, source, architecture, flags, score_mod};
}

py::Bytes compiled(const Program& program) {
  Cubin cubin;
  {
    const py::Released released;
    cubin = compile(program);
  }
  return {*cubin};
}

py::Dict reported(const Program& program) {
  Compiled compiled;
  {
    const py::Released released;
    compiled = compile_uncached(program);
  }
  py::Dict result;
  for (const auto& [function, of] : resources(compiled.log)) {
    py::Dict row;
    row["registers"] = of.registers;
    row["stack_bytes"] = of.stack_bytes;
    row["spill_store_bytes"] = of.spill_store_bytes;
    row["spill_load_bytes"] = of.spill_load_bytes;
    row["shared_bytes"] = of.shared_bytes;
    row["products_wait"] = of.products_wait;
    result[function.c_str()] = row;
  }
  return result;
}

}  // namespace

void bind(py::Module m) {
  m.def("Program", &program, py::arg("source"), py::arg("architecture"), py::arg("name") = "kernel",
        py::arg("flags") = std::vector<std::string>{}, py::arg("score_mod") = "",
        "A kernel's source for an architecture such as '90a'; see csrc/jit/program.h.");
  m.def("compile", &compiled, py::arg("program"), "The cubin: from memory, from the disk, or by NVRTC. Needs no GPU.");
  m.def(
      "key", [](const Program& program) { return hex(cache_key(program)); }, py::arg("program"),
      "What a cubin is stored under: over NVRTC, architecture, flags, headers and source, in hexadecimal digits.");
  m.def("resources", &reported, py::arg("program"),
        "Compiles past the caches: {function: {registers, stack_bytes, spill_store_bytes, spill_load_bytes, "
        "shared_bytes, products_wait}} as ptxas reports it.");
  m.def(
      "nvrtc",
      [] {
        const Nvrtc& nvrtc = Nvrtc::get();
        return std::make_tuple(nvrtc.path(), nvrtc.version().major, nvrtc.version().minor);
      },
      "(path, major, minor) of NVRTC; RuntimeError where there is none.");
  m.def(
      "headers",
      [] {
        py::Dict result;
        for (const Header& header : headers()) result[header.name] = header.text;
        return result;
      },
      "{name: text} of the device headers that kernels may include.");
  m.def("stats", &counts, "What was compiled, found on the disk, found in memory, and rejected, in this process.");
  m.def("forget", &forget, "Empties this process's memory of cubins.");
  m.def("cache_info", &cache_info,
        "{folder, limit, architectures: {name: {entries, bytes}}, other: {entries, bytes}}.");
  m.def(
      "cache_clear", [] { return DiskCache::from_environment().clear(); },
      "Removes our files from the cache folder; how many.");
}

}  // namespace fusegrad::jit
