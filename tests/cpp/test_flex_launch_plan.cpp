// What the planner of flex attention on CUDA decides, without a GPU: specs and their keys, shared memory, launches.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "common/error.h"
#include "cuda/attention/backward/backward.h"
#include "cuda/attention/device/shared_memory.cuh"
#include "cuda/attention/forward/few_queries.h"
#include "cuda/attention/forward/forward.h"
#include "cuda/attention/grad_buffers/grad_buffers.h"
#include "cuda/attention/plan/launch_plan.h"
#include "cuda/attention/plan/plan.h"
#include "cuda/attention/plan/program.h"

namespace fusegrad::cuda {
namespace {

constexpr int64_t kProcessors = 132;

FlexCase make_case(FlexKernel kernel, int head_size, DType dtype = DType::kBFloat16) {
  FlexCase c;
  c.kernel = kernel;
  c.dtype = dtype;
  c.head_size = c.value_size = head_size;
  c.unscaled = kernel == FlexKernel::kForward;
  c.grad_query = kernel != FlexKernel::kForward;
  c.grad_key = c.grad_value = kernel == FlexKernel::kBackward;
  return c;
}
FlexCase masked(FlexCase c, int64_t block) {
  c.blocks = true;
  c.block_size = {block, block};
  return c;
}
FlexShape make_shape(int64_t batches, int64_t heads, int64_t key_heads, int64_t queries, int64_t keys, int64_t size) {
  return {batches, heads, queries, batches, key_heads, keys, size, size};
}
BlockMaskShape make_mask(const FlexShape& shape, int64_t block) {
  const int64_t rows = tiles_in(shape.queries, block), cols = tiles_in(shape.keys, block);
  return {{block, block}, rows, cols, cols, cols};
}
LaunchPlan plan(const FlexCase& c, const FlexShape& shape, int64_t launches = 1) {
  std::optional<BlockMaskShape> mask;
  if (c.blocks) mask = make_mask(shape, c.block_size[0]);
  return plan_launch(plan_kernel(c, "90a"), shape, mask, kProcessors, launches);
}

// A change of anything that a program is made from changes the key.
TEST(KernelSpec, HasEachFactInItsKey) {
  using Change = std::function<void(FlexCase&, KernelFacts&)>;
  const std::vector<Change> any{
      [](auto& c, auto&) { c.dtype = DType::kFloat16; },
      [](auto& c, auto&) { c.blocks = true; },
      [](auto& c, auto&) { c.dropout = true; },
      [](auto& c, auto&) { c.small_lengths = false; },
      [](auto& c, auto&) { c.score_mod.text = "score_mod"; },
      [](auto& c, auto&) { c.mask_mod.text = "mask_mod"; },
      [](auto& c, auto&) { c.score_mod.dtypes = {score_mod::DType::kInt32}; },
      [](auto& c, auto&) { c.mask_mod.dtypes = {score_mod::DType::kInt32}; },
      [](auto& c, auto&) { c.score_mod.small_buffers = false; },
      [](auto& c, auto&) { c.score_mod.small_scalars = false; },
      [](auto& c, auto&) { c.mask_mod.small_buffers = false; },
      [](auto& c, auto&) { c.mask_mod.small_scalars = false; },
      [](auto&, auto& f) { f.tile.own = PortableTile{}; },
      [](auto&, auto& f) { f.tile.rows += 16; },
      [](auto&, auto& f) { f.tile.cols += 16; },
      [](auto&, auto& f) { f.tile.stages += 1; },
      [](auto&, auto& f) { f.tile.hopper().query_stages += 1; },
      [](auto&, auto& f) { f.tile.hopper().parts += 1; },
      [](auto&, auto& f) { f.tile.boxes = true; },
      [](auto&, auto& f) { f.tile.hopper().read_stages += 1; },
      [](auto&, auto& f) { f.tile.hopper().maps += 1; },
      [](auto&, auto& f) { f.head += 64; },
      [](auto&, auto& f) { f.value += 64; },
      [](auto&, auto& f) { f.groups += 1; },
  };
  const std::vector<Change> forward{
      [](auto&, auto& f) { f.tile.hopper().line_bytes = 4096; },
      [](auto&, auto& f) { f.key_splits = true; },
      [](auto& c, auto&) { c.unscaled = !c.unscaled; },
      [](auto& c, auto&) { c.max_scores = true; },
      [](auto& c, auto&) { c.out_low = true; },
  };
  const std::vector<Change> backward{
      [](auto&, auto& f) { f.tile.hopper().key_stages += 1; },
      [](auto&, auto& f) { f.tile.hopper().own_places = true; },
      [](auto&, auto& f) { f.warps += 4; },
      [](auto&, auto& f) { f.keys_shared = true; },
      [](auto&, auto& f) { f.narrow = true; },
      [](auto&, auto& f) { f.grad_query = !f.grad_query; },
      [](auto&, auto& f) { f.stores_boxes = !f.stores_boxes; },
      [](auto&, auto& f) { f.ordered = !f.ordered; },
      [](auto&, auto& f) { f.whole = !f.whole; },
      [](auto&, auto& f) { f.stores_first = !f.stores_first; },
      [](auto&, auto& f) { f.schemes = {device::Scheme::kInvariant}; },
      [](auto&, auto& f) { f.tables = {64}; },
      [](auto& c, auto&) { c.grad_key = false; },
      [](auto& c, auto&) { c.grad_value = false; },
      [](auto& c, auto&) { c.max_gradient = true; },
      [](auto& c, auto&) { c.fixed_point = true; },
      [](auto& c, auto&) { c.partial_sums = true; },
      [](auto& c, auto&) { c.wants_grad = {true}; },
  };
  const std::vector<Change> portable_backward{
      [](auto&, auto& f) { f.tile.portable().share += 1; },
      [](auto&, auto& f) { f.tile.portable().gradient_stages += 1; },
      [](auto&, auto& f) { f.tile.portable().keeps = true; },
  };
  const auto expect_keys = [](const KernelSpec& spec, const std::vector<Change>& changes) {
    EXPECT_EQ(spec.key(), KernelSpec(spec.asked(), spec.facts()).key());
    for (size_t i = 0; i < changes.size(); ++i) {
      FlexCase asked = spec.asked();
      KernelFacts facts = spec.facts();
      changes[i](asked, facts);
      EXPECT_NE(spec.key(), KernelSpec(asked, facts).key()) << "change " << i;
    }
  };
  for (const FlexKernel kernel : {FlexKernel::kForward, FlexKernel::kBackward}) {
    const KernelSpec spec = plan_kernel(make_case(kernel, 128), "90a");
    expect_keys(spec, any);
    expect_keys(spec, kernel == FlexKernel::kForward ? forward : backward);
  }
  expect_keys(plan_kernel(make_case(FlexKernel::kBackward, 128), "80"), portable_backward);
}

TEST(KernelSpec, IsRenderedIntoTheProgram) {
  const KernelSpec spec = plan_kernel(make_case(FlexKernel::kBackward, 128), "90a");
  const auto kernel = flex_program(spec, "90a");
  EXPECT_NE(kernel.program.source.find(spec.config()), std::string::npos);
  EXPECT_EQ(spec.key().find(std::string(spec.name()) + "\n" + spec.config()), 0u);
  EXPECT_EQ(kernel.dynamic_shared_bytes, spec.facts().shared_bytes);
}

// The regions of the Hopper backward as a list, in their order.
TEST(SharedMemory, RegionsFollowOneAnotherAndAreAligned) {
  const device::HopperBackwardMemory m({.rows = 64,
                                        .cols = 128,
                                        .head = 128,
                                        .value = 128,
                                        .stages = 2,
                                        .query_stages = 2,
                                        .key_stages = 2,
                                        .adds_grad_query = true,
                                        .own_keys = true,
                                        .own_places = true,
                                        .has_score_mod = false,
                                        .box_bytes = 32 << 10,
                                        .read_stages = 2,
                                        .captured_bytes = 0});
  const std::vector<device::Region> regions{m.key,        m.value,         m.query,   m.grad_out, m.grad_scores,
                                            m.grad_query, m.key_gradients, m.boxes,   m.rows,     m.places,
                                            m.barriers,   m.lines,         m.captured};
  int end = 0;
  for (const auto& region : regions) {
    EXPECT_EQ(region.offset, end);
    end = region.end();
  }
  EXPECT_EQ(m.bytes(), end);
  // TMA: swizzled boxes at multiples of 1024 bytes, others of 128; dQ by reductions of 16 bytes; mbarriers of 8.
  for (const auto& tile : {m.key, m.value, m.query, m.grad_out, m.grad_scores, m.key_gradients, m.boxes}) {
    EXPECT_EQ(tile.offset % 1024, 0);
    EXPECT_EQ(tile.piece % 1024, 0);
  }
  EXPECT_EQ(m.grad_query.offset % 16, 0);
  EXPECT_EQ(m.rows.offset % 128, 0);
  EXPECT_EQ(m.rows.piece % 128, 0);
  EXPECT_EQ(m.barriers.offset % 8, 0);
  // 2 x 32 KiB of keys, 32 of values, 2 x 16 of queries and of grad_out, 2 x 16 of dS, 32 of dQ, 64 of dK and dV,
  // 2 x 32 of boxes, 1 of row statistics, 128 bytes of places, 24 barriers.
  EXPECT_EQ(m.bytes(), (64 + 32 + 32 + 32 + 32 + 32 + 64 + 64 + 1) * 1024 + 128 + 8 * 24);
}

TEST(SharedMemory, OfAPlanIsWhatItsLaunchGets) {
  // Forward of 128 x 128: alignment, 2 stages of keys and values of 32 KiB each, a tile of queries of 32 KiB.
  const KernelSpec spec = plan_kernel(make_case(FlexKernel::kForward, 128), "90a");
  const FlexTile& t = spec.tile();
  EXPECT_EQ(t.rows, 128);
  EXPECT_EQ(t.cols, 128);
  EXPECT_EQ(spec.facts().shared_bytes,
            1024 + (t.hopper().query_stages + 4) * 32768 + 8 * (4 + 2 * t.hopper().query_stages + 8) + 32 + 8);
  // Portable, float32, 64 x 32 tiles: rows of 64 floats and 16 bytes.
  const KernelSpec portable = plan_kernel(make_case(FlexKernel::kForward, 64, DType::kFloat32), "80");
  EXPECT_EQ(portable.facts().shared_bytes, (64 + 32 + 32) * (64 * 4 + 16));
}

TEST(LaunchPlan, HopperKernelsArePersistent) {
  const FlexShape large = make_shape(2, 16, 4, 4096, 4096, 128), small = make_shape(1, 2, 1, 100, 100, 128);
  for (const FlexKernel kernel : {FlexKernel::kForward, FlexKernel::kBackward, FlexKernel::kGradQuery}) {
    EXPECT_EQ(plan(make_case(kernel, 128), large).ctas, kProcessors);
  }
  EXPECT_EQ(plan(make_case(FlexKernel::kForward, 128), small).ctas, 2);   // query heads
  EXPECT_EQ(plan(make_case(FlexKernel::kBackward, 128), small).ctas, 1);  // key heads
  EXPECT_EQ(plan(make_case(FlexKernel::kGradQuery, 128), small).ctas, 2);
}

TEST(LaunchPlan, OthersHaveACtaForEachTile) {
  const FlexShape shape = make_shape(2, 16, 4, 4096, 1000, 256);
  // Head size 256: 64 keys of both consumer warpgroups.
  const LaunchPlan wide = plan(make_case(FlexKernel::kBackward, 256), shape);
  EXPECT_TRUE(wide.spec.facts().keys_shared);
  EXPECT_EQ(wide.ctas, 2 * 4 * 16);
  const LaunchPlan portable = plan(make_case(FlexKernel::kForward, 64, DType::kFloat32), shape);
  EXPECT_EQ(portable.ctas, 2 * 16 * 64);
  EXPECT_FALSE(portable.lists);
}

TEST(LaunchPlan, LaunchesShareTheKeysOfABackward) {
  const FlexShape shape = make_shape(4, 8, 8, 512, 4096, 128);
  const LaunchPlan by_key = plan(make_case(FlexKernel::kBackward, 128), shape, 4);
  EXPECT_EQ(by_key.launches, 4);
  EXPECT_EQ(by_key.ctas, 8 * 32);
  // dQ's kernel has all of them at once.
  const LaunchPlan by_query = plan(make_case(FlexKernel::kGradQuery, 128), shape, 4);
  EXPECT_EQ(by_query.launches, 1);
  EXPECT_EQ(by_query.ctas, 4 * 8 * 4);
}

LaunchPlan plan_few(const FlexShape& shape, int rows = 16) {
  FlexCase c = make_case(FlexKernel::kForward, 128);
  c.few_rows = rows;
  return plan(c, shape);
}

TEST(FewQueries, FillTheGpuWithSplitsOfTheKeys) {
  // In tiles of 64 keys of 8 heads. Where one CTA a multiprocessor ends as early as two, there is less to merge.
  const LaunchPlan one = plan_few(make_shape(1, 32, 8, 1, 8192, 128));
  EXPECT_TRUE(one.spec.facts().few());
  EXPECT_EQ(one.spec.facts().resident, 2);
  EXPECT_EQ(one.together, 4);
  EXPECT_EQ(one.splits, 16);
  EXPECT_EQ(one.ctas, 8 * 16);
  EXPECT_EQ(plan_few(make_shape(1, 32, 8, 1, 131072, 128)).splits, 33);  // 264 CTAs of 132 multiprocessors
  EXPECT_EQ(plan_few(make_shape(16, 32, 8, 1, 8192, 128)).splits, 1);    // 128 of 132
  EXPECT_EQ(plan_few(make_shape(64, 32, 8, 1, 8192, 128)).splits, 1);    // 512 of 528 places
  EXPECT_EQ(plan_few(make_shape(1, 32, 8, 1, 64, 128)).splits, 1);       // one tile
  // The last CTAs of a wave are many enough.
  const int64_t splits = plan_few(make_shape(17, 32, 8, 1, 8192, 128)).splits, ctas = 17 * 8 * splits;
  EXPECT_GE(10 * ctas, 9 * tiles_in(ctas, kProcessors) * kProcessors);
  // Heads of a group share a tile, as many as fit.
  EXPECT_EQ(plan_few(make_shape(1, 71, 1, 1, 64, 128), 32).ctas, 3);
}

TEST(FewQueries, AreThoseWhoseGroupFitsATile) {
  const FlexCase c = make_case(FlexKernel::kForward, 128);
  const auto rows = [](const FlexCase& of, const FlexShape& shape, std::optional<BlockMaskShape> mask = {}) {
    return few_query_rows(of, shape, mask, "90a");
  };
  EXPECT_EQ(rows(c, make_shape(1, 32, 8, 4, 100, 128)), 16);
  EXPECT_EQ(rows(c, make_shape(1, 32, 8, 5, 100, 128)), 32);
  EXPECT_EQ(rows(c, make_shape(1, 32, 32, 32, 8192, 128)), 32);
  EXPECT_EQ(rows(c, make_shape(1, 32, 32, 32, 100, 128)), 0);
  EXPECT_EQ(rows(c, make_shape(1, 32, 32, 33, 8192, 128)), 0);
  EXPECT_EQ(rows(make_case(FlexKernel::kForward, 256), make_shape(1, 32, 32, 17, 8192, 256)), 0);
  EXPECT_EQ(rows(make_case(FlexKernel::kGradQuery, 128), make_shape(1, 32, 8, 1, 100, 128)), 0);
  // Lists of a mask that differ from head to head.
  BlockMaskShape mask = make_mask(make_shape(1, 32, 2, 2, 100, 128), 128);
  EXPECT_EQ(rows(c, make_shape(1, 32, 2, 2, 100, 128), mask), 32);
  mask.heads = 32;
  EXPECT_EQ(rows(c, make_shape(1, 32, 2, 2, 100, 128), mask), 16);
  // The largest score has the bits of the backward's family.
  FlexCase max_scores = c;
  max_scores.max_scores = true;
  EXPECT_EQ(rows(max_scores, make_shape(1, 32, 8, 4, 100, 128)), 0);
  EXPECT_EQ(few_query_rows(max_scores, make_shape(1, 32, 8, 4, 100, 128), {}, "80"), 16);
}

TEST(FewQueries, SplitKeysOfTheUsualTilesWhereThoseAreFew) {
  EXPECT_TRUE(pays_key_splits(make_shape(1, 8, 8, 256, 65536, 128), kProcessors));
  EXPECT_FALSE(pays_key_splits(make_shape(1, 8, 8, 256, 128, 128), kProcessors));
  EXPECT_FALSE(pays_key_splits(make_shape(4, 16, 16, 4096, 4096, 128), kProcessors));
  // Measured: merging takes more than the half of the keys.
  EXPECT_FALSE(pays_key_splits(make_shape(1, 16, 16, 512, 512, 128), kProcessors));
  EXPECT_TRUE(pays_key_splits(make_shape(1, 8, 8, 512, 2048, 128), kProcessors));
  for (const FlexKernel kernel : {FlexKernel::kForward, FlexKernel::kGradQuery}) {
    FlexCase c = make_case(kernel, 128);
    c.key_splits = true;
    const LaunchPlan split = plan(c, make_shape(1, 8, 8, 256, 65536, 128));
    EXPECT_EQ(split.splits, 8);  // of each of 16 rows of tiles
    EXPECT_EQ(split.ctas, 16 * 8);
  }
  FlexCase by_key = make_case(FlexKernel::kBackward, 128);
  by_key.key_splits = true;
  EXPECT_EQ(plan(by_key, make_shape(1, 8, 8, 256, 65536, 128)).splits, 1);
}

TEST(LaunchPlan, RefusesTooManyCtas) {
  const FlexShape shape = make_shape(int64_t{1} << 16, int64_t{1} << 15, 1, 128, 128, 64);
  EXPECT_THROW(plan(make_case(FlexKernel::kForward, 64, DType::kFloat32), shape), ValueError);
}

TEST(LaunchPlan, ListsAreDirectWhereTilesLieInABlockEach) {
  const FlexShape shape = make_shape(2, 16, 4, 4096, 2048, 128);
  const auto forward = plan(masked(make_case(FlexKernel::kForward, 128), 128), shape).lists;
  EXPECT_EQ(*forward, (TileListPlan{128, 128, false, 1, 32, 16, true}));
  const auto backward = plan(masked(make_case(FlexKernel::kBackward, 128), 128), shape).lists;
  EXPECT_EQ(*backward, (TileListPlan{80, 128, true, 5, 16, 52, true}));
  EXPECT_FALSE(plan(masked(make_case(FlexKernel::kForward, 128), 48), shape).lists->direct);
  // More entries than each CTA should read: 512 rows of 512 blocks.
  const FlexShape long_keys = make_shape(1, 1, 1, 65536, 65536, 128);
  EXPECT_FALSE(plan(masked(make_case(FlexKernel::kBackward, 128), 128), long_keys).lists->direct);
  EXPECT_TRUE(plan(masked(make_case(FlexKernel::kForward, 128), 128), long_keys).lists->direct);
}

TEST(LaunchPlan, SectionsOfHeadsFitTheL2Cache) {
  // Without a block mask heads come one after the other.
  EXPECT_EQ(plan(make_case(FlexKernel::kForward, 128), make_shape(8, 32, 32, 8192, 8192, 128)).section, 1);
  // 8192 keys and values of 256 bytes are 4 MiB a head: 16 MiB hold four, of 256 heads.
  EXPECT_EQ(plan(masked(make_case(FlexKernel::kForward, 128), 128), make_shape(8, 32, 32, 8192, 8192, 128)).section, 4);
  // In groups of 8 query heads, 32 of them.
  EXPECT_EQ(plan(masked(make_case(FlexKernel::kForward, 128), 128), make_shape(8, 32, 4, 8192, 8192, 128)).section, 32);
  // Few rows of tiles and all heads in 48 MiB: one section.
  EXPECT_EQ(plan(masked(make_case(FlexKernel::kForward, 128), 128), make_shape(1, 8, 8, 4096, 4096, 128)).section, 8);
  // Backward: queries, grad_out and dQ in float32 are 8192 * 1024 bytes a head, two in 16 MiB.
  EXPECT_EQ(plan(masked(make_case(FlexKernel::kBackward, 128), 128), make_shape(8, 32, 32, 8192, 8192, 128)).section,
            2);
}

TEST(LaunchPlan, TallTilesPayWhereTheyAreFewEnough) {
  const auto pays = [](const FlexCase& c, const FlexShape& shape, double share = 1.0) {
    std::optional<BlockMaskShape> mask;
    if (c.blocks) mask = make_mask(shape, c.block_size[0]);
    return pays_tall(c, shape, mask, [share] { return share; }, "90a");
  };
  const FlexCase c = make_case(FlexKernel::kBackward, 128);
  EXPECT_TRUE(pays(c, make_shape(1, 8, 8, 4096, 4096, 128)));  // 7 * 52 <= 6 * 64
  EXPECT_FALSE(pays(c, make_shape(1, 8, 8, 64, 64, 128)));     // 7 > 6
  const FlexCase small = make_case(FlexKernel::kBackward, 64);
  EXPECT_FALSE(pays(small, make_shape(1, 8, 8, 4096, 4096, 64)));  // 11 * 29 + 8 > 10 * 32
  EXPECT_TRUE(pays(small, make_shape(1, 8, 8, 8192, 8192, 64)));   // 11 * 57 + 8 <= 10 * 64
  EXPECT_FALSE(pays(make_case(FlexKernel::kBackward, 256), make_shape(1, 8, 8, 8192, 8192, 256)));
  FlexCase mask = masked(c, 128);
  EXPECT_TRUE(pays(mask, make_shape(1, 8, 8, 4096, 4096, 128)));
  EXPECT_FALSE(pays(mask, make_shape(1, 8, 8, 1024, 1024, 128)));
  mask.mask_mod.text = "mask_mod";
  EXPECT_TRUE(pays(mask, make_shape(1, 8, 8, 4096, 4096, 128), 0.5));  // 2048 queries of a key
  EXPECT_FALSE(pays(mask, make_shape(1, 8, 8, 4096, 4096, 128), 0.25));
  // Of heads above 128 columns tiles are less tall, of twice the keys, where those are many enough.
  FlexCase wide = make_case(FlexKernel::kBackward, 192);
  EXPECT_FALSE(pays(wide, make_shape(1, 16, 16, 4096, 4096, 192)));  // no registers for dV of more than 128
  wide.value_size = 128;
  EXPECT_TRUE(pays(wide, make_shape(1, 16, 16, 4096, 4096, 192)));
  EXPECT_TRUE(pays(masked(wide, 128), make_shape(1, 16, 16, 4096, 4096, 192)));
  EXPECT_FALSE(pays(wide, make_shape(1, 4, 4, 1024, 1024, 192)));
  FlexCase float32 = c;
  float32.dtype = DType::kFloat32;
  EXPECT_FALSE(pays(float32, make_shape(1, 8, 8, 4096, 4096, 128)));
}

TEST(LaunchPlan, OneCtaOfEightWarpsWhereSharedMemoryIsSmall) {
  const auto tile = [](FlexKernel kernel, int head, const char* architecture) {
    FlexCase c = make_case(kernel, head);
    const FlexTile t = plan_kernel(c, architecture).tile();
    return std::array{t.rows, t.cols, t.warps, t.share()};
  };
  EXPECT_EQ(tile(FlexKernel::kBackward, 96, "86"), (std::array{32, 128, 8, 1}));
  EXPECT_EQ(tile(FlexKernel::kBackward, 128, "120"), (std::array{32, 128, 8, 1}));
  EXPECT_EQ(tile(FlexKernel::kBackward, 32, "89"), (std::array{128, 128, 8, 1}));
  EXPECT_EQ(tile(FlexKernel::kForward, 96, "89"), (std::array{256, 64, 8, 1}));
  // Elsewhere two CTAs, or warps that share keys.
  EXPECT_EQ(tile(FlexKernel::kBackward, 128, "80"), (std::array{64, 128, 8, 2}));
  EXPECT_EQ(tile(FlexKernel::kBackward, 32, "80"), (std::array{128, 128, 8, 2}));
  EXPECT_EQ(tile(FlexKernel::kForward, 96, "80"), (std::array{128, 64, 4, 1}));
}

TEST(LaunchPlan, WideHeadsSumUpDQWhereKeysAreMany) {
  FlexCase c = make_case(FlexKernel::kBackward, 192);
  c.value_size = 128;
  const auto pays = [&](int64_t keys, double share) {
    return pays_sums_wide(c, make_shape(1, 16, 16, keys, keys, 192), [&] { return share; });
  };
  EXPECT_TRUE(pays(1024, 1));
  EXPECT_FALSE(pays(1024, 0.5));
  EXPECT_TRUE(pays(2048, 0.5));
  const auto kernels = [&](bool deterministic, std::vector<bool> needs_grad = {true, true, true}) {
    return backward_kernels(c, needs_grad, deterministic, "90a");
  };
  ASSERT_EQ(kernels(false).size(), 1u);
  EXPECT_TRUE(plan_kernel(kernels(false).back(), "90a").facts().grad_query);
  for (const auto& two : {kernels(true), kernels(false, {true, true, false})}) {
    ASSERT_EQ(two.size(), 2u);
    EXPECT_EQ(two.front().kernel, FlexKernel::kGradQuery);
    EXPECT_FALSE(plan_kernel(two.back(), "90a").facts().grad_query);
  }
  c.sums_wide = false;
  EXPECT_EQ(kernels(false).size(), 2u);
  c.tall = false;
  EXPECT_TRUE(plan_kernel(kernels(false).back(), "90a").facts().keys_shared);
}

TEST(LaunchPlan, WholeHeadsPayWhereTheyAreManyAndShort) {
  const auto pays = [](const FlexCase& c, const FlexShape& shape, double share = 1.0) {
    return pays_whole(c, shape, kProcessors, [&] { return share; });
  };
  const FlexCase c = make_case(FlexKernel::kBackward, 64);
  EXPECT_TRUE(pays(c, make_shape(32, 16, 16, 512, 512, 64)));   // 132 * 512 rows of 512 bytes are 33 MiB
  EXPECT_FALSE(pays(c, make_shape(32, 16, 16, 640, 640, 64)));  // 41 MiB
  EXPECT_FALSE(pays(c, make_shape(32, 16, 8, 512, 512, 64)));   // of two heads 66 MiB
  EXPECT_TRUE(pays(c, make_shape(32, 16, 8, 256, 256, 64)));
  EXPECT_FALSE(pays(c, make_shape(1, 64, 64, 256, 256, 64)));    // half of the GPU
  EXPECT_FALSE(pays(c, make_shape(1, 200, 200, 256, 256, 64)));  // 200 of 2 * 132
  EXPECT_TRUE(pays(c, make_shape(1, 240, 240, 256, 256, 64)));   // 240 of them
  FlexShape shared = make_shape(32, 16, 16, 512, 512, 64);
  shared.key_batches = 1;
  EXPECT_FALSE(pays(c, shared));
  const FlexCase mask = masked(c, 128);
  EXPECT_TRUE(pays(mask, make_shape(32, 16, 16, 512, 512, 64)));
  EXPECT_FALSE(pays(mask, make_shape(32, 16, 8, 256, 256, 64)));  // grouped heads
  const FlexCase wide = make_case(FlexKernel::kBackward, 128);
  EXPECT_TRUE(pays(masked(wide, 128), make_shape(32, 16, 16, 512, 512, 128), 0.5));  // half of 66 MiB
  EXPECT_FALSE(pays(masked(wide, 128), make_shape(32, 16, 16, 512, 512, 128), 0.7));
  EXPECT_FALSE(pays(wide, make_shape(32, 16, 16, 512, 512, 128), 0.5));
  EXPECT_FALSE(pays(mask, make_shape(32, 32, 32, 1024, 1024, 64), 0.5));
  const FlexCase narrow = masked(make_case(FlexKernel::kBackward, 16), 128);
  EXPECT_TRUE(pays(narrow, make_shape(32, 16, 16, 1024, 1024, 16)));
  EXPECT_FALSE(pays(narrow, make_shape(32, 16, 16, 1025, 1024, 16)));  // more than 16 tiles of 64 queries
  EXPECT_FALSE(pays(narrow, make_shape(32, 16, 16, 512, 2000, 16)));   // more than 15 tiles of 128 keys
}

TEST(LaunchPlan, CtasHaveWholeHeads) {
  FlexCase c = make_case(FlexKernel::kBackward, 64);
  c.whole = true;
  c.tall = false;
  const FlexShape shape = make_shape(32, 16, 16, 512, 512, 64);
  EXPECT_TRUE(plan(c, shape).spec.facts().whole);
  EXPECT_EQ(plan(c, shape).ctas, kProcessors);
  EXPECT_EQ(plan(c, make_shape(5, 16, 16, 512, 512, 64)).ctas, 80);
  EXPECT_EQ(plan(masked(c, 128), shape).section, 1);
  // All gradients, and tiles for the next keys.
  FlexCase keys = c;
  keys.grad_query = false;
  EXPECT_FALSE(plan(keys, shape).spec.facts().whole);
  FlexCase wide = make_case(FlexKernel::kBackward, 256);
  wide.whole = true;
  EXPECT_FALSE(plan(wide, make_shape(32, 16, 16, 512, 512, 256)).spec.facts().whole);
  // Where no tile can, the usual one is taken.
  const auto kernels = [](const FlexCase& of, bool deterministic) {
    return backward_kernels(of, {true, true, true}, deterministic, "90a");
  };
  wide.tall = true;
  EXPECT_FALSE(kernels(wide, false).back().whole);
  EXPECT_TRUE(kernels(wide, false).back().tall);
  // dQ is summed in one order, without a kernel of its own.
  ASSERT_EQ(kernels(c, true).size(), 1u);
  EXPECT_TRUE(kernels(c, true).back().grad_query);
}

TEST(LaunchPlan, TheFirstTileOfKeysStoresDQ) {
  FlexCase c = make_case(FlexKernel::kBackward, 128);
  c.tall = false;
  const auto facts = [](const FlexCase& of) { return plan_kernel(of, "90a").facts(); };
  EXPECT_TRUE(facts(c).stores_first);
  // Warps beside tall tiles have too few registers. CTAs with all keys of a head, and ordered sums, need no states.
  FlexCase tall = c, whole = c, ordered = c, keys = c, zeros = c;
  zeros.stores_first = false;
  tall.tall = true;
  whole.whole = true;
  ordered.ordered = true;
  keys.grad_query = false;
  for (const FlexCase& other : {tall, whole, ordered, keys, zeros}) EXPECT_FALSE(facts(other).stores_first);
  EXPECT_FALSE(plan_kernel(c, "80").facts().stores_first);
}

TEST(LaunchPlan, ZerosPayWhereAMaskGivesKeysManyQueries) {
  FlexCase c = make_case(FlexKernel::kBackward, 64);
  const auto stores = [&](int64_t queries, double share) {
    return pays_stores_first(c, make_shape(4, 16, 16, queries, queries, c.head_size), [&] { return share; });
  };
  EXPECT_TRUE(stores(4096, 0.5));
  c.blocks = true;
  EXPECT_TRUE(stores(4096, 0.5));
  c.mask_mod.text = "mask_mod";
  EXPECT_FALSE(stores(4096, 0.5));
  EXPECT_FALSE(stores(2048, 0.5));
  EXPECT_TRUE(stores(1024, 0.5));
  EXPECT_TRUE(stores(4096, 0.06));
  c.head_size = c.value_size = 80;
  EXPECT_TRUE(stores(4096, 0.5));
}

TEST(FewQueries, CopyKeysByTmaOnHopper) {
  FlexCase c = make_case(FlexKernel::kForward, 128);
  c.few_rows = 16;
  const KernelFacts f = plan_kernel(c, "90a").facts();
  EXPECT_TRUE(f.tile.key_boxes());
  EXPECT_NE(plan_kernel(c, "90a").key(), plan_kernel(c, "80").key());
  const device::FewForwardMemory m({.rows = 16,
                                    .cols = f.tile.cols,
                                    .head = 128,
                                    .value = 72,
                                    .element_bytes = 2,
                                    .warps = f.tile.warps,
                                    .stages = f.tile.stages,
                                    .key_boxes = true});
  EXPECT_EQ(m.stages.offset % 1024, 0);
  EXPECT_EQ(m.stages.piece, f.tile.cols / f.tile.warps * (128 + 128) * 2);  // whole chunks of 64 columns
  EXPECT_LE(m.barriers.end(), m.stages.offset);
  FlexCase floats = c;
  floats.dtype = DType::kFloat32;
  EXPECT_FALSE(plan_kernel(floats, "90a").tile().key_boxes());
  EXPECT_FALSE(plan_kernel(c, "100").tile().key_boxes());
}

// For small heads, a bias of pairs that all batches share, or a table of places in a window.
FlexCase biased(FlexKernel kernel, int head_size, const std::string& buffers, const std::string& body,
                std::vector<score_mod::DType> dtypes, std::vector<int64_t> elements) {
  FlexCase c = make_case(kernel, head_size);
  c.unscaled = false;
  c.score_mod.text = "score_mod 1\n" + buffers + body;
  c.score_mod.dtypes = std::move(dtypes);
  if (kernel != FlexKernel::kForward) {
    c.wants_grad.assign(elements.size(), false);
    c.wants_grad.back() = true;
    c.elements = std::move(elements);
  }
  return c;
}
FlexCase pairs_of_heads(FlexKernel kernel, int head_size, score_mod::DType dtype = score_mod::DType::kBFloat16) {
  return biased(kernel, head_size, "buffer @0 f 3\n", "%0 = load @0 h q_idx kv_idx\n%1 = add score %0\nreturn %1\n",
                {dtype}, {4 * 512 * 512});
}
FlexCase windows(FlexKernel kernel, int head_size) {
  return biased(kernel, head_size, "buffer @0 i64 2\nbuffer @1 f 2\n",
                "%0 = load @0 q_idx kv_idx\n%1 = load @1 %0 h\n%2 = add score %1\nreturn %2\n",
                {score_mod::DType::kInt32, score_mod::DType::kFloat32}, {49 * 49, 169 * 16});
}

TEST(PairBoxes, AreOfRowsOfKeys) {
  for (const FlexKernel kernel : {FlexKernel::kForward, FlexKernel::kBackward}) {
    EXPECT_TRUE(plan_kernel(pairs_of_heads(kernel, 32), "90a").tile().boxes);
    EXPECT_TRUE(plan_kernel(pairs_of_heads(kernel, 32, score_mod::DType::kFloat32), "80").tile().boxes);
    EXPECT_FALSE(plan_kernel(pairs_of_heads(kernel, 32, score_mod::DType::kFloat64), "80").tile().boxes);
    // Where a table is read, integers say.
    EXPECT_TRUE(plan_kernel(windows(kernel, 32), "90a").tile().boxes);
    const FlexCase by_column =
        biased(kernel, 32, "buffer @0 f 3\n", "%0 = load @0 h kv_idx q_idx\n%1 = add score %0\nreturn %1\n",
               {score_mod::DType::kBFloat16}, {4 * 512 * 512});
    EXPECT_FALSE(plan_kernel(by_column, "90a").tile().boxes);
    const FlexCase moved = biased(kernel, 32, "buffer @0 f 3\n",
                                  "%0 = add kv_idx 1\n%1 = load @0 h q_idx %0\n%2 = add score %1\nreturn %2\n",
                                  {score_mod::DType::kBFloat16}, {4 * 512 * 512});
    EXPECT_FALSE(plan_kernel(moved, "90a").tile().boxes);
  }
  EXPECT_FALSE(plan_kernel(pairs_of_heads(FlexKernel::kGradQuery, 32), "80").tile().boxes);
}
TEST(PairBoxes, OfFloatsComeByTma) {
  for (const FlexKernel kernel : {FlexKernel::kForward, FlexKernel::kBackward}) {
    for (const int head_size : {32, 64}) {
      for (const auto dtype : {score_mod::DType::kBFloat16, score_mod::DType::kFloat32}) {
        const FlexTile tile = plan_kernel(pairs_of_heads(kernel, head_size, dtype), "90a").tile();
        EXPECT_TRUE(tile.boxes);
        EXPECT_EQ(tile.maps(), 1) << head_size;
      }
    }
  }
}

TEST(LaunchPlan, TallTilesOfAForwardPayWhereQueriesFillThem) {
  const auto rows = [](const FlexCase& c, int64_t batches, int64_t length, double share) {
    return forward_rows(c, make_shape(batches, 16, 16, length, length, 64), kProcessors, [&] { return share; });
  };
  const auto pays = [&](int64_t length, double share) { return rows(FlexCase(), 4096, length, share) == 192; };
  for (const int64_t length : {130, 384, 512, 577, 1024, 2048}) EXPECT_TRUE(pays(length, 1.0)) << length;
  for (const int64_t length : {128, 197, 256}) EXPECT_FALSE(pays(length, 1.0)) << length;
  for (const int64_t length : {130, 384, 768, 1536, 2048}) EXPECT_TRUE(pays(length, 0.5)) << length;
  for (const int64_t length : {197, 256, 512, 577, 640, 1024}) EXPECT_FALSE(pays(length, 0.5)) << length;
  // 96 tiles of 192 queries and 128 of 128 all have a multiprocessor for themselves.
  EXPECT_EQ(rows(FlexCase(), 2, 512, 1.0), 128);
  // A bias of pairs in 16 bits, which TMA copies, has tiles of four warpgroups too.
  const FlexCase biased = pairs_of_heads(FlexKernel::kForward, 32);
  for (const int64_t length : {256, 512, 1024}) EXPECT_EQ(rows(biased, 4096, length, 1.0), 256) << length;
  for (const int64_t length : {192, 384, 576}) EXPECT_EQ(rows(biased, 4096, length, 1.0), 192) << length;
  for (const int64_t length : {128, 640}) EXPECT_EQ(rows(biased, 4096, length, 1.0), 128) << length;
  EXPECT_EQ(rows(biased, 2, 512, 1.0), 128);
  EXPECT_EQ(rows(pairs_of_heads(FlexKernel::kForward, 64), 4096, 512, 1.0), 192);
  EXPECT_EQ(rows(pairs_of_heads(FlexKernel::kForward, 32, score_mod::DType::kFloat32), 4096, 512, 1.0), 256);
}

// Additions to memory pair by pair take some hundred times as long where pairs share elements.
TEST(LaunchPlan, SumsOfDiagonalsAreWorthMoreThanStages) {
  for (const int head_size : {32, 48, 64, 128}) {
    const FlexCase buckets = biased(FlexKernel::kBackward, head_size, "buffer @0 f 2\n",
                                    "%0 = sub kv_idx q_idx\n%1 = abs %0\n%2 = min %1 31\n%3 = load @0 %2 h\n"
                                    "%4 = add score %3\nreturn %4\n",
                                    {score_mod::DType::kFloat32}, {32 * 12});
    for (const char* architecture : {"80", "90a", "100"})
      EXPECT_EQ(letters(plan_kernel(buckets, architecture).facts().schemes), "D") << head_size << ' ' << architecture;
  }
}

// Two stages of 128 keys fit beside 128 queries of 192 columns where values have 128, but not beside boxes.
TEST(LaunchPlan, HeadsOf192HaveTilesOf128Keys) {
  const auto keys = [](FlexCase c, int value_size) {
    c.value_size = value_size;
    return plan_kernel(c, "90a").tile().cols;
  };
  for (const auto& c : {make_case(FlexKernel::kForward, 192), masked(make_case(FlexKernel::kForward, 192), 128)}) {
    EXPECT_EQ(keys(c, 128), 128);
    EXPECT_LT(keys(c, 192), 128);
  }
  EXPECT_EQ(keys(make_case(FlexKernel::kForward, 136), 128), 128);
  EXPECT_LT(keys(make_case(FlexKernel::kForward, 256), 128), 128);
  EXPECT_LT(keys(pairs_of_heads(FlexKernel::kForward, 192), 128), 128);
}

// A plan is kept by all that decides it: another case, or what tests force, is another plan.
TEST(LaunchPlan, IsKeptByWhatDecidesIt) {
  FlexCase c = make_case(FlexKernel::kForward, 128);
  const KernelSpec first = plan_kernel(c, "90a");
  EXPECT_EQ(plan_kernel(c, "90a"), first);
  EXPECT_EQ(plan_kernel(c, "80").facts().tile.family(), FlexFamily::kPortable);
  force_flex_family(FlexFamily::kPortable);
  EXPECT_EQ(plan_kernel(c, "90a").facts().tile.family(), FlexFamily::kPortable);
  force_flex_family(std::nullopt);
  EXPECT_EQ(plan_kernel(c, "90a"), first);
  c.max_scores = true;
  EXPECT_TRUE(plan_kernel(c, "90a").asked().max_scores);
}

// What deterministic backwards run: dQ by itself but where one CTA has all keys, or tiles of keys add to it in order.
TEST(LaunchPlan, DeterministicGradientsOfQueries) {
  const auto kernels = [](const FlexCase& c, const char* architecture) {
    return backward_kernels(c, {true, true, true, true}, /*deterministic=*/true, architecture);
  };
  FlexCase pairs = pairs_of_heads(FlexKernel::kBackward, 32);
  pairs.partial_sums = true;
  EXPECT_EQ(kernels(pairs, "90a").size(), 1u);
  EXPECT_TRUE(plan_kernel(kernels(pairs, "90a").back(), "90a").facts().ordered);
  EXPECT_EQ(kernels(pairs, "80").size(), 2u);
  EXPECT_EQ(kernels(masked(pairs, 128), "90a").size(), 2u);
  FlexCase fixed = pairs;
  fixed.partial_sums = false;
  fixed.fixed_point = true;
  EXPECT_EQ(kernels(fixed, "90a").size(), 2u);
  EXPECT_EQ(kernels(make_case(FlexKernel::kBackward, 64), "90a").size(), 2u);
  FlexCase few = make_case(FlexKernel::kBackward, 32);
  few.most_queries = few.most_keys = 64;
  const auto one = kernels(few, "90a");
  ASSERT_EQ(one.size(), 1u);
  EXPECT_TRUE(plan_kernel(one.back(), "90a").facts().stores_query);
}

TEST(LaunchPlan, CtasStayWithAHeadOfManyBatches) {
  for (const FlexKernel kernel : {FlexKernel::kForward, FlexKernel::kBackward}) {
    FlexCase c = windows(kernel, 32);
    c.most_queries = c.most_keys = 64;
    const FlexShape shape = make_shape(2048, 16, 16, 49, 49, 32);
    EXPECT_EQ(plan(c, shape).ctas, 2048 * 16);
    c.many_batches = true;
    const LaunchPlan stays = plan(c, shape);
    EXPECT_EQ(stays.ctas % 16, 0);
    EXPECT_LE(stays.ctas, 4 * kProcessors);
    EXPECT_EQ(plan(c, make_shape(3, 16, 16, 49, 49, 32)).ctas, 3 * 16);
  }
}

// CTAs that stay with a head store their sums of a table's column, if all batches have the same one.
TEST(OrderedLaunches, AreOneWhereCtasStoreTheirSums) {
  const auto launches = [](const std::string& index, std::vector<int64_t> sizes, bool many_batches = true) {
    FlexCase c =
        biased(FlexKernel::kBackward, 32, "buffer @0 i64 3\nbuffer @1 f " + std::to_string(sizes.size()) + "\n",
               "%0 = load @0 b q_idx kv_idx\n%1 = load @1 " + index + "\n%2 = add score %1\nreturn %2\n",
               {score_mod::DType::kInt32, score_mod::DType::kFloat32}, {256 * 64 * 64, 64 * 512});
    c.sizes = {{256, 64, 64}, std::move(sizes)};
    c.most_queries = c.most_keys = 64;
    c.many_batches = many_batches;
    return ordered_launches(c, 256, 32, 64, kProcessors, "90a");
  };
  EXPECT_EQ(launches("%0 h", {512, 32}), 1);
  EXPECT_EQ(launches("h %0", {32, 512}), 1);
  EXPECT_EQ(launches("%0 h", {512, 32}, /*many_batches=*/false), 0);
  EXPECT_EQ(launches("b %0 h", {256, 128, 1}), 0);
  EXPECT_EQ(launches("%0 h", {8192, 4}), 0);  // no table for shared memory
}

TEST(SumsOverBatches, AreOfWhatBatchesShare) {
  const auto sums = [](const FlexCase& c, int64_t batches, int64_t heads, int64_t length,
                       const std::string& architecture = "90", bool deterministic = true) {
    return sums_over_batches(c, {true, true, true}, {}, batches, heads, length, length, kProcessors, deterministic,
                             architecture);
  };
  const FlexCase pairs = pairs_of_heads(FlexKernel::kBackward, 32);
  // 32 tiles of 4 heads: CTAs of some batches each fill two places of a multiprocessor, nearly.
  const auto triangle = sums(pairs, 512, 4, 512);
  ASSERT_TRUE(triangle);
  EXPECT_EQ(triangle->common.kernel, FlexKernel::kGradBuffers);
  EXPECT_EQ(triangle->ctas, triangle->parts * 4 * 32);
  EXPECT_EQ(triangle->sums, triangle->ctas * 128 * 64);
  // Queries that fill half of a tall tile, and heads of which a tall tile would take too much shared memory.
  FlexCase window = windows(FlexKernel::kBackward, 32);
  window.most_queries = window.most_keys = 64;
  EXPECT_EQ(sums(window, 2048, 16, 49)->sums % (16 * 64 * 64), 0);
  const auto wide = sums(pairs_of_heads(FlexKernel::kBackward, 64), 512, 4, 512);
  ASSERT_TRUE(wide);
  EXPECT_EQ(wide->ctas, wide->parts * 4 * 64);
  EXPECT_TRUE(triangle->common.partial_sums);
  EXPECT_FALSE(sums(pairs, 512, 4, 512, "90", /*deterministic=*/false)->common.partial_sums);
  // The Hopper kernel: 16 tiles of 4 heads.
  for (const int size : {32, 64}) {
    const auto hopper = sums(pairs_of_heads(FlexKernel::kBackward, size), 512, 4, 512, "90a");
    ASSERT_TRUE(hopper);
    EXPECT_EQ(hopper->ctas, 2 * 4 * 16);
    EXPECT_EQ(hopper->sums, hopper->ctas * 128 * 128);
    EXPECT_EQ(plan_kernel(hopper->common, "90a").tile().family(), FlexFamily::kHopper);
  }
  // So many tiles that one CTA each fills the GPU: a place gets one sum.
  const auto many = sums(pairs, 512, 32, 512);
  ASSERT_TRUE(many);
  EXPECT_EQ(many->parts, 1);
  EXPECT_FALSE(many->common.partial_sums);
  // Pairs of a window share a table's elements.
  EXPECT_TRUE(sums(windows(FlexKernel::kBackward, 32), 2048, 16, 49, "90", false)->common.partial_sums);
  EXPECT_FALSE(sums(pairs, 3, 4, 512));
  EXPECT_FALSE(sums(pairs_of_heads(FlexKernel::kBackward, 80), 512, 4, 512));
  EXPECT_FALSE(sums(masked(pairs, 128), 512, 4, 512));
  EXPECT_FALSE(sums(biased(FlexKernel::kBackward, 32, "buffer @0 f 4\n",
                           "%0 = load @0 b h q_idx kv_idx\n%1 = add score %0\nreturn %1\n",
                           {score_mod::DType::kBFloat16}, {512 * 4 * 512}),
                    512, 4, 512));
  FlexCase dropped = pairs;
  dropped.dropout = true;
  EXPECT_FALSE(sums(dropped, 512, 4, 512));
}

TEST(SumsOverBatches, AreOfWhatBatchesOfAGroupShare) {
  const auto sums = [](const std::string& batch, int64_t batches, std::vector<score_mod::Value> scalars = {},
                       bool deterministic = true) {
    const std::string scalar = scalars.empty() ? "" : "scalar $0 i64\n";
    const FlexCase c = biased(FlexKernel::kBackward, 32, "buffer @0 f 4\n" + scalar,
                              "%0 = " + batch + "\n%1 = load @0 %0 h q_idx kv_idx\n%2 = add score %1\nreturn %2\n",
                              {score_mod::DType::kBFloat16}, {8 * 4 * 512 * 512});
    return sums_over_batches(c, {true, true, true}, scalars, batches, 4, 512, 512, kProcessors, deterministic, "90");
  };
  const auto groups_of = [](const std::optional<BatchSums>& found) {
    return found ? std::array{found->groups.groups, found->groups.group_stride, found->groups.batch_stride}
                 : std::array{0, 0, 0};
  };
  const auto number = [](int64_t i) { return std::vector{score_mod::Value{score_mod::Type::kInt, 0, i}}; };
  EXPECT_EQ(groups_of(sums("floor_div b 128", 512)), (std::array{4, 128, 1}));
  EXPECT_EQ(groups_of(sums("floor_div b 128", 500)), (std::array{4, 128, 1}));
  EXPECT_EQ(groups_of(sums("floor_div b 1000", 512)), (std::array{1, 512, 1}));
  EXPECT_EQ(groups_of(sums("mod b 8", 512)), (std::array{8, 1, 8}));
  EXPECT_EQ(groups_of(sums("floor_div b $0", 512, number(128))), (std::array{4, 128, 1}));
  EXPECT_EQ(groups_of(sums("mod b $0", 512, number(8))), (std::array{8, 1, 8}));
  // Too few batches of each to sum over, or none.
  for (const auto* batch : {"floor_div b 3", "mod b 200", "mod b 1000", "add b 1"}) EXPECT_FALSE(sums(batch, 512));
  for (const int64_t n : {-128, 0, 3}) EXPECT_FALSE(sums("floor_div b $0", 512, number(n)));
  // 4 groups of 32 tiles of 4 heads.
  const auto found = sums("floor_div b 128", 512);
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->common.grouped);
  EXPECT_EQ(found->ctas, found->parts * 4 * 4 * 32);
  EXPECT_EQ(found->common.partial_sums, found->parts > 1);
  EXPECT_FALSE(sums("floor_div b 128", 512, {}, /*deterministic=*/false)->common.partial_sums);
}

TEST(SumsOverBatches, NeedATileThatFits) {
  const auto sums = [](int reads, int size, const std::string& architecture) {
    std::string header, body, score = "score";
    for (int i = 0; i < reads; ++i) {
      const std::string n = std::to_string(i);
      header += "buffer @" + n + " f 3\n";
      body += "%" + std::to_string(2 * i) + " = load @" + n + " h q_idx kv_idx\n";
      body += "%" + std::to_string(2 * i + 1) + " = add " + score + " %" + std::to_string(2 * i) + "\n";
      score = "%" + std::to_string(2 * i + 1);
    }
    FlexCase c = biased(FlexKernel::kBackward, size, header, body + "return " + score + "\n",
                        std::vector(reads, score_mod::DType::kBFloat16), std::vector<int64_t>(reads, 4 * 512 * 512));
    c.wants_grad.assign(static_cast<size_t>(reads), false);
    c.wants_grad[0] = true;
    const auto found = sums_over_batches(c, {true, true, true}, {}, 512, 4, 512, 512, kProcessors, false, architecture);
    if (found) plan_kernel(found->common, architecture);
    return found.has_value();
  };
  EXPECT_TRUE(sums(1, 64, "86"));
  EXPECT_TRUE(sums(2, 32, "86"));
  EXPECT_FALSE(sums(2, 64, "86"));
  EXPECT_TRUE(sums(2, 64, "80"));
  EXPECT_FALSE(sums(8, 64, "80"));
  EXPECT_FALSE(sums(12, 64, "90a"));
}

// As compile_flex asks, which knows what the other kernels are to do, and as a call asks.
TEST(SumsOverBatches, AreOneCaseWhateverElseIsAsked) {
  const auto sums = [](const FlexCase& c) {
    const auto found = sums_over_batches(c, {true, true, true}, {}, 512, 4, 512, 512, kProcessors, true, "90a");
    return found ? found->common : FlexCase{};
  };
  const FlexCase plain = pairs_of_heads(FlexKernel::kBackward, 32);
  const FlexCase expected = sums(plain);
  EXPECT_EQ(expected.kernel, FlexKernel::kGradBuffers);
  for (bool FlexCase::* member :
       {&FlexCase::grad_query, &FlexCase::grad_key, &FlexCase::grad_value, &FlexCase::whole, &FlexCase::ordered,
        &FlexCase::tall, &FlexCase::key_splits, &FlexCase::fixed_point, &FlexCase::partial_sums}) {
    FlexCase other = plain;
    other.*member = !(other.*member);
    EXPECT_EQ(sums(other), expected);
  }
}

TEST(SumsOverBatches, AreOfAllBatchesWhereGroupsGetNoGradient) {
  const FlexCase c = biased(FlexKernel::kBackward, 32, "buffer @0 f 3\nbuffer @1 f 3\n",
                            "%0 = mod b 64\n%1 = load @0 %0 q_idx kv_idx\n%2 = load @1 h q_idx kv_idx\n"
                            "%3 = add score %1\n%4 = add %3 %2\nreturn %4\n",
                            {score_mod::DType::kBFloat16, score_mod::DType::kBFloat16}, {64 * 49 * 49, 4 * 49 * 49});
  const auto found = sums_over_batches(c, {true, true, true}, {}, 512, 4, 49, 49, kProcessors, false, "90");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->groups.groups, 1);
  EXPECT_FALSE(found->common.grouped);
}

