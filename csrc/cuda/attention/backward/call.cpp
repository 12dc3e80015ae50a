// The plan of a backward: the values of rows, sums of buffers' gradients over batches, dQ by itself, the kernel by
// keys, and what rounds and merges sums.
#include <algorithm>

#include "cuda/attention/backward/backward.h"
#include "cuda/attention/backward/prepare.h"
#include "cuda/attention/captured/convert.h"
#include "cuda/attention/captured/places.h"
#include "cuda/attention/captured/sums.h"
#include "cuda/attention/forward/few_queries.h"
#include "cuda/attention/forward/merge.h"
#include "cuda/attention/grad_buffers/grad_buffers.h"
#include "cuda/attention/plan/steps.h"
#include "score_mod/cache.h"
#include "score_mod/scatter_plan.h"

namespace fusegrad::cuda {
namespace {

using Now = Run<FlexBackwardCall>;

// The phases of a backward (Lifetime), in their order.
enum Phase : int { kPreparation, kOverBatches, kKernels, kFinish };

// What the kernels of a backward have in common, the launches of the one by keys, and the kernel for buffers alone.
struct Kernels {
  FlexCase common;
  int64_t launches = 1;
  std::optional<BatchSums> over_batches = std::nullopt;
};

// Whether the CTAs of the backward stay with a head for many batches, and can sum up all contributions over them, so
// that no other kernel computes the pairs again. Sums of many pairs into one element wait for one another in memory:
// CTAs of few batches lose by them.
bool staying_sums(FlexCase c, const FlexShape& n, const Gpu& gpu) {
  constexpr int64_t kHeads = 12;  // of all batches, for each multiprocessor
  if (n.batches * n.heads < kHeads * gpu.multiprocessors) {
    const auto derivative = score_mod::cached_derivative(c.score_mod.text, c.wants_grad);
    const auto steps = score_mod::plan_scatter(*derivative, c.elements);
    if (!std::all_of(steps.begin(), steps.end(), [](const auto& step) { return step.once_a_batch; })) return false;
  }
  c.sums_batches = c.grad_query = c.grad_key = c.grad_value = true;
  const KernelFacts facts = plan_kernel(c, gpu.architecture).facts();
  const auto& schemes = facts.schemes;
  return facts.tile.keeps() && std::all_of(schemes.begin(), schemes.end(), [](device::Scheme scheme) {
           return scheme == device::Scheme::kOverBatches;
         });
}

Kernels kernels_of(const Asked& asked, const Gpu& gpu, CallPlan& plan) {
  align_boxes(asked, plan);
  Kernels made{plan.common};
  FlexCase& c = made.common;
  const FlexShape& n = plan.shape;
  const auto share = [&] { return share_of_pairs(asked); };
  c.kernel = FlexKernel::kBackward;
  c.wide = c.wide || one_warp_alone_fits(c, gpu.architecture);
  c.tall = pays_tall(plan.common, n, plan.mask, share, gpu.architecture);
  c.sums_wide = pays_sums_wide(c, n, share);
  c.stores_first = pays_stores_first(c, n, share);
  c.key_splits = pays_key_splits(n, gpu.multiprocessors);
  c.max_gradient = asked.max_gradient;
  c.wants_grad.assign(asked.needs_grad.begin() + 3, asked.needs_grad.end());
  for (const AskedBuffer& b : asked.score_mod.buffers) c.elements.push_back(elements_of(b));
  const bool all = asked.needs_grad[0] && asked.needs_grad[1] && asked.needs_grad[2];
  // Tall tiles beside a score_mod leave no room for the next keys, which whole heads need.
  const bool tall_mod = c.tall && !c.score_mod.text.empty();
  c.whole = all && !c.wide && !tall_mod && pays_whole(c, n, gpu.multiprocessors, share);
  if (c.wants_buffers()) c.covered = covered_buffers(c, {n.batches, n.heads, n.queries, n.keys});
  // The kernel that sums up over batches has no tiles of wide heads.
  if (c.wants_buffers() && !c.wide) {
    made.over_batches = sums_over_batches(c, asked.needs_grad, asked.score_mod.scalars, n.batches, n.heads, n.queries,
                                          n.keys, gpu.multiprocessors, asked.deterministic, gpu.architecture);
  }
  if (made.over_batches && all && !asked.deterministic && staying_sums(c, n, gpu)) {
    c.sums_batches = true;
    made.over_batches.reset();
  }
  if (made.over_batches) made.over_batches->leave_out(c);
  if (!asked.deterministic || !c.wants_buffers()) return made;
  const int64_t launches =
      ordered_launches(c, n.key_batches, n.key_heads, n.keys, gpu.multiprocessors, gpu.architecture);
  c.fixed_point = launches == 0;
  c.partial_sums = !c.fixed_point;
  made.launches = std::max<int64_t>(launches, 1);
  return made;
}

// Where a gradient of query, key or value goes: into its tensor, or into rows that another step copies from.
struct GradientPlace {
  Region rows = kNoRegion;

