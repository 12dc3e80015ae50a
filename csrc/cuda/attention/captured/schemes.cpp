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

std::atomic<char> forced_scheme{0};

// What a contribution's scheme takes of shared memory.
int scheme_bytes(const KernelFacts& f, char scheme, int table) {
  const FlexTileSize& t = f.tile;
  const bool hopper = f.hopper();
  const int warps = f.warps;
  const device::CapturedMemory memory{.warps = warps,
                                      .teams = hopper ? warps / 4 : 1,
                                      .sets = hopper ? 2 : 1,
                                      .queries = t.rows / t.share,
                                      .keys = t.cols * t.share / warps};
  return memory.bytes(scheme, table);
}

// The classes whose schemes are right for a contribution of a class, which are its special cases.
bool allows(char scheme, char wanted) {
  if (wanted == 'G' || wanted == 'F') return true;
  return scheme == wanted || (scheme == 'A' && (wanted == 'B' || wanted == 'C' || wanted == 'D'));
}

char scheme_of(score_mod::ScatterClass planned) {
  const char scheme = static_cast<char>(planned), forced = forced_scheme;
  return forced != 0 && allows(scheme, forced) ? forced : scheme;
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
  return facts.tile.keeps && facts.schemes == std::string(steps.size(), 'F');
}

// The scheme of contributions that are added element by element (device::FlexBufferSums).
char vector_scheme(char scheme) { return scheme == 'A' ? 'a' : scheme == 'B' ? 'b' : scheme == 'C' ? 'c' : 'g'; }

// Whether contribution k, or the sum that a CTA has of it, is stored, as every element of its buffer gets one.
bool is_stored(const FlexCase& c, const score_mod::ScatterStep& step, size_t buffer) {
  if (forced_scheme != 0 || c.blocks || step.inputs.empty() || buffer >= c.covered.size() || !c.covered[buffer])
    return false;
  if (c.kernel == FlexKernel::kGradBuffers ? step.groups.has_value() != c.grouped : !step.exclusive) return false;
  const score_mod::DType dtype = c.score_mod.dtypes[buffer];
  return dtype == score_mod::DType::kFloat32 || dtype == score_mod::DType::kBFloat16 ||
         dtype == score_mod::DType::kFloat16;
}

// Of a stored contribution, whether it is dS itself, of the same type, whose tiles TMA can store. One of them: there is
// one tensor map.
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
    char scheme = scheme_of(steps[k].scheme);
    const int64_t elements = c.elements[static_cast<size_t>(contributions[k].buffer)];
    if (scheme == 'F' && elements > score_mod::kSmallTableElements) scheme = 'G';
    if (steps[k].is_vector) scheme = vector_scheme(scheme);
    if (const auto buffer = static_cast<size_t>(contributions[k].buffer);
        (c.kernel == FlexKernel::kBackward || c.kernel == FlexKernel::kGradBuffers) && is_stored(c, steps[k], buffer))
      scheme = stores_tiles(c, facts, *derivative, steps[k], buffer) ? 'T' : 'S';
    constexpr int64_t kLeastTable = 32;  // a place for each lane
    int table = scheme == 'F' ? static_cast<int>(std::max(elements, kLeastTable)) : 0;
    const int column = column_elements(c, steps[k], static_cast<size_t>(contributions[k].buffer));
    if (column > 0 && forced_scheme == 0) scheme = 'F';
    if (column > 0 && scheme == 'F') table = column;
    int bytes = scheme_bytes(facts, scheme, table);
    if (bytes > left) {
      const bool crowded = scheme >= 'A' && scheme <= 'D';
      fit = crowded || fit == SchemesFit::kNotCrowded ? SchemesFit::kNotCrowded : SchemesFit::kNotAll;
      scheme = 'G';
      table = bytes = 0;
    }
    left -= bytes;
    facts.schemes += scheme;
    facts.tables.push_back(table);
    facts.shared_bytes += bytes;
  }
  return fit;
}

bool scheme_is_forced() { return forced_scheme != 0; }

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
    if (stored || scheme_of(steps[k].scheme) <= 'B') steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(k));
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

void force_flex_scheme(char scheme) {
  forced_scheme = scheme;
  count_forced();
}

}  // namespace fusegrad::cuda
