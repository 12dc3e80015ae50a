#include "jit/cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "common/error.h"
#include "jit/front_end.h"
#include "jit/program.h"

namespace fusegrad::jit {
namespace {

constexpr std::string_view kMagic = "FUSEGRAD";
constexpr size_t kHeaderBytes = 8 + 32 + 8 + 32;
constexpr std::string_view kSuffix = ".cubin", kTemporary = "tmp-", kFailed = "failed-";
constexpr int64_t kStaleSeconds = 3600;  // after which a temporary file is one that a killed process left

std::atomic<int64_t> rejected{0};

// Only the process's first trouble with a folder is told: the next kernels would all tell the same.
void warn_once(const std::string& folder, const std::string& why) {
  static std::mutex mutex;
  static std::set<std::string> warned;
  {
    const std::lock_guard lock(mutex);
    if (!warned.insert(folder).second) return;
  }
  warn("fusegrad: compiled kernels are not kept in the cache folder " + folder + ": " + why +
       ". Each process compiles its own. FUSEGRAD_CACHE_DIR names another folder.");
}

std::string error_text() { return std::strerror(errno); }

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

  bool write_all(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    return true;
  }
  bool read_all(std::string& bytes) const {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t got = ::read(descriptor_, bytes.data() + at, bytes.size() - at);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      at += static_cast<size_t>(got);
    }
    return true;
  }

 private:
  int descriptor_;
};

std::string header_of(const Digest& key, std::string_view cubin) {
  std::string header(kMagic);
  header.append(key.begin(), key.end());
  for (int i = 0; i < 8; ++i) header += static_cast<char>(cubin.size() >> (8 * i));
  const Digest sum = sha256(cubin);
  return header.append(sum.begin(), sum.end());
}

std::string entry_name(const Digest& key, std::string_view architecture) {
  return hex(key) + ".sm_" + std::string(architecture) + std::string(kSuffix);
}

// "sm_90a" of an entry's name; nothing if it is not one.
std::string_view architecture_of(std::string_view name) {
  constexpr size_t kKey = 64, kPrefix = 4;
  if (name.size() < kKey + kPrefix + kSuffix.size() || !name.ends_with(kSuffix)) return {};
  const std::string_view key = name.substr(0, kKey), rest = name.substr(kKey, name.size() - kKey - kSuffix.size());
  const bool ours = key.find_first_not_of("0123456789abcdef") == std::string_view::npos && rest.starts_with(".sm_") &&
                    is_architecture(rest.substr(kPrefix));
  return ours ? rest.substr(1) : std::string_view();
}
bool is_ours(std::string_view name) {
  return name.starts_with(kTemporary) || (name.starts_with(kFailed) && name.ends_with(".cu")) ||
         !architecture_of(name).empty();
}

std::string random_suffix() {
  std::random_device device;
  Digest words{};
  for (uint8_t& byte : words) byte = static_cast<uint8_t>(device());
  return std::to_string(::getpid()) + "-" + hex(words).substr(0, 16);
}

struct Listed {
  std::string name;
  uint64_t bytes;
  timespec used;
};

}  // namespace

