// The disk cache: whatever happens to the folder, what is loaded is what was stored, or nothing.
#include <fcntl.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "jit/cache.h"
#include "jit_support.h"

namespace fusegrad::jit {
namespace {

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
    EXPECT_THROW(cache.info(), RuntimeError);
    EXPECT_THROW(cache.clear(), RuntimeError);
  }
  EXPECT_EQ(warnings.count, 1) << warnings.text;
  EXPECT_NE(warnings.text.find("no other user may write to it, but its mode is 0770"), std::string::npos)
      << warnings.text;
  ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
  EXPECT_EQ(cache.load(kKey, "80"), "cubin");
  if (::geteuid() != 0) return;
  ASSERT_EQ(::chown(folder_.c_str(), 65534, 65534), 0);
  EXPECT_EQ(cache.load(kKey, "80"), std::nullopt);
  EXPECT_THROW(cache.info(), RuntimeError);
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
  EXPECT_THROW(folder(), RuntimeError);
  if (saved_home != nullptr) ::setenv("HOME", home_before.c_str(), 1);
  if (saved_xdg != nullptr) ::setenv("XDG_CACHE_HOME", xdg_before.c_str(), 1);

  EXPECT_EQ(DiskCache::from_environment().info().limit, uint64_t{512} << 20);
  ::setenv("FUSEGRAD_CACHE_DIR", folder_.c_str(), 1);
  ::setenv("FUSEGRAD_CACHE_LIMIT_MIB", "3", 1);
  EXPECT_EQ(DiskCache::from_environment().info().limit, 3u << 20);
  for (const char* wrong : {"-1", "x", "3x", "1.5", "99999999999999999999"}) {
    ::setenv("FUSEGRAD_CACHE_LIMIT_MIB", wrong, 1);
    EXPECT_THROW(DiskCache::from_environment(), ValueError) << wrong;
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

}  // namespace
}  // namespace fusegrad::jit
