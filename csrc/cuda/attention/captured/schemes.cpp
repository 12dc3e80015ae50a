#include "cuda/attention/captured/schemes.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <optional>

#include "cuda/attention/backward/backward.h"
#include "cuda/attention/captured/reads.h"
#include "cuda/attention/device/shared_memory.cuh"
#include "score_mod/cache.h"
#include "score_mod/derivative.h"
#include "score_mod/scatter_plan.h"

namespace fusegrad::cuda {
namespace planner {
namespace {

using device::Scheme;
using score_mod::ScatterClass;

std::atomic<std::optional<Scheme>> forced_scheme{};

}  // namespace

bool scheme_is_forced() { return forced_scheme.load().has_value(); }

namespace {

// What a contribution's scheme takes of shared memory.
int scheme_bytes(const KernelFacts& f, Scheme scheme, int table) {
  const FlexTile& t = f.tile;
  const bool hopper = f.hopper();
  const int warps = f.warps;
  const device::CapturedMemory memory{.warps = warps,
                                      .teams = hopper ? warps / 4 : 1,
                                      .sets = hopper ? 2 : 1,
                                      .queries = t.rows / t.share(),
                                      .keys = t.cols * t.share() / warps};
  return memory.bytes(scheme, table);
}

// Whether a scheme is right for contributions whose own is another: they are a special case of those that it takes.
bool is_right(Scheme scheme, Scheme own) {
  if (scheme == own || scheme == Scheme::kGeneral || scheme == Scheme::kSmallTable) return true;
  return own == Scheme::kInvariant && (scheme == Scheme::kKv || scheme == Scheme::kQ || scheme == Scheme::kDiagonal);
}

Scheme scheme_of(ScatterClass planned) {
  const auto own = static_cast<Scheme>(planned);  // their letters are the same
  const std::optional<Scheme> forced = forced_scheme;
  return forced && is_right(*forced, own) ? *forced : own;
}

// Whether class F sums up all contributions, `steps`, in CTAs that stay with a head, which may store their sums.
bool sums_of_ctas(const FlexCase& c, const std::vector<score_mod::ScatterStep>& steps,
                  const std::string& architecture) {
  if (!c.many_batches || !std::all_of(steps.begin(), steps.end(), std::mem_fn(&score_mod::ScatterStep::one_column)))
    return false;
  FlexCase one = c;
  one.kernel = FlexKernel::kBackward;
  one.grad_query = one.grad_key = one.grad_value = one.partial_sums = true;
  one.fixed_point = false;
  const KernelFacts facts = plan_kernel(one, architecture).facts();
  return facts.tile.keeps() && facts.schemes == std::vector(steps.size(), Scheme::kSmallTable);
}

// The scheme of contributions to several elements along axes.
Scheme vector_scheme(Scheme scheme) {
  return scheme == Scheme::kInvariant ? Scheme::kInvariantVector
         : scheme == Scheme::kKv      ? Scheme::kKvVector
         : scheme == Scheme::kQ       ? Scheme::kQVector
                                      : Scheme::kGeneralVector;
}

// Whether contribution k, or the sum that a CTA has of it, is stored, as every element of its buffer gets one.
bool is_stored(const FlexCase& c, const score_mod::ScatterStep& step, size_t buffer) {
  if (scheme_is_forced() || c.blocks || step.inputs.empty() || buffer >= c.covered.size() || !c.covered[buffer])
    return false;
  if (c.kernel == FlexKernel::kGradBuffers ? step.groups.has_value() != c.grouped : !step.exclusive) return false;
  const score_mod::DType dtype = c.score_mod.dtypes[buffer];
  return dtype == score_mod::DType::kFloat32 || dtype == score_mod::DType::kBFloat16 ||
         dtype == score_mod::DType::kFloat16;
}

// Whether a stored contribution is dS itself, of the same type, whose tiles TMA can store. There is one tensor map, so
// it must be the only one.
bool stores_tiles(const FlexCase& c, const KernelFacts& facts, const score_mod::Graph& derivative,
                  const score_mod::ScatterStep& step, size_t buffer) {
  using score_mod::Input;
  const auto same = c.dtype == DType::kBFloat16 ? score_mod::DType::kBFloat16 : score_mod::DType::kFloat16;
  const std::vector<std::optional<Input>> pairs{Input::kB, Input::kH, Input::kQ, Input::kKv};
  auto inputs = step.inputs;
  std::erase(inputs, std::nullopt);
  return c.kernel == FlexKernel::kBackward && facts.hopper() && facts.grad_query && c.dtype != DType::kFloat32 &&
         c.score_mod.dtypes[buffer] == same && derivative.contributions().size() == 1 &&
         score_mod::passes_gradient(derivative) && inputs == pairs && step.inputs.back() && buffer < c.sizes.size() &&
         c.sizes[buffer].back() % 8 == 0;
}

}  // namespace

SchemesFit choose_schemes(const FlexCase& c, int left, KernelFacts& facts) {
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  const auto& contributions = derivative->contributions();
  const auto steps = score_mod::plan_scatter(*derivative, c.elements);
  SchemesFit fit = SchemesFit::kAll;
  for (size_t k = 0; k < steps.size(); ++k) {
    Scheme scheme = scheme_of(steps[k].scheme);
    const int64_t elements = c.elements[static_cast<size_t>(contributions[k].buffer)];
    if (scheme == Scheme::kSmallTable && elements > score_mod::kSmallTableElements) scheme = Scheme::kGeneral;
    if (steps[k].is_vector) scheme = vector_scheme(scheme);
    if (const auto buffer = static_cast<size_t>(contributions[k].buffer);
        (c.kernel == FlexKernel::kBackward || c.kernel == FlexKernel::kGradBuffers) && is_stored(c, steps[k], buffer))
      scheme = stores_tiles(c, facts, *derivative, steps[k], buffer) ? Scheme::kStoredTiles : Scheme::kStored;
    if (c.sums_batches && c.kernel == FlexKernel::kBackward && facts.tile.keeps() && steps[k].over_batches)
      scheme = Scheme::kOverBatches;
    constexpr int64_t kLeastTable = 32;  // a place for each lane
    int table = scheme == Scheme::kSmallTable ? static_cast<int>(std::max(elements, kLeastTable)) : 0;
    const int column = column_elements(c, steps[k], static_cast<size_t>(contributions[k].buffer));
    if (column > 0 && !scheme_is_forced() && scheme != Scheme::kOverBatches) scheme = Scheme::kSmallTable;
    if (column > 0 && scheme == Scheme::kSmallTable) table = column;
    int bytes = scheme_bytes(facts, scheme, table);
    if (bytes > left) {
      const bool crowded = device::sums_in_registers(scheme) || scheme == Scheme::kDiagonal;
      fit = crowded || fit == SchemesFit::kNotCrowded ? SchemesFit::kNotCrowded : SchemesFit::kNotAll;
      scheme = Scheme::kGeneral;
      table = bytes = 0;
    }
    left -= bytes;
    facts.schemes.push_back(scheme);
    facts.tables.push_back(table);
    facts.shared_bytes += bytes;
  }
  return fit;
}

}  // namespace planner

using namespace planner;

std::vector<bool> covered_buffers(const FlexCase& c, const std::array<int64_t, 4>& lengths) {
  std::vector<bool> covered(c.sizes.size(), false);
  if (c.score_mod.text.empty()) return covered;
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  const auto steps = score_mod::plan_scatter(*derivative, c.elements);
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto buffer = static_cast<size_t>(derivative->contributions()[k].buffer);
    if (steps[k].inputs.empty() || buffer >= covered.size()) continue;
    const auto length_of = [&](std::optional<score_mod::Input> input) {
      return !input                          ? 1
             : input == score_mod::Input::kB ? lengths[0]
             : input == score_mod::Input::kH ? lengths[1]
             : input == score_mod::Input::kQ ? lengths[2]
                                             : lengths[3];
    };
    covered[buffer] =
        std::equal(steps[k].inputs.begin(), steps[k].inputs.end(), c.sizes[buffer].begin(), c.sizes[buffer].end(),
                   [&](auto input, int64_t size) { return length_of(input) == size; });
  }
  return covered;
}

