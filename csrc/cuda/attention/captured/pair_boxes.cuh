// What a score_mod reads for each pair by itself, as tiles in shared memory: where a query's elements for all keys are
// a row of a buffer (PairRead::box, csrc/score_mod/render_cuda.h), a tile of rows is copied as it lies, 16 bytes at a
// time, and a thread takes its elements by the fragments of its scores. Read from the buffer, each pair would compute
// an address and wait.
#pragma once

#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/device/hopper.cuh"
#include "cuda/device/mma.cuh"

namespace fusegrad::device {

/// What a score_mod reads of a thread's pairs that is the same in every batch, or with kGrouped in every batch of a
/// group, kept in shared memory by each thread for itself: kBlocks times four pairs. kUsed: whether it is kept at all.
template <class Mod, int kBlocks, int kThreads, bool kUsed, bool kGrouped = false>
class KeptReads {
  using Captured = typename Mod::Captured;

 public:
  /// Whether read k is kept. What another read needs as a place is not.
  static __device__ constexpr bool there(int k) {
    return kUsed && (!Mod::kPair[k].on_batch || (kGrouped && Mod::kPair[k].on_group)) && !Mod::kPair[k].integer;
  }

 private:
  static constexpr int kPiece = kBlocks * kThreads * 16;
  static __device__ constexpr int before(int k) {
    int count = 0;
    for (int i = 0; i < k; ++i) count += there(i) ? 1 : 0;
    return count;
  }
  static __device__ __forceinline__ unsigned place(unsigned kept, int k, int block) {
    return kept + before(k) * kPiece + (block * kThreads + static_cast<int>(threadIdx.x)) * 16;
  }
  template <int kValue>
  struct Number {
    static constexpr int value = kValue;
  };
  template <int k = 0, class F>
  static __device__ __forceinline__ void for_each_read(const F& f) {
    if constexpr (k < Mod::kPairCount) {
      if constexpr (there(k)) f(Number<k>());
      for_each_read<k + 1>(f);
    }
  }

 public:
  static constexpr int kCount = before(Mod::kPairCount);
  static constexpr int kBytes = kCount * kPiece;

  /// pair(block, e) is a pair's {query, key}, inside(block, e) whether it has any; b, any batch with these reads.
  template <class Pair, class Inside>
  static __device__ __forceinline__ void load(unsigned kept, const Captured& captured, int b, int h, const Pair& pair,
                                              const Inside& inside) {
    for_each_read([&](auto read) {
      constexpr int k = decltype(read)::value;
#pragma unroll 1
      for (int block = 0; block < kBlocks; ++block) {
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const auto [q, kv] = pair(block, e);
          x[e] = Mod::template pair_read<k>(captured, b, h, q, kv, inside(block, e));
        }
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place(kept, k, block)), "f"(x[0]), "f"(x[1]),
                     "f"(x[2]), "f"(x[3])
                     : "memory");
      }
    });
  }

  /// The reads of four pairs, of which e is one.
  struct Reads {
    float x[kCount + 1][4];
    int e = 0;
    template <int, class T>
    __device__ __forceinline__ auto read(const T* p, bool valid) const {
      return score_mod::read_if<Mod::kUnread>(p, valid);
    }
    template <int k, class T>
    __device__ __forceinline__ auto pair(const T* p, bool valid) const {
      if constexpr (there(k)) {
        return x[before(k)][e];
      } else {
        return score_mod::read_if<Mod::kUnread>(p, valid);
      }
    }
  };
  static __device__ __forceinline__ Reads reads(unsigned kept, int block) {
    Reads found;
    for_each_read([&](auto read) {
      constexpr int k = decltype(read)::value;
      float (&x)[4] = found.x[before(k)];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "r"(place(kept, k, block)));
    });
    return found;
  }
};
/// A pair's place.
struct PairPlace {
  int q, kv;
};

