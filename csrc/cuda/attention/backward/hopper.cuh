// Flex attention backward for sm_90a, one CTA per block of keys.
//
// The CTA owns kCols keys of one KV head, 64 per consumer warpgroup, and walks the query tiles of every query head in
// the group. One producer warp streams Q, dO, lse and delta through a TMA ring. CTAs are persistent: while dK and dV of
// one key block are stored, the next one is already loading. Where two tiles of keys fit (kSeamless), the first scores
// of the next keys run beside the last products of the present ones, and dK and dV leave by TMA through dQ's region of
// shared memory.
//
// Scores and their gradients are kept transposed (keys are rows), so P and dS feed dV and dK straight from registers;
// only dS goes through shared memory, for dQ, which TMA reduces into fp32 global memory. One warp per consumer
// warpgroup issues those reductions, and stores dS where it is the gradient of a captured tensor too. Where a CTA has
// all keys of a head, the warp brings the sums back for the last ones, and stores dQ (whole_head.cuh).
//
// The consumer warpgroups ping-pong: one computes probabilities while the other's WGMMAs run. A warpgroup's step for
// query tile i:
//   pairs   waits for S and dP, computes P and dS as operands, stores dS to shared memory
//   turn    issues dV += P dO, dQ(i - 1) = dS(i - 1) K and dK += dS Q, stores dQ, then issues S and dP of tile i + 1.
//           dQ is one step late, so the other warpgroup's dS is already there
// The order of turns is enforced by the kTurn barriers. Keep fences outside the turn; the turn is the critical path.
// Without a score_mod P is computed while dP is still being multiplied (kOverlapped).
//
// hopper_tiles.cuh describes Config; this file adds:
//   kStoresBoxes               TMA stores dK and dV
//   kStoresFirst, kOrdered     how dQ is summed (query_sums/), as kWhole. In order CTAs take tiles of keys in it, too
#pragma once

#include "cuda/attention/backward/hopper_tiles.cuh"
#include "cuda/attention/backward/query_sums/query_sums.cuh"

