// From a program to its cubin: from this process's memory, from the disk, or by NVRTC. Needs no GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "jit/nvrtc.h"
#include "jit/program.h"

namespace fusegrad::jit {

using Cubin = std::shared_ptr<const std::string>;

/// The cubin of a program. Threads that ask for the same one wait for a single compilation. Throws where NVRTC is not
/// there or the program is wrong, with its name, architecture, score_mod, the file where its source was left, and the
/// compiler's log; and in a child that was forked while another thread compiled, where NVRTC would never return.
Cubin compile(const Program& program);

/// Begins compile(program) on a thread of its own: whoever asks for the program later finds it done, or waits for less.
/// What goes wrong is told to who asks for it. The process waits for such threads at its end.
void compile_ahead(Program program);

/// As above, past all caches, with the compiler's log.
Compiled compile_uncached(const Program& program);

/// Since the process began.
struct Stats {
  int64_t compilations = 0, disk_hits = 0, memory_hits = 0;
  int64_t rejected = 0;  // entries of the disk cache that were not taken
};
Stats stats();

/// Forgets the cubins in this process's memory.
void forget();

}  // namespace fusegrad::jit
