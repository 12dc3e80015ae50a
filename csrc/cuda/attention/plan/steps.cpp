#include "cuda/attention/plan/steps.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <set>
#include <sstream>
#include <string_view>

#include "common/error.h"
#include "cuda/attention/captured/copy_rows.h"
#include "score_mod/cache.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/pair_reads.h"
#include "score_mod/render_cuda.h"

namespace fusegrad::cuda {
namespace {

int as_int(int64_t n) {
  FUSEGRAD_CHECK(ValueError, n <= INT32_MAX / 2, "flex_attention: lengths and heads must be below 2^30, but got ", n);
  return static_cast<int>(n);
}

std::vector<score_mod::Buffer> buffers_of(const AskedMod& mod) {
  std::vector<score_mod::Buffer> buffers;
  for (const AskedBuffer& b : mod.buffers) buffers.push_back(b.buffer());
  return buffers;
}

FlexMod flex_mod(const AskedMod& asked, const std::vector<score_mod::Buffer>& buffers) {
  FlexMod mod;
  if (asked.text.empty()) return mod;
  mod.text = asked.text;
  for (const AskedBuffer& b : asked.buffers) mod.dtypes.push_back(b.dtype);
  mod.small_buffers = score_mod::small_buffers(buffers);
  mod.small_scalars = asked.small_scalars;
  return mod;
}

// Whether boxes (device::PairBoxes) are copied from a buffer 16 bytes at a time: rows are dense, begin at multiples of
// 16 bytes, and may end anywhere.
bool has_box_rows(const AskedBuffer& b) {
  const size_t last = b.sizes.size() - 1;
  const int64_t vector = 16 / element_bytes(b.dtype);
  if (std::find(b.sizes.begin(), b.sizes.end(), 0) != b.sizes.end() || b.strides[last] != 1) return false;
  bool aligned = b.aligned;
  for (size_t d = 0; d < last; ++d) aligned &= b.sizes[d] == 1 || b.strides[d] % vector == 0;
  return aligned;
}

// The buffers that boxes read (score_mod::box_bytes) and that have no such rows.
std::set<size_t> boxes_elsewhere(const AskedMod& asked, const FlexMod& mod) {
  std::set<size_t> found;
  if (mod.dtypes.empty()) return found;
  const auto graph = score_mod::cached_graph(mod.text);
  for (const score_mod::NodeId load : score_mod::pair_reads(*graph)) {
    const auto buffer = static_cast<size_t>((*graph)[load].payload);
    if (score_mod::box_bytes(*graph, load, mod.dtypes) != 0 && !has_box_rows(asked.buffers.at(buffer)))
      found.insert(buffer);
  }
  return found;
}

}  // namespace

int64_t scratch_gap() {
  constexpr int64_t kGap = int64_t{64} << 10;
  const char* value = std::getenv("FUSEGRAD_CHECK_SCRATCH");
  return value != nullptr && std::string_view(value) == "1" ? kGap : 0;
}

void begin_plan(const Asked& asked, CallPlan& plan) {
  plan.shape = asked.shape;
  plan.mask = asked.mask;
  plan.operands.fill(kNoRegion);
  plan.buffers.assign(asked.score_mod.buffers.size(), kNoRegion);
  plan.box_strides.resize(asked.score_mod.buffers.size());
  plan.places.resize(asked.score_mod.buffers.size());
  FlexCase& c = plan.common;
  const FlexShape& n = plan.shape;
  for (const int64_t length : {n.query_heads(), n.queries, n.keys}) c.small_lengths &= as_int(length) <= kSmallLength;
  c.dtype = asked.dtype;
  c.head_size = as_int(n.head_size);
  c.value_size = as_int(n.value_size);
  c.wide = std::max(c.head_size, c.value_size) > kMostCols;
  // Lengths that decide no tile leave the program as it is.
  if (c.dtype != DType::kFloat32) {
    c.most_queries = most_of(n.queries);
    c.most_keys = most_of(n.keys);
  }
  c.split = asked.full_float32;
  take_buffers(asked.score_mod, c);
  c.mask_mod = flex_mod(asked.mask_mod, buffers_of(asked.mask_mod));
  for (const AskedBuffer& b : asked.score_mod.buffers) c.sizes.push_back(b.sizes);
  c.blocks = asked.mask.has_value();
  if (c.blocks) c.block_size = asked.mask->block_size;
  constexpr int64_t kManyBatches = 8;
  c.many_batches = !c.wide && c.most_queries == 64 && c.most_keys == 64 && n.batches >= kManyBatches &&
                   n.key_batches == n.batches && n.group() == 1;
  c.dropout = asked.dropout;
  if (!asked.score_mod.text.empty()) plan.score_mod = score_mod::cached_graph(asked.score_mod.text);
  if (!asked.mask_mod.text.empty()) plan.mask_mod = score_mod::cached_graph(asked.mask_mod.text);
}

void take_buffers(const AskedMod& score_mod, FlexCase& common) {
  common.score_mod = flex_mod(score_mod, buffers_of(score_mod));
  common.aligned_boxes = boxes_elsewhere(score_mod, common.score_mod).empty();
}

double share_of_pairs(const Asked& asked) {
  // What a mask_mod reads, or blocks without one, are not known here.
  if (!asked.mask || asked.mask_mod.text.empty() || !asked.mask_mod.buffers.empty()) return 1.0;
  return score_mod::share_of_pairs(*score_mod::cached_graph(asked.mask_mod.text), asked.mask_mod.scalars,
                                   asked.shape.queries, asked.shape.keys);
}

void align_boxes(const Asked& asked, CallPlan& plan) {
  if (plan.common.aligned_boxes) return;
  // Blocks may leave out most pairs, of whose elements copies would be in vain.
  constexpr int64_t kReadsWithBlocks = 8;
  const int64_t pairs = plan.shape.query_heads() * plan.shape.queries * plan.shape.keys;
  const int64_t most = plan.common.blocks ? pairs / kReadsWithBlocks : pairs;
  const auto elsewhere = boxes_elsewhere(asked.score_mod, plan.common.score_mod);
  const bool pays = std::all_of(elsewhere.begin(), elsewhere.end(), [&](size_t i) {
    const AskedBuffer& b = asked.score_mod.buffers[i];
    const BoxCopy copy(b.sizes, b.strides, element_bytes(b.dtype));
    return copy.elements() > 0 && b.strides.back() != 0 && copy.elements() <= most;
  });
  if (!pays) return;
  AskedMod moved = asked.score_mod;
  for (const size_t i : elsewhere) {
    AskedBuffer& b = moved.buffers[i];
    const BoxCopy copy(b.sizes, b.strides, element_bytes(b.dtype));
    plan.buffers[i] = plan.scratch.add("buffer " + std::to_string(i) + " in rows", copy.bytes());
    plan.box_strides[i] = b.strides = copy.strides();
    b.aligned = true;
  }
  take_buffers(moved, plan.common);
}

std::array<int64_t, 4> aligned_strides(const std::array<int64_t, 4>& sizes, DType dtype) {
  const int64_t vector = 16 / element_bytes(dtype), cols = tiles_in(sizes[3], vector) * vector;
  return {sizes[1] * sizes[2] * cols, sizes[2] * cols, cols, 1};
}
int64_t aligned_bytes(const std::array<int64_t, 4>& sizes, DType dtype) {
  return sizes[0] * aligned_strides(sizes, dtype)[0] * element_bytes(dtype);
}

void align_operand(const Asked& asked, FlexOperand operand, const std::array<int64_t, 4>& sizes, const char* name,
                   CallPlan& plan) {
  if (!asked.there[operand] || asked.aligned[operand]) return;
  plan.operands[operand] = plan.scratch.add(std::string(name) + " in rows", aligned_bytes(sizes, asked.dtype));
}

void align_inputs(const Asked& asked, CallPlan& plan) {
  const FlexShape& n = plan.shape;
  align_operand(asked, kQuery, {n.batches, n.heads, n.queries, n.head_size}, "query", plan);
  align_operand(asked, kKey, {n.key_batches, n.key_heads, n.keys, n.head_size}, "key", plan);
  align_operand(asked, kValue, {n.key_batches, n.key_heads, n.keys, n.value_size}, "value", plan);
}

std::shared_ptr<const Program> make_program(LaunchPlan launch, CallPlan& plan) {
  auto program = std::make_shared<Program>(std::move(launch));
  const auto& lists = program->launch.lists;
  if (!lists) return program;
  const BlockMaskShape& mask = *plan.mask;
  const int64_t rows = mask.batches * mask.heads * as_int(lists->rows);
  program->count = plan.scratch.add("tiles of a row", 4 * (rows + 1));
  program->list = plan.scratch.add("lists of tiles", 4 * rows * as_int(lists->cols));
  if (!lists->direct && plan.states == kNoRegion) {
    plan.states = plan.scratch.add_zeros("states of blocks",
                                         mask.batches * mask.heads * mask.rows * std::max<int64_t>(mask.cols, 1));
  }
  return program;
}

std::string printed(const char* call, const CallPlan& plan, const std::vector<PrintedStep>& steps) {
  std::ostringstream text;
  const FlexShape& n = plan.shape;
  text << "fusegrad: plan of " << call << ", B " << n.batches << " H " << n.heads << '/' << n.key_heads << " M "
       << n.queries << " N " << n.keys << " D " << n.head_size << " E " << n.value_size << '\n';
  for (const PrintedStep& step : steps) {
    text << "  " << step.name;
    if (step.program != nullptr) {
      const LaunchPlan& launch = step.program->launch;
      const FlexTile& tile = launch.spec.tile();
      text << ": tile " << tile.rows << " x " << tile.cols << ", " << launch.ctas << " CTAs of "
           << launch.spec.facts().threads() << " threads, " << launch.spec.facts().shared_bytes << " bytes";
      if (launch.launches > 1) text << ", " << launch.launches << " launches";
      if (launch.splits > 1) text << ", " << launch.splits << " splits";
      if (!launch.spec.facts().schemes.empty()) text << ", schemes " << letters(launch.spec.facts().schemes);
    }
    for (size_t i = 0; i < step.regions.size(); ++i)
      text << (i == 0 ? " [" : ", ") << plan.scratch[step.regions[i]].name;
    text << (step.regions.empty() ? "\n" : "]\n");
  }
  text << "  scratch: " << plan.scratch.bytes() << " bytes";
  for (const Scratch::Part& part : plan.scratch.parts()) text << ", " << part.name << ' ' << part.bytes;
  text << '\n';
  return text.str();
}

}  // namespace fusegrad::cuda