namespace fusegrad::device {

template <class Config>
class FlexBackwardHopper : FlexBackwardHopperTiles<Config> {
  template <class Kernel>
  friend class AddedSums;
  template <class Kernel>
  friend class OrderedSums;
  template <class Kernel>
  friend class StoredFirst;
  template <class Kernel>
  friend class WholeHeadSums;
  using Configured = Config;
  using Tiles = FlexBackwardHopperTiles<Config>;
  using Tiles::a_, Tiles::col_, Tiles::group_, Tiles::key, Tiles::key_batch, Tiles::key_head, Tiles::mask_,
      Tiles::more_;
  using Tiles::alive, Tiles::at_edge, Tiles::begin, Tiles::draw, Tiles::drop_operand, Tiles::first_key, Tiles::masked,
      Tiles::pairs, Tiles::place_of, Tiles::produce;
  using Tiles::grad_out_empty, Tiles::gradient, Tiles::gradient_empty, Tiles::gradient_full;
  using Tiles::issue_grad_key, Tiles::issue_grad_probabilities, Tiles::issue_grad_value, Tiles::issue_scores;
  using Tiles::kAll, Tiles::kAlone, Tiles::kBoxes, Tiles::kConsumerWarps, Tiles::kSumEmpty, Tiles::kSumFull,
      Tiles::kTurn;
  using Tiles::kBlocksD, Tiles::kBlocksE, Tiles::kBlocksN, Tiles::kGroupBytes, Tiles::kNoMore, Tiles::kRowBytes,
      Tiles::key_empty, Tiles::key_gradients, Tiles::key_gradients_empty, Tiles::value_empty;
  using Tiles::kept_, Tiles::kInOrder, Tiles::kLines, Tiles::kSeamless, Tiles::kThreads, Tiles::lane, Tiles::load,
      Tiles::load_rows, Tiles::sum;
  using Tiles::parity_of, Tiles::query_empty, Tiles::query_stage_of, Tiles::release, Tiles::rows, Tiles::stage_of;
  using Tiles::sums_, Tiles::thread, Tiles::touch, Tiles::wait_grad_out, Tiles::wait_query;
  using Tiles::warp;
  using typename Tiles::Lines, typename Tiles::Place, typename Tiles::Sums, typename Tiles::T;
  // A product of dQ is transposed: 64 columns of the head, a chunk. The first warpgroup makes one more than the second
  // where their number is odd. Where the head is one chunk, each warpgroup has its part of the queries; upright they
  // lie as queries do, 64 of them, where many of the 64 would be no columns.
  static constexpr bool kRowsShared = Config::kHead <= 64, kNarrow = Config::kNarrow, kUpright = Config::kUpright;
  static constexpr int kChunks = Tiles::kFirstChunks;
  static constexpr bool kUneven = !kRowsShared && Tiles::kQueryChunks % Config::kGroups != 0;
  static constexpr int kSumRows = Config::kRows / (kRowsShared ? Config::kGroups : 1);
  static constexpr int kBlocksQ = (kUpright ? Config::kHead : kSumRows) / 8;
  static constexpr int kBlockBytes = 8 * 8 * static_cast<int>(sizeof(float));
  static constexpr int kEightRows = (kUpright ? kBlocksQ : 8) * kBlockBytes;
  using QueryProduct = Wgmma<T, kUpright ? Config::kHead : kSumRows, false, kUpright, !kUpright>;
  // P is computed while dP is still being multiplied.
  static constexpr bool kOverlapped = !kInOrder && Config::kGradScores;
  // Mask element by element: it is faster than by bits. A mask_mod that reads nothing can be called for pairs beyond
  // the lengths too, so the code has no branches.
  static constexpr bool kByElement = Config::kMaskAlone && !Config::kMixed;
  static constexpr bool kStoresTiles = Sums::kStoresTiles;
  static_assert(!kStoresTiles || Config::kGradQuery);
  static_assert(Config::kParts == 1 || (kOverlapped && kByElement));
  static_assert(!Config::kStoresFirst || (Config::kGradQuery && !Config::kWhole && !Config::kOrdered));
  static_assert(!Config::kOwnPlaces || (kSeamless && Config::kStoresBoxes));
  static_assert(!Config::kWhole || (kSeamless && Config::kStoresBoxes && Config::kGradKey && Config::kGradValue));
  static_assert((Config::kStoresBoxes || !kSeamless) && (Config::kGradQuery || !Config::kStoresBoxes));
  // Threads at the barriers between a warpgroup and the warp that issues its reductions of dQ.
  static constexpr int kWithWarp = kWarpgroup + kLanes;
  // A warp that copies boxes computes places of rows. Gradients of 128 columns leave it fewer. Some producers count,
  // and warps that store or add dQ keep what they will do next.
  static constexpr bool kCopies = Tiles::Boxes::kCopies;
  static constexpr bool kCounts = Config::kOrdered || (Config::kWhole && Config::kBlocks);
  // Beside tall tiles, whose consumers need the registers, the warps that add dQ spill a few.
  static constexpr bool kAdds = Config::kGradQuery && !Config::kWhole && Config::kRows % 64 == 0;
  static constexpr int kProducerRegisters = kCopies && Config::kHead <= 64 ? 56 : kCopies || kCounts || kAdds ? 40 : 24;
  static constexpr int kConsumerRegisters = consumer_registers(Config::kGroups, kProducerRegisters);
  static_assert(!kBoxes || Config::kGroups == 2);
  static_assert(!kUpright || (kRowsShared && kSumRows == 64) || !Config::kGradQuery);
  static_assert(Tiles::kOwnKeys && (Config::kGroups == 2 || !Config::kGradQuery));
  static_assert(kChunks == 1 || !Config::kGradQuery ||
                !(Config::kStoresBoxes || Config::kWhole || Config::kStoresFirst));

 public:
  using Tiles::kSharedBytes, Tiles::Tiles;

  __device__ __forceinline__ void run() {
    if constexpr (Config::kOrdered) {
      if (!Tiles::draw_first(threadIdx.x == Config::kGroups * kWarpgroup)) return;
    }
    begin(kConsumerWarps);
    if (group_ == Config::kGroups) {
      give_registers<kProducerRegisters>();
      const int warp = __shfl_sync(~0u, this->warp() - kConsumerWarps, 0);
      if (warp == 0) {
        if (lane() == 0) produce();
      } else if (Config::kGradQuery && warp <= Config::kGroups) {
        add_grad_query(warp - 1);
      } else if (kBoxes && warp == Config::kGroups + 1) {
        Tiles::bring_boxes();
      }
    } else {
      take_registers<kConsumerRegisters>();
      if (Config::kGradQuery && kUneven && group_ != 0) {
        consume<kChunks - 1>();
      } else {
        consume<kChunks>();
      }
    }
  }

