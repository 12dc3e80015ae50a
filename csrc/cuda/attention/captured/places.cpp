#include "cuda/attention/captured/places.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "cuda/attention/captured/copy_rows.h"
#include "cuda/attention/plan/plan.h"
#include "cuda/attention/plan/steps.h"
#include "score_mod/cache.h"
#include "score_mod/index_analysis.h"
#include "score_mod/pair_reads.h"

namespace fusegrad::cuda {

using score_mod::DType, score_mod::Graph, score_mod::NodeId;

namespace {

// The largest dimension that the integers of a buffer index, where they are nothing else, in a score_mod and, of a
// backward, in its derivative.
std::optional<int64_t> largest_indexed(const Asked& asked, const Graph& graph, int buffer) {
  int64_t most = 0;
  const auto add = [&](const std::vector<score_mod::Dimension>& indexed) {
    for (const auto& [table, d] : indexed)
      most = std::max(most, asked.score_mod.buffers[static_cast<size_t>(table)].sizes[d]);
    return !indexed.empty();
  };
  if (!add(score_mod::indexed_by(graph, buffer))) return std::nullopt;
  if (asked.direction == FlexDirection::kBackward) {
    const std::vector<bool> wants(asked.needs_grad.begin() + 3, asked.needs_grad.end());
    const auto derivative = score_mod::cached_derivative(asked.score_mod.text, wants);
    const auto reads_it = [&](NodeId id) {
      return (*derivative)[id].op == score_mod::Op::kLoad && (*derivative)[id].payload == buffer;
    };
    const auto all = reachable(*derivative);
    if (std::any_of(all.begin(), all.end(), reads_it) && !add(score_mod::indexed_by(*derivative, buffer)))
      return std::nullopt;
  }
  return most;
}

// The narrowest type that has -most and below it another number.
std::optional<DType> narrowest(int64_t most) {
  if (most <= std::numeric_limits<int8_t>::max()) return DType::kInt8;
  if (most <= std::numeric_limits<int16_t>::max()) return DType::kInt16;
  if (most <= std::numeric_limits<int32_t>::max()) return DType::kInt32;
  return std::nullopt;
}

std::vector<NodeId> reads_of(const Graph& graph, size_t buffer) {
  std::vector<NodeId> found = reachable(graph);
  std::erase_if(found, [&](NodeId id) {
    return graph[id].op != score_mod::Op::kLoad || graph[id].payload != static_cast<int64_t>(buffer);
  });
  return found;
}

// Whether a kernel whose CTAs have all pairs of a head can read all that is read of a buffer in the order of threads.
bool in_tiles(const Graph& graph, size_t buffer) {
  const auto pairs = score_mod::pair_reads(graph);
  const auto all = reads_of(graph, buffer);
  return std::all_of(all.begin(), all.end(), [&](NodeId id) {
    return std::find(pairs.begin(), pairs.end(), id) != pairs.end() && score_mod::reads_places(graph, id);
  });
}

// How often all pairs of the call together read elements of a buffer for themselves.
int64_t count_reads(const Graph& graph, size_t buffer, const Asked& asked) {
  const auto kinds = score_mod::reads(graph);
  int64_t a_pair = 0;
  for (const NodeId id : reads_of(graph, buffer)) {
    if (const auto kind = kinds[static_cast<size_t>(id)];
        kind == score_mod::Reads::kPair || kind == score_mod::Reads::kLater)
      a_pair += graph.values(graph.open_axes(id));
  }
  // Blocks may leave out most pairs.
  constexpr int64_t kShareOfBlocks = 8;
  const int64_t pairs = asked.shape.query_heads() * asked.shape.queries * asked.shape.keys;
  return a_pair * (asked.mask ? pairs / kShareOfBlocks : pairs);
}

// Bytes that are read take their time from the L2 cache, as measured some 3 TB/s of an H200, of which a launch takes
// 16 MiB; a copy's are read and written once, half as fast. So it pays where many heads read a tensor that all share:
// by 64-bit indices from four heads on, of enough pairs. `saved`: bytes that a read then leaves.
bool pays(int64_t reads, int64_t saved, int64_t elements, int64_t from_bytes, int64_t to_bytes) {
  constexpr int64_t kLaunch = int64_t{16} << 20;
  return reads * saved > 2 * elements * (from_bytes + to_bytes) + kLaunch;
}

// Whether kernels of short sequences, whose CTAs have all pairs of a head, may take the call.
bool is_short(const FlexCase& c, const Gpu& gpu) {
  return c.many_batches && !c.blocks && !takes_hopper(c, gpu.architecture);
}

std::optional<PlannedPlaces> places_of_buffer(const Asked& asked, const Gpu& gpu, const CallPlan& plan, size_t i) {
  const AskedBuffer& b = asked.score_mod.buffers[i];
  const Graph& graph = *plan.score_mod;
  const bool is_short = cuda::is_short(plan.common, gpu), tiles = is_short && in_tiles(graph, i);
  // Boxes of 32-bit indices are better than narrower ones in rows; in fixed point a second kernel has no order of
  // threads.
  const bool takes = b.dtype == DType::kInt64 ||
                     (tiles && !asked.deterministic && (b.dtype == DType::kInt32 || b.dtype == DType::kInt16));
  if (!takes || b.sizes.size() < 2 || b.sizes.size() > FlexPlaces::kMostRank) return std::nullopt;
  const BoxCopy copy(b.sizes, b.strides, 1);
  constexpr int64_t kMostElements = int64_t{1} << 30;
  if (copy.elements() == 0 || copy.bytes() > kMostElements || elements_of(b) > kMostElements) return std::nullopt;
  // What all batches read at the same places is kept by CTAs that stay with a head.
  const auto dependence = score_mod::dependences(graph);
  const auto reads = reads_of(graph, i);
  if (is_short && std::none_of(reads.begin(), reads.end(), [&](NodeId id) {
        return (dependence[static_cast<size_t>(id)].on() & score_mod::set_of(score_mod::kVarB)) != 0;
      }))
    return std::nullopt;
  const auto most = largest_indexed(asked, graph, static_cast<int>(i));
  const auto dtype = most ? narrowest(*most) : std::nullopt;
  if (!dtype) return std::nullopt;
  const int64_t from = element_bytes(b.dtype), to = element_bytes(*dtype);
  if (to > from || !pays(count_reads(graph, i, asked), tiles ? from : from - to, copy.elements(), from, to))
    return std::nullopt;
  return PlannedPlaces{*dtype, *most};
}

// A copy in the order of threads: a tile for each index before the last two, expanded ones but once.
struct OrderedCopy {
  std::vector<int64_t> strides;
  int64_t elements = device::kPlaceTile * device::kPlaceTile;
};
OrderedCopy ordered_copy(const AskedBuffer& b) {
  OrderedCopy copy{std::vector<int64_t>(b.sizes.size(), 1)};
  const size_t rank = b.sizes.size();
  copy.strides[rank - 2] = device::kPlaceTile;
  for (size_t d = rank - 2; d-- > 0;) {
    const int64_t size = copied_size(b.sizes, b.strides, d);
    copy.strides[d] = size == 1 ? 0 : copy.elements;
    copy.elements *= size;
  }
  return copy;
}

// FlexCase::place_bytes of kernels that take the copies in the order of threads, as far as the tensors allow it.
std::vector<int> ordered_places(const CallPlan& plan, const Gpu& gpu) {
  if (plan.score_mod == nullptr || !is_short(plan.common, gpu)) return {};
  std::vector<int> bytes(plan.places.size(), 0);
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (plan.places[i] && in_tiles(*plan.score_mod, i)) bytes[i] = element_bytes(plan.places[i]->dtype);
  }
  return std::any_of(bytes.begin(), bytes.end(), [](int n) { return n > 0; }) ? bytes : std::vector<int>{};
}

// Whether a kernel takes them so.
bool takes_ordered_places(const KernelSpec& spec) {
  const FlexTile& t = spec.tile();
  const FlexKernel kernel = spec.facts().kernel;
  return (kernel == FlexKernel::kForward || kernel == FlexKernel::kBackward) && t.family() == FlexFamily::kPortable &&
         t.rows == device::kPlaceTile && t.cols == device::kPlaceTile && t.warps * 32 == device::kPlaceThreads &&
         t.share() == 1 && (kernel == FlexKernel::kForward || t.stages == 1);
}

// Gives the copies regions: in `order` those that `place_bytes` has, the others in rows.
void place_copies(const Asked& asked, const std::vector<int>& place_bytes, device::PlaceOrder order, CallPlan& plan) {
  for (size_t i = 0; i < plan.places.size(); ++i) {
    if (!plan.places[i]) continue;
    const AskedBuffer& b = asked.score_mod.buffers[i];
    const std::string name = std::string("places ").append(std::to_string(i));
    const int64_t bytes = element_bytes(plan.places[i]->dtype);
    if (!place_bytes.empty() && place_bytes[i] > 0) {
      const OrderedCopy copy = ordered_copy(b);
      plan.places[i]->order = order;
      plan.buffers[i] = plan.scratch.add(name, copy.elements * bytes);
      plan.box_strides[i] = copy.strides;
    } else {
      const BoxCopy copy(b.sizes, b.strides, bytes);
      plan.buffers[i] = plan.scratch.add(name, copy.bytes());
      plan.box_strides[i] = copy.strides();
    }
  }
}

}  // namespace