  TensorView view(const Now& r, const TensorView& gradient) const {
    if (rows == kNoRegion) return gradient;
    return {r.at(rows), gradient.dtype, gradient.sizes, aligned_strides(gradient.sizes, gradient.dtype)};
  }
  void copy(const Now& r, const TensorView& gradient) const {
    flex_copy_from_rows(rows_copy(view(r, gradient), gradient), element_bytes(gradient.dtype), r.stream());
  }
};

// What the steps of a backward have in common.
struct Backward {
  FlexCase common;
  std::vector<std::shared_ptr<const Program>> programs;  // by keys, or dQ and then by keys
  std::shared_ptr<const Program> buffers;                // sums over batches
  device::FlexBatchGroups groups{};
  std::optional<BufferSums> sums, over_batches;
  bool wants_query = false;
  GradientPlace query, key, value;
  int64_t heads = 0, row_stride = 0, row_count = 0, sum_rows = 0, sum_cols = 0, counts = 0;
  bool zeroes_query_sum = false;
  Region rows = kNoRegion, grad_max = kNoRegion, zeros = kNoRegion;
  Region query_sum = kNoRegion, sum_states = kNoRegion, query_parts = kNoRegion, added = kNoRegion;

  /// Whether a program is one of those that make dV of wide heads, part by part.
  static bool makes_value_part(const Program& program) {
    const FlexCase& c = program.launch.spec.asked();
    return c.wide && c.grad_value;
  }
  const KernelFacts& last() const { return programs.back()->launch.spec.facts(); }
  const KernelFacts& first() const { return programs.front()->launch.spec.facts(); }
  /// Whether dQ is written by a kernel as it is, not added up.
  bool stores_query() const { return first().kernel == FlexKernel::kGradQuery || last().stores_query; }
  int64_t part_cols() const { return tiles_in(common.head_size, 4) * 4; }
  bool transposes_sum() const { return last().hopper() && !last().upright; }

  TensorView grad_out(const Now& r) const {
    const TensorView& given = r.call.grad_out;
    if (zeros == kNoRegion) return r.operand(kGradOut, given);
    const TensorView& out = r.call.saved.out;
    return {r.at(zeros), out.dtype, out.sizes, aligned_strides(out.sizes, out.dtype)};
  }

  device::FlexBackwardArguments arguments(const Now& r) const {
    const FlexBackwardCall& call = r.call;
    device::FlexBackwardArguments a{};
    r.fill(a);
    a.grad_out = tensor_of(grad_out(r));
    if (wants_query && stores_query()) a.grad_query = tensor_of(query.view(r, call.query));
    if (query_parts != kNoRegion) {
      const int64_t cols = part_cols(), head = a.queries * cols;
      a.grad_query = {r.at(query_parts), a.heads * head, head, cols, 1};
    }
    a.grad_key = tensor_of(key.view(r, call.key));
    a.grad_value = tensor_of(value.view(r, call.value));
    a.rows = r.at<device::FlexRow>(rows);
    a.row_stride = static_cast<int>(row_stride);
    a.lse = static_cast<const float*>(call.saved.lse);
    a.lse_low = static_cast<const float*>(call.saved.lse_low);
    a.far = far(r);
    a.call = r.number();
    a.max_scores = static_cast<const float*>(call.saved.max_scores);
    a.grad_max = r.at<float>(grad_max);
    a.query_sum = r.at<float>(query_sum);
    a.sum_rows = static_cast<int>(sum_rows);
    a.sum_cols = static_cast<int>(sum_cols);
    a.largest = r.at<float>(sums->largest());
    a.fixed_bits = sums->fixed_bits();
    if (r.of().dropout) a.dropout = dropout_of(r.of());
    a.splits = programs.front()->launch.splits;
    a.batch_groups = groups;
    return a;
  }

