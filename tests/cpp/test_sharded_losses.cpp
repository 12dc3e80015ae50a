// The losses over a vocabulary that two processes share, here two threads of one: what C++ gives by a group's name, as
// the unsharded losses give it.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <barrier>
#include <functional>
#include <thread>

#include "common.h"

namespace fusegrad::testing {
namespace {

constexpr int kProcesses = 2;
constexpr int64_t kN = 9, kH = 6, kV = 13, kCut = 5;

struct Finished : c10d::Work {
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

// What the threads share.
struct Meeting {
  std::barrier<> all{kProcesses};
  std::array<Tensor, kProcesses> given;
  int collectives = 0;
};

class Threads : public c10d::Backend {
 public:
  Threads(int rank, Meeting& meeting) : Backend(rank, kProcesses), meeting_(meeting) {}
  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in,
                                                 const c10d::AllgatherOptions& /*options*/) override {
    exchange(in, [&] { out.copy_(at::cat(at::TensorList(meeting_.given)).view_as(out)); });
    return c10::make_intrusive<Finished>();
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<Tensor>& out, std::vector<Tensor>& in,
                                                                 const c10d::AllgatherOptions& options) override {
    return _allgather_base(out.at(0), in.at(0), options);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors,
                                           const c10d::AllreduceOptions& /*options*/) override {
    Tensor sum;
    exchange(tensors[0], [&] { sum = meeting_.given[0] + meeting_.given[1]; });
    tensors[0].copy_(sum);
    return c10::make_intrusive<Finished>();
  }

 private:
  void exchange(const Tensor& mine, const std::function<void()>& read) {
    meeting_.given[static_cast<size_t>(getRank())] = mine;
    if (getRank() == 0) ++meeting_.collectives;
    meeting_.all.arrive_and_wait();
    read();
    meeting_.all.arrive_and_wait();
  }
  Meeting& meeting_;
};

// body(shards, columns) in each of the processes.
int in_processes(
    const std::function<void(const VocabParallel&, const std::function<Tensor(const Tensor&, int64_t)>&)>& body) {
  Meeting meeting;
  std::array<std::thread, kProcesses> threads;
  for (int rank = 0; rank < kProcesses; ++rank) {
    threads[static_cast<size_t>(rank)] = std::thread([&, rank] {
      const std::string name = "sharded losses " + std::to_string(rank);
      auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, kProcesses);
      group->setGroupName(name);
      group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                        c10::make_intrusive<Threads>(rank, meeting));
      c10d::register_process_group(name, group);
      const auto shards = VocabParallel().group(name).rank(rank).bounds({0, kCut, kCut, kV});
      body(shards, [&](const Tensor& whole, int64_t dim) {
        return rank == 0 ? whole.narrow(dim, 0, kCut) : whole.narrow(dim, kCut, kV - kCut);
      });
      c10d::unregister_process_group(name);
    });
  }
  for (auto& thread : threads) thread.join();
  return meeting.collectives;
}

void expect_equal(const Tensor& ours, const Tensor& truth, const char* what) {
  EXPECT_TRUE(at::allclose(ours, truth, 1e-9, 1e-11)) << what << "\n" << ours << "\n" << truth;
}

const Place kPlace{at::kCPU, at::kDouble};

TEST(ShardedLosses, CrossEntropy) {
  at::manual_seed(0);
  const auto logits = random({kN, kV}, kPlace), target = random_target(kN, kV, at::kCPU);
  const auto options = CrossEntropyOptions().label_smoothing(0.1).z_loss(0.01);
  const auto whole = leaf(logits, at::kDouble);
  const auto truth = cross_entropy(whole, target, options);
  truth.backward();
  const int collectives = in_processes([&](const auto& shards, const auto& part) {
    const auto mine = leaf(part(logits, 1), at::kDouble);
    auto own = options;
    const auto out = cross_entropy_with_aux(mine, target, own.vocab_parallel(shards), Aux().predicted_tokens(true));
    out.loss.backward();
    expect_equal(out.loss, truth, "loss");
    expect_equal(mine.grad(), part(whole.grad(), 1), "gradient");
    EXPECT_TRUE(out.aux.predicted_tokens.equal(logits.argmax(1).masked_fill(target.eq(-100), -1)));
  });
  EXPECT_EQ(collectives, 3);  // whether the calls are the same, their values, and the rows' statistics
}

