#include "score_mod/evaluate_cpu.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "common/division.h"
#include "score_mod/tile_program.h"

namespace fusegrad::score_mod {
namespace {

// Uninitialised and aligned for every instruction set.
class Arena {
 public:
  static constexpr int64_t kAlignment = 64;
  static int64_t padded(int64_t bytes) { return round_up(bytes, kAlignment); }

  void allocate(int64_t bytes) {
    data_.reset(static_cast<std::byte*>(
        ::operator new(static_cast<size_t>(std::max<int64_t>(bytes, 1)), std::align_val_t{kAlignment})));
  }
  std::byte* data() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<std::byte, Delete> data_;
};

void store(void* out, Lane lane, const Value& value) {
  switch (lane) {
    case Lane::kFloat32:
      *static_cast<float*>(out) = static_cast<float>(value.f);
      break;
    case Lane::kFloat64:
      *static_cast<double*>(out) = value.f;
      break;
    case Lane::kInt32:
      *static_cast<int32_t*>(out) = static_cast<int32_t>(std::clamp<int64_t>(value.i, INT32_MIN, INT32_MAX));
      break;
    case Lane::kInt64:
      *static_cast<int64_t*>(out) = value.i;
      break;
    default:
      *static_cast<uint8_t*>(out) = value.i != 0;
  }
}

void fill(void* out, Lane lane, const Value& value, int64_t lanes) {
  if (lanes <= 0) return;
  store(out, lane, value);
  const int64_t bytes = lane_bytes(lane);
  for (int64_t i = 1; i < lanes; ++i)
    std::memcpy(static_cast<std::byte*>(out) + i * bytes, out, static_cast<size_t>(bytes));
}

int64_t load_integer(const void* data, Lane lane, int64_t i) {
  return lane == Lane::kInt32 ? static_cast<const int32_t*>(data)[i] : static_cast<const int64_t*>(data)[i];
}

}  // namespace

template <class T>
struct TileEvaluator<T>::State {
  using Code = typename TileProgram<T>::Code;
  static constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

  const Code& code;
  const TileKernels& kernels = tile_kernels();
  const ScatterKernels<T>& scatters;
  int64_t max_rows, max_cols;
  Arena arena;
  std::vector<std::byte*> home;     // of each register
  std::vector<std::byte*> address;  // where it has its values now: there, or in the caller's memory
  std::vector<int64_t> places;      // a row of offsets
  std::vector<bool> adjacent;       // of each read by rows: its columns in this tile
  std::vector<T> scratch;           // a row of values
  // What is kept of a tile for those that differ in b alone: where each row of a register has its values, and room.
  bool keeping = false;  // asked for
  bool kept = false;     // of kept_tile, all of whose reads were in range
  Tile kept_tile{};
  std::vector<std::byte*> kept_rows;  // of each kept register, max_rows
  Arena kept_room;
  // For each contribution whose places are kept: what they were given since the last flush, in tiles.
  static constexpr int kMostAdded = 32;  // then float32 is rounded
  int added = 0;
  std::vector<int> kept_place;  // of each contribution: which of the kept registers has its places, or -1
  std::vector<T> kept_sums;
  std::vector<T> array_sums;  // of each contribution at kColumn or kDiagonal
  std::vector<double> sums;   // of each contribution at kOnce
  OutOfRange wrong;
  int64_t wrong_places = 0;  // rows of the tile in work with places out of range, of pairs that take no part too

  // The tile in work's.
  Tile tile{};
  Rectangle<const uint8_t> mask;
  int64_t row = 0;
  std::span<const GradientSink<T>> sinks;

  State(const Code& code, int64_t max_rows, int64_t max_cols)
      : code(code), scatters(scatter_kernels()), max_rows(max_rows), max_cols(max_cols) {
    const int64_t lanes[kRates] = {1, max_cols, max_rows, max_rows + max_cols, max_cols};
    int64_t begin[kRates + 1] = {0};
    for (int rate = 0; rate < kRates; ++rate) {
      begin[rate + 1] = begin[rate] + code.register_count[rate] * Arena::padded(8 * lanes[rate]);
    }
    arena.allocate(begin[kRates]);
    for (const Register& r : code.registers) {
      const int rate = static_cast<int>(r.rate);
      home.push_back(arena.data() + begin[rate] + r.position * Arena::padded(8 * lanes[rate]));
    }
    address = home;
    places.resize(static_cast<size_t>(max_cols));
    adjacent.resize(code.reads.size());
    for (const Preset& p : code.presets) store(address[p.out], code.registers[p.out].lane, p.value);
    scratch.resize(static_cast<size_t>(max_cols));
    array_sums.resize(code.contributions.size() * static_cast<size_t>(max_rows + max_cols));
    sums.resize(code.contributions.size());
  }

