// The gradients of captured buffers: how the contributions of a tile's pairs reach their elements, by a class for each
// scheme (schemes/); docs/design/score_mod.md explains the classes of contributions.
//
// Keys are rows here. In its warp's part of a tile a thread has the pairs (kv, q) = (16 * m + g + 8 * (e / 2), 8 * n +
// 2 * t + e % 2) for m below kBlocksM, n below kBlocksN and e below 4. scores.cuh describes Config; this file adds:
//   Derivative                 the rendered derivative
//   Schemes::kScheme[]         the Scheme of each contribution
//   Schemes::kTable[]          the elements of a histogram
//   kFixedPoint                sums are 64-bit integers, the same in every order
//   kPartialSums               classes A and B are stored head by head, and class F of CTAs that stay (kKeeps) CTA by
//                              CTA; a later kernel sums them up
#pragma once

#include "cuda/attention/captured/schemes/diagonal.cuh"
#include "cuda/attention/captured/schemes/histogram.cuh"
#include "cuda/attention/captured/schemes/of_cta.cuh"
#include "cuda/attention/captured/schemes/of_head.cuh"
#include "cuda/attention/captured/schemes/of_pair.cuh"
#include "cuda/attention/captured/schemes/of_query.cuh"
#include "cuda/attention/captured/schemes/vector.cuh"

namespace fusegrad::device {

template <int kValue>
struct Index {
  static constexpr int value = kValue;
};
/// f(Index<0>()), f(Index<1>()), ...
template <int kCount, int kFirst = 0, class F>
__device__ __forceinline__ void for_each_index(F&& f) {
  if constexpr (kFirst < kCount) {
    f(Index<kFirst>());
    for_each_index<kCount, kFirst + 1>(f);
  }
}

/// The sums of contributions k and beyond.
template <class Of, int k = 0, bool kEnd = k == Of::kCount>
class EachSum {
  using Captured = typename Of::Captured;

 public:
  __device__ __forceinline__ EachSum(const FlexBackwardArguments& a, const FlexSums* sums, const Captured& captured,
                                     char* shared)
      : first_(a, sums, captured, shared), rest_(a, sums, captured, shared) {}
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) {
    f(first_);
    rest_.for_each(f);
  }
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) const {
    f(first_);
    rest_.for_each(f);
  }
  template <int kIndex>
  __device__ __forceinline__ const auto& at() const {
    if constexpr (kIndex == k) {
      return first_;
    } else {
      return rest_.template at<kIndex>();
    }
  }

 private:
  SchemeSums<Of, k> first_;
  EachSum<Of, k + 1> rest_;
};
template <class Of, int k>
class EachSum<Of, k, true> {
 public:
  __device__ __forceinline__ EachSum(const FlexBackwardArguments&, const FlexSums*, const typename Of::Captured&,
                                     char*) {}
  template <class F>
  __device__ __forceinline__ void for_each(const F&) const {}
};

/// kTeams: the CTA's warps form so many teams, each of which sums up a tile for its own keys. A team's threads must
/// meet between a tile's end_tile and its flush; with one set of lines (kLines = 1), and where kOnce, also after flush.
template <class Config, int kTeams = 1, int kLines = 1>
class FlexBufferSums {
  using Of = Contributions<Config, kTeams, kLines>;
  using D = typename Of::Derivative;
  using Captured = typename Of::Captured;
  static constexpr int kCount = Of::kCount;

  // Whether numbers live from pair to pair; for more than eight queries at a time they would spill.
  static __device__ constexpr bool held() {
    for (int k = 0; k < kCount; ++k) {
      if (!sums_in_registers(Of::scheme(k)) && Of::scheme(k) != Scheme::kStoredTiles) return true;
    }
    return false;
  }
  static constexpr bool kHeld = held();

 public:
  static constexpr int kSharedBytes = Of::offset(kCount);
  /// Whether the kernel stores dS, for a contribution that is left out here.
  static constexpr bool kStoresTiles = Of::some_is(Scheme::kStoredTiles);
  /// Whether a tile's sums and the next one's lie in one place.
  static constexpr bool kOnce = Of::some_is(Scheme::kDiagonal) || Of::some_is(Scheme::kSmallTable);
  /// Whether flush() does anything.
  static constexpr bool kFlushes = kOnce || Of::some_is(Scheme::kQ);
  /// Whether the CTA computes a tile again, with another limit, if it has contributions beyond the limit, instead of
  /// adding these to memory one by one. CTAs that stay with a head do, as they have many tiles, where class F sums up
  /// all contributions in float.
  static constexpr bool kRepeats = Of::kRepeats;