/// kUsed: whether there are such tiles at all; none of reads that are kept (Kept). kMaps (sm_90): TMA copies the tiles
/// of so many reads, the first whose boxes are a tensor's as they lie, swizzled.
template <class Mod, int kQueries, int kKeys, class Kept, bool kUsed, int kMaps = 0>
class PairBoxes {
  using Captured = typename Mod::Captured;
  static __device__ constexpr bool there(int k) { return kUsed && Mod::kPair[k].box > 0 && !Kept::there(k); }
  static __device__ constexpr bool could_map(int k) { return there(k) && Mod::kPair[k].dimensions >= 0; }
  /// The tensor map of read k.
  static __device__ constexpr int map_of(int k) {
    int count = 0;
    for (int i = 0; i < k; ++i) count += could_map(i) ? 1 : 0;
    return count;
  }
  static __device__ constexpr bool mapped(int k) { return could_map(k) && map_of(k) < kMaps; }
  static __device__ constexpr int map_bytes(int k) { return mapped_tile_bytes(kQueries, kKeys, Mod::kPair[k].box); }
  /// Keys of one of a mapped tile's chunks, whose rows have 128 bytes.
  static __device__ constexpr int chunk_of(int k) { return kChunkBytes / Mod::kPair[k].box; }
  /// The bytes of the mapped tiles before read k.
  static __device__ constexpr int maps_before(int k) {
    int sum = 0;
    for (int i = 0; i < k; ++i) sum += mapped(i) ? map_bytes(i) : 0;
    return sum;
  }
  static constexpr int kMapBytes = maps_before(Mod::kPairCount);
  static __device__ constexpr int stride(int k) { return padded_row_bytes(kKeys, Mod::kPair[k].box); }
  static __device__ constexpr int offset(int k) {
    if (mapped(k)) return maps_before(k);
    int sum = kMapBytes;
    for (int i = 0; i < k; ++i) sum += there(i) && !mapped(i) ? kQueries * stride(i) : 0;
    return sum;
  }
  template <int kValue>
  struct Number {
    static constexpr int value = kValue;
  };
  template <int k = 0, class F>
  static __device__ __forceinline__ void for_each_box(const F& f) {
    if constexpr (k < Mod::kPairCount) {
      if constexpr (there(k)) f(Number<k>());
      for_each_box<k + 1>(f);
    }
  }

 public:
  /// Each read from where it is.
  using There = score_mod::ReadThere<Mod::kUnread>;
  static constexpr int kBytes = mapped_box_bytes(kMapBytes, offset(Mod::kPairCount) - kMapBytes);
  /// Whether threads copy some of them.
  static constexpr bool kCopies = offset(Mod::kPairCount) > kMapBytes;
  static constexpr bool kMapped = kMaps > 0;

  /// Called by kThreads threads: copies the tile from (q, kv) on, of which `queries` by `keys` have elements. The
  /// threads wait for copies and meet before any reads.
  template <int kThreads>
  static __device__ __forceinline__ void load(unsigned to, const Captured& captured, int b, int h, int q, int kv,
                                              int queries, int keys, int thread) {
    for_each_box([&](auto box) {
      constexpr int k = decltype(box)::value, kElement = Mod::kPair[k].box, kTogether = 16 / kElement;
      constexpr int kAcross = kKeys / kTogether;
      static_assert(kThreads % kAcross == 0 && kQueries % (kThreads / kAcross) == 0);
      const int first = thread / kAcross, at = kv + thread % kAcross * kTogether;
      const int count = max(min(kTogether, keys - at), 0);
      unsigned place = to + offset(k) + first * stride(k) + thread % kAcross * 16;
#pragma unroll 4
      for (int i = 0; i < kQueries; i += kThreads / kAcross, place += kThreads / kAcross * stride(k)) {
        const bool inside = q + first + i < queries && count > 0;
        const auto row = Mod::template pair_row<k>(captured, b, h, q + first + i, inside);
        const char* from = row.data + at * row.stride * kElement;
        const bool dense = row.data != nullptr && row.stride == 1 && at + count <= row.size;
        if (!inside || (dense && reinterpret_cast<unsigned long long>(from) % 16 == 0)) {
          copy_async_some(place, from, inside ? count * kElement : 0);
        } else {
          copy_each<kElement, Mod::kPair[k].integer>(place, row, at);
        }
      }
    });
  }

  /// Whether all that the score_mod reads for each pair by itself comes so.
  static __device__ constexpr bool all() {
    for (int k = 0; k < Mod::kPairCount; ++k) {
      if (!there(k)) return false;
    }
    return true;
  }