  static const ScatterKernels<T>& scatter_kernels() {
    if constexpr (std::is_same_v<T, float>) {
      return tile_kernels().float32;
    } else {
      return tile_kernels().float64;
    }
  }

  // A register's values as an instruction or a reader at `rate` sees them; at kPair those of the current row.
  const void* values(RegisterId id, Rate rate) const {
    const Register& r = code.registers[id];
    if (rate != Rate::kPair) return address[id];
    if (r.rate == Rate::kRow) return address[id] + row * lane_bytes(r.lane);
    if (r.rate == Rate::kDiagonal) return address[id] + (tile.rows - 1 - row) * lane_bytes(r.lane);
    return address[id];
  }
  T* array_sum(size_t k) { return &array_sums[k * static_cast<size_t>(max_rows + max_cols)]; }
  int64_t diagonals() const { return tile.rows + tile.cols - 1; }

  void run(Rate rate, int64_t lanes) { run(rate, lanes, 0, code.instructions[static_cast<int>(rate)].size()); }
  // A row of pairs.
  void run_row() {
    size_t first = 0;
    if (keeping) {
      first = code.kept_instructions;
      keep_row();
    }
    const auto last = code.instructions[static_cast<int>(Rate::kPair)].size();
    run(Rate::kPair, tile.cols, first, last);
  }

  // --- what is kept ---