// The opened folder: what was checked is what is used, whatever is renamed meanwhile.
class DiskCache::Folder {
 public:
  Folder(const std::string& path, bool make) : file_(open(path, make)) {
    if (!file_) {
      missing_ = errno == ENOENT;
      why_ = path.empty() ? "there is no home folder (HOME, XDG_CACHE_HOME)" : "it cannot be opened: " + error_text();
      return;
    }
    struct stat status{};
    if (::fstat(file_.get(), &status) != 0) {
      why_ = error_text();
    } else if (status.st_uid != ::geteuid()) {
      why_ =
          "it must belong to user " + std::to_string(::geteuid()) + ", but belongs to " + std::to_string(status.st_uid);
    } else if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
      char mode[8];
      std::snprintf(mode, sizeof mode, "%04o", static_cast<unsigned>(status.st_mode & 07777));
      why_ = "no other user may write to it, but its mode is " + std::string(mode) + " (chmod 700 mends it)";
    }
  }
  bool usable() const { return why_.empty(); }
  bool missing() const { return missing_; }
  const std::string& why() const { return why_; }
  int get() const { return file_.get(); }

  // All of our files; nothing, with errno, where the folder cannot be read.
  std::optional<std::vector<Listed>> list() const {
    // A descriptor of its own: closedir closes it, and the position in the folder is its own too.
    const int descriptor = ::openat(get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return {};
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(::fdopendir(descriptor), ::closedir);
    if (folder == nullptr) {
      const int error = errno;
      ::close(descriptor);
      errno = error;
      return {};
    }
    std::vector<Listed> found;
    while (true) {
      errno = 0;
      const dirent* entry = ::readdir(folder.get());
      if (entry == nullptr && errno != 0) return {};
      if (entry == nullptr) return found;
      struct stat status{};
      // Another process may have removed it meanwhile.
      if (!is_ours(entry->d_name) || ::fstatat(get(), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
      if (S_ISDIR(status.st_mode)) continue;
      found.push_back({entry->d_name, static_cast<uint64_t>(status.st_size), status.st_mtim});
    }
  }
  // The same; throws where the folder cannot be read.
  std::vector<Listed> list_or_throw(const std::string& path) const {
    auto found = list();
    FUSEGRAD_CHECK(RuntimeError, found.has_value(), "jit: the cache folder ", path, " cannot be read: ", error_text());
    return *std::move(found);
  }
  bool remove(const std::string& name) const { return ::unlinkat(get(), name.c_str(), 0) == 0; }

  // Puts a file in its place at once. False with errno.
  bool put(const std::string& name, std::initializer_list<std::string_view> parts) const {
    const std::string temporary = std::string(kTemporary) + random_suffix();
    bool written = false;
    {
      const File file(::openat(get(), temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
      if (!file) return false;
      written = std::all_of(parts.begin(), parts.end(), [&](std::string_view part) { return file.write_all(part); });
      // Before the rename: after a crash of the machine the name must not stand for an empty file.
      written = written && ::fsync(file.get()) == 0;
    }
    if (written && ::renameat(get(), temporary.c_str(), get(), name.c_str()) == 0) return true;
    const int error = errno;
    remove(temporary);
    errno = error;
    return false;
  }

  // Brings our files below the limit, oldest use first, but keeps `newest`.
  void shrink(uint64_t limit, const std::string& newest) const {
    // What cannot be listed is not removed: the next store tries again.
    std::vector<Listed> files = list().value_or(std::vector<Listed>());
    const time_t now = ::time(nullptr);
    uint64_t total = 0;
    for (const Listed& file : files) {
      const bool temporary = file.name.starts_with(kTemporary);
      if (temporary && now - file.used.tv_sec > kStaleSeconds) remove(file.name);
      if (!temporary) total += file.bytes;
    }
    if (total <= limit) return;
    std::sort(files.begin(), files.end(), [](const Listed& a, const Listed& b) {
      return std::pair(a.used.tv_sec, a.used.tv_nsec) < std::pair(b.used.tv_sec, b.used.tv_nsec);
    });
    for (const Listed& file : files) {
      if (total <= limit) return;
      if (file.name == newest || file.name.starts_with(kTemporary)) continue;
      // Another process may have removed it first.
      if (remove(file.name) || errno == ENOENT) total -= file.bytes;
    }
  }

 private:
  static int open(const std::string& path, bool make) {
    if (path.empty()) {
      errno = ENOENT;
      return -1;
    }
    const int not_made = make ? make_folders(path) : 0;
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0 && not_made != 0 && not_made != EEXIST) errno = not_made;
    return descriptor;
  }

  File file_;
  bool missing_ = false;
  std::string why_;
};

DiskCache DiskCache::from_environment() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text == nullptr ? "" : text);
  };
  std::string folder = value("FUSEGRAD_CACHE_DIR");
  if (folder.empty()) {
    const std::string xdg = value("XDG_CACHE_HOME"), home = value("HOME");
    if (xdg.starts_with('/')) {  // a relative one is invalid, and to be ignored
      folder = xdg + "/fusegrad";
    } else if (!home.empty()) {
      folder = home + "/.cache/fusegrad";
    }
  }
  uint64_t limit = 512;
  if (const std::string text = value("FUSEGRAD_CACHE_LIMIT_MIB"); !text.empty()) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), limit);
    FUSEGRAD_CHECK(ValueError, error == std::errc() && end == text.data() + text.size() && limit < (1u << 30),
                   "jit: FUSEGRAD_CACHE_LIMIT_MIB must be a whole number of MiB, 0 or more, but got '", text, "'");
  }
  return {folder, limit << 20};
}