  /// sm_90: called by one thread, which arrives at `full` too: copies the tiles that TMA copies. What lies beyond the
  /// tensor is NaN.
  static __device__ __forceinline__ void bring_mapped(unsigned to, unsigned full, const TensorMap* maps,
                                                      const Captured& captured, int b, int h, int q, int kv) {
    Barrier::expect(full, kMapBytes);
    for_each_box([&](auto box) {
      constexpr int k = decltype(box)::value;
      if constexpr (mapped(k)) {
        static_assert(kKeys % chunk_of(k) == 0);
#pragma unroll
        for (int c = 0; c < kKeys / chunk_of(k); ++c)
          copy_box(to + offset(k) + c * kQueries * kChunkBytes, maps[map_of(k)], full, kv + c * chunk_of(k), q,
                   (Mod::kPair[k].dimensions & 2) != 0 ? h : 0, Mod::template pair_batch<k>(captured, b));
      }
    });
  }

  /// sm_90: the others by kThreads threads of whole warps that do not wait. Each arrives at the mbarrier `full` with
  /// its copies; what it writes otherwise needs another arrival. Rows beyond the queries and columns beyond the keys
  /// stay as they are.
  template <int kThreads>
  static __device__ __forceinline__ void bring(unsigned to, unsigned full, const Captured& captured, int b, int h,
                                               int q, int kv, int queries, int keys, int thread) {
    if constexpr (kCopies) {
      for_each_box([&](auto box) {
        constexpr int k = decltype(box)::value, kElement = Mod::kPair[k].box, kTogether = 16 / kElement;
        if constexpr (mapped(k)) return;
        constexpr int kRows = kQueries % kThreads == 0 ? 32 : 16, kAcross = kKeys / kTogether;
        // Bulk copies of a row each take the time of some 500 bytes.
        constexpr bool kBulk = kElement == 4;
        // Lanes that copy a row together, 128 bytes at a time, where all rows lie so.
        constexpr int kRowLanes = 8, kRowsAtOnce = kLanes / kRowLanes;
        static_assert(kRows * kAcross % kLanes == 0 && kQueries % kRows == 0 && kLanes % kRows == 0);
        const int lane = thread % kLanes, rows = min(kQueries, queries - q), cols = min(kKeys, keys - kv);
#pragma unroll 1
        for (int first = thread / kLanes * kRows; first < rows; first += kThreads / kLanes * kRows) {
          // The lane's row, of which other lanes copy parts too.
          const int own = first + lane % kRows;
          const bool has_row = lane < kRows && own < rows;
          const auto row = Mod::template pair_row<k>(captured, b, h, q + own, own < rows);
          const char* from = row.data + kv * row.stride * kElement;
          const bool lies_so =
              row.data != nullptr && row.stride == 1 && reinterpret_cast<unsigned long long>(from) % 16 == 0;
          const int vectors =
              lies_so ? static_cast<int>(max(min(row.size - kv, static_cast<score_mod::int64>(cols)), 0ll)) / kTogether
                      : 0;
          if constexpr (!kBulk && kAcross % kRowLanes == 0) {
            // A warp has the addresses of many rows to compute: its instructions are what the tile takes.
            if (__all_sync(~0u, lane >= kRows || vectors == kAcross)) {
              const unsigned at = to + offset(k) + (first + lane / kRowLanes) * stride(k) + lane % kRowLanes * 16;
#pragma unroll
              for (int i = 0; i < kRows; i += kRowsAtOnce) {
                const char* of_row = address_of_lane(from, i + lane / kRowLanes) + lane % kRowLanes * 16;
#pragma unroll
                for (int v = 0; v < kAcross; v += kRowLanes)
                  copy_async(at + i * stride(k) + v * 16, of_row + v * 16, true);
              }
              continue;
            }
          }
          const unsigned place = to + offset(k) + own * stride(k);
          if constexpr (kBulk) {
            if (has_row && vectors > 0) copy_counted(place, from, vectors * 16, full);
          } else {
#pragma unroll 4
            for (int i = 0; i < kRows * kAcross; i += kLanes) {
              const int r = (i + lane) / kAcross, at = (i + lane) % kAcross;
              const char* of_row = address_of_lane(from, r);
              if (at < __shfl_sync(~0u, vectors, r))
                copy_async(to + offset(k) + (first + r) * stride(k) + at * 16, of_row + at * 16, true);
            }
          }
          const int copied = vectors * kTogether;
          if (has_row && lies_so && copied < cols && cols <= row.size - kv) {
            copy_async_some(place + copied * kElement, from + copied * kElement, (cols - copied) * kElement);
          } else if (has_row) {
#pragma unroll 1
            for (int at = copied; at < cols; at += kTogether)
              copy_each<kElement, Mod::kPair[k].integer>(place + at * kElement, row, kv + at);
          }
        }
      });
      arrive_after_copies(full);
    }
  }