  void keep() {
    if (keeping || code.kept_instructions == 0) return;
    keeping = true;
    kept_rows.resize(code.kept.size() * static_cast<size_t>(max_rows));
    kept_room.allocate(static_cast<int64_t>(kept_rows.size()) * Arena::padded(8 * max_cols));
    bool sums = false;
    for (const ProgramContribution& c : code.contributions) {
      const auto found = std::find(code.kept.begin(), code.kept.end(), code.reads[c.read].offset);
      const bool pair = found != code.kept.end() && code.registers[*found].rate == Rate::kPair;
      kept_place.push_back(pair ? static_cast<int>(found - code.kept.begin()) : -1);
      sums = sums || pair;
    }
    if (sums) kept_sums.resize(code.contributions.size() * static_cast<size_t>(max_rows * max_cols));
  }
  std::byte*& kept_row(size_t i, int64_t of_row) { return kept_rows[i * static_cast<size_t>(max_rows) + of_row]; }
  T* kept_sum(size_t k, int64_t of_row) {
    return &kept_sums[(k * static_cast<size_t>(max_rows) + static_cast<size_t>(of_row)) *
                      static_cast<size_t>(max_cols)];
  }
  bool same_pairs(const Tile& t) const {
    return t.h == kept_tile.h && t.q == kept_tile.q && t.kv == kept_tile.kv && t.rows == kept_tile.rows &&
           t.cols == kept_tile.cols;
  }
  void keep_row() {
    if (!kept) {
      for (const RegisterId id : code.kept) address[id] = home[id];
      run(Rate::kPair, tile.cols, 0, code.kept_instructions);
    }
    for (size_t i = 0; i < code.kept.size(); ++i) {
      const auto id = static_cast<size_t>(code.kept[i]);
      auto*& there = kept_row(i, row);
      if (!kept) {
        there = address[id];
        if (there == home[id]) {
          there = kept_room.data() + static_cast<int64_t>(&there - kept_rows.data()) * Arena::padded(8 * max_cols);
          std::memcpy(there, address[id], static_cast<size_t>(tile.cols * lane_bytes(code.registers[id].lane)));
        }
      }
      address[id] = there;
    }
  }
  // After all rows of a tile.
  void finish_kept() {
    if (!keeping) return;
    kept = wrong_places == 0;
    kept_tile = tile;
  }
  void flush(std::span<const GradientSink<T>> to) {
    if (added == 0) return;
    added = 0;
    sinks = to;
    for (size_t k = 0; k < code.contributions.size(); ++k) {
      if (kept_place[k] < 0 || !wanted(k)) continue;
      const GradientSink<T> sink = sink_of(k);
      const Lane lane = code.registers[code.kept[static_cast<size_t>(kept_place[k])]].lane;
      for (int64_t r = 0; r < kept_tile.rows; ++r) {
        T* sum = kept_sum(k, r);
        scatters.scatter(sink.sum, sink.wide_sum, kept_row(static_cast<size_t>(kept_place[k]), r), lane, sum,
                         kept_tile.cols);
        std::fill_n(sum, kept_tile.cols, T(0));
      }
    }
  }
  // Instructions of a list, whose values have so many lanes. Within loops some have one: those that do not differ, and
  // of pairs those of the row.
  void run(Rate rate, int64_t all_lanes, size_t begin, size_t end) {
    const auto& instructions = code.instructions[static_cast<int>(rate)];
    for (size_t i = begin; i < end; ++i) {
      const Instruction& instruction = instructions[i];
      if (instruction.contribution >= 0) {
        const auto k = static_cast<size_t>(instruction.contribution);
        if (wanted(k)) contribute(k, sink_of(k));
        continue;
      }
      void* out = const_cast<void*>(values(instruction.out, rate));
      const bool of_row = rate == Rate::kPair && instruction.rate == Rate::kRow;
      const int64_t lanes = of_row || instruction.rate == Rate::kOnce ? 1 : all_lanes;
      if (instruction.extent > 0) {
        for (int64_t at = 0; at < instruction.extent; ++at) {
          *static_cast<int32_t*>(out) = static_cast<int32_t>(at);
          run(rate, all_lanes, i + 1, instruction.end);
        }
        i = instruction.end - 1;
      } else if (instruction.fills != 0) {
        fill(out, code.registers[instruction.out].lane, instruction.value, lanes);
      } else if (instruction.copies != 0) {
        const auto bytes = lanes * lane_bytes(code.registers[instruction.out].lane);
        std::memcpy(out, values(instruction.x[0], rate), static_cast<size_t>(bytes));
      } else if (instruction.compute != nullptr) {
        const void* x[kMaxArity];
        for (int i = 0; i < kMaxArity; ++i) {
          x[i] = instruction.x[i] == kNoRegister ? nullptr : values(instruction.x[i], rate);
        }
        instruction.compute(out, x, lanes);
        if (instruction.within != 0) check_within(instruction, of_row ? Rate::kRow : instruction.rate, rate, lanes);
      } else if (instruction.offset != nullptr) {
        instruction.offset(out, values(instruction.x[0], rate), lanes, instruction.size, instruction.stride);
      } else if (code.reads[instruction.read].by_rows()) {
        gather_row(instruction);
      } else {
        const void* offset = values(instruction.x[0], rate);
        if (instruction.gather(out, code.reads[instruction.read].data, offset, lanes)) {
          if (of_row) {
            check_row(instruction.read);
          } else {
            check_read(instruction.read, instruction.rate, 0, lanes);
          }
        }
      }
    }
  }

  // The offset of the row at work's first column, where the columns are adjacent and all are in range; otherwise -1.
  int64_t first_place(int read_id) const {
    const Read& read = code.reads[read_id];
    if (!adjacent[static_cast<size_t>(read_id)]) return -1;
    const Lane lane = code.registers[read.row].lane;
    const int64_t row_offset = load_integer(values(read.row, Rate::kPair), lane, 0);
    return row_offset < 0 ? -1 : row_offset + load_integer(address[read.column], lane, 0);
  }
  // The offsets of the row at work.
  const void* row_places(const Read& read) {
    const void* x[kMaxArity] = {values(read.row, Rate::kPair), address[read.column]};
    read.add(places.data(), x, tile.cols);
    return places.data();
  }
  void find_adjacent() {
    for (size_t i = 0; i < code.reads.size(); ++i) {
      const Read& read = code.reads[i];
      if (!read.by_rows()) continue;
      const Lane lane = code.registers[read.column].lane;
      const int64_t first = load_integer(address[read.column], lane, 0);
      bool found = first >= 0;
      for (int64_t c = 1; found && c < tile.cols; ++c) found = load_integer(address[read.column], lane, c) == first + c;
      adjacent[i] = found;
    }
  }