int64_t ordered_launches(const FlexCase& c, int64_t batches, int64_t heads, int64_t keys, int64_t processors,
                         const std::string& architecture) {
  if (c.score_mod.text.empty()) return 0;
  const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
  auto steps = score_mod::plan_scatter(*derivative, c.elements);
  if (std::any_of(steps.begin(), steps.end(), [](const auto& step) { return step.is_vector; })) return 0;
  if (sums_of_ctas(c, steps, architecture)) return 1;
  for (size_t k = steps.size(); k-- > 0;) {
    const bool stored = is_stored(c, steps[k], static_cast<size_t>(derivative->contributions()[k].buffer));
    if (stored || device::sums_over_queries(scheme_of(steps[k].scheme)))
      steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(k));
  }
  if (steps.empty()) return 1;
  if (!takes_hopper(c, architecture)) return 0;
  const auto all = [&](auto member) { return std::all_of(steps.begin(), steps.end(), std::mem_fn(member)); };
  if (!all(&score_mod::ScatterStep::once_a_batch)) return 0;
  if (batches == 1 || all(&score_mod::ScatterStep::exclusive)) return 1;
  // Fixed point takes one and a half times as long at least: so much may wait for the last CTAs of a launch.
  const int cols = hopper_backward(c).front().cols;
  const int64_t ctas = heads * ((keys + cols - 1) / cols);
  const int64_t waves = (ctas + processors - 1) / processors;
  return 2 * waves * processors <= 3 * ctas ? batches : 0;
}

void force_flex_scheme(std::optional<Scheme> scheme) {
  forced_scheme = scheme;
  count_forced();
}

}  // namespace fusegrad::cuda