TEST(SumsOverBatches, AreStoredWhereEachElementGetsOne) {
  const auto schemes = [](const std::string& batch, std::vector<int64_t> sizes, int64_t batches, int64_t heads,
                          bool deterministic = true, score_mod::DType dtype = score_mod::DType::kBFloat16) {
    const bool shared = batch.empty();
    FlexCase c = biased(FlexKernel::kBackward, 32, "buffer @0 f " + std::to_string(sizes.size()) + "\n",
                        (shared ? "%0 = load @0 h q_idx kv_idx\n%1 = add score %0\nreturn %1\n"
                                : "%0 = " + batch + "\n%1 = load @0 %0 h q_idx kv_idx\n%2 = add score %1\nreturn %2\n"),
                        {dtype}, {std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies())});
    c.sizes = {sizes};
    const auto found =
        sums_over_batches(c, {true, true, true}, {}, batches, heads, 512, 512, kProcessors, deterministic, "90a");
    if (!found) return std::string("none");
    return std::to_string(found->parts) + letters(plan_kernel(found->common, "90a").facts().schemes) +
           (found->common.partial_sums ? " partial" : "");
  };
  // As many tiles as fill the GPU: one CTA each.
  EXPECT_EQ(schemes("", {16, 512, 512}, 64, 16), "1S");
  EXPECT_EQ(schemes("", {16, 512, 512}, 64, 16, true, score_mod::DType::kFloat32), "1S");
  EXPECT_EQ(schemes("floor_div b 32", {2, 16, 512, 512}, 64, 16), "1S");
  EXPECT_EQ(schemes("mod b 4", {4, 16, 512, 512}, 64, 16), "1S");
  // The table is larger than what the call reaches, or smaller.
  EXPECT_EQ(schemes("", {17, 512, 512}, 64, 16), "1E");
  EXPECT_EQ(schemes("", {16, 512, 520}, 64, 16), "1E");
  EXPECT_EQ(schemes("floor_div b 32", {3, 16, 512, 512}, 64, 16), "1E");
  EXPECT_EQ(schemes("floor_div b 32", {1, 16, 512, 512}, 64, 16), "1E");
  // Few tiles: several CTAs each, whose sums are added, or added up in one order.
  EXPECT_EQ(schemes("", {2, 512, 512}, 512, 2, false), "4E");
  EXPECT_EQ(schemes("", {2, 512, 512}, 512, 2, true), "4E partial");
  // A CTA has four batches at least.
  EXPECT_EQ(schemes("", {2, 512, 512}, 4, 2), "1S");
}

