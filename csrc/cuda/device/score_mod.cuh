// What rendered score_mods call: the functions that primitives.def names as CUDA spellings, and reads of captured
// buffers. It includes nothing, so that NVRTC takes it on a machine without a toolkit. A C++ compiler takes it too,
// given the names of CUDA that it uses; tests without a GPU do so.
#pragma once

namespace fusegrad::device::score_mod {

using int64 = long long;

// --- primitives ---------------------------------------------------------------------------------------------

// Integer divisions have no branches, so that compilers compute once what all pairs share. / and % take this divisor:
// they cannot divide by 0, and by -1 the least integer overflows.
template <class T>
__device__ __forceinline__ T safe_divisor(T b) {
  return b == 0 || b == -1 ? 1 : b;
}
template <class T>
__device__ __forceinline__ T floor_mod(T a, T b) {
  const T d = safe_divisor(b), m = a % d;
  return (m != 0) & ((m < 0) != (d < 0)) ? m + d : m;
}
template <>
__device__ __forceinline__ float floor_mod(float a, float b) {
  const float m = fmodf(a, b);
  return m != 0.0f && (m < 0.0f) != (b < 0.0f) ? m + b : m;
}

template <class T>
__device__ __forceinline__ T floor_div(T a, T b) {
  const T d = safe_divisor(b), q = a / d;
  const T floor = (a % d != 0) & ((a < 0) != (d < 0)) ? q - 1 : q;
  return b == 0 ? 0 : b == -1 ? -a : floor;
}
// floor(a / b) would be off by one where the quotient rounds up to the next integer.
template <>
__device__ __forceinline__ float floor_div(float a, float b) {
  if (b == 0.0f) return a / b;
  const float m = fmodf(a, b);
  float q = (a - m) / b;
  if (m != 0.0f && (m < 0.0f) != (b < 0.0f)) q -= 1.0f;
  if (q == 0.0f) return copysignf(0.0f, a / b);
  const float f = floorf(q);
  return q - f > 0.5f ? f + 1.0f : f;
}

template <class T>
__device__ __forceinline__ T power(T a, T b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 == 0 ? 1 : -1) : 0;
  T result = 1;
  for (; b != 0; b >>= 1) {
    if (b & 1) result *= a;
    a *= a;
  }
  return result;
}
template <>
__device__ __forceinline__ float power(float a, float b) {
  return powf(a, b);
}

template <class T>
__device__ __forceinline__ T absolute(T a) {
  return a < 0 ? -a : a;
}
template <class T>
__device__ __forceinline__ T sign(T a) {
  return static_cast<T>((a > 0) - (a < 0));
}

// NaN where either is NaN, unlike fminf and fmaxf.
template <class T>
__device__ __forceinline__ T minimum(T a, T b) {
  return a < b ? a : b;
}
template <>
__device__ __forceinline__ float minimum(float a, float b) {
#ifdef __CUDACC__
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || a < b ? a : b;
#endif
}
template <class T>
__device__ __forceinline__ T maximum(T a, T b) {
  return a > b ? a : b;
}
template <>
__device__ __forceinline__ float maximum(float a, float b) {
#ifdef __CUDACC__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || a > b ? a : b;
#endif
}

template <class T>
__device__ __forceinline__ T relu(T a) {
  return a <= 0 ? T(0) : a;
}
// kFastMath: for scores of 16-bit queries and keys, whose own rounding is no finer: tanh to 2^-11, sigmoid and
// quotients to a few units of 1e-7.
template <bool kFastMath>
__device__ __forceinline__ float sigmoid(float x) {
#ifdef __CUDACC__
  if constexpr (kFastMath) return __fdividef(1.0f, 1.0f + __expf(-x));
#endif
  return 1.0f / (1.0f + expf(-x));
}
template <bool kFastMath>
__device__ __forceinline__ float tanh_of(float x) {
#ifdef __CUDACC__
  if constexpr (kFastMath) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
#endif
  return tanhf(x);
}
template <bool kFastMath>
__device__ __forceinline__ float divide(float a, float b) {
#ifdef __CUDACC__
  if constexpr (kFastMath) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    return a * inverse;
  }