 private:
  // --- a consumer warpgroup ---

  /// kMine: the chunks of dQ that it makes.
  template <int kMine>
  __device__ __forceinline__ void consume() {
    float grad_key[kBlocksD][4], grad_value[kBlocksE][4], s[kBlocksN][4], d[kBlocksN][4];
    sums_.begin();
    named_sync(kAll, kThreads);
    // Warpgroup 0 begins and each hands the turn to the next. Nobody takes the last turn.
    if (group_ == Config::kGroups - 1) named_arrive(kTurn, 2 * kWarpgroup);
    int i = 0;
    for (;; ++i) {
      const bool more = add_tiles<kMine>(i, s, d, grad_key, grad_value);
      if constexpr (!kSeamless) {
        release(key_empty(0));
        if constexpr (Config::kStoresBoxes) {
          give_gradients(grad_key, grad_value);
        } else {
          store_gradients(place_of(i), grad_key, grad_value);
        }
      }
      if constexpr (Config::kGradQuery) {
        // The warp reads place i, which stands for no tile.
        named_sync(kSumEmpty + group_, kWithWarp);
        named_arrive(kSumFull + group_, kWithWarp);
      }
      if (!more) break;
    }
    if (group_ == 0) named_sync(kTurn, 2 * kWarpgroup);
    if constexpr (Tiles::kTouches) wait_touches();
  }

  // Walks all tiles of the keys, from tile i to the place behind the last one, which i becomes. Returns whether other
  // keys follow.
  template <int kMine>
  __device__ __forceinline__ bool add_tiles(int& i, float (&s)[kBlocksN][4], float (&d)[kBlocksN][4],
                                            float (&grad_key)[kBlocksD][4], float (&grad_value)[kBlocksE][4]) {
    zero(grad_key);
    zero(grad_value);
    const int first = i;
    int b = 0, h = -1;
    wait_query(i);
    issue_scores(s, i, 0);
    wait_grad_out(i);
    issue_grad_probabilities(d, i);
    if constexpr (kOverlapped) wait_scores(s);
    if constexpr (kLines) {
      Lines lines;
      load(lines, i);
      lines.store(this->lines(), thread() % kWarpgroup);
      named_sync(kAlone + group_, kWarpgroup);
    }
    draw(i);
    Place now = place_of(i);
    for (; now.tile >= 0; now = place_of(++i)) {
      if constexpr (!kOverlapped) {
        wgmma_wait<0>();
        pin<kBlocksN * 4>(s[0]);
        if constexpr (Config::kGradScores) pin<kBlocksN * 4>(d[0]);
      }
      if (now.b != b || now.h != h || (kSeamless && now.first())) {
        if (h >= 0) sums_.end_head(b, h, first_key());
        col_ = now.col();
        sums_.begin_head();
        b = now.b;
        h = now.h;
      }
      unsigned p[kBlocksN * 2], ds[kBlocksN * 2];
      if constexpr (kOverlapped) {
        overlapped_pairs(now, i, s, d, p, ds);
      } else {
        pairs(now, i, s, d, p, ds);
        if (now.last()) release(value_empty());
      }
      if constexpr (Config::kGradQuery) {
        keep(ds, i);
        if (i != first) named_sync(kSumEmpty + group_, kWithWarp);
      }
      named_sync(kTurn + group_, 2 * kWarpgroup);
      turn<kMine>(i, i == first, now, p, ds, s, d, grad_key, grad_value);
      named_arrive(kTurn + (group_ + 1) % Config::kGroups, 2 * kWarpgroup);
      if constexpr (Config::kGradQuery) {
        fence_before_copy();  // WGMMA too reads shared memory through the asynchronous proxy
        release(gradient_full(stage_of(i)));
        if (i != first) {
          named_arrive(kSumFull + group_, kWithWarp);
          release(gradient_empty(stage_of(i - 1)));
          if (kSeamless && now.first()) release(key_empty(now.stage_before()));
        }
      }
      if (kSeamless && now.last()) {
        if constexpr (Config::kOwnPlaces) {
          Barrier::wait(key_gradients_empty(group_), ended_ ^ 1);
          ended_ ^= 1;
        }
        give_gradients(grad_key, grad_value);
        zero(grad_key);
        zero(grad_value);
      }
      touch(i + 1);
      Lines lines;
      if constexpr (kLines) load(lines, i + 1);
      // The warpgroup's threads met in its turn; the next tile's products are in flight.
      if constexpr (Sums::kFlushes) {
        const Place done = place_of(i);
        sums_.flush(done.b, done.h, done.row(), col_, i & 1);
      }
      if constexpr (kLines) lines.store(this->lines(), thread() % kWarpgroup);
      if constexpr (kLines || Sums::kOnce) named_sync(kAlone + group_, kWarpgroup);
      draw(i + 1);
      // The wait is here: at the loop's head the compiler would wait for each product.
      if constexpr (kOverlapped) wait_scores(s);
    }
    wgmma_wait<0>();
    pin<kBlocksN * 4>(s[0]);
    if constexpr (Config::kGradScores) pin<kBlocksN * 4>(d[0]);
    if constexpr (Config::kGradQuery) {
      if (i > first) last_grad_query<kMine>(i - 1, now);
      // The place behind the last tile has stages too.
      Barrier::wait(gradient_empty(stage_of(i)), parity_of(i) ^ 1);
      release(gradient_full(stage_of(i)));
      release(gradient_empty(stage_of(i)));
    }
    release(grad_out_empty(stage_of(i)));
    release(query_empty(query_stage_of(i)));
    if (now.tile != kNoMore) Tiles::skip_boxes(i);
    if (h >= 0) sums_.end_head(b, h, first_key());
    return now.tile != kNoMore;
  }

