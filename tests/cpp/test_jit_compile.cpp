// From a program to its cubin, without a GPU: through memory and disk, and what is said where that fails.
#include <fcntl.h>

#include <atomic>
#include <map>
#include <thread>

#include "jit/compile.h"
#include "jit_support.h"

namespace fusegrad::jit {
namespace {

TEST_F(Jit, MemoryThenDiskThenCompiler) {
  NEEDS_NVRTC();
  const Stats before = stats();
  const Cubin first = compile(program());
  EXPECT_EQ(stats().compilations, before.compilations + 1);
  EXPECT_EQ(compile(program()), first);
  EXPECT_EQ(stats().memory_hits, before.memory_hits + 1);
  forget();
  EXPECT_EQ(*compile(program()), *first);
  EXPECT_EQ(stats().disk_hits, before.disk_hits + 1);
  EXPECT_EQ(stats().compilations, before.compilations + 1);
  forget();
  ASSERT_EQ(::unlink(only_file().c_str()), 0);
  EXPECT_EQ(*compile(program()), *first);
  EXPECT_EQ(stats().compilations, before.compilations + 2);
}

TEST_F(Jit, KeyCoversWhatTheCubinDependsOn) {
  NEEDS_NVRTC();
  const Digest key = cache_key(program());
  EXPECT_EQ(cache_key(program()), key);
  EXPECT_NE(cache_key(program(2)), key);
  EXPECT_NE(cache_key(program(1, "86")), key);
  Program flagged = program();
  flagged.flags = {"--use_fast_math"};
  EXPECT_NE(cache_key(flagged), key);
  ::setenv("FUSEGRAD_JIT_FLAGS", " --use_fast_math ", 1);
  const Digest by_environment = cache_key(program());
  ::unsetenv("FUSEGRAD_JIT_FLAGS");
  EXPECT_EQ(by_environment, cache_key(flagged));
}

TEST_F(Jit, DamagedEntryIsCompiledAgainAndReplaced) {
  NEEDS_NVRTC();
  const Cubin good = compile(program());
  const std::string file = only_file();
  const std::string bytes = read(file);
  for (const std::string& damaged : {std::string(), bytes.substr(0, 1000), std::string(bytes.size(), '\0')}) {
    write(file, damaged);
    forget();
    const Stats before = stats();
    EXPECT_EQ(*compile(program()), *good);
    EXPECT_EQ(stats().compilations, before.compilations + 1);
    EXPECT_EQ(stats().rejected, before.rejected + 1);
    EXPECT_EQ(read(only_file()), bytes);
  }
}

TEST_F(Jit, ThreadsShareOneCompilation) {
  NEEDS_NVRTC();
  const Stats before = stats();
  std::vector<Cubin> found(8);
  std::vector<std::thread> threads;
  for (Cubin& cubin : found) threads.emplace_back([&cubin] { cubin = compile(program(8)); });
  for (std::thread& thread : threads) thread.join();
  for (const Cubin& cubin : found) EXPECT_EQ(cubin, found[0]);
  EXPECT_EQ(stats().compilations, before.compilations + 1);
  EXPECT_EQ(stats().memory_hits, before.memory_hits + 7);
}

TEST_F(Jit, WrongSource) {
  NEEDS_NVRTC();
  Program wrong = program();
  wrong.source = "#include \"cuda/device/score_mod.cuh\"\nextern \"C\" __global__ void probe() { nonsense; }\n";
  wrong.score_mod = "score_mod 1\nreturn score\n";
  for (int turn = 0; turn < 2; ++turn) {  // the second is no memory of the first
    const int64_t before = stats().compilations;
    const std::string message = message_of([&] { compile(wrong); });
    EXPECT_EQ(stats().compilations, before + 1);
    for (const char* part :
         {"jit: probe was not compiled for sm_80 by NVRTC ", "score_mod: \nscore_mod 1\nreturn score",
          "identifier \"nonsense\" is undefined", "log:\nNVRTC_ERROR_COMPILATION"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
    const std::string kept = only_file();
    EXPECT_NE(message.find("source: " + kept), std::string::npos) << message;
    const std::string text = read(kept);
    EXPECT_NE(text.find("nonsense"), std::string::npos);
    EXPECT_NE(text.find("floor_mod"), std::string::npos) << "the headers are in it";
    EXPECT_NE(text.find("//   return score"), std::string::npos);
  }
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { failed += message_of([&] { compile(wrong); }).find("nonsense") != std::string::npos; });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 4);
}

TEST_F(Jit, WrongPrograms) {
  NEEDS_NVRTC();
  const auto error = [](const std::function<void(Program&)>& change) {
    Program p = program();
    change(p);
    return message_of([&] { compile(p); });
  };
  EXPECT_EQ(error([](Program& p) { p.name = "../x"; }), "jit: a program's name must match [a-z0-9_]+, but got '../x'");
  for (const char* wrong : {"", "9", "sm_90", "90b", "90a ", "99999"}) {
    EXPECT_EQ(error([&](Program& p) { p.architecture = wrong; }),
              "jit: probe: the architecture must be one such as '80' or '90a', but got '" + std::string(wrong) + "'");
  }
  const std::string unknown = error([](Program& p) { p.architecture = "35"; });
  EXPECT_NE(unknown.find("the architecture must be one that NVRTC"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("but got sm_35"), std::string::npos) << unknown;
  EXPECT_NE(error([](Program& p) { p.flags = {"--no-such-flag"}; }).find("no-such-flag"), std::string::npos);
  EXPECT_EQ(error([](Program& p) { p.source += '\0'; }), "jit: probe: the source must not hold a null character");
}

// No file beside the embedded headers is read, not even of the working directory.
TEST_F(Jit, HeadersOfTheWorkingDirectoryAreNotRead) {
  NEEDS_NVRTC();
  write(root_ + "/local.cuh", "#define LOCAL\n");
  const int before = ::open(".", O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::chdir(root_.c_str()), 0);
  Program p = program();
  p.source = "#include \"local.cuh\"\n" + p.source;
  const std::string message = message_of([&] { compile(p); });
  ASSERT_EQ(::fchdir(before), 0);
  ::close(before);
  EXPECT_NE(message.find("local.cuh"), std::string::npos) << message;
}

TEST_F(Jit, ProgressIsTold) {
  NEEDS_NVRTC();
  const auto told = [](const char* after) {
    ::setenv("FUSEGRAD_JIT_PROGRESS", after, 1);
    ::testing::internal::CaptureStderr();
    compile_uncached(program());
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(told("off"), "");
  EXPECT_EQ(told("100000"), "");
  const std::string text = told("0");
  EXPECT_NE(text.find("fusegrad: compiling probe for sm_80\nfusegrad: compiling probe for sm_80 took "),
            std::string::npos)
      << text;
  for (const char* wrong : {"-1", "soon", "2s"}) {
    ::setenv("FUSEGRAD_JIT_PROGRESS", wrong, 1);
    EXPECT_THROW(compile_uncached(program()), ValueError) << wrong;
  }
}

TEST_F(Jit, Dump) {
  NEEDS_NVRTC();
  const std::string dumped = root_ + "/dump";
  ::setenv("FUSEGRAD_JIT_DUMP", dumped.c_str(), 1);
  const Cubin cubin = compile(program());
  std::map<std::string, std::string> found;
  for (const std::string& name : list(dumped)) found[name.substr(name.rfind('.'))] = read(dumped + "/" + name);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[".cubin"], *cubin);
  EXPECT_NE(found[".cu"].find(program().source), std::string::npos);
  EXPECT_EQ(found[".cu"].find("// " + program().name + ", by NVRTC with --gpu-architecture="), 0u);
  Program again = program();
  again.source = found[".cu"];
  EXPECT_FALSE(compile_uncached(again).cubin.empty());
  EXPECT_NE(found[".log"].find("registers"), std::string::npos);
  ::setenv("FUSEGRAD_JIT_DUMP", "/dev/null/x", 1);
  EXPECT_NE(message_of([] { compile(program(2)); }).find("FUSEGRAD_JIT_DUMP must name a folder that can be written"),
            std::string::npos);
}

}  // namespace
}  // namespace fusegrad::jit
