// Many processes, and folders that cannot be written: the cubin is the right one.
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <csignal>

#include "jit/compile.h"
#include "jit_support.h"

namespace fusegrad::jit {
namespace {

TEST_F(Jit, ManyProcessesOnOneColdFolder) {
  NEEDS_NVRTC();
  constexpr int kProcesses = 32, kKernels = 2;
  std::vector<std::string> expected;
  for (int k = 0; k < kKernels; ++k) expected.push_back(compile_uncached(program(k)).cubin);
  EXPECT_NE(expected[0], expected[1]);
  int gate[2];
  ASSERT_EQ(::pipe(gate), 0);
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(gate[1]);
      char byte;
      bool good = ::read(gate[0], &byte, 1) == 0;  // until the parent closes its end
      try {
        for (int k = 0; k < kKernels; ++k) good = good && *compile(program(k)) == expected[k];
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        good = false;
      }
      ::_exit(good ? 0 : 1);
    }
    children.push_back(child);
  }
  ::close(gate[0]);
  ::close(gate[1]);
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  EXPECT_EQ(files().size(), size_t{kKernels});
  const Stats before = stats();
  for (int k = 0; k < kKernels; ++k) EXPECT_EQ(*compile(program(k)), expected[k]);
  EXPECT_EQ(stats().disk_hits, before.disk_hits + kKernels);
}

/// Runs `body` in a process of its own; whether it returned true.
bool in_process(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    bool good = false;
    try {
      good = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(good ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Root may write wherever it likes, unless it gives that up.
void obey_modes() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  if (::syscall(SYS_capget, &header, data) != 0) return;
  for (const int capability : {CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH}) data[0].effective &= ~(1u << capability);
  ::syscall(SYS_capset, &header, data);
}

/// Two kernels come out right, with one warning.
bool right_with_one_warning(const std::vector<std::string>& expected, const std::string& words) {
  CountWarnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  bool good = true;
  for (size_t k = 0; k < expected.size(); ++k) good = good && *compile(program(static_cast<int>(k))) == expected[k];
  const bool one = warnings.count == 1 && warnings.text.find(words) != std::string::npos;
  if (!good || !one) std::fprintf(stderr, "right: %d; %d warnings:%s\n", good, warnings.count, warnings.text.c_str());
  return good && one;
}

TEST_F(Jit, FoldersThatCannotBeWritten) {
  NEEDS_NVRTC();
  const std::vector<std::string> expected{compile_uncached(program(0)).cubin, compile_uncached(program(1)).cubin};
  ASSERT_EQ(::mkdir(folder_.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(folder_.c_str(), 0500), 0);
  EXPECT_TRUE(in_process([&] {
    obey_modes();
    return right_with_one_warning(expected, "it cannot be written: Permission denied");
  }));
  // What is in it is read.
  ASSERT_EQ(::chmod(folder_.c_str(), 0700), 0);
  compile(program(0));
  compile(program(1));
  ASSERT_EQ(::chmod(folder_.c_str(), 0500), 0);
  EXPECT_TRUE(in_process([&] {
    obey_modes();
    forget();
    return *compile(program(1)) == expected[1] && stats().disk_hits > 0;
  }));
  ASSERT_EQ(::chmod(folder_.c_str(), 0700), 0);
  forget();

  // No folder at all can be made there.
  write(root_ + "/file", "");
  ::setenv("FUSEGRAD_CACHE_DIR", (root_ + "/file/cache").c_str(), 1);
  EXPECT_TRUE(in_process([&] { return right_with_one_warning(expected, "Not a directory"); }));
}

TEST_F(Jit, FullDisk) {
  NEEDS_NVRTC();
  const std::vector<std::string> expected{compile_uncached(program(0)).cubin, compile_uncached(program(1)).cubin};
  EXPECT_TRUE(in_process([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return right_with_one_warning(expected, "it cannot be written: File too large");
  }));
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace fusegrad::jit