  __device__ __forceinline__ void give_gradients(const float (&grad_key)[kBlocksD][4],
                                                 const float (&grad_value)[kBlocksE][4]) const {
    if constexpr (Config::kGradValue)
      give_rows(place_of_gradient(group_, true), grad_value, 1.0f);  // dropout's factor is in P
    if constexpr (Config::kGradKey) give_rows(place_of_gradient(group_, false), grad_key, a_.scale);
  }
  /// Where TMA stores a warpgroup's dV or dK from.
  __device__ __forceinline__ unsigned place_of_gradient(int group, bool value) const {
    if constexpr (!Config::kOwnPlaces) return sum(group);
    return key_gradients(group) + (value ? 0 : chunks_of(Config::kValue, kRowBytes) * kGroupBytes);
  }
  /// In a place of its own the warp finds it behind the next dQ.
  template <int kBlocks>
  __device__ __forceinline__ void give_rows(unsigned place, const float (&x)[kBlocks][4], float factor) const {
    if constexpr (!Config::kOwnPlaces) named_sync(kSumEmpty + group_, kWithWarp);
    const int matrix = lane() / 8, row = lane() % 8, swizzle = kNarrow ? row / 2 : row;
    const unsigned to = place + (warp() % 4 * 16 + matrix % 2 * 8 + row) * kRowBytes + (matrix / 2 ^ swizzle) * 16;
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      unsigned words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        words[e] = pack(T{}, x[n + e / 2][e % 2 * 2] * factor, x[n + e / 2][e % 2 * 2 + 1] * factor);
      constexpr int kBlocksOfChunk = kRowBytes / 16;
      store_matrices((to ^ n % kBlocksOfChunk * 16) + n / kBlocksOfChunk * kGroupBytes, words);
    }
    fence_before_copy();
    if constexpr (!Config::kOwnPlaces) named_arrive(kSumFull + group_, kWithWarp);
  }

  __device__ __forceinline__ void store_gradients(const Place& last, float (&grad_key)[kBlocksD][4],
                                                  float (&grad_value)[kBlocksE][4]) const {
    if constexpr (Config::kGradKey && Config::kGradValue && kBlocksD == kBlocksE) {
#pragma unroll 1  // the same code for both
      for (int value = 0; value < 2; ++value) {
        const float factor = value != 0 ? 1.0f : a_.scale;
        store_rows<T>(value != 0 ? a_.grad_value : a_.grad_key, key_batch(last), key_head(last), first_key(), a_.keys,
                      value != 0 ? a_.value_size : a_.head_size, grad_key, {factor, factor});
#pragma unroll
        for (int i = 0; i < kBlocksD * 4; ++i) grad_key[i / 4][i % 4] = grad_value[i / 4][i % 4];
      }
    } else {
      if constexpr (Config::kGradKey) {
        store_rows<T>(a_.grad_key, key_batch(last), key_head(last), first_key(), a_.keys, a_.head_size, grad_key,
                      {a_.scale, a_.scale});
      }
      if constexpr (Config::kGradValue) {
        store_rows<T>(a_.grad_value, key_batch(last), key_head(last), first_key(), a_.keys, a_.value_size, grad_value,
                      {1.0f, 1.0f});
      }
    }
  }