Asked narrow_places(const Asked& asked, const Gpu& gpu, CallPlan& plan) {
  Asked narrowed = asked;
  if (plan.score_mod == nullptr) return narrowed;
  for (size_t i = 0; i < asked.score_mod.buffers.size(); ++i) {
    plan.places[i] = places_of_buffer(asked, gpu, plan, i);
    if (!plan.places[i]) continue;
    AskedBuffer& b = narrowed.score_mod.buffers[i];
    b.dtype = plan.places[i]->dtype;
    b.strides = BoxCopy(b.sizes, b.strides, element_bytes(b.dtype)).strides();
    b.aligned = true;
  }
  take_buffers(narrowed.score_mod, plan.common);
  return narrowed;
}

void take_places(const Asked& given, const Gpu& gpu, device::PlaceOrder order,
                 const std::function<std::vector<FlexCase>(const FlexCase&)>& kernels, FlexCase& common,
                 CallPlan& plan) {
  if (auto places = ordered_places(plan, gpu); !places.empty()) {
    FlexCase ordered = common;
    ordered.place_bytes = std::move(places);
    const auto cases = kernels(ordered);
    const auto takes = [&](const FlexCase& c) { return takes_ordered_places(plan_kernel(c, gpu.architecture)); };
    if (!cases.empty() && std::all_of(cases.begin(), cases.end(), takes)) common = std::move(ordered);
  }
  place_copies(given, common.place_bytes, order, plan);
}

}  // namespace fusegrad::cuda