  void take_value_part(const Program& program, int64_t first, const Now& r, device::FlexBackwardArguments& a) const {
    const int count = program.launch.spec.asked().value_size;
    a.value_size = count;
    a.value = tensor_of(columns_of(r.value(), first, count));
    a.grad_out = tensor_of(columns_of(grad_out(r), first, count));
    a.grad_value = tensor_of(columns_of(value.view(r, r.call.value), first, count));
  }

  // What the Hopper kernels take besides.
  device::FlexBackwardHopperArguments hopper(const Now& r, const Program& program) const {
    const KernelFacts& facts = program.launch.spec.facts();
    const FlexTile& tile = facts.tile;
    const FlexBackwardCall& call = r.call;
    const int cols = facts.narrow ? 32 : 64;
    const bool by_key = facts.kernel == FlexKernel::kBackward, stores = by_key && facts.stores_boxes;
    device::FlexBackwardHopperArguments more{};
    more.query = boxes_of(r.query(), tile.rows, cols);
    more.key = boxes_of(r.key(), tile.cols, cols);
    more.value = boxes_of(r.value(), tile.cols, cols);
    more.grad_out = boxes_of(grad_out(r), tile.rows, cols);
    if (by_key && facts.whole) {
      const int sum_rows_of_group = tile.rows / (facts.head <= 64 ? facts.groups : 1);
      more.grad_query = boxes_of(query.view(r, call.query), sum_rows_of_group, cols);
    }
    if (stores) more.grad_key = boxes_of(key.view(r, call.key), 64, cols);
    if (stores) more.grad_value = boxes_of(value.view(r, call.value), 64, cols);
    if (by_key) more.grad_scores = boxes_of(sums->tiles(r), tile.rows);
    more.rows = rows_map(r.at(rows), row_count, tile.rows);
    more.next = r.next(program);
    more.section = program.launch.section;
    more.heads = static_cast<int>(r.call.of.key.sizes[0] * r.call.of.key.sizes[1] / program.launch.launches);
    r.take_maps(tile, more.boxes);
    if (by_key) {
      more.sum_states = r.at<int>(sum_states);
      if (added != kNoRegion) {
        more.added = r.at<int>(added);
        more.next = more.added + counts;
      }
    }
    return more;
  }
  // Behind the rows of all heads: whether one of the call, and of each head, is far from 0
  // (FlexBackwardArguments::far).
  unsigned* far(const Now& r) const {
    return reinterpret_cast<unsigned*>(r.at<device::FlexRow>(rows) + heads * row_stride);
  }
};

void plan_regions(const Asked& asked, Backward& b, CallPlan& plan) {
  const FlexShape& n = plan.shape;
  Scratch& scratch = plan.scratch;
  const KernelFacts& last = b.last();
  const int64_t heads = n.query_heads();
  const std::array<int64_t, 4> queries{n.batches, n.heads, n.queries, n.head_size},
      keys{n.key_batches, n.key_heads, n.keys, n.head_size}, values{n.key_batches, n.key_heads, n.keys, n.value_size};
  b.heads = heads;
  b.row_stride = tiles_in(n.queries, 2) * 2;
  b.row_count = heads * b.row_stride + tiles_in(1 + heads, 2);  // behind the rows: which are far
  b.rows = scratch.add("values of rows", 8 * b.row_count);
  if (asked.max_gradient) b.grad_max = scratch.add("gradient of max_scores", 4 * heads * n.queries);
  if (!asked.there[kGradOut])
    b.zeros = scratch.add_zeros("grad_out of zeros",
                                aligned_bytes({n.batches, n.heads, n.queries, n.value_size}, asked.dtype));
  const auto place = [&](const char* name, const std::array<int64_t, 4>& sizes) {
    return GradientPlace{scratch.add(name, aligned_bytes(sizes, asked.dtype))};
  };
  const bool boxes = last.kernel == FlexKernel::kBackward && last.stores_boxes;
  const auto stored = [&](size_t i) { return boxes && asked.needs_grad[i] && !asked.aligned_gradients[i]; };
  if (stored(1)) b.key = place("gradient of key in rows", keys);
  if (stored(2)) b.value = place("gradient of value in rows", values);
  // The kernel behind those that make dV reads the values.
  if (asked.inplace && asked.needs_grad[2] && b.common.wide && !Backward::makes_value_part(*b.programs.back()))
    b.value = place("gradient of value", values);
  b.wants_query = asked.needs_grad[0];
  b.sum_rows = tiles_in(n.queries, last.tile.rows) * last.tile.rows;
  b.sum_cols = tiles_in(n.head_size, 16) * 16;
  if (!b.wants_query) return;
  // A kernel of its own writes the queries' gradient itself, but not over what it and the next kernel read.
  if (b.stores_query()) {
    if (asked.inplace) b.query = place("gradient of query", queries);
  } else {
    const int64_t group = n.group();
    const int64_t sum_heads = last.whole ? b.programs.back()->launch.ctas * group : heads;
    b.zeroes_query_sum = !last.whole && !last.stores_first;
    b.query_sum = scratch.add("sum of dQ", 4 * sum_heads * b.sum_rows * b.sum_cols,
                              {b.zeroes_query_sum ? kPreparation : kKernels, kFinish});
    if (last.stores_first) {
      b.sum_states =
          scratch.add("states of dQ", 4 * (heads * b.sum_rows / 8) * sum_chunks(static_cast<int>(b.sum_cols)));
    }
    if (last.whole && !asked.aligned_gradients[0]) b.query = place("gradient of query in rows", queries);
  }
  if (b.first().kernel == FlexKernel::kGradQuery && b.first().key_splits) {
    b.query_parts = scratch.add(
        "parts of dQ", 4 * b.programs.front()->launch.splits * heads * n.queries * b.part_cols(), {kKernels, kFinish});
  }
  if (last.ordered) {
    b.counts = heads * tiles_in(n.queries, last.tile.rows) * 2;
    b.added = scratch.add_zeros("order of dQ", 4 * (b.counts + 2 * b.programs.back()->launch.launches));
  }
}

// The steps before the kernels that go over pairs.
void add_preparation(const std::shared_ptr<const Backward>& b, Plan<FlexBackwardCall>& plan) {
  if (b->grad_max != kNoRegion) {
    plan.steps.push_back({"gradient of max_scores over ties", nullptr, {b->grad_max}, [b](Now& r) {
                            const FlexBackwardCall& call = r.call;
                            const auto& n = call.of.query.sizes;
                            flex_divide(static_cast<const float*>(call.grad_max_scores),
                                        static_cast<const float*>(call.saved.max_ties), r.at<float>(b->grad_max),
                                        n[0] * n[1] * n[2], r.stream());
                          }});
  }
  std::vector<Region> regions{b->rows};
  if (b->zeroes_query_sum) regions.push_back(b->query_sum);
  if (b->sum_states != kNoRegion) regions.push_back(b->sum_states);
  plan.steps.push_back({"flex_rows", nullptr, regions, [b](Now& r) {
                          const FlexBackwardCall& call = r.call;
                          const auto a = b->arguments(r);
                          flex_rows({call.grad_out.data == nullptr ? device::FlexTensor{} : a.grad_out,
                                     tensor_of(call.saved.out), tensor_of(call.saved.out_low), a.lse,
                                     static_cast<const float*>(call.grad_lse), r.of().dropout ? a.dropout.scale : 1.0f,
                                     a.batches, a.heads, a.queries, a.value_size, a.row_stride,
                                     b->zeroes_query_sum ? a.query_sum : nullptr, a.sum_rows, a.sum_cols,
                                     r.at<int>(b->sum_states), b->far(r), a.call},
                                    r.at<device::FlexRow>(b->rows), b->common.dtype, r.stream());
                        }});
}

void add_sums_over_batches(const std::shared_ptr<const Backward>& b, Plan<FlexBackwardCall>& plan) {
  if (!b->buffers) return;
  plan.steps.push_back({b->buffers->launch.spec.name(), b->buffers, b->over_batches->regions(), [b](Now& r) {
                          b->over_batches->prepare(r);
                          auto a = b->arguments(r);
                          auto sums = b->over_batches->arguments(r);
                          std::vector<void*> further{sums.data()};
                          device::FlexBackwardHopperArguments more{};
                          if (b->buffers->launch.spec.facts().hopper()) {
                            more = b->hopper(r, *b->buffers);
                            further.push_back(&more);
                          }
                          r.launch(*b->buffers, &a, further);
                        }});
  if (b->over_batches->finishes()) {
    plan.steps.push_back({"gradients of sums over batches", nullptr, b->over_batches->regions(),
                          [b](Now& r) { b->over_batches->finish(r); }});
  }
}

// dQ by itself, a part of dV from column `first` on, or the kernel by keys.
void add_kernel(const std::shared_ptr<const Backward>& b, const std::shared_ptr<const Program>& program, int64_t first,
                Plan<FlexBackwardCall>& plan) {
  add_lists(plan, program);
  const bool by_key = program->launch.spec.facts().kernel == FlexKernel::kBackward;
  std::vector<Region> regions{b->rows};
  for (const Region region : {b->query_sum, b->sum_states, b->query_parts, b->added, b->query.rows}) {
    if (region != kNoRegion) regions.push_back(region);
  }
  if (by_key) {
    const auto sums = b->sums->regions();
    regions.insert(regions.end(), sums.begin(), sums.end());
  }
  plan.steps.push_back({program->launch.spec.name(), program, regions, [=](Now& r) {
                          device::FlexBackwardArguments a = b->arguments(r);
                          a.tiles = r.tiles(*program);
                          if (Backward::makes_value_part(*program)) b->take_value_part(*program, first, r, a);
                          auto sums = b->sums->arguments(r);
                          std::vector<void*> further;
                          if (by_key) further.push_back(sums.data());
                          device::FlexBackwardHopperArguments more{};
                          if (program->launch.spec.facts().hopper()) {
                            more = b->hopper(r, *program);
                            further.push_back(&more);
                          }
                          if (by_key && r.call.begin_writing != nullptr) r.call.begin_writing();
                          for (int64_t i = 0; i < program->launch.launches; ++i) {
                            r.launch(*program, &a, further);
                            more.first_head += more.heads;
                            if (b->added != kNoRegion) more.next += 2;
                          }
                        }});
}

void add_copy_back(const std::shared_ptr<const Backward>& b, const GradientPlace Backward::* place,
                   const TensorView FlexBackwardCall::* gradient, const char* name, Plan<FlexBackwardCall>& plan) {
  if ((*b.*place).rows == kNoRegion) return;
  plan.steps.push_back({std::string("copy of the gradient of ") + name, nullptr, {(*b.*place).rows}, [=](Now& r) {
                          (*b.*place).copy(r, r.call.*gradient);
                        }});
}

// What makes gradients of sums.
void add_finish(const std::shared_ptr<const Backward>& b, Plan<FlexBackwardCall>& plan) {
  if (b->query_sum != kNoRegion && !b->last().whole) {
    plan.steps.push_back({"flex_scale_query_sum", nullptr, {b->query_sum}, [b](Now& r) {
                            const auto a = b->arguments(r);
                            flex_scale_query_sum(
                                {tensor_of(r.call.query), a.query_sum, a.batches, a.heads, a.queries, a.head_size,
                                 a.sum_rows, a.sum_cols, r.at<int>(b->sum_states), b->transposes_sum(), a.scale},
                                b->common.dtype, r.stream());
                          }});
  }
  if (b->query_parts != kNoRegion) {
    plan.steps.push_back({"flex_add_query_parts", nullptr, {b->query_parts}, [b](Now& r) {
                            const auto a = b->arguments(r);
                            flex_add_query_parts(
                                {tensor_of(b->query.view(r, r.call.query)), r.at<float>(b->query_parts), a.splits,
                                 a.batches, a.heads, a.queries, a.head_size, static_cast<int>(b->part_cols())},
                                b->common.dtype, r.stream());
                          }});
  }
  add_copy_back(b, &Backward::query, &FlexBackwardCall::query, "query", plan);
  add_copy_back(b, &Backward::key, &FlexBackwardCall::key, "key", plan);
  add_copy_back(b, &Backward::value, &FlexBackwardCall::value, "value", plan);
  if (b->sums->finishes()) {
    plan.steps.push_back({"gradients of sums", nullptr, b->sums->regions(), [b](Now& r) { b->sums->finish(r); }});
  }
}

}  // namespace

Plan<FlexBackwardCall> plan_backward(const Asked& given, const Gpu& gpu) {
  Plan<FlexBackwardCall> plan;
  begin_plan(given, plan);
  const Asked asked = narrow_places(given, gpu, plan);
  Kernels kernels = kernels_of(asked, gpu, plan);
  const auto of_places = [&](const FlexCase& c) {
    return kernels.over_batches ? std::vector<FlexCase>{}
                                : backward_kernels(c, given.needs_grad, given.deterministic, gpu.architecture);
  };
  take_places(given, gpu, device::PlaceOrder::kKeyRows, of_places, kernels.common, plan);
  align_inputs(asked, plan);
  const FlexShape& n = plan.shape;
  align_operand(asked, kGradOut, {n.batches, n.heads, n.queries, n.value_size}, "grad_out", plan);
  const auto made = std::make_shared<Backward>();
  made->common = kernels.common;
  for (const FlexCase& c : backward_kernels(kernels.common, asked.needs_grad, asked.deterministic, gpu.architecture)) {
    const bool part = c.wide && c.grad_value;
    made->programs.push_back(make_program(
        plan_launch(plan_kernel(c, gpu.architecture), n, plan.mask, gpu.multiprocessors, part ? 1 : kernels.launches),
        plan));
  }
  plan_regions(asked, *made, plan);
  made->sums.emplace(asked, made->last(), made->programs.back()->launch.ctas, Lifetime{kKernels, kFinish}, plan);
  if (const auto& over_batches = kernels.over_batches) {
    LaunchPlan launch{plan_kernel(over_batches->common, gpu.architecture), over_batches->ctas};
    made->over_batches.emplace(asked, launch.spec.facts(), over_batches->ctas, Lifetime{kOverBatches, kOverBatches},
                               plan);
    made->groups = over_batches->groups;
    made->buffers = make_program(std::move(launch), plan);
  }
  const std::shared_ptr<const Backward> b = made;
  add_copies(plan);
  add_copy(plan, kGradOut, "grad_out", [](const auto& call) -> const TensorView& { return call.grad_out; });
  if (asked.inplace) {
    // A kernel that cannot be compiled or loaded must not be found after another has begun to write.
    plan.steps.push_back({"kernels loaded", nullptr, {}, [b](Now& r) {
                            for (const auto& program : b->programs) r.kernel(*program);
                          }});
  }
  add_preparation(b, plan);
  add_sums_over_batches(b, plan);
  plan.steps.push_back({"zeros of gradients", nullptr, {}, [b](Now& r) { b->sums->prepare(r); }});
  int64_t first_value = 0;
  for (const auto& program : b->programs) {
    add_kernel(b, program, first_value, plan);
    if (Backward::makes_value_part(*program)) first_value += program->launch.spec.asked().value_size;
  }
  add_finish(b, plan);
  plan.scratch.lay_out();
  return plan;
}

}  // namespace fusegrad::cuda
