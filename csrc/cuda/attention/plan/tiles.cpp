#include "cuda/attention/plan/tiles.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "cuda/attention/backward/backward.h"
#include "cuda/attention/captured/reads.h"
#include "cuda/attention/plan/case_facts.h"
#include "cuda/limits.h"

namespace fusegrad::cuda {
namespace planner {
namespace {

std::atomic<std::optional<FlexFamily>> forced{};
std::atomic<uint64_t> changes{0};

}  // namespace

std::optional<FlexFamily> forced_family() { return forced; }

// Whether the Hopper forward or backward has boxes of what a score_mod reads.
bool has_hopper_boxes(const FlexCase& c) {
  const bool backward = c.kernel == FlexKernel::kBackward && fits_hopper_backward(c) && (c.grad_query || c.grad_key);
  const bool forward = c.kernel == FlexKernel::kForward || (c.kernel == FlexKernel::kSegments && c.few_rows == 0);
  return (forward || backward) && c.aligned_boxes && has_boxes(c.score_mod);
}

// CTAs of a multiprocessor. More than two would leave each thread fewer registers than it needs.
int resident_ctas(int shared_bytes, const std::string& architecture) {
  return std::clamp((flex_shared_limit(std::stoi(architecture)) + kReserved) / (shared_bytes + kReserved), 1, 2);
}

// Each of the portable tiles with columns of tables first, where the score_mod has reads for them.
std::vector<FlexTile> with_columns(const FlexCase& c, const std::vector<FlexTile>& tiles) {
  std::vector<FlexTile> found;
  for (FlexTile t : tiles) {
    t.portable().columns = true;
    if (column_bytes(c, t) > 0) found.push_back(t);
    t.portable().columns = false;
    found.push_back(t);
  }
  return found;
}

// Each of the portable tiles with boxes first, where the score_mod has reads for them.
std::vector<FlexTile> with_boxes(const FlexCase& c, std::vector<FlexTile> tiles) {
  if (!has_boxes(c.score_mod)) return tiles;
  std::vector<FlexTile> found;
  for (FlexTile& t : tiles) {
    // Where reads are kept, boxes would be copied for each batch in vain.
    t.boxes = !t.keeps() || kept_reads(c) == 0;
    found.push_back(t);
  }
  for (FlexTile& t : tiles) {
    t.boxes = false;
    found.push_back(t);
  }
  return found;
}

// Whether boxes are worth more than the Hopper kernels that have none: measured with biases of pairs, without block
// masks, where sums are in any order. The gradient of max_scores needs the forward's scores to the bit, of one family.
bool boxes_pay(const FlexCase& c) {
  if (forced_family() || c.max_scores || c.max_gradient || c.blocks || c.fixed_point || c.partial_sums ||
      !has_boxes(c.score_mod, Boxes::kNumbers))
    return false;
  const int head = std::max(head_cols(c), value_cols(c));
  return (c.kernel == FlexKernel::kForward && head <= 48 && !has_hopper_boxes(c)) ||
         (c.kernel == FlexKernel::kBackward && c.grad_query && head <= 64 && !has_hopper_boxes(c));
}

}  // namespace planner

using namespace planner;

bool takes_hopper(const FlexCase& c, const std::string& architecture) {
  if (architecture != "90a" || c.dtype == DType::kFloat32) return false;
  if (c.wide) return false;
  if (c.head_size == 0 || c.value_size == 0) return false;  // the copy engine has no empty tensors
  if (const auto family = forced_family()) return *family == FlexFamily::kHopper;
  // The portable kernels have tiles for short sequences of small heads, and boxes in all kernels. The gradient of
  // max_scores needs forward and backward of one family.
  const int cols = head_cols(c) + value_cols(c);
  if (c.most_queries == 64 && c.most_keys == 64) return cols > 96;
  const bool boxes_too = has_hopper_boxes(c) && !c.max_scores;
  return cols >= 96 || (c.most_queries == 0 && c.most_keys == 0 && (boxes_too || !has_boxes(c.score_mod)));
}
int most_of(int64_t length) { return length <= 64 ? 64 : length <= 128 ? 128 : 0; }
bool reads_pairs(const FlexMod& mod) { return reads_by(mod, {score_mod::Reads::kPair}); }

namespace {

int bytes_of_multiprocessor(int capability) {
  const int kib = capability == 80 || capability == 87                                 ? 164
                  : capability == 90 || capability / 10 == 10 || capability / 10 == 11 ? 228
                                                                                       : 100;
  return kib << 10;
}

}  // namespace

int flex_shared_limit(int capability) {
  const int own = bytes_of_multiprocessor(capability) - kReserved, limit = forced_limits().shared_bytes;
  return limit > 0 ? std::min(limit, own) : own;
}
int flex_launched_bytes(int bytes, int capability) {
  constexpr int kBesides = 2 * kReserved;  // what a kernel declares is less than as much again
  const int limit = forced_limits().shared_bytes;
  if (limit == 0) return bytes;
  return bytes_for_as_many(bytes, limit + kReserved, bytes_of_multiprocessor(capability), kBesides);
}
void force_limits(int cluster, int shared_bytes) {
  forced_limits().cluster = cluster;
  forced_limits().shared_bytes = shared_bytes;
  count_forced();
}
bool flex_shared_limit_is_forced() { return forced_limits().shared_bytes > 0; }

void count_forced() { ++changes; }
uint64_t forced_changes() { return changes; }
void force_flex_family(std::optional<FlexFamily> family) {
  forced = family;
  count_forced();
}
bool flex_family_is_forced() { return forced_family().has_value(); }

}  // namespace fusegrad::cuda