  // Adjacent elements that lie in memory as registers hold them are not copied.
  void gather_row(const Instruction& instruction) {
    const Read& read = code.reads[instruction.read];
    const auto out = static_cast<size_t>(instruction.out);
    const int64_t first = first_place(instruction.read);
    address[out] = home[out];
    if (first >= 0) {
      auto* begin = static_cast<std::byte*>(const_cast<void*>(read.data)) + first * storage_bytes(instruction.storage);
      if (lies_as(instruction.storage, code.registers[instruction.out].lane)) {
        address[out] = begin;
      } else {
        instruction.gather(address[out], begin, nullptr, tile.cols);
      }
    } else if (instruction.gather(address[out], read.data, row_places(read), tile.cols)) {
      check_read(instruction.read, Rate::kPair, 0, tile.cols);
    }
  }

  // Whether a pair for which lane `i` of a register at `rate` is used takes part.
  bool takes_part(Rate rate, int64_t i) const {
    if (mask.data == nullptr) return true;
    const bool one_row = rate == Rate::kRow || rate == Rate::kPair;
    const int64_t row_begin = rate == Rate::kRow ? i : rate == Rate::kPair ? row : 0;
    const int64_t row_end = one_row ? row_begin + 1 : tile.rows;
    for (int64_t r = row_begin; r < row_end; ++r) {
      const bool all = rate == Rate::kOnce || rate == Rate::kRow;
      const int64_t col = rate == Rate::kDiagonal ? i - (tile.rows - 1 - r) : i;
      const int64_t begin = all ? 0 : std::max<int64_t>(col, 0);
      const int64_t end = all ? tile.cols : std::min(col + 1, tile.cols);
      for (int64_t c = begin; c < end; ++c) {
        if (mask.row(r)[c] != 0) return true;
      }
    }
    return false;
  }

  // Some offset of the read is negative: finds out whether it matters, and which index is to blame.
  void check_row(int read_id) { check_read(read_id, Rate::kRow, row, row + 1); }
  void check_read(int read_id, Rate rate, int64_t begin, int64_t end) {
    ++wrong_places;
    if (wrong.buffer >= 0) return;
    const Read& read = code.reads[read_id];
    const Lane offset_lane = code.registers[read.by_rows() ? read.row : read.offset].lane;
    const void* offset = read.by_rows() ? row_places(read) : values(read.offset, rate);
    const Rate offset_rate = read.by_rows() ? Rate::kPair : code.registers[read.offset].rate;
    for (int64_t i = begin; i < end; ++i) {
      if (load_integer(offset, offset_lane, i) >= 0 || !takes_part(offset_rate, i)) continue;
      for (size_t k = 0; k < read.index.size(); ++k) {
        const Register& r = code.registers[read.index[k]];
        const bool array = r.rate == rate || (rate == Rate::kPair && varies_in_a_row(r.rate));
        const int64_t index = load_integer(values(read.index[k], rate), r.lane, array ? i : 0);
        const int64_t size = code.sizes[read.buffer][k];
        if (index >= -size && index < size) continue;
        wrong = {read.buffer, static_cast<int>(k), index, size};
        return;
      }
    }
  }

  // Lanes of `within` that are the size itself, of a register at `of`, in a list at `rate`.
  void check_within(const Instruction& instruction, Rate of, Rate rate, int64_t lanes) {
    const auto values_of = [&](RegisterId id) { return values(id, rate); };
    const Lane lane = code.registers[instruction.out].lane;
    const auto at = [&](RegisterId id, int64_t i) {
      const Register& r = code.registers[id];
      const bool array = r.rate == of || (of == Rate::kPair && varies_in_a_row(r.rate));
      return load_integer(values_of(id), r.lane, array ? i : 0);
    };
    const void* out = values_of(instruction.out);
    int64_t wrong_lanes = 0;
    if (const Register& size = code.registers[instruction.x[1]]; size.rate == Rate::kOnce) {
      const int64_t n = load_integer(values_of(instruction.x[1]), size.lane, 0);
      for (int64_t i = 0; i < lanes; ++i) wrong_lanes += load_integer(out, lane, i) == n ? 1 : 0;
    } else {
      wrong_lanes = lanes;
    }
    for (int64_t i = 0; wrong_lanes != 0 && i < lanes; ++i) {
      const int64_t size = at(instruction.x[1], i), index = at(instruction.x[0], i);
      if (index >= 0 && index < size) continue;
      ++wrong_places;
      if (wrong.buffer >= 0 || !takes_part(of, of == Rate::kRow && rate == Rate::kPair ? row : i)) continue;
      wrong = {OutOfRange::kValue, 0, index, size};
      return;
    }
  }

