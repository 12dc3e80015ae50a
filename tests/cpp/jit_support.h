// What the tests of csrc/jit share: a cache folder of their own, kernels, warnings counted.
#pragma once

#include <c10/util/Exception.h>
#include <dirent.h>
#include <ftw.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "common/error.h"
#include "jit/compile.h"

namespace fusegrad::jit {

inline bool has_nvrtc() {
  try {
    Nvrtc::get();
    return true;
  } catch (const RuntimeError&) {
    return false;
  }
}
#define NEEDS_NVRTC() \
  if (!has_nvrtc()) GTEST_SKIP() << "NVRTC was not found"

// Not std::filesystem: libtorch.so exports functions of those names, of another version.
inline bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

inline std::vector<std::string> list(const std::string& folder) {
  std::vector<std::string> found;
  DIR* opened = ::opendir(folder.c_str());
  if (opened == nullptr) return found;
  while (const dirent* entry = ::readdir(opened)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") found.push_back(name);
  }
  ::closedir(opened);
  return found;
}

inline void remove_all(const std::string& folder) {
  const auto remove = [](const char* path, const struct stat*, int, FTW*) { return ::remove(path); };
  ::nftw(folder.c_str(), remove, 8, FTW_DEPTH | FTW_PHYS);
}

inline std::string read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}
inline void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

/// A fresh folder, which is the cache folder while the test runs.
class Jit : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "fusegrad-test-XXXXXX";
    ASSERT_NE(::mkdtemp(root_.data()), nullptr);
    folder_ = root_ + "/cache";
    ::setenv("FUSEGRAD_CACHE_DIR", folder_.c_str(), 1);
    ::setenv("FUSEGRAD_JIT_PROGRESS", "off", 1);
    forget();
  }
  void TearDown() override {
    for (const char* name :
         {"FUSEGRAD_CACHE_DIR", "FUSEGRAD_CACHE_LIMIT_MIB", "FUSEGRAD_JIT_PROGRESS", "FUSEGRAD_JIT_DUMP"}) {
      ::unsetenv(name);
    }
    remove_all(root_);
  }

  std::vector<std::string> files() const { return list(folder_); }
  std::string only_file() const {
    const auto found = files();
    EXPECT_EQ(found.size(), 1u);
    return folder_ + "/" + found.at(0);
  }

  std::string root_, folder_;
};

/// Kernels that differ in a number.
inline Program program(int number = 1, const std::string& architecture = "80") {
  return {"probe",
          "extern \"C\" __global__ void probe(int* out) { out[threadIdx.x] = " + std::to_string(number) + "; }",
          architecture,
          {},
          ""};
}

class CountWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text += "\n" + warning.msg(), ++count; }
  int count = 0;
  std::string text;
};

inline std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace fusegrad::jit
