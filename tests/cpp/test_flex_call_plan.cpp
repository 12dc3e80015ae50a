// Plans of calls: their steps, their scratch memory, and that the kernels that are compiled ahead are those of calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "attention/flex_attention.h"
#include "cuda/attention/plan/call_plan.h"
#include "pytorch/score_mod/tensors.h"
#include "score_mod_examples.h"

namespace fusegrad::cuda {
namespace {

const Gpu kHopper{"90a", 132, 0};

// A tensor that begins at a multiple of 16 bytes; its data is never read.
TensorView tensor(std::array<int64_t, 4> sizes, DType dtype, int64_t row_stride = 0) {
  const int64_t row = row_stride == 0 ? sizes[3] : row_stride;
  return {reinterpret_cast<void*>(0x1000), dtype, sizes, {sizes[1] * sizes[2] * row, sizes[2] * row, row, 1}};
}

struct Shape {
  int64_t batches, heads, key_heads, queries, keys;
};

/// A call and its backward, of a score_mod whose captured tensors all get gradients.
struct Calls {
  Calls(const Shape& n, int64_t size, const ScoreMod& mod, DType dtype = DType::kBFloat16)
      : captured(mod.buffers, mod.scalars) {
    FlexArguments of;
    of.query = tensor({n.batches, n.heads, n.queries, size}, dtype);
    of.key = of.value = tensor({n.batches, n.key_heads, n.keys, size}, dtype);
    of.score_mod = {mod.text, captured.buffers(), captured.scalars()};
    forward.of = backward.of = of;
    forward.results.out = tensor({n.batches, n.heads, n.queries, size}, dtype);
    forward.results.out_low = forward.results.out;
    backward.saved.out = backward.saved.out_low = backward.grad_out = forward.results.out;
    backward.query = of.query;
    backward.key = backward.value = of.key;
    backward.needs_query = backward.needs_key = backward.needs_value = true;
    for (const auto& buffer : captured.buffers()) {
      const bool wanted = score_mod::type_of(buffer.dtype) == score_mod::Type::kFloat;
      backward.needs_buffers.push_back(wanted);
      backward.buffers.push_back({reinterpret_cast<void*>(0x1000), buffer.dtype, 1});
    }
    forward.needs_grad.assign(3, true);
    forward.needs_grad.insert(forward.needs_grad.end(), backward.needs_buffers.begin(), backward.needs_buffers.end());
  }
  void deterministic(bool is) { forward.deterministic = backward.deterministic = is; }