  /// Waits for the scores; dP is still being multiplied.
  static __device__ __forceinline__ void wait_scores(float (&s)[kBlocksN][4]) {
    wgmma_wait<1>();
    pin<kBlocksN * 4>(s[0]);
  }
  // Computes what pairs() computes, and waits for dP itself. A loop of its own replaces what a mask leaves out: beside
  // the exponentials it would spill.
  __device__ __forceinline__ void overlapped_pairs(const Place& place, int i, float (&s)[kBlocksN][4],
                                                   float (&d)[kBlocksN][4], unsigned (&p)[kBlocksN * 2],
                                                   unsigned (&ds)[kBlocksN * 2]) const {
    const auto of_alive = [&] {
      if constexpr (kByElement)
        return 0;
      else
        return Tested<Bits<kBlocksN * 4>>(alive(place, masked(place)));
    }();
    const unsigned rows = this->rows(stage_of(i)) + lane() % 4 * 2 * static_cast<int>(sizeof(FlexRow));
    if (place.far()) subtract_far_lse(s, place, rows);
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      FlexRow of_row[2];
      load_rows(of_row, rows + n * 8 * static_cast<int>(sizeof(FlexRow)));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float changed;
        s[n][e] = FlexPairGradient<Config>::template probability<true>(
            this->score_, a_.scale, s[n][e], {of_row[e % 2], 0.0f, 0.0f, 0.0f}, 0, 0, 0, 0, true, changed);
      }
    }
    if constexpr (kByElement) {
      mark_others(s, place);
    } else {
      if (masked(place)) keep_those(s, [&](int i) { return of_alive[i]; });
    }
    pin<kBlocksN * 4>(s[0]);
    wgmma_wait<0>();
    pin<kBlocksN * 4>(d[0]);
    if (place.last()) release(value_empty());
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      FlexRow of_row[2];
      load_rows(of_row, rows + n * 8 * static_cast<int>(sizeof(FlexRow)));
      if constexpr (Config::kDropout && kByElement) {
        put_operand<T>(p + 2 * n, s[n]);
        // Both gradients, of kept and of dropped pairs, and one of them as operands: fewer instructions than for dP.
        unsigned dropped[2];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float probability = s[n][e];
          // As an expression compilers would negate the product by an instruction of its own.
          asm("{\n.reg .f32 x;\nneg.f32 x, %2;\nmul.f32 %0, %1, x;\n}"
              : "=f"(s[n][e])
              : "f"(probability), "f"(of_row[e % 2].delta));
          d[n][e] = fmaf(probability, d[n][e], s[n][e]);
        }
        put_operand<T>(ds + 2 * n, d[n]);
        put_operand<T>(dropped, s[n]);
#pragma unroll
        for (int r = 0; r < 2; ++r) ds[2 * n + r] = select_bits(kept_.mask(n, r), ds[2 * n + r], dropped[r]);
      } else {
        if constexpr (Config::kDropout) kept_.drop(n, d[n]);
#pragma unroll
        for (int e = 0; e < 4; ++e) d[n][e] = s[n][e] * (d[n][e] - of_row[e % 2].delta);
        put_operand<T>(p + 2 * n, s[n]);
        if constexpr (kByElement) put_operand<T>(ds + 2 * n, d[n]);
      }
      drop_operand(n, p);
    }
    if constexpr (kByElement) {
      if (masked(place)) {
#pragma unroll
        for (int n = 0; n < kBlocksN * 2; ++n) ds[n] &= ~sign_masks(p[n]);
      }
    } else {
      if (masked(place)) keep_those(d, [&](int i) { return of_alive[i]; });
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) put_operand<T>(ds + 2 * n, d[n]);
    }
  }
  /// Makes scores of far rows what of them is above lse.
  __device__ __forceinline__ void subtract_far_lse(float (&s)[kBlocksN][4], const Place& place, unsigned rows) const {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
      FlexRow of_row[2];
      load_rows(of_row, rows + n * 8 * static_cast<int>(sizeof(FlexRow)));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!is_far(of_row[r])) continue;
        const int q = place.row() + n * 8 + lane() % 4 * 2 + r;
        const float origin = take_origin<Config>(a_, of_row[r], place.b, place.h, q);