#endif
  return a / b;
}
__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
template <bool kFastMath>
__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanh_of<kFastMath>(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

__device__ __forceinline__ bool invert(bool a) { return !a; }
__device__ __forceinline__ int invert(int a) { return ~a; }
__device__ __forceinline__ int64 invert(int64 a) { return ~a; }

// By a negative number or by the width and more: what shifting one by one without end would leave.
template <class T>
__device__ __forceinline__ T shift_left(T a, T b) {
  return b < 0 || b >= T(8 * sizeof(T)) ? T(0) : static_cast<T>(static_cast<unsigned long long>(a) << b);
}
template <class T>
__device__ __forceinline__ T shift_right(T a, T b) {
  return a >> (b < 0 || b >= T(8 * sizeof(T)) ? T(8 * sizeof(T) - 1) : b);
}
template <class T>
__device__ __forceinline__ T within(T a, T size) {
  return a >= 0 && a < size ? a : size;
}

/// For -2^22 <= a < 2^22: by an addition to the bits of 1.5 * 2^23, where a float's unit is 1, since conversions are
/// slow.
__device__ __forceinline__ float small_to_float(int a) { return __int_as_float(a + 0x4b400000) - 12582912.0f; }
__device__ __forceinline__ int64 to_int(float a) { return a != a ? 0 : __float2ll_rz(a); }
__device__ __forceinline__ int to_int(bool a) { return a; }

// --- captured buffers ---------------------------------------------------------------------------------------

struct BFloat16 {
  unsigned short bits;
};
struct Float16 {
  unsigned short bits;
};
struct Bool {
  unsigned char byte;
};

/// A negative index counts from the end.
template <class Size>
__device__ __forceinline__ Size wrapped(Size i, Size size) {
  return i < 0 ? i + size : i;
}
__device__ __forceinline__ int64 wrapped(int i, int64 size) { return wrapped(int64{i}, size); }
__device__ __forceinline__ bool inside(int i, int size) {
  return static_cast<unsigned>(i) < static_cast<unsigned>(size);
}
__device__ __forceinline__ bool inside(int i, int64 size) {
  return static_cast<unsigned long long>(int64{i}) < static_cast<unsigned long long>(size);
}
__device__ __forceinline__ bool inside(int64 i, int64 size) {
  return static_cast<unsigned long long>(i) < static_cast<unsigned long long>(size);
}

/// How a read is left out that is not to be made.
enum class Unread : char {
  kBranch,     ///< by a branch
  kPredicate,  ///< by a predicate, so that what is around reads stays one block of instructions. It takes registers,
               ///< which not all kernels have
  kElsewhere,  ///< not at all: zeros, or what is NaN in all types, are read from elsewhere. Equal reads are one, which
               ///< with a predicate they are not
};

#ifdef __CUDACC__
static __device__ unsigned long long all_zeros = 0, all_ones = ~0ull;
#define FUSEGRAD_PREDICATED_LOAD(Bits, type, constraint)                                             \
  __device__ __forceinline__ Bits predicated_load(const Bits* p, bool there, Bits bits) {            \
    asm("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there ld.global.nc." type " %0, [%1];\n}" \
        : "+" constraint(bits)                                                                       \
        : "l"(p), "r"(static_cast<int>(there)));                                                     \
    return bits;                                                                                     \
  }
FUSEGRAD_PREDICATED_LOAD(unsigned short, "b16", "h")
FUSEGRAD_PREDICATED_LOAD(unsigned, "b32", "r")
FUSEGRAD_PREDICATED_LOAD(unsigned long long, "b64", "l")
#undef FUSEGRAD_PREDICATED_LOAD
__device__ __forceinline__ unsigned char predicated_load(const unsigned char* p, bool there, unsigned char bits) {
  unsigned short wide = bits;
  asm("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there ld.global.nc.u8 %0, [%1];\n}"
      : "+h"(wide)
      : "l"(p), "r"(static_cast<int>(there)));
  return static_cast<unsigned char>(wide);
}
#endif
/// Bits of memory where they are `there`, else `bits`. Nothing writes captured buffers while a kernel runs: loads may
/// take the read-only path and change places with stores, and equal ones are one.
template <Unread kUnread, class Bits>
__device__ __forceinline__ Bits load_if(const Bits* p, bool there, Bits bits) {
#ifdef __CUDACC__
  if constexpr (kUnread == Unread::kElsewhere) {
    return __ldg(there ? p : reinterpret_cast<const Bits*>(bits == 0 ? &all_zeros : &all_ones));
  } else if constexpr (kUnread == Unread::kPredicate) {
    return predicated_load(p, there, bits);
  } else {
    return there ? __ldg(p) : bits;
  }
#else
  return there ? *p : bits;
#endif
}

__device__ __forceinline__ float from_bits(BFloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ __forceinline__ float from_bits(Float16 x) {
#ifdef __CUDACC__
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
#else
  return half_to_float(x.bits);
#endif
}

/// An element where it is `there`; else nothing is read, and it is NaN, 0 or false.
template <Unread kUnread>
__device__ __forceinline__ float read_if(const float* p, bool there) {
  return __uint_as_float(load_if<kUnread>(reinterpret_cast<const unsigned*>(p), there, 0x7fffffffu));
}
template <Unread kUnread>
__device__ __forceinline__ float read_if(const double* p, bool there) {
  const unsigned long long bits =
      load_if<kUnread>(reinterpret_cast<const unsigned long long*>(p), there, 0x7fffffffffffffffull);
  return static_cast<float>(__longlong_as_double(static_cast<long long>(bits)));
}
template <Unread kUnread>
__device__ __forceinline__ float read_if(const BFloat16* p, bool there) {
  return from_bits(BFloat16{load_if<kUnread>(&p->bits, there, static_cast<unsigned short>(0x7fff))});
}
template <Unread kUnread>
__device__ __forceinline__ float read_if(const Float16* p, bool there) {
  return from_bits(Float16{load_if<kUnread>(&p->bits, there, static_cast<unsigned short>(0x7fff))});
}
template <Unread kUnread>
__device__ __forceinline__ int64 read_if(const int64* p, bool there) {
  return static_cast<int64>(load_if<kUnread>(reinterpret_cast<const unsigned long long*>(p), there, 0ull));
}
template <Unread kUnread>
__device__ __forceinline__ int read_if(const int* p, bool there) {
  return static_cast<int>(load_if<kUnread>(reinterpret_cast<const unsigned*>(p), there, 0u));
}
template <Unread kUnread>
__device__ __forceinline__ int read_if(const short* p, bool there) {
  return static_cast<short>(
      load_if<kUnread>(reinterpret_cast<const unsigned short*>(p), there, static_cast<unsigned short>(0)));
}
template <Unread kUnread>
__device__ __forceinline__ int read_if(const signed char* p, bool there) {
  return static_cast<signed char>(
      load_if<kUnread>(reinterpret_cast<const unsigned char*>(p), there, static_cast<unsigned char>(0)));
}
template <Unread kUnread>
__device__ __forceinline__ int read_if(const unsigned char* p, bool there) {
  return load_if<kUnread>(p, there, static_cast<unsigned char>(0));
}
template <Unread kUnread>
__device__ __forceinline__ bool read_if(const Bool* p, bool there) {
  return load_if<kUnread>(&p->byte, there, static_cast<unsigned char>(0)) != 0;
}

/// What a query reads of a buffer, element by element for the keys: nowhere if `data` is null.
struct PairRow {
  const char* data;
  int64 size, stride;  // elements; beyond the size a read is out of range
};

/// Each read from where it is. An integer stays one: float has no room for those beyond 2^24.
template <Unread kUnread>
struct ReadThere {
  template <int, class T>
  __device__ __forceinline__ auto read(const T* p, bool there) const {
    return read_if<kUnread>(p, there);
  }
  template <int, class T>
  __device__ __forceinline__ auto pair(const T* p, bool there) const {
    return read_if<kUnread>(p, there);
  }
  __device__ __forceinline__ ReadThere at(int, int) const { return {}; }
};

// --- what rendered structs say of themselves ---------------------------------------------------------------------

/// A read that lines may hold (csrc/score_mod/render_cuda.h).
enum class LineBy : char { kQuery, kKey, kDiagonal };
struct LineRead {
  LineBy by;
  int words;  // of an element in a line
};
/// A read of each pair by itself.
struct PairRead {
  bool on_batch;   // b plays a part in its place
  bool on_group;   // but by the groups of batch_groups alone
  int box;         // box_bytes
  int dimensions;  // box_dimensions
  bool bfloat16, integer;
};
/// A contribution to the gradient of a captured buffer.
struct ContributionFacts {
  int buffer, element_bytes;
  bool bfloat16;
  bool meets;   // of class D: diagonals may share an element
  bool column;  // in_column() and of_column() are there
};

/// A place that no column has. narrowed() gives it for places that do not fit 32 bits.
constexpr int kNowhere = -0x7fffffff - 1;
__device__ __forceinline__ int narrowed(int i) { return i; }
__device__ __forceinline__ int narrowed(int64 i) { return i == static_cast<int>(i) ? static_cast<int>(i) : kNowhere; }

/// A read of a table, of which `reads` may have the column that the head reaches: of `size` elements, `at` being the
/// place in it, which may be negative and then counts from the end.
template <int k, class Reads, class T>
__device__ __forceinline__ float read_column(const Reads& reads, const T* p, bool there, [[maybe_unused]] int at,
                                             [[maybe_unused]] int size) {
  if constexpr (requires { reads.template column<k>(p, there, at, size); }) {
    return reads.template column<k>(p, there, at, size);
  } else {
    return reads.template pair<k>(p, there);
  }
}

/// Brings an element to the first-level cache where it is `there`; nothing waits for it. It is copied to shared memory,
/// 4 bytes that nobody reads: prefetch.global.L1 makes no difference on an H200. A narrower element comes with its
/// whole word, which may reach beyond its tensor but not beyond what memory is handed out in. wait_touches() before the
/// CTA ends.
__device__ __forceinline__ void touch_if([[maybe_unused]] const void* p, [[maybe_unused]] bool there,
                                         [[maybe_unused]] unsigned nowhere) {
#ifdef __CUDACC__
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there cp.async.ca.shared.global [%0], [%1], 4;\n}"
               :
               : "r"(nowhere), "l"(reinterpret_cast<unsigned long long>(p) & ~3ull), "r"(static_cast<int>(there))
               : "memory");
#endif
}

}  // namespace fusegrad::device::score_mod
