// The headers that are embedded for NVRTC, and what the compiler reports of kernels.
// FUSEGRAD_JIT_HEADERS=all compiles each for every architecture, which takes half as long again.
#include <cstdlib>
#include <map>
#include <set>

#include "jit/headers.h"
#include "jit_support.h"

namespace fusegrad::jit {
namespace {

// For a family of instructions each; the others in turns.
constexpr const char* kFirst[] = {"80", "90a", "120"};
constexpr const char* kOthers[] = {"86", "89", "100"};

std::vector<const char*> architectures_of(size_t turn) {
  const char* all = std::getenv("FUSEGRAD_JIT_HEADERS");
  std::vector<const char*> found(std::begin(kFirst), std::end(kFirst));
  if (all && std::string(all) == "all") {
    found.insert(found.end(), std::begin(kOthers), std::end(kOthers));
  } else {
    found.push_back(kOthers[turn % std::size(kOthers)]);
  }
  return found;
}

/// A kernel with what a header offers. The limits are those of every architecture.
struct HeaderKernel {
  const char* header;
  const char* body;
  int registers;
  bool flex = false;  // with the Config of flex_config.cuh
  int threads = 0;    // of a CTA, where the kernel must know
  // Bytes of stores, loads and stack: of the one thread that brings tiles with 24 registers; of consumers only in
  // forward mode, whose three accumulators leave no room for masks and dropout.
  int spilled = 0;
};

// A way in which dQ is summed, for some tiles.
#define SUMS_OF_TILES(way)                                  \
  "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"                      \
  "static __constant__ FlexBackwardArguments arguments;\n"  \
  "static __constant__ FlexBackwardHopperArguments more;\n" \
  "const SumsKernel kernel{arguments, more};\n" way         \
  "<SumsKernel> sums(kernel, 1);\n"                         \
  "for (int i = 0; i < 4; ++i) {\n"                         \
  "  const auto place = kernel.place_of(i);\n"              \
  "  sums.begin();\n"                                       \
  "  sums.give(place, i);\n"                                \
  "  sums.finish(place);\n"                                 \
  "  sums.look_ahead(place, i + 1);\n"                      \
  "  sums.load_sums(place);\n"                              \
  "}\n"                                                     \
  "sums.end();\n"                                           \
  "#endif"

// A scheme's class, over one tile.
#define SUM_OF_CONFIG(config)                                                                               \
  "extern __shared__ __align__(16) char shared[];\n"                                                        \
  "SchemeSums<Contributions<" config                                                                        \
  ", 1, 1>, 0> sum(\n"                                                                                      \
  "    *(const FlexBackwardArguments*)in, (const FlexSums*)out, *(const ScoreMod::Captured*)in, shared);\n" \
  "sum.begin();\n"                                                                                          \
  "sum.begin_head();\n"                                                                                     \
  "sum.begin_tile();\n"                                                                                     \
  "for (int n = 0; n < 4; ++n) {\n"                                                                         \
  "  for (int e = 0; e < 4; ++e)\n"                                                                         \
  "    sum.add(in[4 * n + e], 0, n, e, 1.0f, 0, 1, 8 * n + e % 2, 8 * (e / 2), true, "                      \
  "score_mod::ReadThere<score_mod::Unread::kBranch>());\n"                                                  \
  "  sum.end_block(0, n, 0, 1);\n"                                                                          \
  "}\n"                                                                                                     \
  "sum.end_tile(0);\n"                                                                                      \
  "__syncthreads();\n"                                                                                      \
  "sum.flush(0, 1, 2, 3, 0, false);\n"                                                                      \
  "sum.end_head(0, 1, 3);\n"                                                                                \
  "sum.end_batches(1, 2, 3);"
#define SUM_OF_SCHEME(scheme) SUM_OF_CONFIG("SchemeConfig<Scheme::" scheme ">")

constexpr HeaderKernel kHeaderKernels[] = {
    {"cstdint",
     "uint64_t x = (uint64_t)out; int64_t y = -1; uint32_t z = (uint32_t)(x >> 2); int8_t w = -1;\n"
     "static_assert(sizeof(x) == 8 && sizeof(y) == 8 && sizeof(z) == 4 && sizeof(uint16_t) == 2);\n"
     "out[0] = z + (y < 0) + (w < 0) + (uint8_t)x;",
     16},
    {"cuda/device/bulk.cuh",
     "#if __CUDA_ARCH__ >= 900\n"
     "using namespace fusegrad::device;\n"
     "__shared__ __align__(16) float copy[1024];\n"
     "__shared__ Arrival arrival;\n"
     "if (threadIdx.x == 0) {\n"
     "  arrival.init();\n"
     "  Arrival::fence_init();\n"
     "  arrival.expect(sizeof(copy));\n"
     "  arrival.copy(copy, in, sizeof(copy));\n"
     "}\n"
     "cluster_arrive();\n"
     "cluster_wait();\n"
     "arrival.wait();\n"
     "store_counted(remote_address(copy, 0), uint4{}, remote_address(&arrival, 0));\n"
     "out[threadIdx.x] = copy[threadIdx.x];\n"
     "#endif",
     24},
    {"cuda/device/tensor.cuh",
     "using namespace fusegrad::device;\n"
     "static_assert(sizeof(FlexTensor) == 40 && sizeof(TensorMap) == 128 && alignof(TensorMap) == 64);\n"
     "const FlexTensor& t = *(const FlexTensor*)in;\n"
     "out[threadIdx.x] = ((const float*)t.data)[threadIdx.x * t.row_stride];",
     16},
    {"cuda/attention/device/arguments.cuh",
     "using namespace fusegrad::device;\n"
     "static_assert(sizeof(FlexTensor) == 40 && sizeof(FlexRow) == 8 && sizeof(FlexSums) == 24);\n"
     "const FlexTiles& tiles = *(const FlexTiles*)in;\n"
     "out[threadIdx.x] = tiles.list[threadIdx.x] % 4 == kTileMixed || tiles.blocks[threadIdx.x] == kBlockBad;",
     16},
    {"cuda/attention/mask/block_states_arguments.cuh",
     "using namespace fusegrad::device;\n"
     "static_assert(sizeof(BlockStatesArguments) == 40 && kBlockStateThreads % 32 == 0);\n"
     "out[threadIdx.x] = ((const BlockStatesArguments*)in)->states[threadIdx.x] == kBlockPartial;",
     16},
    {"cuda/attention/mask/block_states.cuh",
     "using namespace fusegrad::device;\n"
     "struct Causal {\n"
     "  struct Captured {};\n"
     "  static __device__ bool apply(const Captured&, int b, int h, int q, int kv, bool) { return q >= kv; }\n"
     "};\n"
     "const auto& arguments = *(const BlockStatesArguments*)in;\n"
     "const Causal::Captured none;\n"
     "block_states<Causal, Causal, Causal>(arguments, none, none, none);",
     48},
    {"cuda/attention/device/shared_memory.cuh",
     "using namespace fusegrad::device;\n"
     "constexpr ForwardMemory memory(ForwardMemory::Sizes{64, 32, 128, 64, 2});\n"
     "static_assert(memory.query.piece == 64 * (128 * 2 + 16) && memory.key.offset == memory.query.bytes());\n"
     "static_assert(memory.bytes() == memory.value.offset + 32 * (64 * 2 + 16));\n"
     "out[threadIdx.x] = memory.bytes();",
     16},
    {"cuda/attention/pair_tangents/arguments.cuh",
     "using namespace fusegrad::device;\n"
     "static_assert(sizeof(FlexPairRow) == 20);\n"
     "out[threadIdx.x] = ((const FlexPairTangentsArguments*)in)->rows[threadIdx.x].delta_tangent;",
     16},
    {"cuda/attention/tangents/arguments.cuh",
     "using namespace fusegrad::device;\n"
     "static_assert(sizeof(FlexTangentsHopperArguments) > 6 * sizeof(TensorMap));\n"
     "out[threadIdx.x] = ((const FlexTangentsArguments*)in)->lse[threadIdx.x];",
     16},
    {"cuda/attention/mask/tile_entry.cuh",
     "using namespace fusegrad::device;\n"
     "const int word = tile_entry_word(2, 5, 0b1001);\n"
     "using Entry = TileEntry<2>;\n"
     "bool right = Entry::column(word) == 5 && Entry::kind(word) == 1 && Entry::kind(word, 1) == 2;\n"
     "const int last = LastTileEntry::of(tile_entry_word(1, 7, 2)) + LastTileEntry::kLast;\n"
     "right &= LastTileEntry::column(last) == 7 && LastTileEntry::kind(last) == 2;\n"
     "out[threadIdx.x] = right ? in[threadIdx.x] : 0;",
     16},
    {"cuda/attention/backward/portable.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexBackward<Config>(*(const FlexBackwardArguments*)in, (const FlexSums*)out, *(const ScoreMod::Captured*)in,\n"
     "                     *(const MaskMod::Captured*)in, shared).run();",
     168, true},
    {"cuda/attention/pair_tangents/portable.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexPairTangents<PairConfig>(*(const FlexPairTangentsArguments*)in, *(const ScoreMod::Captured*)in,\n"
     "                             *(const MaskMod::Captured*)in, shared_address(shared)).run();",
     255, true},
    {"cuda/attention/tangents/portable.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexTangents<Config>(*(const FlexTangentsArguments*)in, *(const ScoreMod::Captured*)in,\n"
     "                     *(const MaskMod::Captured*)in, *(const ScoreMod::Captured*)in,\n"
     "                     shared_address(shared)).run();",
     168, true},
    {"cuda/attention/tangents/hopper.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexTangentsHopper<HopperTangentsConfig>(*(const FlexTangentsArguments*)in,\n"
     "                                         *(const FlexTangentsHopperArguments*)in,\n"
     "                                         *(const ScoreMod::Captured*)in, *(const MaskMod::Captured*)in,\n"
     "                                         *(const ScoreMod::Captured*)in, shared_address(shared)).run();\n"
     "#endif",
     168, true, 384, 352},
    {"cuda/attention/backward/hopper.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "extern __shared__ __align__(1024) char shared[];\n"
     // As a kernel's parameters are: what must be read from global memory stays in registers.
     "static __constant__ FlexBackwardArguments arguments;\n"
     "static __constant__ FlexBackwardHopperArguments more;\n"
     "static __constant__ ScoreMod::Captured captured;\n"
     "FlexBackwardHopper<HopperBackwardConfig>(arguments, (const FlexSums*)out, more, captured,\n"
     "                                         *(const MaskMod::Captured*)in, shared).run();\n"
     "#endif",
     168, true, 384, 160},
    {"cuda/attention/backward/hopper_tiles.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "static_assert(FlexBackwardHopperTiles<HopperBackwardConfig>::kSharedBytes <= 227 << 10);\n"
     "static_assert(FlexBackwardHopperTiles<HopperWideConfig>::kSharedBytes <\n"
     "              FlexBackwardHopperTiles<HopperBackwardConfig>::kSharedBytes);\n"
     "#endif\n"
     "out[threadIdx.x] = in[threadIdx.x];",
     16, true},
    {"cuda/attention/backward/hopper_wide.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "extern __shared__ __align__(1024) char shared[];\n"
     "static __constant__ FlexBackwardArguments arguments;\n"
     "static __constant__ FlexBackwardHopperArguments more;\n"
     "static __constant__ ScoreMod::Captured captured;\n"
     "FlexBackwardWideHopper<HopperWideConfig>(arguments, (const FlexSums*)out, more, captured,\n"
     "                                         *(const MaskMod::Captured*)in, shared).run();\n"
     "#endif",
     168, true, 384, 160},
    {"cuda/attention/backward/place.cuh",
     "const Place<HopperBackwardConfig> place{0, 1, (int)in[threadIdx.x], kFarRows | 128 | kKeyStage | kLastOfKeys};\n"
     "out[threadIdx.x] = place.row() + place.kinds() + place.col() + place.next_stage() + place.has(kFarRows);",
     24, true},
    {"cuda/attention/backward/query_sums/added.cuh", SUMS_OF_TILES("AddedSums"), 48, true},
    {"cuda/attention/backward/query_sums/ordered.cuh", SUMS_OF_TILES("OrderedSums"), 48, true},
    {"cuda/attention/backward/query_sums/query_sums.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "static_assert(kSame<QuerySumsOf<int, false, true, false>::Type, StoredFirst<int>>);\n"
     "#endif\n"
     "out[threadIdx.x] = in[threadIdx.x];",
     16, true},
    {"cuda/attention/backward/query_sums/stored_first.cuh", SUMS_OF_TILES("StoredFirst"), 64, true},
    {"cuda/attention/backward/query_sums/whole_head.cuh", SUMS_OF_TILES("WholeHeadSums"), 64, true},
    {"cuda/attention/captured/scheme.cuh",
     "using namespace fusegrad::device;\n"
     "static_assert(is_vector(Scheme::kQVector) && is_stored(Scheme::kStored) && "
     "!sums_in_registers(Scheme::kDiagonal));\n"
     "out[threadIdx.x] = in[threadIdx.x] + (sums_over_queries(Scheme::kQ) ? 1 : 0);",
     16},
    {"cuda/attention/captured/schemes/contribution.cuh", SUM_OF_SCHEME("kStoredTiles"), 16, true},
    {"cuda/attention/captured/schemes/diagonal.cuh", SUM_OF_SCHEME("kDiagonal"), 64, true},
    {"cuda/attention/captured/schemes/histogram.cuh", SUM_OF_SCHEME("kSmallTable"), 64, true},
    {"cuda/attention/captured/schemes/of_cta.cuh", SUM_OF_CONFIG("StayingConfig<Scheme::kOverBatches>"), 40, true},
    {"cuda/attention/captured/schemes/of_head.cuh", SUM_OF_SCHEME("kKv"), 40, true},
    {"cuda/attention/captured/schemes/of_pair.cuh", SUM_OF_SCHEME("kGeneral"), 48, true},
    {"cuda/attention/captured/schemes/of_query.cuh", SUM_OF_SCHEME("kQ"), 48, true},
    {"cuda/attention/captured/schemes/vector.cuh",
     SUM_OF_SCHEME("kQVector") "\n"
                               "const float value[4] = {in[0], in[1], in[2], in[3]};\n"
                               "const long long place[4] = {0, 1, threadIdx.x, 3};\n"
                               "sum.put_vector(value, place);",
     40, true},
    {"cuda/attention/captured/buffers.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexBufferSums<Config> sums(*(const FlexBackwardArguments*)in, (const FlexSums*)out,\n"
     "                            *(const ScoreMod::Captured*)in, shared);\n"
     "float value[2] = {in[threadIdx.x], 0.0f};\n"
     "sums.begin();\n"
     "sums.begin_tile();\n"
     "sums.add(value, 0, 0, 0, 1.0f, 0, 1, 2, 3, true);\n"
     "sums.end_block(0, 0, 0, 0);\n"
     "sums.end_tile();\n"
     "sums.flush(0, 1, 2, 3);\n"
     "sums.end_head(0, 1, 3);",
     24, true},
    {"cuda/attention/forward/portable.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexForward<Config>(*(const FlexForwardArguments*)in, *(const ScoreMod::Captured*)in,\n"
     "                    *(const MaskMod::Captured*)in, shared_address(shared)).run();",
     96, true},
    {"cuda/attention/forward/few.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "static __constant__ FlexForwardFewArguments more;\n"
     "FlexForwardFew<FewBoxesConfig>(*(const FlexForwardArguments*)in, more, *(const ScoreMod::Captured*)in,\n"
     "                               *(const MaskMod::Captured*)in, shared_address(shared)).run();\n"
     "#else\n"
     "FlexForwardFew<FewConfig>(*(const FlexForwardArguments*)in, *(const ScoreMod::Captured*)in,\n"
     "                          *(const MaskMod::Captured*)in, shared_address(shared)).run();\n"
     "#endif",
     160, true},
    {"cuda/attention/forward/merge.cuh",
     "FlexRowMerge merged;\n"
     "merged.merge(3, in[0], [&](int i) { return ((const FlexPartialRow*)in)[i + 1]; },\n"
     "             [&](int i) { return ((const float4*)in)[32 * i + threadIdx.x]; });\n"
     "merged.finish<BFloat16>(*(const FlexRowResults*)out, 0, 1, 2, 3, 4 * threadIdx.x);",
     48, true},
    {"cuda/attention/forward/segments.cuh",
     "FlexSegmentRow total{in[0], in[1]};\n"
     "const FlexSegmentWeights w = add_segment(total, {in[2], in[3]}, 1.0f);\n"
     "out[0] = w.add(in[4], in[5]) + segment_result(total, 1.0f, 1.0f).lse;",
     48, true},
    {"cuda/attention/forward/segments_merge.cuh",
     "FlexMergeSegments<Config>(*(const FlexForwardArguments*)in, 0, 0, 0).run();", 80, true},
    {"cuda/attention/forward/segments_portable.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexForwardSegments<SegmentsConfig>(*(const FlexForwardArguments*)in, *(const ScoreMod::Captured*)in,\n"
     "                                    *(const MaskMod::Captured*)in, shared_address(shared)).run();",
     128, true},
    {"cuda/attention/forward/segments_hopper.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexSegmentsHopper<SegmentsHopperConfig>(*(const FlexForwardArguments*)in,\n"
     "                                         *(const FlexForwardHopperArguments*)in,\n"
     "                                         *(const ScoreMod::Captured*)in, *(const MaskMod::Captured*)in,\n"
     "                                         shared_address(shared)).run();\n"
     "#endif",
     168, true, 384},
    {"cuda/attention/forward/hopper.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexForwardHopper<HopperConfig>(*(const FlexForwardArguments*)in, *(const FlexForwardHopperArguments*)in,\n"
     "                                *(const ScoreMod::Captured*)in, *(const MaskMod::Captured*)in,\n"
     "                                shared_address(shared)).run();\n"
     "#endif",
     168, true, 384},
    {"cuda/attention/forward/hopper_reads.cuh",
     "static_assert(!FlexForwardReads<HopperConfig>::kUsed && FlexForwardReads<HopperConfig>::kWarps == 0);\n"
     "out[threadIdx.x] = in[threadIdx.x];",
     16, true},
    {"cuda/attention/forward/hopper_tiles.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "static_assert(FlexForwardHopperTiles<HopperConfig>::kSharedBytes <= 227 << 10);\n"
     "#endif\n"
     "out[threadIdx.x] = in[threadIdx.x];",
     16, true},
    {"cuda/attention/grad_buffers/portable.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexGradBuffers<GradBuffersConfig>(*(const FlexBackwardArguments*)in, (const FlexSums*)out,\n"
     "                                   *(const ScoreMod::Captured*)in, *(const MaskMod::Captured*)in,\n"
     "                                   shared_address(shared)).run();",
     136, true},
    {"cuda/attention/grad_buffers/hopper.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "extern __shared__ __align__(1024) char shared[];\n"
     "static __constant__ FlexBackwardArguments arguments;\n"
     "static __constant__ FlexBackwardHopperArguments more;\n"
     "FlexGradBuffersHopper<HopperGradBuffersConfig>(arguments, (const FlexSums*)out, more,\n"
     "                                               *(const ScoreMod::Captured*)in,\n"
     "                                               *(const MaskMod::Captured*)in, shared_address(shared)).run();\n"
     "#endif",
     168, true, 384},
    {"cuda/attention/grad_query/portable.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "FlexGradQuery<Config>(*(const FlexBackwardArguments*)in, *(const ScoreMod::Captured*)in,\n"
     "                      *(const MaskMod::Captured*)in, shared_address(shared)).run();",
     152, true},
    {"cuda/attention/grad_query/hopper.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "extern __shared__ __align__(16) char shared[];\n"
     "static __constant__ FlexBackwardArguments arguments;\n"
     "static __constant__ FlexBackwardHopperArguments more;\n"
     "static __constant__ ScoreMod::Captured captured;\n"
     "FlexGradQueryHopper<HopperConfig>(arguments, more, captured, *(const MaskMod::Captured*)in,\n"
     "                                  shared_address(shared)).run();\n"
     "#endif",
     168, true, 384, 72},
    {"cuda/attention/device/far_rows.cuh",
     "FlexRow row{in[0], in[1]};\n"
     "const FlexLse lse = lse_of(in[2], in[3], in[4]);\n"
     "const float origin = take_origin<Config>(*(const FlexBackwardArguments*)in, row, 0, 1, threadIdx.x);\n"
     "out[threadIdx.x] = origin + row.lse + lse.lse + lse.low;",
     24, true},
    {"cuda/attention/device/gradient.cuh",
     "float p, value[2];\n"
     "const FlexQuery row{{in[0], in[1]}, in[2], in[3]};\n"
     "out[threadIdx.x] = FlexPairGradient<Config>::apply(*(const ScoreMod::Captured*)in, in[4], in[threadIdx.x],\n"
     "                                                   in[5], row, 0, 1, 2, 3, threadIdx.x < 7, p, value);\n"
     "out[threadIdx.x + 32] = p + value[0];",
     24, true},
    {"cuda/attention/captured/pair_boxes.cuh",
     "using Boxes = PairBoxes<ScoreMod, 32, 32, KeptReads<ScoreMod, 4, 128, false>, true>;\n"
     "extern __shared__ __align__(16) char shared[];\n"
     "Boxes::load<64>(shared_address(shared), *(const ScoreMod::Captured*)in, 0, 1, 2, 3, 32, 40, threadIdx.x);\n"
     "auto reads = Boxes::reads<true>(shared_address(shared), 0, 16, threadIdx.x % kLanes);\n"
     "reads.e = 3;\n"
     "out[threadIdx.x] = ScoreMod::apply(*(const ScoreMod::Captured*)in, in[1], 0, 1, 2, 3, true, reads);",
     24, true},
    {"cuda/attention/captured/pair_columns.cuh",
     "extern __shared__ __align__(16) char shared[];\n"
     "PairColumns<Config>::load<64>(shared_address(shared), *(const ScoreMod::Captured*)in, 1, threadIdx.x);\n"
     "out[threadIdx.x] = PairColumns<Config>::there(0) ? 1.0f : 0.0f;",
     24, true},
    {"cuda/attention/captured/pair_places.cuh",
     "PairPlaces<Config> places;\n"
     "places.load(*(const ScoreMod::Captured*)in, 1, 2);\n"
     "out[threadIdx.x] = PairPlaces<Config>::there(0) ? 1.0f : 0.0f;",
     16, true},
    {"cuda/attention/captured/place_order.cuh",
     "constexpr fusegrad::device::PlaceOfThread place = fusegrad::device::place_of_thread(40, 3, 8);\n"
     "static_assert(place.row == 26 && place.col == 1);\n"
     "out[0] = place.col;",
     16},
    {"cuda/attention/captured/pair_sums.cuh",
     "const BatchWalk<true> batches(*(const FlexBackwardArguments*)in, 4);\n"
     "float sums[4][4];\n"
     "for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = in[32 * i + threadIdx.x];\n"
     "put_pair_sums<Config, 0, 32>(\n"
     "    *(const FlexSums*)out, sums, *(const ScoreMod::Captured*)in, batches.first, 1, [](int e) { return e; },\n"
     "    [](int n, int e) { return 8 * n + e; }, [](int n, int e) { return threadIdx.x < 7; });\n"
     "const long long at[2] = {threadIdx.x, batches.end};\n"
     "const float two[2] = {in[0], in[1]};\n"
     "store_two((ElementOf<ScaleGradient, 0>*)out, at, two);\n"
     "store_two((BFloat16*)out, at, two);\n"
     "add_two(out, at, two);",
     48, true},
    {"cuda/attention/device/scores.cuh",
     "hold_order();\n"
     "const FlexTiles& tiles = *(const FlexTiles*)in;\n"
     "const TileWalk walk(tiles, 0, 1, 2, 3, (Config*)nullptr);\n"
     "for (int i = threadIdx.x; i < walk.count(); i += 32) {\n"
     "  out[i] = takes_part<Config>(tiles, *(const MaskMod::Captured*)in, walk[i] % 4, 0, 1, i, walk[i] / 4, true);\n"
     "}\n"
     "static_assert(sizeof(Bits<32>) == 4 && sizeof(Bits<33>) == 8 && kHas<ScoreMod>);",
     48, true},
    {"cuda/attention/forward/softmax.cuh",
     "FlexHopperSoftmax<HopperConfig> softmax(*(const FlexForwardArguments*)in);\n"
     "float s[8][4], rescale[2];\n"
     "for (int i = 0; i < 32; ++i) s[i / 4][i % 4] = in[32 * i + threadIdx.x];\n"
     "softmax.begin();\n"
     "softmax.add(s, rescale, [] {});\n"
     "out[threadIdx.x] = softmax.max(0) + softmax.sum(1) + rescale[0] + s[3][1];",
     80, true},
    {"cuda/attention/backward/whole_head.cuh",
     "WholeHead<HopperBackwardConfig> head;\n"
     "struct Walk {\n"
     "  const float* words;\n"
     "  __device__ int count() const { return 4; }\n"
     "  __device__ int operator[](int i) const { return (int)words[i]; }\n"
     "};\n"
     "head.begin(4, 4, true, [&](int col) { return Walk{in + 4 * col}; });\n"
     "for (int i = 0; i < 8; ++i)\n"
     "  out[i] = head.next(head.lacks_keys(4) ? head.tile_beyond(4) : (int)in[i], 64 * i, 200, i == 0, i > "
     "6);",
     64, true},
    {"cuda/device/hopper.cuh",
     "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n"
     "using namespace fusegrad::device;\n"
     "__shared__ __align__(1024) char memory[64 * kChunkBytes];\n"
     "__shared__ long long full;\n"
     "const unsigned barrier = shared_address(&full), tile = shared_address(memory);\n"
     "give_registers<24>();\n"
     "if (threadIdx.x == 0) {\n"
     "  Barrier::init(barrier, 1);\n"
     "  Barrier::fence_inits();\n"
     "  copy_tile<64, 64>(tile, *(const TensorMap*)in, barrier, 0, 1, 2);\n"
     "}\n"
     "named_sync(1, kWarpgroup);\n"
     "Barrier::wait(barrier, 0);\n"
     "float d[4] = {in[0], in[1], in[2], in[3]};\n"
     "wgmma_fence();\n"
     "wgmma_commit();\n"
     "wgmma_wait<0>();\n"
     "pin<4>(d);\n"
     "named_arrive(2, 2 * kWarpgroup);\n"
     "Ring<2> ring;\n"
     "ring.next();\n"
     "unsigned words[4] = {1, 2, 3, threadIdx.x};\n"
     "transpose_in_fours(words);\n"
     "store_matrices_transposed(tile + threadIdx.x % 32 * 16, words);\n"
     "store_pair(tile + 4096 + threadIdx.x * 8, d[1], d[2]);\n"
     "fence_before_copy();\n"
     "named_sync(1, kWarpgroup);\n"
     "if (threadIdx.x == 0) {\n"
     "  copy_line(tile, *(const TensorMap*)in, barrier, 3);\n"
     "  add_floats((float*)out + 4 * ring.stage, tile, 16);\n"
     "  commit_sums();\n"
     "  wait_sums_read();\n"
     "  wait_sums_added();\n"
     "}\n"
     "out[threadIdx.x] = d[0] + d[3] + advanced(descriptor(tile, 16), step_bytes<64>(5));\n"
     "#endif",
     40, false, 128},
    {"cuda/device/low_part.cuh",
     "using namespace fusegrad::device;\n"
     "const FlexTensor& t = *(const FlexTensor*)in;\n"
     "const float factor[2] = {in[0], in[1]};\n"
     "float x[6][4];\n"
     "for (int n = 0; n < 6; ++n)\n"
     "  for (int e = 0; e < 4; ++e) x[n][e] = in[4 * n + e];\n"
     "store_low_rows<BFloat16>(t, 1, 2, 3, 40, 48, x, factor);\n"
     "store_low_rows<Float16>(t, 1, 2, 3, 40, 47, x, factor);\n"
     "store_low<Float16>((signed char*)out, in[2]);",
     64},
    {"cuda/device/mma.cuh",
     "using namespace fusegrad::device;\n"
     "using Rows = Tile<BFloat16, 16, 32>;\n"
     "__shared__ __align__(16) char memory[Rows::kBytes];\n"
     "const unsigned tile = shared_address(memory);\n"
     "const int lane = threadIdx.x;\n"
     "Rows::load<kLanes>(tile, (const char*)in, 64, 16, Rows::kVectors, lane);\n"
     "commit_copies();\n"
     "wait_copies<0>();\n"
     "__syncwarp();\n"
     "unsigned a[4], b[4];\n"
     "float c[4] = {};\n"
     "load_a(a, tile, Rows::kStride, 0, 0, lane);\n"
     "load_b(b, tile, Rows::kStride, 0, 1, lane);\n"
     "Mma<BFloat16>::step<0>(c, Mma<BFloat16>::factor(a), Mma<BFloat16>::factor(b));\n"
     "Mma<Float16>::load_b_transposed(b, tile, Rows::kStride, 0, 16, lane);\n"
     "Mma<Float16>::step<1>(c, Mma<Float16>::factor(a), Mma<Float16>::factor(b));\n"
     "Mma<float, true>::load_a_transposed(a, tile, Rows::kStride, 0, 0, lane);\n"
     "Mma<float, true>::step<0>(c, Mma<float, true>::factor(a), Mma<float, true>::factor(b));\n"
     "put_operand<BFloat16>(a, c);\n"
     "store_operand<BFloat16>(tile, Rows::kStride, 0, 1, a, lane);\n"
     "add_pair(out + 64 + 2 * lane, row_sum(c[0]), row_max(c[1]));\n"
     "store((BFloat16*)out + lane, power_of_two(c[2]) + rounded<Float16>(c[3]));",
     48},
    {"cuda/attention/device/dropout.cuh",
     "using namespace fusegrad::device;\n"
     "unsigned x[4] = {threadIdx.x, blockIdx.x, 2, 3};\n"
     "philox(x, 4, 5, 1, 7);\n"
     "out[threadIdx.x] = in[x[0] % 32] + in[x[1] % 32] + in[x[2] % 32] + in[x[3] % 32];",
     40},
    {"cuda/device/score_mod.cuh",
     "using namespace fusegrad::device::score_mod;\n"
     "const float x = in[threadIdx.x], y = in[threadIdx.x + 32];\n"
     "const float f = sigmoid<true>(x) + gelu(y) + gelu_tanh<false>(x) + floor_div(x, y) + floor_mod(x, y);\n"
     "const long long i = floor_div(to_int(x), to_int(y)) + shift_left(to_int(x), to_int(y)) + to_int(x > y);\n"
     "const long long size = gridDim.x;\n"
     "const long long at = wrapped(i, size);\n"
     "out[threadIdx.x] = f + maximum(x, minimum(y, f)) + read_if<Unread::kBranch>(in + at, inside(at, size)) +\n"
     "    read_if<Unread::kPredicate>((const Float16*)in, x > 1) + read_if<Unread::kElsewhere>((const BFloat16*)in, x "
     "> 2) + read_if<Unread::kBranch>((const Bool*)in, x > 3) "
     "+\n"
     "    read_if<Unread::kBranch>((const double*)in, x > 4) + read_if<Unread::kPredicate>((const signed char*)in, x > "
     "5) + divide<true>(x, y) + invert(i) +\n"
     "    absolute(x);",
     40},
};

std::string source_of(const HeaderKernel& kernel) {
  return "#include <" + std::string(kernel.header) + ">\n" +
         (kernel.flex ? read(FUSEGRAD_TEST_SOURCE_DIR "/tests/cpp/flex_config.cuh") : "") +
         "extern \"C\" __global__ void " +
         (kernel.threads == 0 ? "" : "__launch_bounds__(" + std::to_string(kernel.threads) + ", 1) ") +
         "probe(const float* in, float* out) {\n" + kernel.body + "\n}\n";
}

// The lines that have code, up to their comments.
std::string without_comments(const std::string& text) {
  std::string out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    line.resize(std::min(line.find("//"), line.size()));
    line.resize(line.find_last_not_of(" \t") + 1);
    if (!line.empty()) out += line + "\n";
  }
  return out;
}

TEST_F(Jit, EveryHeaderHasAKernelHere) {
  std::set<std::string> embedded, tested;
  for (const Header& header : headers()) embedded.insert(header.name);
  for (const HeaderKernel& kernel : kHeaderKernels) tested.insert(kernel.header);
  EXPECT_EQ(embedded, tested);
}

TEST_F(Jit, HeadersAreTheFilesAndIncludeOnlyOneAnother) {
  std::set<std::string> names;
  for (const Header& header : headers()) names.insert(header.name);
  for (const Header& header : headers()) {
    const bool standard = std::string(header.name) == "cstdint";
    const std::string file = FUSEGRAD_TEST_SOURCE_DIR "/csrc/" + std::string(standard ? "jit/cstdint.h" : header.name);
    EXPECT_EQ(without_comments(read(file)), without_comments(header.text)) << file;
    std::istringstream lines(header.text);
    for (std::string line; std::getline(lines, line);) {
      if (line.find("#include") == std::string::npos) continue;
      const size_t begin = line.find_first_of("\"<") + 1;
      EXPECT_TRUE(names.count(line.substr(begin, line.find_first_of("\">", begin) - begin)))
          << header.name << ": " << line;
    }
  }
}

TEST_F(Jit, HeadersCompileEverywhere) {
  NEEDS_NVRTC();
  size_t turn = 0;
  for (const HeaderKernel& kernel : kHeaderKernels) {
    for (const char* architecture : architectures_of(turn++)) {
      SCOPED_TRACE(std::string(kernel.header) + " for sm_" + architecture);
      const Compiled compiled = compile_uncached({"probe", source_of(kernel), architecture, {}, ""});
      EXPECT_EQ(compiled.log.find("warning"), std::string::npos) << compiled.log;
      if (std::string(architecture) == "90a") {
        EXPECT_EQ(compile_uncached({"probe", self_contained(source_of(kernel)), "90a", {}, ""}).cubin, compiled.cubin);
      }
      const auto found = resources(compiled.log);
      ASSERT_TRUE(found.count("probe")) << compiled.log;
      EXPECT_GT(found.at("probe").registers, 0);
      EXPECT_LE(found.at("probe").registers, kernel.registers);
      for (const auto& [function, of] : found) {
        EXPECT_LE(of.spill_store_bytes + of.spill_load_bytes + of.stack_bytes, kernel.spilled) << function;
      }
    }
  }
}

TEST_F(Jit, ResourcesAreThoseOfTheReport) {
  NEEDS_NVRTC();
  // More values live at once than registers are allowed, an array indexed at run time, shared memory.
  const Program spills{"probe",
                       "extern \"C\" __global__ void spilling(float* out, int n) {\n"
                       "  float x[96];\n#pragma unroll\n  for (int i = 0; i < 96; ++i) x[i] = out[i * n];\n"
                       "  __syncthreads();\n"
                       "#pragma unroll\n  for (int i = 0; i < 96; ++i) out[i * n + 1] = x[95 - i] * x[i];\n}\n"
                       "extern \"C\" __global__ void sharing(float* out) {\n"
                       "  __shared__ float x[256];\n  x[threadIdx.x] = out[threadIdx.x];\n  __syncthreads();\n"
                       "  out[threadIdx.x] = x[255 - threadIdx.x];\n}\n",
                       "80",
                       {"--maxrregcount=32"},
                       ""};
  const auto found = resources(compile_uncached(spills).log);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_GT(found.at("spilling").spill_store_bytes, 0);
  EXPECT_GT(found.at("spilling").spill_load_bytes, 0);
  EXPECT_GT(found.at("spilling").stack_bytes, 0);
  EXPECT_LE(found.at("spilling").registers, 32);
  EXPECT_EQ(found.at("spilling").shared_bytes, 0);
  EXPECT_EQ(found.at("sharing").shared_bytes, 1024);
  EXPECT_EQ(found.at("sharing").spill_store_bytes, 0);
}

// A product is read while it and the next one are in flight.
TEST_F(Jit, ProductsThatWaitForEachOtherAreReported) {
  const auto product = [](const std::string& sum) {
    return "asm volatile(\"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, "
           "0;\""
           " : \"+f\"(" +
           sum + "[0]), \"+f\"(" + sum + "[1]), \"+f\"(" + sum + "[2]), \"+f\"(" + sum + "[3]) : \"l\"(d));\n";
  };
  const auto kernel = [&](const std::string& name, const std::string& between) {
    return "extern \"C\" __global__ void " + name +
           "(float* out, unsigned long long d) {\n  float x[4] = {}, y[4] = {};\n"
           "  asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\");\n" +
           product("x") + between + product("y") +
           "  asm volatile(\"wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;\""
           " : \"+f\"(x[1]), \"+f\"(y[1]) :: \"memory\");\n  out[threadIdx.x] = x[1] + y[1];\n}\n";
  };
  const Program program{
      "products", kernel("waiting", "  out[1000 + threadIdx.x] = x[0];\n") + kernel("flying", ""), "90a", {}, ""};
  const Compiled compiled = compile_uncached(program);
  const auto found = resources(compiled.log);
  EXPECT_TRUE(found.at("waiting").products_wait) << compiled.log;
  EXPECT_FALSE(found.at("flying").products_wait) << compiled.log;
  // So ptxas puts it where registers are the reason.
  const auto few = resources(
      "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
      "insufficient register resources for the function 'few'\n");
  EXPECT_TRUE(few.at("few").products_wait);
}

// A change to a header renames the cubins of the sources that reach it, and no others; one to a comment none.
TEST_F(Jit, HeadersCountInTheKeysOfSourcesThatIncludeThem) {
  for (const Header& h : headers()) {
    const std::string_view text = h.text;
    EXPECT_EQ(text.find("//"), std::string_view::npos) << h.name;
    EXPECT_EQ(text.find("\n\n"), std::string_view::npos) << h.name;
  }
  const auto of = [](const std::string& name) { return headers_digest("#include \"" + name + "\"\nint x;"); };
  EXPECT_EQ(headers_digest("int x;"), headers_digest("#include <other>\nint y;"));
  EXPECT_NE(headers_digest("int x;"), of("cuda/device/bulk.cuh"));
  EXPECT_NE(of("cuda/device/tensor.cuh"), of("cuda/device/bulk.cuh"));
  // Naming a header beside one that includes it adds nothing.
  const std::string scores = "cuda/attention/device/scores.cuh", dropout = "cuda/attention/device/dropout.cuh";
  EXPECT_EQ(of(scores), headers_digest("#include \"" + scores + "\"\n#include \"" + dropout + "\"\n"));
  EXPECT_NE(of(scores), of(dropout));
}

TEST_F(Jit, SelfContainedSourceHasEachHeaderOnce) {
  const std::string text =
      self_contained("#include \"cuda/device/bulk.cuh\"\n#include <cstdint>\n#include <other>\nint x;");
  EXPECT_EQ(text.find("class Arrival"), text.rfind("class Arrival"));
  EXPECT_EQ(text.find("using uint32_t"), text.rfind("using uint32_t"));
  EXPECT_NE(text.find("using uint32_t"), std::string::npos);
  EXPECT_NE(text.find("#include <other>\nint x;"), std::string::npos);
  EXPECT_EQ(text.find("#include <cstdint>"), std::string::npos);
}

}  // namespace
}  // namespace fusegrad::jit