TEST(SumsOverBatches, AddToAPlaceFromAllGroups) {
  // The second bias is of all batches, whose sums come from each group's CTAs.
  const std::string text =
      "%0 = floor_div b 128\n%1 = load @0 %0 h q_idx kv_idx\n%2 = load @1 h q_idx kv_idx\n%3 = add score %1\n"
      "%4 = add %3 %2\nreturn %4\n";
  FlexCase c = biased(FlexKernel::kBackward, 32, "buffer @0 f 4\nbuffer @1 f 3\n", text,
                      {score_mod::DType::kBFloat16, score_mod::DType::kBFloat16}, {4 * 8 * 512 * 512, 8 * 512 * 512});
  for (const bool second : {false, true}) {
    c.wants_grad = {true, second};
    const auto found = sums_over_batches(c, {true, true, true}, {}, 512, 8, 512, 512, kProcessors, true, "90");
    ASSERT_TRUE(found);
    EXPECT_EQ(found->parts, 1);
    EXPECT_EQ(found->common.partial_sums, second);
  }
}

TEST(TensorMaps, HaveValidStridesOfDimensionsOfOne) {
  const auto map = box_map(DType::kBFloat16, {{2, 1, 300, 96}, {57600, 3, 192, 1}}, 128);
  EXPECT_EQ(map.dtype, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  EXPECT_EQ(map.rank, 4);
  EXPECT_EQ(map.sizes, (std::array<uint64_t, 5>{96, 300, 1, 2, 0}));
  EXPECT_EQ(map.stride_bytes, (std::array<uint64_t, 5>{2, 384, 16, 115200, 0}));
  EXPECT_EQ(map.box, (std::array<uint32_t, 5>{64, 128, 1, 1, 0}));
  EXPECT_EQ(map.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);
  const auto floats = box_map(DType::kFloat32, {{2, 1, 300, 96}, {57600, 3, 192, 1}}, 128, 32);
  EXPECT_EQ(floats.dtype, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
  EXPECT_EQ(floats.stride_bytes, (std::array<uint64_t, 5>{4, 768, 32, 230400, 0}));
  EXPECT_EQ(floats.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);
  const auto rows = row_map(1000, 80);
  EXPECT_EQ(rows.rank, 1);
  EXPECT_EQ(rows.sizes[0], 1000u);
  EXPECT_EQ(rows.box[0], 80u);
  EXPECT_THROW(row_map(int64_t{1} << 31, 64), ValueError);
}

}  // namespace
}  // namespace fusegrad::cuda