#pragma unroll
        for (int e = r; e < 4; e += 2) subtract_lse(s[n][e], a_.scale, of_row[r], origin);
      }
    }
  }
  /// For each of two 16-bit numbers all bits if its sign is set, else none.
  static __device__ __forceinline__ unsigned sign_masks(unsigned x) {
    unsigned masks;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(masks) : "r"(x));
    return masks;
  }
  /// Marks pairs that take no part by a probability of -0, which no other pair has. So the mask is computed once and
  /// their gradients are found by the sign.
  __device__ __forceinline__ void mark_others(float (&p)[kBlocksN][4], const Place& place) const {
    const int q = place.row() + lane() % 4 * 2, kv = first_key();
    if constexpr (kHas<typename Config::MaskMod> || Config::kParts > 1) {
      if (const int kinds = place.kinds(); kinds != kTileFull) {
        keep_those(p, [&](int i) {
          const int kind = Config::kParts == 1 ? kTilePartial : kinds >> i * Config::kParts / (kBlocksN * 4) * 2 & 3;
          bool takes = kind != kTileNone;
          if constexpr (kHas<typename Config::MaskMod>) {
            takes &= kind == kTileFull |
                     Config::MaskMod::apply(mask_, place.b, place.h, q + i / 4 * 8 + i % 2, kv + i / 2 % 2 * 8, true);
          }
          return takes;
        });
      }
    }
    if (at_edge(place)) {
      keep_those(p, [&](int i) { return q + i / 4 * 8 + i % 2 < a_.queries & kv + i / 2 % 2 * 8 < a_.keys; });
    }
  }
  /// The others become -0.
  template <class Takes>
  static __device__ __forceinline__ void keep_those(float (&x)[kBlocksN][4], const Takes& takes) {
#pragma unroll
    for (int i = 0; i < kBlocksN * 4; ++i) x[i / 4][i % 4] = takes(i) ? x[i / 4][i % 4] : -0.0f;
  }

  /// Issues the products of tile i and the first ones of the next tile. None is under a condition, which would make the
  /// compiler wait for it: behind the last tile they multiply whatever lies in shared memory, and nobody uses them.
  template <int kMine>
  __device__ __forceinline__ void turn(int i, bool first, const Place& now, const unsigned (&p)[kBlocksN * 2],
                                       const unsigned (&ds)[kBlocksN * 2], float (&s)[kBlocksN][4],
                                       float (&d)[kBlocksN][4], float (&grad_key)[kBlocksD][4],
                                       float (&grad_value)[kBlocksE][4]) {
    float c[kBlocksQ][4];
    issue_grad_value(grad_value, p, i);
    if constexpr (Config::kGradQuery) issue_grad_query(c, i - 1, now.stage_before());
    issue_grad_key(grad_key, ds, i);
    wgmma_commit();
    wgmma_wait<1>();
    pin<kBlocksE * 4>(grad_value[0]);
    if constexpr (Config::kGradQuery) {
      pin<kBlocksQ * 4>(c[0]);
      if (!first) keep_grad_query(c, now);
    }
    static_assert(kMine <= 2);
    constexpr bool kSecond = Config::kGradQuery && kMine == 2;
    if constexpr (kSecond) issue_grad_query(c, i - 1, now.stage_before(), 1);
    wait_query(i + 1);
    wgmma_wait<kSecond ? 1 : 0>();
    pin<kBlocksD * 4>(grad_key[0]);
    issue_scores(s, i + 1, now.next_stage());
    release(grad_out_empty(stage_of(i)));
    release(query_empty(query_stage_of(i)));
    if constexpr (kSecond) {
      wgmma_wait<1>();
      pin<kBlocksQ * 4>(c[0]);
      if (!first) keep_grad_query(c, now, 1);
    }
    // The wait is here, not before the turn, so that the compiler does not hold dP's registers beside dQ's.
    wait_grad_out(i + 1);
    issue_grad_probabilities(d, i + 1);
  }

  // --- dS and dQ through shared memory ---

  // Stores the warp's 16 keys of dS transposed: a row is a query. Matrix i of a store has keys from 8 * (i % 2) and
  // queries from 8 * (i / 2); a lane has the address of row lane % 8 of matrix lane / 8.
  __device__ __forceinline__ void keep(const unsigned (&ds)[kBlocksN * 2], int i) const {
    const int s = stage_of(i);
    Barrier::wait(gradient_empty(s), parity_of(i) ^ 1);
    const int matrix = lane() / 8, row = lane() % 8, part = warp() % 4 * 2 + matrix % 2;
    const unsigned to =
        gradient(s) + group_ * Config::kRows * kChunkBytes + (matrix / 2 * 8 + row) * kChunkBytes + (part ^ row) * 16;
#pragma unroll
    for (int n = 0; n < kBlocksN; n += 2) store_matrices_transposed(to + n * 8 * kChunkBytes, ds + n * 2);
  }
  /// Issues a chunk of the warpgroup's columns and queries of dQ of tile i once its dS is there. For the tile before
  /// the first one (i = -1) the barrier's phase counts as over.
  __device__ __forceinline__ void issue_grad_query(float (&c)[kBlocksQ][4], int i, int key_stage, int chunk = 0) const {
    if (chunk == 0) Barrier::wait(gradient_full(stage_of(i)), parity_of(i));
    // The last product of a narrow tile may have 32 columns that lie behind the keys: nobody adds those rows of dQ.
    constexpr int kChunkStride = Config::kCols * kRowBytes, kChunksOfProduct = kChunkBytes / kRowBytes;
    const auto keys = descriptor<kRowBytes>(
        key(key_stage) + (first_col(group_) / kChunk + chunk) * kChunksOfProduct * kChunkStride, kChunkStride);
    const auto gradients = descriptor(gradient(stage_of(i)) + first_row(group_) * kChunkBytes, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kCols / 16; ++k) {
      const auto key = advanced(keys, k * 16 * kRowBytes), gradient = advanced(gradients, step_bytes<Config::kRows>(k));
      QueryProduct::run(c[0], kUpright ? gradient : key, kUpright ? key : gradient, k != 0);
    }
    wgmma_commit();
  }
  static __device__ __forceinline__ int first_row(int group) { return kRowsShared ? group * kSumRows : 0; }
  static __device__ __forceinline__ int first_col(int group) { return kRowsShared ? 0 : group * kChunks * kChunk; }
  static __device__ __forceinline__ int chunks(int group) { return kUneven && group != 0 ? kChunks - 1 : kChunks; }

  // Hands dQ to the warp that issues its reduction, in the order of global memory: for each eight queries the 8 x 8
  // blocks of 64 columns, two of them from each warp, side by side; upright all blocks of eight queries from one warp.
  __device__ __forceinline__ void store_grad_query(const float (&c)[kBlocksQ][4], int chunk) const {
    each_sum([&](unsigned at, int n, int r) { store_pair(at, c[n][2 * r], c[n][2 * r + 1]); }, chunk);
  }
  /// use(where it lies there, n, r) of each two sums of the thread, r of accumulator n.
  template <class Use>
  __device__ __forceinline__ void each_sum(const Use& use, int chunk = 0) const {
    // From one accumulator to the next, and from a warp's first eight rows of them to the second.
    constexpr int kNext = kUpright ? kBlockBytes : kEightRows, kSecond = kUpright ? kEightRows : kBlockBytes;
    const unsigned at = sum(group_) + chunk * (kSumRows / 8 * kEightRows) + warp() % 4 * 2 * kSecond + lane() * 8;
#pragma unroll
    for (int n = 0; n < kBlocksQ; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) use(at + n * kNext + r * kSecond, n, r);
    }
  }
  /// dQ of the tile before `next`.
  __device__ __forceinline__ void keep_grad_query(float (&c)[kBlocksQ][4], const Place& next, int chunk = 0) {
    if (Config::kWhole && next.has(kAfterRounds)) {
      round_grad_query(c, next.has(kAfterSums));
    } else {
      store_grad_query(c, chunk);
    }
  }
  // With the last keys of a tile of queries: adds the sums of those before, which the warp has brought, and rounds.
  __device__ __forceinline__ void round_grad_query(float (&c)[kBlocksQ][4], bool sums) {
    if (sums) {
      Barrier::wait(Tiles::sums_full(group_), rounded_);
      rounded_ ^= 1;
      each_sum([&](unsigned at, int n, int r) { add_pair(c[n][2 * r], c[n][2 * r + 1], at); });
      named_sync(kAlone + group_, kWarpgroup);
    }
    const int matrix = lane() / 8, row = lane() % 8;
#pragma unroll
    for (int n = 0; n < kBlocksQ; n += 2) {
      unsigned words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        words[e] = pack(T{}, c[n + e / 2][e % 2 * 2] * a_.scale, c[n + e / 2][e % 2 * 2 + 1] * a_.scale);
      if constexpr (kNarrow) {
        const unsigned to = sum(group_) + (warp() % 4 * 16 + matrix % 2 * 8 + row) * kRowBytes;
        store_matrices(to + ((n + matrix / 2) ^ row / 2) * 16, words);
      } else {
        const int part = warp() % 4 * 2 + matrix % 2;
        const unsigned to = sum(group_) + (matrix / 2 * 8 + row) * kChunkBytes + (part ^ row) * 16;
        store_matrices_transposed(to + n * 8 * kChunkBytes, words);
      }
    }
  }
  template <int kMine>
  __device__ __forceinline__ void last_grad_query(int i, const Place& next) {
#pragma unroll
    for (int chunk = 0; chunk < kMine; ++chunk) {
      float c[kBlocksQ][4];
      issue_grad_query(c, i, next.stage(), chunk);
      wgmma_wait<0>();
      pin<kBlocksQ * 4>(c[0]);
      if (chunk + 1 == kMine) release(gradient_empty(stage_of(i)));
      if (chunk == 0) named_sync(kSumEmpty + group_, kWithWarp);
      keep_grad_query(c, next, chunk);
    }
    fence_before_copy();
    named_arrive(kSumFull + group_, kWithWarp);
  }

  /// Run by one warp: reduces a warpgroup's dQ of each tile into global memory by TMA. Issuing the reductions and
  /// waiting for them would take the warpgroup as long as a product.
  __device__ __forceinline__ void add_grad_query(int group) const {
    QuerySums<FlexBackwardHopper, Config> sums(*this, group);
    store_grad_scores(0, group);
    named_arrive(kSumEmpty + group, kWithWarp);
    for (int i = 0;; ++i) {
      sums.begin();
      named_sync(kSumFull + group, kWithWarp);
      const Place place = place_of(i);
      const bool ended = Config::kStoresBoxes && (kSeamless ? place.last() : place.tile < 0);
      if (ended) {
        if constexpr (Config::kGradValue)
          store_gradient<Config::kValue, false>(more_.grad_value, place_of_gradient(group, true), group, place, sums);
        if constexpr (Config::kGradKey)
          store_gradient<Config::kHead, true>(more_.grad_key, place_of_gradient(group, false), group, place, sums);
      }
      if (place.tile == kNoMore) break;
      sums.give(place, i);
      __syncwarp();
      named_arrive(kSumEmpty + group, kWithWarp);
      sums.finish(place);
      if (Config::kOwnPlaces && ended) {
        wait_sums_read();
        __syncwarp();
        release(key_gradients_empty(group));
      }
      sums.look_ahead(place, i + 1);
      store_grad_scores(i + 1, group);
    }
    sums.end();
  }
  // Stores the warpgroup's keys of dS of tile i by TMA, and releases it.
  __device__ __forceinline__ void store_grad_scores(int i, int group) const {
    if constexpr (kStoresTiles) {
      Barrier::wait(gradient_full(stage_of(i)), parity_of(i));
      const Place place = place_of(i);
      if (lane() == 0 && place.tile >= 0) {
        store_box(more_.grad_scores, gradient(stage_of(i)) + group * Config::kRows * kChunkBytes,
                  place.col() + group * 64, place.row(), place.h, place.b);
        commit_sums();
        wait_sums_read();
      }
      release(gradient_empty(stage_of(i)));
    }
  }
  // Stores dK or dV by TMA, then, unless it has a place of its own, waits for what the warpgroup hands over next.
  template <int kCols, bool kThenSums, class QuerySums>
  __device__ __forceinline__ void store_gradient(const TensorMap& to, unsigned from, int group, const Place& place,
                                                 const QuerySums& sums) const {
    if (const int chunk = lane(); chunk < chunks_of(kCols, kRowBytes)) {
      store_box<Tiles::kUsedOnce>(to, from + chunk * kGroupBytes, chunk * (kRowBytes / 2), place.col() + group * 64,
                                  key_head(place), key_batch(place));
      commit_sums();
      if constexpr (!Config::kOwnPlaces) wait_sums_read();
    }
    if constexpr (Config::kOwnPlaces) return;
    __syncwarp();
    if constexpr (kThenSums) sums.load_sums(place);
    named_arrive(kSumEmpty + group, kWithWarp);
    named_sync(kSumFull + group, kWithWarp);
  }

  int rounded_ = 0;  // the parity of how many tiles of dQ it rounded
  int ended_ = 0;    // the parity of how many keys had their last tile
};

}  // namespace fusegrad::device
