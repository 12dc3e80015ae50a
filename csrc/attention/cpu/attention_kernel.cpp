// The vectorised loops of attention. This file is compiled once per instruction set, with CPU_CAPABILITY set.
#include "attention/cpu/attention_kernels.h"
#include "attention/low_part.h"

#include <algorithm>

#include "common/lanes.h"
#include "common/products.h"

namespace fusegrad::cpu {
namespace CPU_CAPABILITY {
namespace {

// --- packing ------------------------------------------------------------------------------------------------

// function(zero of the stored type), for the types that are computed in T.
template <class T, class Function>
void with_stored_type(DType dtype, Function&& function) {
  if constexpr (std::is_same_v<T, double>) {
    function(double{});
  } else {
    with_type(dtype, [&](auto zero) {
      if constexpr (!std::is_same_v<decltype(zero), double>) function(zero);
    });
  }
}

template <class T, class S>
const S* row_of(const Matrix& m, int64_t r) {
  return static_cast<const S*>(m.data) + r * m.row_stride;
}

// One row, in T.
template <class T, class S>
inline void load_row(T* out, const S* in, int64_t stride, int64_t cols, T factor) {
  if (stride != 1) {
    for (int64_t c = 0; c < cols; ++c) out[c] = static_cast<T>(in[c * stride]) * factor;
    return;
  }
  using L = Lanes<S>;
  const typename L::Vec f(factor);
  int64_t c = 0;
  for (; c + L::kStep <= cols; c += L::kStep) {
    const auto x = L::load(in + c);
    (x.a * f).store(out + c);
    (x.b * f).store(out + c + L::Vec::size());
  }
  for (; c < cols; ++c) out[c] = static_cast<T>(in[c]) * factor;
}

template <class T>
void pack_rows(T* out, int64_t stride, const Matrix& in, int64_t rows, int64_t cols, T factor) {
  with_stored_type<T>(in.dtype, [&](auto zero) {
    using S = decltype(zero);
    for (int64_t r = 0; r < rows; ++r) {
      load_row<T, S>(out + r * stride, row_of<T, S>(in, r), in.col_stride, cols, factor);
    }
  });
}

template <class T>
void pack_panels(T* out, const Matrix& in, int64_t rows, int64_t cols, T factor) {
  with_stored_type<T>(in.dtype, [&](auto zero) {
    using S = decltype(zero);
    for (int64_t begin = 0; begin < cols; begin += kPanel<T>) {
      const int64_t width = cols - begin < kPanel<T> ? cols - begin : kPanel<T>;
      for (int64_t r = 0; r < rows; ++r, out += kPanel<T>) {
        load_row<T, S>(out, row_of<T, S>(in, r) + begin * in.col_stride, in.col_stride, width, factor);
        for (int64_t c = width; c < kPanel<T>; ++c) out[c] = 0;
      }
    }
  });
}

template <class T>
void pack_transposed(T* out, const Matrix& in, int64_t rows, int64_t cols) {
  constexpr int64_t kChunk = 64;
  alignas(64) T part[kPanel<T> * kChunk];
  with_stored_type<T>(in.dtype, [&](auto zero) {
    using S = decltype(zero);
    for (int64_t begin = 0; begin < rows; begin += kPanel<T>) {
      const int64_t height = rows - begin < kPanel<T> ? rows - begin : kPanel<T>;
      if constexpr (std::is_same_v<S, T>) {
        if (height == kPanel<T> && in.col_stride == 1) {
          transpose_panel(row_of<T, S>(in, begin), in.row_stride, cols, out);
          out += cols * kPanel<T>;
          continue;
        }
      }
      for (int64_t c0 = 0; c0 < cols; c0 += kChunk) {
        const int64_t width = cols - c0 < kChunk ? cols - c0 : kChunk;
        for (int64_t r = 0; r < kPanel<T>; ++r) {
          if (r < height) {
            load_row<T, S>(part + r * kChunk, row_of<T, S>(in, begin + r) + c0 * in.col_stride, in.col_stride, width,
                           T(1));
          } else {
            for (int64_t c = 0; c < width; ++c) part[r * kChunk + c] = 0;
          }
        }
        transpose_panel(part, kChunk, width, out);
        out += width * kPanel<T>;
      }
    }
  });
}

template <class T>
void unpack(const Matrix& out, const T* in, int64_t stride, int64_t rows, int64_t cols, const T* factor, T scale) {
  with_stored_type<T>(out.dtype, [&](auto zero) {
    using S = decltype(zero);
    using L = Lanes<S>;
    for (int64_t r = 0; r < rows; ++r) {
      S* o = static_cast<S*>(out.data) + r * out.row_stride;
      const T* x = in + r * stride;
      const T f = factor != nullptr ? factor[r] * scale : scale;
      int64_t c = 0;
      if (out.col_stride == 1) {
        const typename L::Vec v(f);
        for (; c + L::kStep <= cols; c += L::kStep) {
          L{L::Vec::loadu(x + c) * v, L::Vec::loadu(x + c + L::Vec::size()) * v}.store(o + c);
        }
      }
      for (; c < cols; ++c) o[c * out.col_stride] = static_cast<S>(x[c] * f);
    }
  });
}

template <class T>
void unpack_low(const Matrix& low, const Matrix& out, const T* in, int64_t stride, int64_t rows, int64_t cols,
                const T* factor) {
  with_stored_type<T>(out.dtype, [&](auto zero) {
    using S = decltype(zero);
    if constexpr (sizeof(S) == 2) {
      for (int64_t r = 0; r < rows; ++r) {
        int8_t* l = static_cast<int8_t*>(low.data) + r * low.row_stride;
        const S* o = row_of<T, S>(out, r);
        for (int64_t c = 0; c < cols; ++c) {
          l[c * low.col_stride] = low_part(in[r * stride + c] * factor[r], static_cast<float>(o[c * out.col_stride]),
                                           std::is_same_v<S, c10::BFloat16>);
        }
      }
    }
  });
}

// --- scores -------------------------------------------------------------------------------------------------

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// A row of scores is followed by memory for a whole vector, which gets `pad`.
template <class T>
inline int64_t pad_row(T* row, int64_t cols, T pad) {
  using Vec = at::vec::Vectorized<T>;
  const int64_t rest = cols % Vec::size();
  if (rest == 0) return cols;
  T* last = row + cols - rest;
  Vec::set(Vec(pad), Vec::loadu(last), rest).store(last);
  return cols - rest + Vec::size();
}

// body(vector) -> vector over a row in place, of whole vectors.
template <class T, class Body>
inline void each_vector(T* row, int64_t padded, Body&& body) {
  using Vec = at::vec::Vectorized<T>;
  for (int64_t c = 0; c < padded; c += Vec::size()) body(Vec::loadu(row + c)).store(row + c);
}

template <class T>
void apply_mask(T* score, const uint8_t* mask, int64_t cols) {
  for (int64_t c = 0; c < cols; ++c) score[c] = mask[c] != 0 ? score[c] : -kInfinity<T>;
}

template <class T>
void softmax(const ScoreTile<T>& tile, const OnlineSoftmax<T>& state) {
  using Vec = at::vec::Vectorized<T>;
  for (int64_t r = 0; r < tile.rows; ++r) {
    T* s = tile.score + r * tile.stride;
    if (tile.mask != nullptr) apply_mask(s, tile.mask + r * tile.mask_stride, tile.cols);
    const T before = state.max[r];
    Vec largest(before);
    const int64_t padded = pad_row(s, tile.cols, -kInfinity<T>);
    for (int64_t c = 0; c < padded; c += Vec::size()) largest = at::vec::maximum(largest, Vec::loadu(s + c));
    const T max = reduce_max(largest);
    if (max == -kInfinity<T>) {
      for (int64_t c = 0; c < tile.cols; ++c) s[c] = 0;
      continue;
    }
    if (state.ties != nullptr) {
      T ties = max == before ? state.ties[r] : T(0);
      for (int64_t c = 0; c < tile.cols; ++c) ties += s[c] == max ? T(1) : T(0);
      state.ties[r] = ties;
    }
    Vec sum(T(0));
    const Vec offset(max);
    each_vector(s, padded, [&](const Vec& x) {
      const auto p = exp_nonpositive(x - offset);
      sum = sum + p;
      return p;
    });
    if (before == -kInfinity<T>) {
      state.max[r] = max;  // the sums are still 0
    } else if (max != before) {
      alignas(64) T lane[Vec::size()];
      exp_nonpositive(Vec(before - max)).store(lane);
      const T shrink = lane[0];
      state.max[r] = max;
      state.sum[r] *= shrink;
      T* o = state.out + r * state.out_stride;
      for (int64_t c = 0; c < state.out_cols; ++c) o[c] *= shrink;
    }
    state.sum[r] += reduce_add(sum);
  }
}

template <class T>
bool probabilities(const ScoreTile<T>& tile, const T* lse, const T* low) {
  using Vec = at::vec::Vectorized<T>;
  bool infinite = false;
  for (int64_t r = 0; r < tile.rows; ++r) {
    T* s = tile.score + r * tile.stride;
    const uint8_t* mask = tile.mask == nullptr ? nullptr : tile.mask + r * tile.mask_stride;
    if (lse[r] == -kInfinity<T>) {
      infinite = true;
      for (int64_t c = 0; c < tile.cols; ++c) s[c] = 0;
      continue;
    }
    // Scores that are not masked are counted before the mask makes others -inf.
    Vec infinities(T(0));
    // Two differences: the first is exact where it matters.
    const Vec offset(lse[r]), rest(low[r]), one(T(1)), lowest(-kInfinity<T>);
    if (mask != nullptr) {
      bool found = false;
      for (int64_t c = 0; c < tile.cols; ++c) found |= (mask[c] != 0) & (s[c] == -kInfinity<T>);
      infinite |= found;
      apply_mask(s, mask, tile.cols);
    }
    // What pads is 0 afterwards, and none of those that are counted.
    each_vector(s, pad_row(s, tile.cols, std::numeric_limits<T>::lowest()), [&](const Vec& x) {
      infinities = infinities + ((x == lowest) & one);
      return exp_nonpositive(x - offset - rest);
    });
    if (mask == nullptr) infinite |= reduce_add(infinities) != 0;
  }
  return infinite;
}

template <class T>
void alive(uint8_t* alive, int64_t alive_stride, const T* p, int64_t stride, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) alive[r * alive_stride + c] = p[r * stride + c] != 0 ? 1 : 0;
  }
}

template <class T>
void score_gradient(T* grad, const T* p, int64_t stride, int64_t rows, int64_t cols, const T* delta) {
  using Vec = at::vec::Vectorized<T>;
  for (int64_t r = 0; r < rows; ++r) {
    T* g = grad + r * stride;
    const T* q = p + r * stride;
    const Vec d(delta[r]);
    for (int64_t c = 0; c < cols; c += Vec::size()) {  // the last vector ends in what pads a row
      product_or_zero(Vec::loadu(q + c), Vec::loadu(g + c) - d).store(g + c);
    }
  }
}

template <class T>
void add_max_gradient(T* grad, const ScoreTile<T>& tile, const T* max, const T* grad_max) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    T* g = grad + r * tile.stride;
    const T* s = tile.score + r * tile.stride;
    const uint8_t* mask = tile.mask == nullptr ? nullptr : tile.mask + r * tile.mask_stride;
    if (max[r] == -kInfinity<T>) continue;
    for (int64_t c = 0; c < tile.cols; ++c) {
      if (s[c] == max[r] && (mask == nullptr || mask[c] != 0)) g[c] += grad_max[r];
    }
  }
}