  /// The reads of a thread's four pairs of a block.
  struct Reads {
    float x[Mod::kPairCount + 1][4];
    int e = 0;
    template <int, class T>
    __device__ __forceinline__ auto read(const T* p, bool valid) const {
      return score_mod::read_if<Mod::kUnread>(p, valid);
    }
    template <int k, class T>
    __device__ __forceinline__ auto pair(const T* p, bool valid) const {
      if constexpr (there(k) && Mod::kPair[k].integer) {
        return __float_as_int(x[k][e]);
      } else if constexpr (there(k)) {
        return x[k][e];
      } else {
        return score_mod::read_if<Mod::kUnread>(p, valid);
      }
    }
  };
  /// Those of 16 queries by 8 keys, queries being rows, or of 16 keys by 8 queries, keys being rows (kKeyRows), from
  /// (q, kv) of the tile on. Called by whole warps.
  template <bool kKeyRows>
  static __device__ __forceinline__ Reads reads(unsigned tile, int q, int kv, int lane) {
    Reads found;
    for_each_box([&](auto box) {
      constexpr int k = decltype(box)::value;
      float (&x)[4] = found.x[k];
      const unsigned from = tile + offset(k);
      if constexpr (mapped(k) && Mod::kPair[k].box == 4) {
        take_mapped<k, kKeyRows>(x, from, q, kv, lane);
      } else if constexpr (mapped(k)) {
        // Key kv's part of a row: parts of 16 bytes are exchanged by the row's place among eight.
        const int row = q + lane % (kKeyRows ? 8 : 16), part = kv / 8 + (kKeyRows ? lane / 8 % 2 : 0);
        const unsigned at = from + part / 8 * kQueries * kChunkBytes + row * kChunkBytes + (part ^ row) % 8 * 16;
        take(x, load_two_matrices<kKeyRows>(at), Mod::kPair[k].bfloat16);
      } else if constexpr (Mod::kPair[k].box == 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if constexpr (kKeyRows) {
            const unsigned at = from + (q + lane % 4 * 2) * stride(k) + (kv + lane / 4 + r * 8) * 4;
            x[2 * r] = load_shared<float>(at);
            x[2 * r + 1] = load_shared<float>(at + stride(k));
          } else {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(x[2 * r]), "=f"(x[2 * r + 1])
                         : "r"(from + (q + lane / 4 + r * 8) * stride(k) + (kv + lane % 4 * 2) * 4));
          }
        }
      } else {
        const unsigned at = kKeyRows ? from + (q + lane % 8) * stride(k) + (kv + lane / 8 % 2 * 8) * 2
                                     : from + (q + lane % 16) * stride(k) + kv * 2;
        take(x, load_two_matrices<kKeyRows>(at), Mod::kPair[k].bfloat16);
      }
    });
    return found;
  }

 private:
  // Four pairs' floats of a mapped tile, of which a chunk has 32 keys. Parts of 16 bytes are exchanged as those of 16
  // bits; q and kv are multiples of 8. By keys no two lanes read one bank; by queries two rows meet in each.
  template <int k, bool kKeyRows>
  static __device__ __forceinline__ void take_mapped(float (&x)[4], unsigned from, int q, int kv, int lane) {
    const unsigned chunk = from + kv / chunk_of(k) * kQueries * kChunkBytes, part = kv % chunk_of(k) * 4;
    if constexpr (kKeyRows) {
      // Queries 2 * t and 2 * t + 1 of key g, or g + 8, two parts on.
      const int t = lane % 4, g = lane / 4;
      const unsigned at = chunk + (q + 2 * t) * kChunkBytes + ((part + g * 4) ^ t * 32);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        x[2 * r] = load_shared<float>(at ^ r * 32);
        x[2 * r + 1] = load_shared<float>((at ^ r * 32 ^ 16) + kChunkBytes);
      }
    } else {
      const int row = lane / 4;
      const unsigned at = chunk + (q + row) * kChunkBytes + ((part + lane % 4 * 8) ^ row * 16);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(x[2 * r]), "=f"(x[2 * r + 1])
                     : "r"(at + r * 8 * kChunkBytes));
      }
    }
  }
  struct TwoWords {
    unsigned word[2];
  };
  /// Words of the fragments of two matrices, transposed or not. `at`: for each lane below 16 the address of eight
  /// numbers.
  template <bool kTransposed>
  static __device__ __forceinline__ TwoWords load_two_matrices(unsigned at) {
    TwoWords found;
    if constexpr (kTransposed) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                   : "=r"(found.word[0]), "=r"(found.word[1])
                   : "r"(at));
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                   : "=r"(found.word[0]), "=r"(found.word[1])
                   : "r"(at));
    }
    return found;
  }
  static __device__ __forceinline__ void take(float (&x)[4], const TwoWords& words, bool bfloat16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto bits = static_cast<unsigned short>(words.word[i / 2] >> i % 2 * 16);
      x[i] = bfloat16 ? score_mod::from_bits(BFloat16{bits}) : score_mod::from_bits(Float16{bits});
    }
  }
  static __device__ __forceinline__ const char* address_of_lane(const char* address, int lane) {
    return reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(address), lane));
  }
  // 16 bytes of a row that does not lie so.
  template <int kElement, bool kInteger>
  static __device__ __forceinline__ void copy_each(unsigned to, score_mod::PairRow row, int at) {
#pragma unroll 1
    for (int i = 0; i < 16 / kElement; ++i, ++at, to += kElement) {
      const bool valid = row.data != nullptr && at < row.size;
      const char* from = row.data + at * row.stride * kElement;
      if constexpr (kElement == 4) {
        const unsigned bits = valid ? *reinterpret_cast<const unsigned*>(from) : kInteger ? 0u : 0x7fffffffu;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
      } else {
        const unsigned short bits = valid ? *reinterpret_cast<const unsigned short*>(from) : 0x7fff;
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
      }
    }
  }
};

