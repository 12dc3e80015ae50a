// The vectorised loops of the CPU evaluator, compiled once for each instruction set (tile_kernel.cpp).
#pragma once

#include <cstdint>

#include "common/capability.h"
#include "score_mod/primitives.h"

namespace fusegrad::score_mod {

/// How a register stores its values; bools are bytes of 0 or 1.
enum class Lane : uint8_t { kFloat32, kFloat64, kInt32, kInt64, kBool };

constexpr int64_t lane_bytes(Lane lane) {
  return lane == Lane::kBool ? 1 : lane == Lane::kFloat32 || lane == Lane::kInt32 ? 4 : 8;
}

/// A captured buffer's storage: see DType in evaluate_cpu.h, in its order.
enum class Storage : uint8_t { kFloat64, kFloat32, kBFloat16, kFloat16, kInt64, kInt32, kInt16, kInt8, kUInt8, kBool };

constexpr int64_t storage_bytes(Storage storage) {
  constexpr int64_t kBytes[] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 1};
  return kBytes[static_cast<int>(storage)];
}

/// Whether a buffer's elements are a register's values as they lie in memory.
constexpr bool lies_as(Storage storage, Lane lane) {
  return (storage == Storage::kFloat64 && lane == Lane::kFloat64) ||
         (storage == Storage::kFloat32 && lane == Lane::kFloat32) ||
         (storage == Storage::kInt64 && lane == Lane::kInt64) || (storage == Storage::kInt32 && lane == Lane::kInt32);
}

/// out[i] = f(x0[i], x1[i], x2[i]). `out` overlaps no operand.
using Kernel = void (*)(void* out, const void* const* x, int64_t lanes);

/// The offset of an index in one dimension: (i < 0 ? i + size : i) * stride, or kNoOffset out of range. Sums of the
/// offsets of up to kMaxRank dimensions are negative if one of them is kNoOffset.
using OffsetKernel = void (*)(void* out, const void* index, int64_t lanes, int64_t size, int64_t stride);

/// out[i] = data[offset[i]], 0 at negative offsets. Returns whether there was one. Without offsets: out[i] = data[i].
using GatherKernel = bool (*)(void* out, const void* data, const void* offset, int64_t lanes);

/// Offsets in 32 bits are for buffers whose largest offset is below this.
inline constexpr int64_t kSmallOffsets = int64_t{1} << 26;
inline constexpr int32_t kNoOffset32 = -(1 << 28);
inline constexpr int64_t kNoOffset64 = -(int64_t{1} << 60);

template <class T>
struct ScatterKernels {
  /// out[i] = mask[i] ? x[i] : other
  void (*select)(T* out, const T* x, const uint8_t* mask, T other, int64_t lanes);
  void (*fill)(T* out, T value, int64_t lanes);
  double (*sum)(const T* x, int64_t lanes);
  void (*add)(T* out, const T* x, int64_t lanes);
  /// sum[offset[i]] += x[i] in order, nothing at negative offsets; returns whether there was one. Exactly one of the
  /// two sums is not null.
  bool (*scatter)(T* sum, double* wide_sum, const void* offset, Lane offset_lane, const T* x, int64_t lanes);
};

struct TileKernels {
  /// Bit i of `broadcast`: operand i is one value, not an array; not all of them are. `lane` is the operands' (of
  /// `where`, the branches'). Null for casts, and for lanes that the rule excludes.
  Kernel (*find)(Op op, Lane lane, unsigned broadcast);
  Kernel (*cast)(Lane from, Lane to);
  OffsetKernel (*offset)(Lane index, Lane offset);
  /// Null where the storage is not read as such a lane.
  GatherKernel (*gather)(Storage storage, Lane out, Lane offset);
  /// out[i] = begin + i
  void (*iota)(void* out, Lane lane, int64_t begin, int64_t lanes);
  ScatterKernels<float> float32;
  ScatterKernels<double> float64;
};

/// Those of this machine.
const TileKernels& tile_kernels();

FUSEGRAD_EACH_CAPABILITY(extern const TileKernels kTileKernels;)

}  // namespace fusegrad::score_mod