std::optional<std::string> DiskCache::load(const Digest& key, std::string_view architecture) const {
  if (limit_ == 0) return {};
  const Folder folder(folder_, false);
  if (!folder.usable()) {
    if (!folder.missing()) warn_once(folder_, folder.why());
    return {};
  }
  // O_NONBLOCK: a pipe of that name must not hold the process up.
  const File file(
      ::openat(folder.get(), entry_name(key, architecture).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file) {
    if (errno != ENOENT) ++rejected;
    return {};
  }
  struct stat status{};
  constexpr int64_t kMost = int64_t{1} << 30;
  std::string bytes;
  const bool readable = ::fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == ::geteuid() &&
                        (status.st_mode & (S_IWGRP | S_IWOTH)) == 0 &&
                        status.st_size > static_cast<int64_t>(kHeaderBytes) && status.st_size <= kMost;
  if (readable) bytes.resize(static_cast<size_t>(status.st_size));
  const std::string_view cubin = std::string_view(bytes).substr(std::min(bytes.size(), kHeaderBytes));
  if (!readable || !file.read_all(bytes) || bytes.compare(0, kHeaderBytes, header_of(key, cubin)) != 0) {
    ++rejected;
    return {};
  }
  // The file's time is that of its last use. It cannot be set in a folder that is not writable: nothing is evicted
  // there.
  ::futimens(file.get(), nullptr);
  return bytes.substr(kHeaderBytes);
}

void DiskCache::store(const Digest& key, std::string_view architecture, std::string_view cubin) const {
  if (limit_ == 0) return;
  const Folder folder(folder_, true);
  const std::string name = entry_name(key, architecture);
  if (!folder.usable()) {
    warn_once(folder_, folder.why());
  } else if (folder.put(name, {header_of(key, cubin), cubin})) {
    folder.shrink(limit_, name);
  } else if (errno != ENOENT) {  // that: another process cleared the cache between the writing and the renaming
    warn_once(folder_, "it cannot be written: " + error_text());
  }
}

std::optional<std::string> DiskCache::keep_source(const std::string& name, std::string_view source) const {
  if (limit_ == 0) return {};
  const Folder folder(folder_, true);
  const std::string file = std::string(kFailed) + name + ".cu";
  if (!folder.usable() || !folder.put(file, {source})) return {};
  folder.shrink(limit_, file);
  return folder_ + "/" + file;
}

DiskCache::Info DiskCache::info() const {
  Info result{folder_, limit_, {}, {}};
  const Folder folder(folder_, false);
  if (folder.missing() && !folder_.empty()) return result;
  FUSEGRAD_CHECK(RuntimeError, folder.usable(), "jit: the cache folder ", folder_, " is not used: ", folder.why());
  for (const Listed& file : folder.list_or_throw(folder_)) {
    const std::string architecture(architecture_of(file.name));
    Usage& usage = architecture.empty() ? result.other : result.architectures[architecture];
    ++usage.entries;
    usage.bytes += file.bytes;
  }
  return result;
}

int64_t DiskCache::clear() const {
  const Folder folder(folder_, false);
  if (folder.missing() && !folder_.empty()) return 0;
  FUSEGRAD_CHECK(RuntimeError, folder.usable(), "jit: the cache folder ", folder_, " is not used: ", folder.why());
  int64_t removed = 0;
  for (const Listed& file : folder.list_or_throw(folder_)) {
    const bool gone = folder.remove(file.name);
    FUSEGRAD_CHECK(RuntimeError, gone || errno == ENOENT, "jit: ", folder_, "/", file.name,
                   " cannot be removed: ", error_text());
    removed += gone ? 1 : 0;
  }
  return removed;
}

int make_folders(const std::string& path) {
  for (size_t at = path.find('/', 1);; at = path.find('/', at + 1)) {
    const bool made = ::mkdir(path.substr(0, at).c_str(), 0700) == 0;
    if (at == std::string::npos) return made ? 0 : errno;
  }
}

int64_t rejected_entries() { return rejected; }

}  // namespace fusegrad::jit
