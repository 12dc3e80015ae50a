// What a graph is compiled to for the CPU: a list of vector instructions on registers, by how often they run.
#pragma once

#include <string>
#include <vector>

#include "score_mod/evaluate_cpu.h"
#include "score_mod/tile_kernels.h"

namespace fusegrad::score_mod {

/// How often a value is computed: once a tile, once for each column, row, or difference kv_idx - q_idx, or once a pair.
enum class Rate : uint8_t { kOnce, kColumn, kRow, kDiagonal, kPair };
inline constexpr int kRates = 5;
constexpr Rate join(Rate a, Rate b) { return a == b || b == Rate::kOnce ? a : a == Rate::kOnce ? b : Rate::kPair; }

/// Whether a value of such a rate differs along a row of the tile.
constexpr bool varies_in_a_row(Rate rate) { return rate != Rate::kOnce && rate != Rate::kRow; }

/// An array of as many lanes as its rate has values: 1, the columns, the rows, rows + columns - 1 (by ascending
/// difference, so that a row of the tile finds its values side by side), or the columns of one row at a time.
struct Register {
  Rate rate;
  Lane lane;
  int64_t position = 0;  ///< among the registers of its rate; those of kPair are used several times
};
using RegisterId = int32_t;
inline constexpr RegisterId kNoRegister = -1;

struct Instruction {
  // One of these is set.
  Kernel compute = nullptr;
  OffsetKernel offset = nullptr;
  GatherKernel gather = nullptr;
  int64_t extent = 0;     ///< a loop: `out` is its variable, and the instructions up to number `end` its body
  int copies = 0;         ///< 1: `out` is x[0]
  int fills = 0;          ///< 1: `out` is `value`
  int within = 0;         ///< 1: with `compute`, x[0] is checked to be in range of x[1]
  int contribution = -1;  ///< of a derivative: with the axes' values of now

  Rate rate = Rate::kOnce;
  RegisterId out = kNoRegister;
  RegisterId x[kMaxArity] = {kNoRegister, kNoRegister, kNoRegister};
  int64_t size = 0, stride = 0;  ///< of an offset's dimension
  int read = -1;                 ///< of a gather
  Storage storage{};             ///< what it reads
  size_t end = 0;
  Value value{};
};

/// A gather's or a contribution's place in a buffer; its indices to say which was wrong.
struct Read {
  int buffer;
  const void* data;
  RegisterId offset;  ///< kNoRegister: the sum of the next two, of which `column` may be adjacent elements
  std::vector<RegisterId> index;
  RegisterId row = kNoRegister, column = kNoRegister;
  Kernel add = nullptr;  ///< of one row's offset and the columns'

  bool by_rows() const { return offset == kNoRegister; }
};

struct ProgramContribution {
  int buffer;
  int read;  ///< its place in the dense gradient
  RegisterId value;
  bool in_loops;  ///< made by an instruction, not once a row
};

/// A register that has its value before anything runs.
struct Preset {
  RegisterId out;
  Value value;
};

template <class T>
struct TileProgram<T>::Code {
  std::vector<Register> registers;
  std::vector<Instruction> instructions[kRates];
  std::vector<Preset> presets;
  RegisterId input[kInputCount];  ///< kNoRegister where the graph does not use it
  // q_idx and kv_idx where only their difference matters: the tile's first row, and one kv_idx for each difference.
  RegisterId diagonal_q = kNoRegister, diagonal_kv = kNoRegister;
  std::vector<Read> reads;
  std::vector<std::vector<int64_t>> sizes;  ///< of each buffer
  RegisterId result;
  std::vector<ProgramContribution> contributions;
  int64_t register_count[kRates] = {};  ///< positions
  // The first so many instructions at kPair depend on neither a pair's inputs nor b, and on no loop; their registers
  // that anything else reads. There are none where that would spare neither a gather nor a contribution's places.
  size_t kept_instructions = 0;
  std::vector<RegisterId> kept;
  Kind kind;
};

}  // namespace fusegrad::score_mod