/// Reads of four pairs, kept, from boxes, in the order of threads or from columns of tables.
template <class Kept, class Boxes, class Columns, class Places>
struct PairReads {
  typename Kept::Reads kept;
  typename Boxes::Reads boxes;
  unsigned columns;
  typename Places::Reads places;
  __device__ __forceinline__ void of(int e) { kept.e = boxes.e = e; }
  template <int, class T>
  __device__ __forceinline__ auto read(const T* p, bool valid) const {
    return boxes.template read<0>(p, valid);
  }
  template <int k, class T>
  __device__ __forceinline__ auto pair(const T* p, bool valid) const {
    if constexpr (Kept::there(k)) {
      return kept.template pair<k>(p, valid);
    } else if constexpr (Places::there(k)) {
      return places.template read<k>(kept.e);
    } else {
      return boxes.template pair<k>(p, valid);
    }
  }
  template <int k, class T>
  __device__ __forceinline__ float column(const T* p, bool valid, int at, int size) const {
    if constexpr (Columns::there(k)) {
      return Columns::template read<k>(columns, at, size);
    } else {
      return pair<k>(p, valid);
    }
  }
};

/// Reads of lines, or where there are none from where they are, and of boxes.
template <class Lines, class Boxes>
struct LineAndBoxReads {
  Lines lines;
  Boxes boxes;
  template <int k, class T>
  __device__ __forceinline__ auto read(const T* p, bool valid) const {
    return lines.template read<k>(p, valid);
  }
  template <int k, class T>
  __device__ __forceinline__ auto pair(const T* p, bool valid) const {
    return boxes.template pair<k>(p, valid);
  }
};

/// Called by whole warps: what Boxes::reads gives, or where there are no boxes, reads from where they are.
template <class Boxes, bool kKeyRows>
__device__ __forceinline__ auto reads_of_boxes(unsigned tile, int q, int kv, int lane) {
  if constexpr (Boxes::kBytes > 0) {
    return Boxes::template reads<kKeyRows>(tile, q, kv, lane);
  } else {
    return typename Boxes::There();
  }
}
/// A pair's reads of lines and, it being the e-th of four, those of reads_of_boxes.
template <class Lines, class OfBlock>
__device__ __forceinline__ auto reads_of_pair(const Lines& lines, const OfBlock& of_block, int e) {
  if constexpr (requires { of_block.e; }) {
    LineAndBoxReads<Lines, OfBlock> reads{lines, of_block};
    reads.boxes.e = e;
    return reads;
  } else {
    return lines;
  }
}

}  // namespace fusegrad::device