template <class T>
void row_dot(T* out, const Matrix& a, const Matrix& b, const Matrix& low, int64_t rows, int64_t cols) {
  constexpr int64_t kChunk = 256;
  T x[kChunk], y[kChunk];
  // A row's part where it lies, or in T in `to`.
  const auto load = [](T* to, const Matrix& m, int64_t r, int64_t begin, int64_t count) -> const T* {
    const T* found = to;
    with_stored_type<T>(m.dtype, [&](auto zero) {
      using S = decltype(zero);
      const S* from = row_of<T, S>(m, r) + begin * m.col_stride;
      if constexpr (std::is_same_v<S, T>) {
        if (m.col_stride == 1) {
          found = from;
          return;
        }
      }
      load_row<T, S>(to, from, m.col_stride, count, T(1));
    });
    return found;
  };
  constexpr int kSums = 16;  // that do not wait for each other
  for (int64_t r = 0; r < rows; ++r) {
    double sums[kSums] = {};
    for (int64_t begin = 0; begin < cols; begin += kChunk) {
      const int64_t count = cols - begin < kChunk ? cols - begin : kChunk;
      const T* p = load(x, a, r, begin, count);
      const T* q = load(y, b, r, begin, count);
      if constexpr (std::is_same_v<T, float>) {
        if (low.data != nullptr) {  // b has 16 bits, and lies in y
          const int8_t* l = row_of<T, int8_t>(low, r) + begin * low.col_stride;
          const bool bfloat16 = b.dtype == DType::kBFloat16;
          for (int64_t c = 0; c < count; ++c) y[c] = with_low(y[c], l[c * low.col_stride], bfloat16);
        }
      }
      int64_t c = 0;
      for (; c + kSums <= count; c += kSums) {
        for (int i = 0; i < kSums; ++i) sums[i] += static_cast<double>(p[c + i]) * static_cast<double>(q[c + i]);
      }
      for (int i = 0; c < count; ++c, ++i) sums[i] += static_cast<double>(p[c]) * static_cast<double>(q[c]);
    }
    for (int half = kSums / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    out[r] = static_cast<T>(sums[0]);
  }
}

// A bit for each of the pairs of 16 queries by 64 keys, set where it is kept; see cuda/attention/device/dropout.cuh.
constexpr int kDropoutRows = 16, kDropoutCols = 64, kDropoutLanes = 32;
void dropout_block(uint32_t (&kept)[kDropoutLanes], const HeadDropout& head, int64_t q_block, int64_t kv_block) {
  alignas(64) uint32_t digit[8][kDropoutLanes];
  auto* word = digit;
  for (int i = 0; i < kDropoutLanes; ++i) {
    word[0][i] = static_cast<uint32_t>(q_block) * kDropoutLanes + static_cast<uint32_t>(i);
    word[1][i] = static_cast<uint32_t>(kv_block);
    word[2][i] = head.key[0];
    word[3][i] = head.key[1];
  }
  uint32_t key[2] = {};
  for (int round = 0; round < 9; ++round) {
    if (round == 7) std::copy_n(&digit[0][0], 4 * kDropoutLanes, &digit[4][0]);
    for (int i = 0; i < kDropoutLanes; ++i) {
      const uint64_t a = uint64_t{0xD2511F53} * word[0][i], b = uint64_t{0xCD9E8D57} * word[2][i];
      word[0][i] = static_cast<uint32_t>(b >> 32) ^ word[1][i] ^ key[0];
      word[1][i] = static_cast<uint32_t>(b);
      word[2][i] = static_cast<uint32_t>(a >> 32) ^ word[3][i] ^ key[1];
      word[3][i] = static_cast<uint32_t>(a);
    }
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  for (int i = 0; i < kDropoutLanes; ++i) kept[i] = digit[5][i] * digit[6][i] + digit[7][i] < head.rest ? 0 : ~0u;
  for (int d = 7; d >= 0; --d) {
    const bool one = (head.digits >> (7 - d) & 1) != 0;
    for (int i = 0; i < kDropoutLanes; ++i) kept[i] = one ? kept[i] & digit[d][i] : kept[i] | digit[d][i];
  }
}

template <class T>
void dropout(T* factor, int64_t stride, const HeadDropout& head, int64_t q, int64_t kv, int64_t rows, int64_t cols) {
  const T scale = static_cast<T>(head.scale);
  alignas(64) uint32_t kept[kDropoutLanes];
  for (int64_t qb = q / kDropoutRows; qb * kDropoutRows < q + rows; ++qb) {
    for (int64_t kb = kv / kDropoutCols; kb * kDropoutCols < kv + cols; ++kb) {
      dropout_block(kept, head, qb, kb);
      const int64_t col = kb * kDropoutCols - kv;
      const int64_t begin = col < 0 ? -col : 0, end = cols - col < kDropoutCols ? cols - col : kDropoutCols;
      for (int64_t r = 0; r < kDropoutRows; ++r) {
        const int64_t row = qb * kDropoutRows + r - q;
        if (row < 0 || row >= rows) continue;
        // A lane's word has bits of two keys side by side in its halves.
        const uint32_t* of_row = kept + r % 8 * 4;
        for (int64_t c = begin; c < end; ++c) {
          const uint32_t bit = of_row[c % 8 / 2] >> (c % 2 * 16 + r / 8 * 8 + c / 8) & 1;
          factor[row * stride + col + c] = bit != 0 ? scale : T(0);
        }
      }
    }
  }
}

template <class T>
void drop(T* out, const T* in, const T* factor, int64_t stride, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r * stride; c < r * stride + cols; ++c) out[c] = factor[c] != 0 ? in[c] * factor[c] : T(0);
  }
}