  __device__ __forceinline__ FlexBufferSums(const FlexBackwardArguments& a, const FlexSums* sums,
                                            const Captured& captured, char* shared)
      : captured_(captured), shared_(shared), each_(a, sums, captured, shared) {}

  /// Called by all threads before the first tile; a barrier must follow.
  __device__ __forceinline__ void begin() {
    for (int i = static_cast<int>(threadIdx.x); i < kSharedBytes / 4; i += Of::kThreads)
      reinterpret_cast<int*>(shared_)[i] = 0;
    each_.for_each([](auto& sum) { sum.begin(); });
    begin_head();
  }
  /// Where kRepeats, after a tile's flush(): whether the tile has to be repeated, since flush() added nothing. A
  /// barrier must lie between this, called by all threads, and next_limits(), and another one before the next tile.
  __device__ __forceinline__ bool must_repeat() const {
    bool some = false;
    if constexpr (kRepeats) each_.for_each([&](const auto& sum) { some |= sum.must_repeat(); });
    return some;
  }
  /// Sets the limits of the next tile.
  __device__ __forceinline__ void next_limits() const {
    if (threadIdx.x != 0) return;
    if constexpr (kRepeats) each_.for_each([](const auto& sum) { sum.next_limit(); });
  }
  /// Called after the last tile of head h: if the CTA stores its sums, it stores the elements that they belong to.
  __device__ __forceinline__ void end_histograms(int h) const {
    if constexpr (kRepeats && Config::kPartialSums) each_.for_each([&](const auto& sum) { sum.store_elements(h); });
  }
  /// Called behind the last batch of a CTA that stays with head h. (q, kv): the thread's first pair.
  __device__ __forceinline__ void end_batches(int h, int q, int kv) const {
    each_.for_each([&](const auto& sum) { sum.end_batches(h, q, kv); });
  }
  /// Called before the tiles of a query head.
  __device__ __forceinline__ void begin_head() {
    each_.for_each([](auto& sum) { sum.begin_head(); });
  }
  /// Called before a tile.
  __device__ __forceinline__ void begin_tile() {
    each_.for_each([](auto& sum) { sum.begin_tile(); });
  }
  /// Adds what the pair (m, n, e) contributes, `value` as Derivative::apply leaves it.
  template <class Reads = score_mod::ReadThere<Config::ScoreMod::kUnread>>
  __device__ __forceinline__ void add(const float* value, int m, int n, int e, float score, int b, int h, int q, int kv,
                                      bool takes_part, const Reads& of_pair = Reads()) {
    each_.for_each([&](auto& sum) { sum.add(value[sum.kIndex], m, n, e, score, b, h, q, kv, takes_part, of_pair); });
    if constexpr (D::kVectors) {
      vectors_.set(e, value, score, q, kv);
      b_ = b;
      h_ = h;
    }
  }
  /// Called after the pairs of 16 keys and 8 queries.
  __device__ __forceinline__ void end_block(int m, int n, int b, int h) {
    if constexpr (kTeams == 1 && kHeld) hold_order();
    each_.for_each([&](auto& sum) { sum.end_block(m, n, b, h); });
    if constexpr (D::kVectors) vectors_.scatter(captured_, b_, h_, VectorPut{each_});
  }
  /// Called after the pairs of a tile.
  __device__ __forceinline__ void end_tile(int parity = 0) {
    each_.for_each([&](auto& sum) { sum.end_tile(parity); });
  }
  /// Called by a team's threads: adds the tile's sums to their elements. (q, kv): the tile's first pair.
  __device__ __forceinline__ void flush(int b, int h, int q, int kv, int parity = 0) {
    // One contribution beyond its limit has all computed again, so none may add now.
    const bool again = must_repeat();
    each_.for_each([&](auto& sum) { sum.flush(b, h, q, kv, parity, again); });
  }
  /// Called after the tiles of a query head. kv: the thread's first key.
  __device__ __forceinline__ void end_head(int b, int h, int kv) {
    each_.for_each([&](auto& sum) { sum.end_head(b, h, kv); });
  }

 private:
  struct VectorPut {
    const EachSum<Of>& each;
    template <int k>
    __device__ __forceinline__ void put(const float (&value)[4], const long long (&place)[4]) const {
      each.template at<k>().put_vector(value, place);
    }
  };

  const Captured& captured_;
  char* const shared_;
  EachSum<Of> each_;
  FlexVectorPairs<Config> vectors_;
  int b_, h_;
};

}  // namespace fusegrad::device