TEST(ShardedLosses, LinearCrossEntropy) {
  at::manual_seed(0);
  const auto input = random({kN, kH}, kPlace), weight = random({kV, kH}, kPlace);
  const auto target = random_target(kN, kV, at::kCPU);
  for (const auto* reduction : {"mean", "none"}) {
    const auto options = LinearCrossEntropyOptions().reduction(reduction);
    const auto x = leaf(input, at::kDouble), w = leaf(weight, at::kDouble);
    const auto truth = linear_cross_entropy(x, w, target, options);
    truth.sum().backward();
    const int collectives = in_processes([&](const auto& shards, const auto& part) {
      const auto mine = leaf(input, at::kDouble), head = leaf(part(weight, 0), at::kDouble);
      auto own = options;
      const auto loss = linear_cross_entropy(mine, head, target, own.vocab_parallel(shards));
      loss.sum().backward();
      expect_equal(loss, truth, reduction);
      expect_equal(mine.grad(), x.grad(), "input");
      expect_equal(head.grad(), part(w.grad(), 0), "weight");
    });
    EXPECT_EQ(collectives, 4);  // and the sum of the input's gradient
  }
}

TEST(ShardedLosses, Divergences) {
  at::manual_seed(0);
  const auto input = random({kN, kH}, kPlace), weight = random({kV, kH}, kPlace), frozen = random({kV, kH}, kPlace);
  const auto x = leaf(input, at::kDouble), w = leaf(weight, at::kDouble);
  const auto truth = linear_jsd(x, w, input, frozen, LinearJSDOptions());
  truth.backward();
  const auto z = leaf(at::matmul(input, weight.t()), at::kDouble);
  const auto teacher = at::matmul(input, frozen.t());
  const auto of_logits = jsd(z, teacher, JSDOptions());
  of_logits.backward();
  const int collectives = in_processes([&](const auto& shards, const auto& part) {
    const auto mine = leaf(input, at::kDouble), head = leaf(part(weight, 0), at::kDouble);
    const auto loss = linear_jsd(mine, head, input, part(frozen, 0), LinearJSDOptions().vocab_parallel(shards));
    loss.backward();
    expect_equal(loss, truth, "linear_jsd");
    expect_equal(mine.grad(), x.grad(), "linear_jsd, input");
    expect_equal(head.grad(), part(w.grad(), 0), "linear_jsd, weight");
    const auto logits = leaf(part(z.detach(), 1), at::kDouble);
    const auto other = jsd(logits, part(teacher, 1), JSDOptions().vocab_parallel(shards));
    other.backward();
    expect_equal(other, of_logits, "jsd");
    expect_equal(logits.grad(), part(z.grad(), 1), "jsd, gradient");
  });
  EXPECT_EQ(collectives, 5 + 3);  // of jsd there are no values to compare, and no gradient to sum
}

TEST(ShardedLosses, WrongCalls) {
  const auto logits = random({kN, kV}, kPlace), target = random_target(kN, kV, at::kCPU);
  in_processes([&](const auto& shards, const auto& part) {
    // Each process finds out what is wrong with one of them.
    const auto options = CrossEntropyOptions().vocab_parallel(shards);
    EXPECT_THROW(cross_entropy(part(logits, 1), target + shards.rank(), options), c10::ValueError);
    const auto mine = shards.rank() == 0 ? logits : part(logits, 1);
    EXPECT_THROW(cross_entropy(mine, target, options), c10::Error);
  });
  const auto gaps = VocabParallel().bounds({0, 5, 6, kV});
  EXPECT_THROW(cross_entropy(logits, target, CrossEntropyOptions().vocab_parallel(gaps)), c10::ValueError);
}

TEST(ShardedLosses, OneProcessNeedsNoGroup) {
  const auto logits = random({kN, kV}, kPlace), target = random_target(kN, kV, at::kCPU);
  const auto alone = VocabParallel().bounds({0, kV});
  expect_equal(cross_entropy(logits, target, CrossEntropyOptions().vocab_parallel(alone)),
               cross_entropy(logits, target), "loss");
}

}  // namespace
}  // namespace fusegrad::testing