template <class T>
void merge(const Matrix& out, const Matrix& low, const Matrix& more, const Matrix& more_low, const T* weight,
           const T* more_weight, int64_t rows, int64_t cols) {
  with_stored_type<T>(out.dtype, [&](auto zero) {
    using S = decltype(zero);
    constexpr bool kBFloat16 = std::is_same_v<S, c10::BFloat16>;
    for (int64_t r = 0; r < rows; ++r) {
      S* to = static_cast<S*>(out.data) + r * out.row_stride;
      const S* from = row_of<T, S>(more, r);
      for (int64_t c = 0; c < cols; ++c) {
        S& o = to[c * out.col_stride];
        T x = static_cast<T>(o), y = static_cast<T>(from[c * more.col_stride]);
        if constexpr (sizeof(S) == 2) {
          int8_t& l = static_cast<int8_t*>(low.data)[r * low.row_stride + c * low.col_stride];
          if (std::isfinite(x)) x = with_low(x, l, kBFloat16);
          if (std::isfinite(y)) y = with_low(y, row_of<T, int8_t>(more_low, r)[c * more_low.col_stride], kBFloat16);
          x = x * weight[r] + y * more_weight[r];
          l = low_part(x, static_cast<float>(static_cast<S>(x)), kBFloat16);
        } else {
          x = x * weight[r] + y * more_weight[r];
        }
        o = static_cast<S>(x);
      }
    }
  });
}

template <class T>
void add(T* __restrict out, const T* in, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] += in[i];
}

template <class T>
constexpr AttentionKernels<T> make_kernels() {
  static_assert(kTerms % kPanel<T> == 0);
  return {
      kPanel<T>,     kTerms,      kMicroRows, pack_rows<T>,     pack_panels<T>, pack_transposed<T>, unpack<T>,
      unpack_low<T>, multiply<T>, softmax<T>, probabilities<T>, alive<T>,       score_gradient<T>,  add_max_gradient<T>,
      row_dot<T>,    dropout<T>,  drop<T>,    merge<T>,         add<T>};
}

}  // namespace

extern const AttentionKernels<float> kAttentionFloat;
extern const AttentionKernels<double> kAttentionDouble;
const AttentionKernels<float> kAttentionFloat = make_kernels<float>();
const AttentionKernels<double> kAttentionDouble = make_kernels<double>();

}  // namespace CPU_CAPABILITY
}  // namespace fusegrad::cpu
