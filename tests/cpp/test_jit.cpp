// Compilation at run time and the disk cache, without a GPU: whatever happens to the folder, the cubin is the right
// one.
#include <c10/util/Exception.h>
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "jit/cache.h"
#include "jit/compile.h"
#include "jit/headers.h"

namespace fusegrad::jit {
namespace {

constexpr const char* kArchitectures[] = {"80", "86", "89", "90a", "100", "120"};

bool has_nvrtc() {
  try {
    Nvrtc::get();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}
#define NEEDS_NVRTC() \
  if (!has_nvrtc()) GTEST_SKIP() << "NVRTC was not found"

// Not std::filesystem: libtorch.so exports functions of those names, of another version.
bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::vector<std::string> list(const std::string& folder) {
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

void remove_all(const std::string& folder) {
  const auto remove = [](const char* path, const struct stat*, int, FTW*) { return ::remove(path); };
  ::nftw(folder.c_str(), remove, 8, FTW_DEPTH | FTW_PHYS);
}

std::string read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}
void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

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
Program program(int number = 1, const std::string& architecture = "80") {
  return {"probe",
          "extern \"C\" __global__ void probe(int* out) { out[threadIdx.x] = " + std::to_string(number) + "; }",
          architecture,
          {},
          ""};
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

class CountWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text += "\n" + warning.msg(), ++count; }
  int count = 0;
  std::string text;
};

// --- SHA-256: the examples of FIPS 180-4 --------------------------------------------------------------------------

TEST(Sha256, KnownValues) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  Sha256 pieces;
  for (int i = 0; i < 1000; ++i) pieces.update(std::string(1000, 'a'));
  EXPECT_EQ(hex(pieces.digest()), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, FieldsStayApart) {
  EXPECT_NE(Sha256().field("a").field("bc").digest(), Sha256().field("ab").field("c").digest());
}

// --- headers ------------------------------------------------------------------------------------------------------

/// A kernel with what a header offers. The limits are those of every architecture.
struct HeaderKernel {
  const char* header;
  const char* body;
  int registers;
};
constexpr HeaderKernel kHeaderKernels[] = {
    {"cstdint",
     "uint64_t x = (uint64_t)out; int64_t y = -1; uint32_t z = (uint32_t)(x >> 2); int8_t w = -1;\n"
     "static_assert(sizeof(x) == 8 && sizeof(y) == 8 && sizeof(z) == 4 && sizeof(uint16_t) == 2);\n"
     "out[0] = z + (y < 0) + (w < 0) + (uint8_t)x;",
     16},
    {"cuda/device/bulk.cuh",
     "#if __CUDA_ARCH__ >= 900\n"
     "using namespace fusegrad::device;\n"
     "__shared__ __align__(16) float copy[1024];\n"
     "__shared__ Arrival arrival;\n"
     "if (threadIdx.x == 0) {\n"
     "  arrival.init();\n"
     "  Arrival::fence_init();\n"
     "  arrival.expect(sizeof(copy));\n"
     "  arrival.copy(copy, in, sizeof(copy));\n"
     "}\n"
     "cluster_arrive();\n"
     "cluster_wait();\n"
     "arrival.wait();\n"
     "store_counted(remote_address(copy, 0), uint4{}, remote_address(&arrival, 0));\n"
     "out[threadIdx.x] = copy[threadIdx.x];\n"
     "#endif",
     24},
    {"cuda/device/score_mod.cuh",
     "using namespace fusegrad::device::score_mod;\n"
     "const float x = in[threadIdx.x], y = in[threadIdx.x + 32];\n"
     "const float f = sigmoid(x) + gelu(y) + gelu_tanh(x) + floor_div(x, y) + floor_mod(x, y);\n"
     "const long long i = floor_div(to_int(x), to_int(y)) + shift_left(to_int(x), to_int(y)) + to_int(x > y);\n"
     "const long long size = gridDim.x;\n"
     "const long long at = wrapped(i, size);\n"
     "out[threadIdx.x] = f + maximum(x, minimum(y, f)) + (inside(at, size) ? read(in + at) : 0.0f) +\n"
     "    read((const Float16*)in) + read((const BFloat16*)in) + read((const Bool*)in) + invert(i) + absolute(x);",
     40},
};

std::string source_of(const HeaderKernel& kernel) {
  return "#include <" + std::string(kernel.header) +
         ">\nextern \"C\" __global__ void probe(const float* in, float* out) {\n" + kernel.body + "\n}\n";
}

TEST_F(Jit, EveryHeaderHasAKernelHere) {
  std::set<std::string> embedded, tested;
  for (const Header& header : headers()) embedded.insert(header.name);
  for (const HeaderKernel& kernel : kHeaderKernels) tested.insert(kernel.header);
  EXPECT_EQ(embedded, tested);
}

TEST_F(Jit, HeadersAreTheFilesAndIncludeOnlyOneAnother) {
  std::set<std::string> names;
  for (const Header& header : headers()) names.insert(header.name);
  for (const Header& header : headers()) {
    const bool standard = std::string(header.name) == "cstdint";
    const std::string file = FUSEGRAD_TEST_SOURCE_DIR "/csrc/" + std::string(standard ? "jit/cstdint.h" : header.name);
    EXPECT_EQ(read(file), header.text) << file;
    std::istringstream lines(header.text);
    for (std::string line; std::getline(lines, line);) {
      if (line.find("#include") == std::string::npos) continue;
      const size_t begin = line.find_first_of("\"<") + 1;
      EXPECT_TRUE(names.count(line.substr(begin, line.find_first_of("\">", begin) - begin)))
          << header.name << ": " << line;
    }
  }
}

TEST_F(Jit, HeadersCompileEverywhereWithoutSpills) {
  NEEDS_NVRTC();
  for (const HeaderKernel& kernel : kHeaderKernels) {
    for (const char* architecture : kArchitectures) {
      SCOPED_TRACE(std::string(kernel.header) + " for sm_" + architecture);
      const Compiled compiled = compile_uncached({"probe", source_of(kernel), architecture, {}, ""});
      EXPECT_EQ(compiled.log.find("warning"), std::string::npos) << compiled.log;
      const auto found = resources(compiled.log);
      ASSERT_TRUE(found.count("probe")) << compiled.log;
      EXPECT_GT(found.at("probe").registers, 0);
      EXPECT_LE(found.at("probe").registers, kernel.registers);
      for (const auto& [function, of] : found) {
        EXPECT_EQ(of.spill_store_bytes + of.spill_load_bytes + of.stack_bytes, 0) << function;
      }
    }
  }
}

TEST_F(Jit, ResourcesAreThoseOfTheReport) {
  NEEDS_NVRTC();
  // More values live at once than registers are allowed, an array indexed at run time, shared memory.
  const Program spills{"probe",
                       "extern \"C\" __global__ void spilling(float* out, int n) {\n"
                       "  float x[96];\n#pragma unroll\n  for (int i = 0; i < 96; ++i) x[i] = out[i * n];\n"
                       "  __syncthreads();\n"
                       "#pragma unroll\n  for (int i = 0; i < 96; ++i) out[i * n + 1] = x[95 - i] * x[i];\n}\n"
                       "extern \"C\" __global__ void sharing(float* out) {\n"
                       "  __shared__ float x[256];\n  x[threadIdx.x] = out[threadIdx.x];\n  __syncthreads();\n"
                       "  out[threadIdx.x] = x[255 - threadIdx.x];\n}\n",
                       "80",
                       {"--maxrregcount=32"},
                       ""};
  const auto found = resources(compile_uncached(spills).log);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_GT(found.at("spilling").spill_store_bytes, 0);
  EXPECT_GT(found.at("spilling").spill_load_bytes, 0);
  EXPECT_GT(found.at("spilling").stack_bytes, 0);
  EXPECT_LE(found.at("spilling").registers, 32);
  EXPECT_EQ(found.at("spilling").shared_bytes, 0);
  EXPECT_EQ(found.at("sharing").shared_bytes, 1024);
  EXPECT_EQ(found.at("sharing").spill_store_bytes, 0);
}

TEST_F(Jit, SelfContainedSourceHasEachHeaderOnce) {
  const std::string text =
      self_contained("#include \"cuda/device/bulk.cuh\"\n#include <cstdint>\n#include <other>\nint x;");
  EXPECT_EQ(text.find("class Arrival"), text.rfind("class Arrival"));
  EXPECT_EQ(text.find("using uint32_t"), text.rfind("using uint32_t"));
  EXPECT_NE(text.find("using uint32_t"), std::string::npos);
  EXPECT_NE(text.find("#include <other>\nint x;"), std::string::npos);
  EXPECT_EQ(text.find("#include <cstdint>"), std::string::npos);
  NEEDS_NVRTC();
  for (const HeaderKernel& kernel : kHeaderKernels) {
    EXPECT_EQ(compile_uncached({"probe", self_contained(source_of(kernel)), "90a", {}, ""}).cubin,
              compile_uncached({"probe", source_of(kernel), "90a", {}, ""}).cubin);
  }
}

// --- the disk cache -----------------------------------------------------------------------------------------------

const Digest kKey = sha256("key"), kOther = sha256("other key");

TEST_F(Jit, StoredIsLoaded) {
  const DiskCache cache(folder_, 1 << 20);
  EXPECT_EQ(cache.load(kKey, "80"), std::nullopt);
  std::string cubin(3000, '\0');
  for (size_t i = 0; i < cubin.size(); ++i) cubin[i] = static_cast<char>(i * i);
  cache.store(kKey, "80", cubin);
  EXPECT_EQ(cache.load(kKey, "80"), cubin);
  EXPECT_EQ(cache.load(kOther, "80"), std::nullopt);
  EXPECT_EQ(cache.load(kKey, "90a"), std::nullopt);
  struct stat status{};
  ASSERT_EQ(::stat(folder_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0700u);
  ASSERT_EQ(::stat(only_file().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
}

TEST_F(Jit, DamagedEntriesAreNothing) {
  const DiskCache cache(folder_, 1 << 20);
  const std::string cubin = "a cubin of some length";
  cache.store(kKey, "80", cubin);
  const std::string file = only_file();
  const std::string good = read(file);
  const auto rejected = [&](const std::string& bytes) {
    const int64_t before = rejected_entries();
    write(file, bytes);
    const auto loaded = cache.load(kKey, "80");
    return !loaded && rejected_entries() == before + 1;
  };
  for (size_t length = 0; length < good.size(); ++length) EXPECT_TRUE(rejected(good.substr(0, length))) << length;
  EXPECT_TRUE(rejected(good + "x"));
  for (size_t i = 0; i < good.size(); ++i) {
    std::string flipped = good;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    EXPECT_TRUE(rejected(flipped)) << i;
  }
  EXPECT_TRUE(rejected(std::string(good.size(), '\0')));
  EXPECT_TRUE(rejected(std::string(100, '\xff')));
  write(file, good);
  EXPECT_EQ(cache.load(kKey, "80"), cubin);

  // Swapped with another.
  cache.store(kOther, "80", "the other cubin");
  std::string other;
  for (const std::string& name : files()) {
    if (folder_ + "/" + name != file) other = folder_ + "/" + name;
  }
  const std::string content = read(other);
  write(other, read(file));
  EXPECT_TRUE(rejected(content));
  EXPECT_EQ(cache.load(kOther, "80"), std::nullopt);
  // What is stored again replaces it.
  cache.store(kKey, "80", cubin);
  EXPECT_EQ(cache.load(kKey, "80"), cubin);
}

TEST_F(Jit, EntriesThatAreNoFileOfOursAreNothing) {
  const DiskCache cache(folder_, 1 << 20);
  cache.store(kKey, "80", "cubin");
  const std::string file = only_file(), away = root_ + "/away";
  const auto refused = [&] {
    const int64_t before = rejected_entries();
    const bool nothing = !cache.load(kKey, "80");
    return nothing && rejected_entries() == before + 1;
  };
  // A link would let the content change between two looks.
  ASSERT_EQ(::rename(file.c_str(), away.c_str()), 0);
  ASSERT_EQ(::symlink(away.c_str(), file.c_str()), 0);
  EXPECT_TRUE(refused());
  ASSERT_EQ(::unlink(file.c_str()), 0);
  // A pipe would hold the process up.
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  EXPECT_TRUE(refused());
  cache.store(kKey, "80", "cubin");
  EXPECT_EQ(cache.load(kKey, "80"), "cubin");
  // Others may write to it.
  ASSERT_EQ(::chmod(file.c_str(), 0622), 0);
  EXPECT_TRUE(refused());
  cache.store(kKey, "80", "cubin");
  EXPECT_EQ(cache.load(kKey, "80"), "cubin");
  if (::geteuid() != 0) return;
  // It belongs to another.
  ASSERT_EQ(::chown(file.c_str(), 65534, 65534), 0);
  EXPECT_TRUE(refused());
  cache.store(kKey, "80", "cubin");
  EXPECT_EQ(cache.load(kKey, "80"), "cubin");
}

TEST_F(Jit, FolderOfAnotherOrOpenToOthersIsNotUsed) {
  const DiskCache cache(folder_, 1 << 20);
  cache.store(kKey, "80", "cubin");
  CountWarnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (const mode_t mode : {0770, 0707, 0702, 01777}) {
    ASSERT_EQ(::chmod(folder_.c_str(), mode), 0);
    EXPECT_EQ(cache.load(kKey, "80"), std::nullopt);
    cache.store(kOther, "80", "cubin");
    EXPECT_EQ(files().size(), 1u);
    EXPECT_THROW(cache.info(), c10::Error);
    EXPECT_THROW(cache.clear(), c10::Error);
  }
  EXPECT_EQ(warnings.count, 1) << warnings.text;
  EXPECT_NE(warnings.text.find("no other user may write to it, but its mode is 0770"), std::string::npos)
      << warnings.text;
  ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
  EXPECT_EQ(cache.load(kKey, "80"), "cubin");
  if (::geteuid() != 0) return;
  ASSERT_EQ(::chown(folder_.c_str(), 65534, 65534), 0);
  EXPECT_EQ(cache.load(kKey, "80"), std::nullopt);
  EXPECT_THROW(cache.info(), c10::Error);
}

void set_age(const std::string& path, int64_t seconds) {
  const timespec then{::time(nullptr) - seconds, 0};
  const timespec times[2] = {then, then};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

TEST_F(Jit, LeastRecentlyUsedGoFirst) {
  const DiskCache cache(folder_, 5000);
  const std::string cubin(1000, 'x');
  std::vector<Digest> keys;
  for (int i = 0; i < 4; ++i) {
    keys.push_back(sha256(std::to_string(i)));
    cache.store(keys[i], "80", cubin);
    set_age(folder_ + "/" + (hex(keys[i]) + ".sm_80.cubin"), 1000 - 100 * i);
  }
  write(folder_ + "/somebody's", std::string(9000, 'y'));
  EXPECT_TRUE(cache.load(keys[0], "80"));  // now the last used
  keys.push_back(sha256("4"));
  cache.store(keys[4], "80", cubin);
  EXPECT_TRUE(cache.load(keys[0], "80"));
  EXPECT_FALSE(cache.load(keys[1], "80"));
  for (int i = 2; i <= 4; ++i) EXPECT_TRUE(cache.load(keys[i], "80")) << i;
  EXPECT_TRUE(exists(folder_ + "/somebody's"));
  // One that is larger than the limit stays until the next comes.
  cache.store(kKey, "80", std::string(6000, 'z'));
  EXPECT_TRUE(cache.load(kKey, "80"));
  EXPECT_EQ(cache.info().architectures.at("sm_80").entries, 1);
}

TEST_F(Jit, LimitOfZeroKeepsNothing) {
  const DiskCache cache(folder_, 0);
  cache.store(kKey, "80", "cubin");
  EXPECT_EQ(cache.load(kKey, "80"), std::nullopt);
  EXPECT_FALSE(exists(folder_));
}

TEST_F(Jit, InfoAndClearSeeOnlyOurFiles) {
  const DiskCache cache(folder_, 1 << 20);
  EXPECT_EQ(cache.info().architectures.size(), 0u);
  EXPECT_EQ(cache.clear(), 0);
  cache.store(kKey, "80", "cubin");
  cache.store(kKey, "90a", "cubin");
  cache.store(kOther, "90a", "cubin");
  ASSERT_TRUE(cache.keep_source("kernel", "int x;"));
  const std::set<std::string> foreign{"README", "x.cubin", hex(kKey) + ".sm_.cubin",
                                      hex(kKey).substr(1) + ".sm_80.cubin"};
  for (const std::string& name : foreign) write(folder_ + "/" + name, "not ours");
  ASSERT_EQ(::mkdir((folder_ + "/tmp-folder").c_str(), 0700), 0);
  const auto info = cache.info();
  EXPECT_EQ(info.folder, folder_);
  EXPECT_EQ(info.limit, 1u << 20);
  ASSERT_EQ(info.architectures.size(), 2u);
  EXPECT_EQ(info.architectures.at("sm_80").entries, 1);
  EXPECT_EQ(info.architectures.at("sm_90a").entries, 2);
  EXPECT_EQ(info.architectures.at("sm_90a").bytes, 2 * (80 + 5u));
  EXPECT_EQ(info.other.entries, 1);
  EXPECT_EQ(cache.clear(), 4);
  std::set<std::string> left;
  for (const std::string& name : files()) left.insert(name);
  auto expected = foreign;
  expected.insert("tmp-folder");
  EXPECT_EQ(left, expected);
}

TEST_F(Jit, EnvironmentNamesFolderAndLimit) {
  const auto folder = [] { return DiskCache::from_environment().info().folder; };
  const std::string xdg = root_ + "/xdg", home = root_ + "/home";
  const char* saved_home = std::getenv("HOME");
  const char* saved_xdg = std::getenv("XDG_CACHE_HOME");
  const std::string home_before = saved_home == nullptr ? "" : saved_home;
  const std::string xdg_before = saved_xdg == nullptr ? "" : saved_xdg;
  ::setenv("XDG_CACHE_HOME", xdg.c_str(), 1);
  ::setenv("HOME", home.c_str(), 1);
  EXPECT_EQ(folder(), folder_);
  ::unsetenv("FUSEGRAD_CACHE_DIR");
  EXPECT_EQ(folder(), xdg + "/fusegrad");
  ::setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(folder(), home + "/.cache/fusegrad");
  DiskCache::from_environment().store(kKey, "80", "cubin");
  EXPECT_TRUE(DiskCache::from_environment().load(kKey, "80"));
  struct stat status{};
  ASSERT_EQ(::stat((home + "/.cache/fusegrad").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0700u);
  ::unsetenv("XDG_CACHE_HOME");
  ::unsetenv("HOME");
  EXPECT_THROW(folder(), c10::Error);
  if (saved_home != nullptr) ::setenv("HOME", home_before.c_str(), 1);
  if (saved_xdg != nullptr) ::setenv("XDG_CACHE_HOME", xdg_before.c_str(), 1);

  EXPECT_EQ(DiskCache::from_environment().info().limit, uint64_t{512} << 20);
  ::setenv("FUSEGRAD_CACHE_DIR", folder_.c_str(), 1);
  ::setenv("FUSEGRAD_CACHE_LIMIT_MIB", "3", 1);
  EXPECT_EQ(DiskCache::from_environment().info().limit, 3u << 20);
  for (const char* wrong : {"-1", "x", "3x", "1.5", "99999999999999999999"}) {
    ::setenv("FUSEGRAD_CACHE_LIMIT_MIB", wrong, 1);
    EXPECT_THROW(DiskCache::from_environment(), c10::ValueError) << wrong;
  }
}

// A process that is killed leaves whole entries, and temporary files that are removed when they are old.
TEST_F(Jit, KilledWriters) {
  const DiskCache cache(folder_, 64 << 20);
  std::mt19937 random(0);
  std::map<int, std::string> cubins;
  for (int i = 0; i < 3; ++i) cubins[i] = std::string((i + 1) << 18, static_cast<char>('a' + i));
  for (int round = 0; round < 30; ++round) {
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      for (int i = 0;; ++i) {
        cache.store(sha256(std::to_string(i % 3)), "80", cubins[i % 3]);
        if (i == 0 && ::write(ready[1], "x", 1) != 1) ::_exit(1);
      }
    }
    ::close(ready[1]);
    char byte;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 10000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(ready[0]);
    for (const auto& [i, cubin] : cubins) {
      const auto loaded = cache.load(sha256(std::to_string(i)), "80");
      EXPECT_TRUE(!loaded || *loaded == cubin);
    }
    EXPECT_TRUE(cache.load(sha256("0"), "80"));
  }
  write(folder_ + "/tmp-1-0123456789abcdef", "half");
  write(folder_ + "/tmp-2-0123456789abcdef", "half");
  set_age(folder_ + "/tmp-1-0123456789abcdef", 7200);
  cache.store(kKey, "80", "cubin");
  EXPECT_FALSE(exists(folder_ + "/tmp-1-0123456789abcdef"));
  EXPECT_TRUE(exists(folder_ + "/tmp-2-0123456789abcdef"));  // its process may be alive
}

// --- compilation through the caches
// -----------------------------------------------------------------------------------

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

// --- errors and what is told
// ------------------------------------------------------------------------------------------

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
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
    EXPECT_THROW(compile_uncached(program()), c10::ValueError) << wrong;
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
  EXPECT_NE(found[".log"].find("registers"), std::string::npos);
  ::setenv("FUSEGRAD_JIT_DUMP", "/dev/null/x", 1);
  EXPECT_NE(message_of([] { compile(program(2)); }).find("FUSEGRAD_JIT_DUMP must name a folder that can be written"),
            std::string::npos);
}

}  // namespace
}  // namespace fusegrad::jit
