#include "jit/nvrtc.h"

#include <dlfcn.h>

#include <charconv>
#include <cstdlib>
#include <sstream>

#include "common/error.h"
#include "jit/front_end.h"
#include "jit/headers.h"

namespace fusegrad::jit {
namespace {

constexpr int kNewest = 13, kOldest = 12;  // the versions of CUDA whose NVRTC has what is needed

// Where NVRTC may be. The wheels' come first: their version is the front end's, and the driver that runs that loads
// what it compiles.
std::vector<std::string> candidates() {
  const char* named = std::getenv("FUSEGRAD_NVRTC");
  if (named != nullptr && *named != '\0') return {named};
  std::vector<std::string> paths;
  const auto add = [&](std::string folder, int major) {
    paths.push_back(folder.append("libnvrtc.so.").append(std::to_string(major)));
  };
  for (const std::string& packages : package_folders()) {
    const std::string nvidia = packages + "/nvidia/";
    for (int major = kNewest; major >= kOldest; --major) {
      add(nvidia + (major >= 13 ? "cu" + std::to_string(major) : "cuda_nvrtc") + "/lib/", major);
    }
  }
  for (int major = kNewest; major >= kOldest; --major) add("", major);
  return paths;
}

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

std::string file_name(const Program& program) {
  // A folder that is nowhere: NVRTC would search the working directory for headers otherwise.
  return "/fusegrad/" + program.name + ".cu";
}

// The number before `unit` in `line`, or 0.
int number_before(std::string_view line, std::string_view unit) {
  const size_t end = line.find(unit);
  if (end == std::string_view::npos) return 0;
  const size_t begin = line.find_last_not_of("0123456789", end - 1) + 1;
  int value = 0;
  std::from_chars(line.data() + begin, line.data() + end, value);
  return value;
}

}  // namespace

const Nvrtc& Nvrtc::get() {
  static const Nvrtc nvrtc;
  return nvrtc;
}

Nvrtc::Nvrtc() {
  std::string tried;
  for (const std::string& path : candidates()) {
    void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = dlerror();
      tried += "\n  " + (why != nullptr ? std::string(why) : path);
      continue;
    }
    Functions& f = call_;
    if (find(library, "nvrtcGetErrorString", f.error_string) && find(library, "nvrtcVersion", f.version) &&
        find(library, "nvrtcGetNumSupportedArchs", f.supported_count) &&
        find(library, "nvrtcGetSupportedArchs", f.supported) && find(library, "nvrtcCreateProgram", f.create) &&
        find(library, "nvrtcDestroyProgram", f.destroy) && find(library, "nvrtcCompileProgram", f.compile) &&
        find(library, "nvrtcGetCUBINSize", f.cubin_size) && find(library, "nvrtcGetCUBIN", f.cubin) &&
        find(library, "nvrtcGetProgramLogSize", f.log_size) && find(library, "nvrtcGetProgramLog", f.log) &&
        f.version(&version_.major, &version_.minor) == 0) {
      path_ = path;
      return;
    }
    dlclose(library);
    tried += "\n  " + path + ": not NVRTC of CUDA " + std::to_string(kOldest) + " or later";
  }
  fail<RuntimeError>("jit: kernels are compiled by NVRTC, which must be installed, but was not found:", tried,
                     "\nPyTorch's CUDA packages bring it; alone it is `pip install nvidia-cuda-nvrtc` (CUDA 13) or "
                     "`nvidia-cuda-nvrtc-cu12`. FUSEGRAD_NVRTC=/path/to/libnvrtc.so names another.");
}

void Nvrtc::check(int status, const char* function, const Program& program) const {
  FUSEGRAD_CHECK(RuntimeError, status == 0, "jit: ", program.name, ": ", function,
                 " failed: ", call_.error_string(status));
}

void Nvrtc::check_architecture(const Program& program) const {
  int count = 0;
  check(call_.supported_count(&count), "nvrtcGetNumSupportedArchs", program);
  std::vector<int> supported(static_cast<size_t>(count));
  check(call_.supported(supported.data()), "nvrtcGetSupportedArchs", program);
  const std::string& name = program.architecture;
  int wanted = 0;  // what no NVRTC supports, where the name begins with no number
  std::from_chars(name.data(), name.data() + name.size(), wanted);
  std::string known;
  for (const int architecture : supported) {
    if (architecture == wanted) return;
    known += known.empty() ? "" : " ";
    known += std::to_string(architecture);
  }
  fail<RuntimeError>("jit: ", program.name, ": the architecture must be one that NVRTC ", version_.major, ".",
                     version_.minor, " knows (", known, "), but got sm_", program.architecture, " (", path_, ")");
}

Compiled Nvrtc::compile(const Program& program) const {
  check_architecture(program);
  std::vector<const char*> texts, names, flags;
  for (const Header& header : headers()) {
    texts.push_back(header.text);
    names.push_back(header.name);
  }
  const std::vector<std::string> words = all_flags(program);
  for (const std::string& flag : words) flags.push_back(flag.c_str());

  struct Handle {
    const Functions& call;
    void* program = nullptr;
    ~Handle() {
      if (program != nullptr) call.destroy(&program);
    }
  } handle{call_};
  check(call_.create(&handle.program, program.source.c_str(), file_name(program).c_str(),
                     static_cast<int>(texts.size()), texts.data(), names.data()),
        "nvrtcCreateProgram", program);
  const int status = call_.compile(handle.program, static_cast<int>(flags.size()), flags.data());
  Compiled result;
  size_t size = 0;
  check(call_.log_size(handle.program, &size), "nvrtcGetProgramLogSize", program);
  result.log.resize(size);
  check(call_.log(handle.program, result.log.data()), "nvrtcGetProgramLog", program);
  while (!result.log.empty() && result.log.back() == '\0') result.log.pop_back();
  if (status != 0) {
    result.log = std::string(call_.error_string(status)) + "\n" + result.log;
    return result;
  }
  check(call_.cubin_size(handle.program, &size), "nvrtcGetCUBINSize", program);
  result.cubin.resize(size);
  check(call_.cubin(handle.program, result.cubin.data()), "nvrtcGetCUBIN", program);
  return result;
}

std::map<std::string, Resources> resources(const std::string& log) {
  std::map<std::string, Resources> result;
  std::istringstream lines(log);
  std::string entry, function;
  for (std::string line; std::getline(lines, line);) {
    constexpr std::string_view kEntry = "Compiling entry function '", kFunction = "Function properties for ";
    if (line.find("wgmma.mma_async instructions are serialized") != std::string::npos) {
      constexpr std::string_view kOf = " the function '";  // "in", or "for"
      const size_t begin = line.find(kOf) + kOf.size();
      result[line.substr(begin, line.find('\'', begin) - begin)].products_wait = true;
    } else if (const size_t at = line.find(kEntry); at != std::string::npos) {
      const size_t begin = at + kEntry.size();
      entry = function = line.substr(begin, line.find('\'', begin) - begin);
    } else if (const size_t before = line.find(kFunction); before != std::string::npos) {
      function = line.substr(before + kFunction.size());
    } else if (line.find(" bytes stack frame") != std::string::npos) {
      Resources& r = result[function];
      r.stack_bytes = number_before(line, " bytes stack frame");
      r.spill_store_bytes = number_before(line, " bytes spill stores");
      r.spill_load_bytes = number_before(line, " bytes spill loads");
    } else if (line.find("Used ") != std::string::npos) {
      Resources& r = result[entry];
      r.registers = number_before(line, " registers");
      r.shared_bytes = number_before(line, " bytes smem");
    }
  }
  return result;
}

}  // namespace fusegrad::jit
