// Runs plans: a call's data, its scratch memory and a stream; and what the steps of all calls do alike.
#pragma once

#include <bit>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/attention/captured/copy_rows.h"
#include "cuda/attention/mask/tile_lists.h"
#include "cuda/attention/plan/call_plan.h"
#include "cuda/attention/tangents/arguments.cuh"

struct CUstream_st;

namespace fusegrad::cuda {

device::FlexTensor tensor_of(const TensorView& t);
device::FlexDropout dropout_of(const FlexArguments& call);
/// Columns [first, first + count) of the last dimension.
TensorView columns_of(const TensorView& t, int64_t first, int64_t count);
/// The copy of a tensor to one of its sizes, for flex_copy_into_rows or flex_copy_from_rows.
FlexRowsCopy rows_copy(const TensorView& from, const TensorView& to);
/// A tensor map of boxes of `rows` rows and `cols` columns; empty where there is no tensor.
device::TensorMap boxes_of(const TensorView& t, int rows, int cols = 64);
device::TensorMap rows_map(const void* rows, int64_t count, int box);

/// A plan's run, but for what belongs to the kind of call.
class PlanRun {
 public:
  PlanRun(const CallPlan& plan, const FlexArguments& of, void* scratch, CUstream_st* stream);

  CUstream_st* stream() const { return stream_; }
  /// Another one in each run, so that what memory held before can be told from what the run left there.
  unsigned number() const { return number_; }
  /// A region, or null.
  template <class T = void>
  T* at(Region region) const {
    return region == kNoRegion ? nullptr : reinterpret_cast<T*>(scratch_ + plan_.scratch[region].offset);
  }
  /// An operand as kernels read it: where it lies, or its copy.
  TensorView operand(FlexOperand operand, const TensorView& given) const;
  const TensorView& query() const { return query_; }
  const TensorView& key() const { return key_; }
  const TensorView& value() const { return value_; }
  /// The score_mod's buffers as kernels read them.
  std::span<const score_mod::Buffer> buffers() const { return buffers_; }

  void copy_operand(FlexOperand operand, const TensorView& given) const;
  void copy_buffer(size_t i) const;
  /// All that plan's places are copied from, by one kernel.
  void copy_places() const;

  template <class Arguments>
  void fill(Arguments& a) const {
    const FlexShape& n = plan_.shape;
    a.query = tensor_of(query_);
    a.key = tensor_of(key_);
    a.value = tensor_of(value_);
    a.batches = static_cast<int>(n.batches);
    a.key_batches = static_cast<int>(n.key_batches);
    a.heads = static_cast<int>(n.heads);
    a.group = static_cast<int>(n.group());
    a.queries = static_cast<int>(n.queries);
    a.keys = static_cast<int>(n.keys);
    a.head_size = static_cast<int>(n.head_size);
    a.value_size = static_cast<int>(n.value_size);
    a.scale = static_cast<float>(of_.scale);
  }

  /// The lists of tiles of a program, which the step before it makes, and the number from which its CTAs count; of a
  /// call without a block mask both are null.
  device::FlexTiles tiles(const Program& program) const;
  int* next(const Program& program) const;
  void make_states() const;
  void make_lists(const Program& program) const;

  /// Tensor maps of the first reads of pairs whose boxes are a tensor's as they lie (score_mod::box_dimensions).
  void take_maps(const FlexTile& tile, device::TensorMap (&maps)[device::kMostBoxMaps]) const;
  /// What the Hopper kernels of results take besides; of `value` in place of the call's.
  device::FlexForwardHopperArguments hopper_forward(const Program& program, const TensorView& value) const;

  /// The kernel, compiled and loaded. `ahead`: called where it is compiled.
  const jit::Kernel& kernel(const Program& program, const std::function<void()>& ahead = nullptr) const;
  /// `more`: the kernel's further arguments.
  void launch(const Program& program, void* arguments, const std::vector<void*>& more,
              const std::function<void()>& ahead = nullptr) const;

  const FlexArguments& of() const { return of_; }

 private:
  device::FlexTiles all_tiles() const;

  const CallPlan& plan_;
  const FlexArguments& of_;
  std::byte* const scratch_;
  CUstream_st* const stream_;
  const unsigned number_;
  TensorView query_, key_, value_;
  std::vector<score_mod::Buffer> buffers_;
  mutable std::vector<int64_t> score_words_, mask_words_;  // launches take pointers to what they do not change
};

template <class Call>
class Run : public PlanRun {
 public:
  Run(const CallPlan& plan, const Call& call, void* scratch, CUstream_st* stream)
      : PlanRun(plan, call.of, scratch, stream), call(call) {}
  const Call& call;
};

void fill_scratch(const Scratch& scratch, void* memory, CUstream_st* stream);
/// Where the scratch memory has gaps: waits for the stream, and raises where a step has written one.
void check_scratch(const Scratch& scratch, const void* memory, const std::string& step, CUstream_st* stream);

template <class Call>
void run(const Plan<Call>& plan, const Call& call, void* scratch, CUstream_st* stream) {
  fill_scratch(plan.scratch, scratch, stream);
  Run<Call> now(plan, call, scratch, stream);
  for (const Step<Call>& step : plan.steps) {
    step.run(now);
    if (plan.scratch.checked()) check_scratch(plan.scratch, scratch, step.name, stream);
  }
}

// Steps that plans of all calls have.

template <class Call, class Given>
void add_copy(Plan<Call>& plan, FlexOperand operand, const char* name, const Given& given) {
  if (plan.operands[operand] == kNoRegion) return;
  plan.steps.push_back(
      {std::string("copy of ") + name, nullptr, {plan.operands[operand]}, [operand, given](Run<Call>& r) {
         r.copy_operand(operand, given(r.call));
       }});
}
template <class Call>
void add_copies(Plan<Call>& plan) {
  add_copy(plan, kQuery, "query", [](const Call& c) -> const TensorView& { return c.of.query; });
  add_copy(plan, kKey, "key", [](const Call& c) -> const TensorView& { return c.of.key; });
  add_copy(plan, kValue, "value", [](const Call& c) -> const TensorView& { return c.of.value; });
  std::vector<Region> places;
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    if (plan.buffers[i] == kNoRegion) continue;
    if (plan.places[i]) {
      places.push_back(plan.buffers[i]);
      continue;
    }
    plan.steps.push_back(
        {"copy of buffer " + std::to_string(i), nullptr, {plan.buffers[i]}, [i](Run<Call>& r) { r.copy_buffer(i); }});
  }
  if (!places.empty())
    plan.steps.push_back({"flex_copy_places", nullptr, places, [](Run<Call>& r) { r.copy_places(); }});
}
/// The lists of a program, which is to be the next step.
template <class Call>
void add_lists(Plan<Call>& plan, const std::shared_ptr<const Program>& program) {
  if (!program->launch.lists) return;
  const auto is_states = [](const Step<Call>& step) { return step.name == "states of blocks"; };
  if (!program->launch.lists->direct && std::none_of(plan.steps.begin(), plan.steps.end(), is_states)) {
    plan.steps.push_back({"states of blocks", nullptr, {plan.states}, [](Run<Call>& r) { r.make_states(); }});
  }
  plan.steps.push_back({"lists of tiles", nullptr, {program->count, program->list}, [program](Run<Call>& r) {
                          r.make_lists(*program);
                        }});
}

}  // namespace fusegrad::cuda