  void start(const Tile& t, Rectangle<const uint8_t> m) {
    if (t.rows > max_rows || t.cols > max_cols) throw GraphError("the tile is larger than the evaluator was made for");
    tile = t;
    mask = m;
    row = 0;
    wrong = OutOfRange{};
    wrong_places = 0;
    kept = kept && same_pairs(t);
    const auto set = [&](Input input, int64_t begin, int64_t lanes) {
      const RegisterId id = code.input[static_cast<int>(input)];
      if (id != kNoRegister) kernels.iota(address[id], code.registers[id].lane, begin, lanes);
    };
    set(Input::kB, t.b, 1);
    set(Input::kH, t.h, 1);
    set(Input::kQ, t.q, t.rows);
    set(Input::kKv, t.kv, t.cols);
    if (code.diagonal_q != kNoRegister) kernels.iota(address[code.diagonal_q], Lane::kInt64, t.q, 1);
    if (code.diagonal_kv != kNoRegister) {
      kernels.iota(address[code.diagonal_kv], Lane::kInt64, t.kv - (t.rows - 1), diagonals());
    }
    run(Rate::kOnce, 1);
    run(Rate::kColumn, t.cols);
    run(Rate::kRow, t.rows);
    run(Rate::kDiagonal, diagonals());
    find_adjacent();
  }

  // Inputs of a pair are read where the caller has them.
  void bind(Input input, const T* data) {
    const RegisterId id = code.input[static_cast<int>(input)];
    if (id != kNoRegister) address[id] = reinterpret_cast<std::byte*>(const_cast<T*>(data));
  }

  GradientSink<T> sink_of(size_t k) const {
    const auto buffer = static_cast<size_t>(code.contributions[k].buffer);
    return buffer < sinks.size() ? sinks[buffer] : GradientSink<T>{};
  }
  bool wanted(size_t k) const { return sink_of(k).sum != nullptr || sink_of(k).wide_sum != nullptr; }

  // The float register's values for the current row, one a column.
  const T* row_values(RegisterId id) {
    const T* x = static_cast<const T*>(values(id, Rate::kPair));
    if (varies_in_a_row(code.registers[id].rate)) return x;
    scatters.fill(scratch.data(), *x, tile.cols);
    return scratch.data();
  }

  void write(const T* x, T masked, T* out) {
    const uint8_t* m = mask.row(row);
    if (m != nullptr) {
      scatters.select(out, x, m, masked, tile.cols);
    } else if (out != x) {
      std::memcpy(out, x, static_cast<size_t>(tile.cols) * sizeof(T));
    }
  }

  // A row of contribution k: into its sums, or where its places differ from pair to pair, into the sink. The derivative
  // need not make the read that it contributes to, so that the indices are checked here.
  void contribute(size_t k, const GradientSink<T>& sink) {
    const ProgramContribution& c = code.contributions[k];
    const T* x = row_values(c.value);
    if (mask.data != nullptr) {
      write(x, 0, scratch.data());
      x = scratch.data();
    }
    const Read& read = code.reads[c.read];
    if (read.by_rows()) {
      const int64_t first = first_place(c.read);
      if (first >= 0 && sink.sum != nullptr) {
        scatters.add(sink.sum + first, x, tile.cols);
      } else if (scatters.scatter(sink.sum, sink.wide_sum, row_places(read), code.registers[read.row].lane, x,
                                  tile.cols)) {
        check_read(c.read, Rate::kPair, 0, tile.cols);
      }
      return;
    }
    const RegisterId place = read.offset;
    const Register& r = code.registers[place];
    if (r.rate == Rate::kOnce) {
      sums[k] += scatters.sum(x, tile.cols);
    } else if (r.rate == Rate::kColumn) {
      scatters.add(array_sum(k), x, tile.cols);
    } else if (r.rate == Rate::kDiagonal) {
      scatters.add(array_sum(k) + tile.rows - 1 - row, x, tile.cols);
    } else if (r.rate == Rate::kRow) {
      const T total = static_cast<T>(scatters.sum(x, tile.cols));
      if (scatters.scatter(sink.sum, sink.wide_sum, values(place, Rate::kPair), r.lane, &total, 1)) {
        check_row(c.read);
      }
    } else if (kept && kept_place[k] >= 0) {
      scatters.add(kept_sum(k, row), x, tile.cols);
    } else if (scatters.scatter(sink.sum, sink.wide_sum, values(place, Rate::kPair), r.lane, x, tile.cols)) {
      check_read(c.read, Rate::kPair, 0, tile.cols);
    }
  }

