// Cubins on the disk, shared by all processes of a user. No lock is needed: an entry is written to a temporary file and
// renamed, so others see all of it or nothing, and what is read is checked: whatever is in the folder, the worst
// that can come of it is another compilation.
//
// A file is <key>.sm_<architecture>.cubin: "FUSEGRAD", the key (32 bytes), the cubin's length (8, little endian) and
// its SHA-256 (32), the cubin.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "jit/sha256.h"

namespace fusegrad::jit {

class DiskCache {
 public:
  /// A folder of the user's own. It is made (mode 0700) at the first store.
  DiskCache(std::string folder, uint64_t limit_bytes) : folder_(std::move(folder)), limit_(limit_bytes) {}

  /// FUSEGRAD_CACHE_DIR, else $XDG_CACHE_HOME/fusegrad, else ~/.cache/fusegrad; FUSEGRAD_CACHE_LIMIT_MIB (512; 0: no
  /// cache at all). Throws where the limit is no number.
  static DiskCache from_environment();

  /// What was stored, or nothing. An entry that is cut, altered, of another key or another user counts as rejected
  /// and is nothing. Marks the entry as used.
  std::optional<std::string> load(const Digest& key, std::string_view architecture) const;

  /// Keeps `cubin`, then removes the entries that were not used for longest until all fit the limit (the new one
  /// stays). Where that cannot be done it warns, once a process, and the entry is not there.
  void store(const Digest& key, std::string_view architecture, std::string_view cubin) const;

  /// Keeps a source that did not compile: its path, or nothing where that cannot be done.
  std::optional<std::string> keep_source(const std::string& name, std::string_view source) const;

  struct Usage {
    int64_t entries = 0;
    uint64_t bytes = 0;
  };
  struct Info {
    std::string folder;
    uint64_t limit = 0;
    std::map<std::string, Usage> architectures;  // "sm_90a"
    Usage other;                                 // of ours: kept sources, what killed processes left
  };
  /// Throws where the folder must not be used or cannot be read.
  Info info() const;

  /// Removes our files and no others; returns how many. Throws where the folder must not be used.
  int64_t clear() const;

 private:
  class Folder;

  std::string folder_;  // empty: none
  uint64_t limit_;
};

/// As mkdir -p, mode 0700; the errno of the last folder, 0 if it was made.
int make_folders(const std::string& path);

/// Entries that load() found and did not take, since the process began.
int64_t rejected_entries();

}  // namespace fusegrad::jit