  score_mod::CapturedTensors captured;
  FlexForwardCall forward;
  FlexBackwardCall backward;
};

std::vector<std::string> kernels(const Plan<FlexBackwardCall>& plan) {
  std::vector<std::string> ids;
  for (const auto& program : programs_of(plan)) ids.push_back(program->id);
  return ids;
}
template <class Call>
std::vector<std::string> steps(const Plan<Call>& plan) {
  std::vector<std::string> names;
  for (const auto& step : plan.steps) names.push_back(step.name);
  return names;
}

TEST(FlexCallPlan, WhatAForwardCompilesAheadIsWhatItsBackwardRuns) {
  const std::vector<Shape> shapes{{2, 4, 4, 128, 128},     {1, 1, 1, 16, 4096},  {8, 4, 2, 64, 64},
                                  {2, 16, 16, 4096, 4096}, {64, 4, 4, 256, 256}, {1, 2, 1, 3001, 500},
                                  {132, 1, 1, 49, 49}};
  const auto examples = score_mod_examples();
  ASSERT_GE(examples.size(), 18U);
  for (const auto& example : examples) {
    for (const Shape& shape : shapes) {
      for (const int64_t size : {32, 64, 128}) {
        for (const Gpu& gpu : {Gpu{"80", 108, 0}, Gpu{"86", 84, 0}, kHopper, Gpu{"120", 170, 0}}) {
          for (const bool deterministic : {false, true}) {
            Calls calls(shape, size, example.mod);
            calls.deterministic(deterministic);
            const Asked after = backward_after(asked_of(calls.forward), calls.forward);
            EXPECT_EQ(kernels(plan_backward(after, gpu)), kernels(plan_backward(asked_of(calls.backward), gpu)))
                << example.name << " " << shape.queries << " D " << size << " sm_" << gpu.architecture;
          }
        }
      }
    }
  }
}

TEST(FlexCallPlan, RegionsOfTheScratchMemoryLieApart) {
  for (const auto& example : score_mod_examples()) {
    for (const bool deterministic : {false, true}) {
      Calls calls({8, 4, 4, 100, 104}, 24, example.mod);
      calls.deterministic(deterministic);
      calls.backward.grad_out = {};
      const auto plan = plan_backward(asked_of(calls.backward), kHopper);
      const auto& parts = plan.scratch.parts();
      for (size_t i = 0; i < parts.size(); ++i) {
        const auto& part = parts[i];
        EXPECT_EQ(part.offset % 256, 0);
        EXPECT_EQ(part.zeros, part.offset < plan.scratch.zero_bytes()) << part.name;
        EXPECT_GE(part.room, part.bytes);
        EXPECT_LE(part.offset + part.room, plan.scratch.bytes());
        for (size_t k = 0; k < i; ++k) EXPECT_FALSE(part.meets(parts[k])) << part.name << ", " << parts[k].name;
      }
      for (const auto& step : plan.steps) {
        for (const Region region : step.regions) EXPECT_LT(static_cast<size_t>(region), parts.size()) << step.name;
      }
    }
  }
}

TEST(Scratch, RegionsThatAreNotInUseTogetherShareMemory) {
  const auto laid_out = [](int64_t gap) {
    Scratch scratch;
    scratch.add("early", 1000, {0, 1});
    scratch.add_zeros("zeros", 256);
    scratch.add("late", 2000, {2, 3});
    scratch.add("always", 512);
    scratch.add("between", 256, {1, 2});
    scratch.lay_out(gap);
    const auto& parts = scratch.parts();
    for (size_t i = 0; i < parts.size(); ++i) {
      for (size_t k = 0; k < i; ++k) EXPECT_FALSE(parts[i].meets(parts[k])) << parts[i].name << ", " << parts[k].name;
    }
    return scratch;
  };
  const Scratch scratch = laid_out(0);
  EXPECT_EQ(scratch[0].offset, scratch[2].offset);
  EXPECT_EQ(scratch[3].offset, 256);
  EXPECT_EQ(scratch.bytes(), 256 + 512 + 2048 + 256);
  // Writes beyond a region are found: no other one lies there.
  EXPECT_GE(laid_out(1000).bytes(), 256 + 1024 + 2048 + 512 + 256 + 5 * 1000);
}

// What the kernel for sums over batches needs is free again when dQ is summed up.
TEST(FlexCallPlan, SumsOverBatchesLendTheirMemory) {
  const auto examples = score_mod_examples();
  bool some = false;
  for (const auto& example : examples) {
    const Calls calls({64, 4, 4, 256, 256}, 32, example.mod);
    const auto plan = plan_backward(asked_of(calls.backward), kHopper);
    int64_t bytes = 0;
    for (const auto& part : plan.scratch.parts()) bytes += part.room;
    some |= plan.scratch.bytes() < bytes;
  }
  EXPECT_TRUE(some);
}

TEST(Scratch, HasGapsWhereItIsChecked) {
  Scratch scratch;
  const Region a = scratch.add("a", 100), b = scratch.add_zeros("b", 256), c = scratch.add("c", 1);
  scratch.lay_out(/*gap=*/1000);
  EXPECT_TRUE(scratch.checked());
  int64_t bytes = 0;
  for (const Region region : {b, a, c}) {
    EXPECT_EQ(scratch[region].offset, bytes) << scratch[region].name;
    EXPECT_EQ(scratch[region].offset % 256, 0);
    EXPECT_GE(scratch[region].room, scratch[region].bytes + 1000);
    bytes += scratch[region].room;
  }
  EXPECT_EQ(scratch.bytes(), bytes);
}

TEST(FlexCallPlan, TheOrderOfABackward) {
  Calls calls({2, 16, 16, 4096, 4096}, 64, ScoreMod());
  EXPECT_EQ(steps(plan_forward(asked_of(calls.forward), kHopper)), std::vector<std::string>{"flex_forward_hopper"});
  EXPECT_EQ(
      steps(plan_backward(asked_of(calls.backward), kHopper)),
      (std::vector<std::string>{"flex_rows", "zeros of gradients", "flex_backward_hopper", "flex_scale_query_sum"}));
  calls.deterministic(true);
  EXPECT_EQ(
      steps(plan_backward(asked_of(calls.backward), kHopper)),
      (std::vector<std::string>{"flex_rows", "zeros of gradients", "flex_grad_query_hopper", "flex_backward_hopper"}));
  // In place the gradient of the query may not be written before the keys' kernel has read the query.
  calls.backward.begin_writing = [] {};
  EXPECT_EQ(steps(plan_backward(asked_of(calls.backward), kHopper)),
            (std::vector<std::string>{"kernels loaded", "flex_rows", "zeros of gradients", "flex_grad_query_hopper",
                                      "flex_backward_hopper", "copy of the gradient of query"}));
}

TEST(FlexCallPlan, OperandsWhoseRowsLieElsewhereAreCopied) {
  Calls calls({2, 4, 4, 300, 300}, 60, ScoreMod());
  EXPECT_EQ(steps(plan_forward(asked_of(calls.forward), kHopper)),
            (std::vector<std::string>{"copy of query", "copy of key", "copy of value", "flex_forward_hopper"}));
  auto& of = calls.forward.of;
  of.query = tensor(of.query.sizes, of.query.dtype, 64);
  of.key = of.value = tensor(of.key.sizes, of.key.dtype, 64);
  // Rows must be filled up to 16 bytes, too.
  EXPECT_EQ(steps(plan_forward(asked_of(calls.forward), kHopper)).size(), 4U);
  Calls even({2, 4, 4, 300, 300}, 64, ScoreMod());
  even.forward.of.key.data = reinterpret_cast<void*>(0x1008);
  EXPECT_EQ(steps(plan_forward(asked_of(even.forward), kHopper)),
            (std::vector<std::string>{"copy of key", "flex_forward_hopper"}));
}

TEST(FlexCallPlan, ASplitForwardIsMerged) {
  Calls calls({1, 1, 1, 1, 8192}, 64, ScoreMod());
  const auto plan = plan_forward(asked_of(calls.forward), kHopper);
  EXPECT_EQ(steps(plan), (std::vector<std::string>{"flex_forward_few", "flex_merge"}));
  EXPECT_EQ(plan.scratch.parts().size(), 1U);
}

// Every fact that decides something makes another plan; data alone does not.
TEST(FlexCallPlan, OnlyWhatIsAskedTellsCallsApart) {
  const auto examples = score_mod_examples();
  const auto biased =
      std::find_if(examples.begin(), examples.end(), [](const auto& e) { return e.name == "key bias"; });
  ASSERT_NE(biased, examples.end());
  const auto asked = [&](const std::function<void(Calls&)>& change) {
    Calls calls({2, 4, 4, 128, 128}, 64, biased->mod);
    change(calls);
    return asked_of(calls.backward);
  };
  const Asked same = asked([](Calls&) {});
  EXPECT_EQ(asked([](Calls& c) { c.backward.of.query.data = reinterpret_cast<void*>(0x2000); }), same);
  EXPECT_EQ(AskedHash()(asked([](Calls& c) { c.backward.of.scale = 0.5; })), AskedHash()(same));
  const std::vector<std::function<void(Calls&)>> changes{
      [](Calls& c) { c.backward.of.query.sizes[2] = 64; },
      [](Calls& c) { c.backward.of.query.data = reinterpret_cast<void*>(0x1008); },
      [](Calls& c) { c.backward.of.key.strides[2] = 68; },
      [](Calls& c) { c.backward.of.dropout = true; },
      [](Calls& c) { c.backward.of.scale = -1; },
      [](Calls& c) { c.backward.grad_out = {}; },
      [](Calls& c) { c.backward.grad_max_scores = reinterpret_cast<void*>(0x1000); },
      [](Calls& c) { c.backward.needs_query = false; },
      [](Calls& c) { c.backward.needs_buffers[0] = false; },
      [](Calls& c) { c.backward.buffers[0].dtype = score_mod::DType::kBFloat16; },
      [](Calls& c) { c.backward.deterministic = true; },
      [](Calls& c) { c.backward.begin_writing = [] {}; },
      [](Calls& c) { c.backward.of.score_mod.text = "score_mod 1\nreturn score\n"; },
      [](Calls& c) {
        static const int32_t list = 0;
        c.backward.of.block_mask = {{&list, &list, 1}, {}, 1, 1, 1, {128, 128}};
      },
  };
  for (size_t i = 0; i < changes.size(); ++i) EXPECT_NE(asked(changes[i]), same) << i;
}

TEST(FlexCallPlan, ItIsPrintedForPeople) {
  Calls calls({1, 1, 1, 1, 8192}, 64, ScoreMod());
  const std::string text = printed("flex_attention", plan_forward(asked_of(calls.forward), kHopper));
  EXPECT_NE(text.find("B 1 H 1/1 M 1 N 8192 D 64 E 64"), std::string::npos) << text;
  EXPECT_NE(text.find("flex_forward_few: tile 16 x "), std::string::npos) << text;
  EXPECT_NE(text.find("scratch: "), std::string::npos) << text;
}

}  // namespace
}  // namespace fusegrad::cuda