  void finish_contribution(size_t k, const GradientSink<T>& sink) {
    const ProgramContribution& c = code.contributions[k];
    const RegisterId place = code.reads[c.read].offset;
    if (place == kNoRegister) return;
    const Register& r = code.registers[place];
    if (r.rate == Rate::kOnce) {
      // The sum over the tile is in float64; it is not rounded before it reaches a sink of that precision.
      const int64_t offset = load_integer(address[place], r.lane, 0);
      if (offset < 0) return check_read(c.read, Rate::kOnce, 0, 1);
      if (sink.wide_sum != nullptr) {
        sink.wide_sum[offset] += sums[k];
      } else {
        sink.sum[offset] += static_cast<T>(sums[k]);
      }
    } else if (r.rate == Rate::kColumn || r.rate == Rate::kDiagonal) {
      const int64_t lanes = r.rate == Rate::kColumn ? tile.cols : diagonals();
      if (scatters.scatter(sink.sum, sink.wide_sum, address[place], r.lane, array_sum(k), lanes)) {
        check_read(c.read, r.rate, 0, lanes);
      }
    }
  }
};

template <class T>
TileEvaluator<T>::TileEvaluator(const TileProgram<T>& program, int64_t max_rows, int64_t max_cols)
    : state_(std::make_unique<State>(program.code(), max_rows, max_cols)) {}
template <class T>
TileEvaluator<T>::~TileEvaluator() = default;
template <class T>
TileEvaluator<T>::TileEvaluator(TileEvaluator&&) noexcept = default;

template <class T>
const OutOfRange& TileEvaluator<T>::out_of_range() const {
  return state_->wrong;
}

template <class T>
void TileEvaluator<T>::keep() {
  state_->keep();
}
template <class T>
void TileEvaluator<T>::flush(std::span<const GradientSink<T>> sinks) {
  state_->flush(sinks);
}

template <class T>
bool TileEvaluator<T>::score_mod(const Tile& tile, Rectangle<const T> score, Rectangle<const uint8_t> mask,
                                 Rectangle<T> out) {
  State& s = *state_;
  if (s.code.kind != Kind::kScoreMod) throw GraphError("not the program of a score_mod");
  if (tile.rows <= 0 || tile.cols <= 0) return true;
  s.start(tile, mask);
  for (s.row = 0; s.row < tile.rows; ++s.row) {
    s.bind(Input::kScore, score.row(s.row));
    s.run_row();
    s.write(s.row_values(s.code.result), State::kMinusInfinity, out.row(s.row));
  }
  s.finish_kept();
  return s.wrong.buffer < 0;
}

template <class T>
bool TileEvaluator<T>::tangent(const Tile& tile, Rectangle<const T> score, Rectangle<const T> tangent,
                               Rectangle<const uint8_t> mask, Rectangle<T> out) {
  State& s = *state_;
  if (s.code.kind != Kind::kTangent) throw GraphError("not the program of a tangent");
  if (tile.rows <= 0 || tile.cols <= 0) return true;
  s.start(tile, mask);
  for (s.row = 0; s.row < tile.rows; ++s.row) {
    s.bind(Input::kScore, score.row(s.row));
    s.bind(Input::kGrad, tangent.row(s.row));
    s.run(Rate::kPair, tile.cols);
    s.write(s.row_values(s.code.result), T(0), out.row(s.row));
  }
  return s.wrong.buffer < 0;
}

template <class T>
bool TileEvaluator<T>::mask_mod(const Tile& tile, Rectangle<uint8_t> out) {
  State& s = *state_;
  if (s.code.kind != Kind::kMaskMod) throw GraphError("not the program of a mask_mod");
  if (tile.rows <= 0 || tile.cols <= 0) return true;
  s.start(tile, {});
  for (s.row = 0; s.row < tile.rows; ++s.row) {
    s.run(Rate::kPair, tile.cols);
    const auto* x = static_cast<const uint8_t*>(s.values(s.code.result, Rate::kPair));
    if (varies_in_a_row(s.code.registers[s.code.result].rate)) {
      std::memcpy(out.row(s.row), x, static_cast<size_t>(tile.cols));
    } else {
      std::memset(out.row(s.row), *x, static_cast<size_t>(tile.cols));
    }
  }
  return s.wrong.buffer < 0;
}

template <class T>
bool TileEvaluator<T>::backward(const Tile& tile, Rectangle<const T> score, Rectangle<const T> grad,
                                Rectangle<const uint8_t> mask, Rectangle<T> grad_score,
                                std::span<const GradientSink<T>> sinks) {
  State& s = *state_;
  if (s.code.kind != Kind::kDerivative) throw GraphError("not the program of a derivative");
  if (tile.rows <= 0 || tile.cols <= 0) return true;
  if (s.keeping && !s.same_pairs(tile)) s.flush(sinks);
  s.start(tile, mask);
  std::fill(s.sums.begin(), s.sums.end(), 0.0);
  std::fill(s.array_sums.begin(), s.array_sums.end(), T(0));
  s.sinks = sinks;
  for (s.row = 0; s.row < tile.rows; ++s.row) {
    s.bind(Input::kScore, score.row(s.row));
    s.bind(Input::kGrad, grad.row(s.row));
    s.run_row();
    for (size_t k = 0; k < s.code.contributions.size(); ++k) {
      if (!s.code.contributions[k].in_loops && s.wanted(k)) s.contribute(k, s.sink_of(k));
    }
    // Last, because it may be written over `grad`.
    if (grad_score.data != nullptr) s.write(s.row_values(s.code.result), 0, grad_score.row(s.row));
  }
  if (s.kept && !s.kept_sums.empty() && ++s.added == State::kMostAdded) s.flush(sinks);
  s.finish_kept();
  s.row = 0;
  for (size_t k = 0; k < s.code.contributions.size(); ++k) {
    if (s.wanted(k)) s.finish_contribution(k, s.sink_of(k));
  }
  return s.wrong.buffer < 0;
}

MaskProgram::MaskProgram(const Graph& graph, const Lengths& lengths, std::span<const Buffer> buffers,
                         std::span<const Value> scalars, bool in_float64)
    : program_([&]() -> decltype(program_) {
        if (in_float64) return TileProgram<double>(graph, lengths, buffers, scalars);
        return TileProgram<float>(graph, lengths, buffers, scalars);
      }()) {}

MaskEvaluator::MaskEvaluator(const MaskProgram& program, int64_t max_rows, int64_t max_cols)
    : evaluator_(std::visit([&]<class T>(const TileProgram<T>& of)
                                -> decltype(evaluator_) { return TileEvaluator<T>(of, max_rows, max_cols); },
                            program.program_)) {}

bool MaskEvaluator::mask_mod(const Tile& tile, Rectangle<uint8_t> out) {
  return std::visit([&](auto& evaluator) { return evaluator.mask_mod(tile, out); }, evaluator_);
}

const OutOfRange& MaskEvaluator::out_of_range() const {
  return std::visit([](const auto& evaluator) -> const OutOfRange& { return evaluator.out_of_range(); }, evaluator_);
}

double share_of_pairs(const Graph& mask_mod, std::span<const Value> scalars, int64_t queries, int64_t keys) {
  constexpr int64_t kQueries = 8, kKeys = 4;
  const TileProgram<float> program(mask_mod, {1, 1, queries, keys}, {}, scalars);
  TileEvaluator<float> evaluator(program, 1, 1);
  int found = 0;
  for (int64_t i = 0; i < kQueries * kKeys; ++i) {
    // In the middle of equal parts.
    const int64_t q = (2 * (i % kQueries) + 1) * queries / (2 * kQueries);
    const int64_t kv = (2 * (i / kQueries) + 1) * keys / (2 * kKeys);
    uint8_t takes = 0;
    evaluator.mask_mod({0, 0, q, kv, 1, 1}, {&takes, 1});
    found += takes;
  }
  return static_cast<double>(found) / (kQueries * kKeys);
}

template class TileEvaluator<float>;
template class TileEvaluator<double>;

}  // namespace fusegrad::score_mod
