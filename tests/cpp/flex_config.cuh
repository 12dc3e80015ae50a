// What a kernel of flex attention is compiled for, at its smallest, with what a program renders of a score_mod and a
// mask_mod. For NVRTC too.
#include "cuda/attention/backward/place.cuh"
#include "cuda/attention/captured/scheme.cuh"
#include "cuda/device/hopper.cuh"
#include "cuda/device/score_mod.cuh"
using namespace fusegrad::device;
struct Given {
  static constexpr bool kGiven = true, kFastMath = false;
  static constexpr auto kUnread = score_mod::Unread::kBranch;
};
struct ScoreMod : Given {
  struct Captured {
    const float* scale;
  };
  template <class Reads = score_mod::ReadThere<kUnread>>
  static __device__ float apply(const Captured& c, float score, int b, int h, int q, int kv, bool valid,
                                const Reads& = Reads()) {
    return valid ? score * c.scale[h] : 0.0f;
  }
  static constexpr int kLineCount = 0;
  static constexpr score_mod::LineRead kLine[] = {{}};
  template <int>
  static __device__ float line(const Captured&, int b, int h, int q, int kv, bool valid) {
    return 0.0f;
  }
  static constexpr int kPairCount = 0;
  static constexpr score_mod::PairRead kPair[] = {{}};
  template <int>
  static __device__ float pair_column(const Captured&, int h, int i) {
    return 0.0f;
  }
  template <int>
  static __device__ int pair_column_size(const Captured&) {
    return 0;
  }
  template <int>
  static __device__ float pair_read(const Captured&, int b, int h, int q, int kv, bool valid) {
    return 0.0f;
  }
  template <int>
  static __device__ score_mod::PairRow pair_row(const Captured&, int b, int h, int q, bool valid) {
    return {};
  }
  static constexpr bool kTouchesKeys = true, kTouchesDiagonals = true, kTouchesBesides = true;
  static constexpr int kPairBytes = 4;
  static __device__ void touch(const Captured& c, int b, int h, int q, int kv, bool valid, unsigned nowhere) {
    score_mod::touch_if(c.scale + h, valid, nowhere);
  }
  static __device__ void touch_pair(const Captured& c, int b, int h, int q, int kv, bool valid, unsigned nowhere) {
    score_mod::touch_if(c.scale + h, valid, nowhere);
  }
};
struct MaskMod : Given {
  struct Captured {
    long long nothing;
  };
  template <class Reads = score_mod::ReadThere<kUnread>>
  static __device__ bool apply(const Captured&, int b, int h, int q, int kv, bool valid, const Reads& = Reads()) {
    return valid && q >= kv;
  }
  static constexpr int kLineCount = 0;
  static constexpr score_mod::LineRead kLine[] = {{}};
  template <int>
  static __device__ bool line(const Captured&, int b, int h, int q, int kv, bool valid) {
    return false;
  }
};
// nvcc has no static member arrays in device code that an index of run time reads; NVRTC has.
__device__ constexpr score_mod::ContributionFacts kOfScale[] = {{0, 4, false, false, false}};
struct ScaleGradient : Given {
  using Captured = ScoreMod::Captured;
  static constexpr int kContributions = 1;
  static constexpr bool kVectors = false, kPasses = false;
  static constexpr const score_mod::ContributionFacts* kContribution = kOfScale;
  template <class Reads = score_mod::ReadThere<kUnread>>
  static __device__ float apply(const Captured& c, float score, float grad, int b, int h, int q, int kv, bool valid,
                                float* value, const Reads& = Reads()) {
    value[0] = valid ? grad * score : 0.0f;
    return valid ? grad * c.scale[h] : 0.0f;
  }
  template <int, class Reads = score_mod::ReadThere<kUnread>>
  static __device__ long long offset(const Captured&, float, int b, int h, int q, int kv, bool valid,
                                     const Reads& = Reads()) {
    return valid ? h : -1;
  }
  template <int, class Reads = score_mod::ReadThere<kUnread>>
  static __device__ int in_column(const Captured&, float, int, int, int, int, bool, const Reads& = Reads()) {
    return -1;
  }
  template <int>
  static __device__ long long of_column(const Captured&, int, int, int i) {
    return i;
  }
};
struct ScaleTangent : Given {
  using Captured = ScoreMod::Captured;
  template <class Reads = score_mod::ReadThere<kUnread>>
  static __device__ float apply(const Captured& c, float score, float grad, int b, int h, int q, int kv, bool valid,
                                const Reads& = Reads()) {
    return valid ? grad * c.scale[h] : 0.0f;
  }
  static constexpr int kLineCount = 0;
  static constexpr score_mod::LineRead kLine[] = {{}};
  template <int>
  static __device__ float line(const Captured&, int b, int h, int q, int kv, bool valid) {
    return 0.0f;
  }
};
struct Config {
  using Element = BFloat16;
  using ScoreMod = ::ScoreMod;
  using MaskMod = ::MaskMod;
  using Derivative = ScaleGradient;
  using Tangent = ScaleTangent;
  static constexpr bool kQueryTangent = true, kKeyTangent = true, kValueTangent = true;
  struct Schemes {
    static constexpr Scheme kScheme[] = {Scheme::kInvariant, {}};
    static constexpr int kTable[] = {0, 0};
  };
  static constexpr int kHead = 16, kValue = 16, kRows = 32, kCols = 32, kWarps = 2, kShare = 1, kStages = 1,
                       kGradientStages = 1;
  static constexpr bool kKeySplits = false, kBlocks = true, kMixed = true, kSplit = false;
  static constexpr bool kDropout = true;
  static constexpr bool kUnscaled = false, kMaxScores = true, kOutLow = true, kMaskInline = true;
  static constexpr bool kNarrow = false, kUpright = false, kGradQuery = true, kGradKey = true, kGradValue = true,
                        kGradScores = true;
  static constexpr int kColumns[] = {0}, kPlaces[] = {0};
  static constexpr bool kBoxes = false, kKeeps = false, kStoresQuery = false, kMaxGradient = true, kFixedPoint = false,
                        kPartialSums = true, kGrouped = true;
};
template <Scheme kOne>
struct SchemeConfig : Config {
  struct Schemes {
    static constexpr Scheme kScheme[] = {kOne, {}};
    static constexpr int kTable[] = {64, 0};
  };
  static constexpr bool kPartialSums = false;
};
template <Scheme kOne>
struct StayingConfig : SchemeConfig<kOne> {
  static constexpr bool kKeeps = true;
};
struct GradBuffersConfig : Config {
  static constexpr bool kBlocks = false, kMixed = false, kDropout = false, kMaxGradient = false;
};
struct PairConfig : Config {
  using Curvature = Derivative;
  static constexpr bool kGradOutTangent = true, kDropout = false;
};
struct FewConfig : Config {
  static constexpr int kStages = 2;
  static constexpr bool kKeyBoxes = false;
};
struct FewBoxesConfig : FewConfig {
  static constexpr bool kKeyBoxes = true;
};
// At its smallest for sm_90a.
struct HopperConfig : Config {
  static constexpr int kHead = 64, kValue = 64, kRows = 128, kCols = 64, kWarps = 8, kGroups = 2, kStages = 2;
  static constexpr int kQueryStages = 2, kKeyStages = 1, kParts = 1;
  static constexpr bool kMaskAlone = false, kCornersTell = false, kFirstMaximum = true, kSeamless = false,
                        kStoresBoxes = false, kOwnPlaces = false, kOrdered = false, kWhole = false,
                        kStoresFirst = false;
  static constexpr int kReadStages = 2, kMaps = 0, kLineBytes = 4096;
};
struct SegmentsConfig : Config {
  static constexpr int kSegment = 2;
  static constexpr bool kMaxScores = false, kPacked = true;
};
struct SegmentsHopperConfig : HopperConfig {
  static constexpr int kSegment = 16;
  static constexpr bool kMaxScores = false, kFirstMaximum = false, kManySegments = true, kKeptSums = true;
};
struct HopperBackwardConfig : HopperConfig {
  static constexpr int kCols = 128, kReadStages = 0;
  static constexpr bool kStoresFirst = true;
};
struct HopperGradBuffersConfig : HopperConfig {
  static constexpr int kCols = 128;
  static constexpr bool kBlocks = false, kMixed = false, kDropout = false, kMaxGradient = false;
};
struct HopperTangentsConfig : HopperConfig {
  static constexpr int kQueryStages = 1, kReadStages = 0, kLineBytes = 0;
};
struct HopperWideConfig : HopperConfig {
  static constexpr int kRows = 64, kWarps = 4, kReadStages = 0;
  static constexpr bool kGradQuery = false;
};
// What a way of summing dQ asks of FlexBackwardHopper.
struct SumsKernel {
  using Configured = HopperBackwardConfig;
  using Place = fusegrad::device::Place<Configured>;
  static constexpr int kSumRows = 64, kBlockBytes = 256, kEightRows = 2048, kChunks = 1;
  static constexpr bool kUpright = false;
  static constexpr Evict kUsedOnce = Evict::kNormal;
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ int first_row(int group) { return 64 * group; }
  static __device__ int first_col(int) { return 0; }
  static __device__ int chunks(int) { return 1; }
  static __device__ unsigned sum(int group) { return 1024u * group; }
  static __device__ unsigned sums_full(int group) { return 8u * group; }
  static __device__ Place place_of(int i) { return {0, 1, i, 128}; }
  const FlexBackwardArguments& a_;
  const FlexBackwardHopperArguments& more_;
};
// In place of the products that a program renders.
template <int kCols, bool kRegisterA, bool kTransposedB, bool kTransposedA>
struct fusegrad::device::Wgmma<BFloat16, kCols, kRegisterA, kTransposedB, kTransposedA> {
  template <class A>
  static __device__ void run(float* d, A a, unsigned long long b, bool accumulate) {
    d[0] = (accumulate ? d[0] : 0.0f) + static_cast<float>(b) + sizeof(a);
  }
};
