// Trains a small classifier on points from noisy spirals, one arm per class, with fusegrad's linear cross
// entropy: the last layer and the loss are one op, which never holds all logits. Ends with 0 where held-out
// accuracy is good.
#include <fusegrad/fusegrad.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <numbers>
#include <utility>

namespace {

constexpr int64_t kClasses = 10, kHidden = 64, kBatch = 256, kSteps = 400;

/// Points [count, 2] and the arm of the spiral that each lies on.
std::pair<torch::Tensor, torch::Tensor> sample_spirals(int64_t count) {
  const auto arm = torch::randint(kClasses, {count}, torch::kLong);
  const auto radius = torch::rand({count}) * 0.9 + 0.1;
  const auto angle = 2 * std::numbers::pi * (arm / static_cast<double>(kClasses) + radius / 2);
  const auto points = torch::stack({radius * angle.cos(), radius * angle.sin()}, 1);
  return {points + 0.01 * torch::randn_like(points), arm};
}

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl() {
    body = register_module("body", torch::nn::Sequential(torch::nn::Linear(2, kHidden), torch::nn::SiLU(),
                                                         torch::nn::Linear(kHidden, kHidden), torch::nn::SiLU(),
                                                         torch::nn::Linear(kHidden, kHidden)));
    head = register_module("head", torch::nn::Linear(kHidden, kClasses));
  }

  /// The mean loss over the batch. No op has saved the hidden states, the output of a Linear, for its
  /// backward: they may be overwritten with their gradient.
  torch::Tensor loss(const torch::Tensor& points, const torch::Tensor& arm) {
    const auto options = fusegrad::LinearCrossEntropyOptions().linear_bias(head->bias).inplace(true);
    return fusegrad::linear_cross_entropy(body->forward(points), head->weight, arm, options);
  }

  double accuracy(const torch::Tensor& points, const torch::Tensor& arm) {
    const torch::NoGradGuard no_grad;
    const auto options = fusegrad::LinearCrossEntropyOptions().linear_bias(head->bias);
    const auto [loss, aux] = fusegrad::linear_cross_entropy_with_aux(body->forward(points), head->weight, arm, options,
                                                                     fusegrad::Aux().token_accuracy(true));
    return aux.token_accuracy.mean().item<double>();
  }

  torch::nn::Sequential body{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Classifier);

}  // namespace

int main() {
  torch::manual_seed(0);
  torch::set_num_threads(1);  // for work this small more threads only wait for each other
  Classifier model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(1e-4));
  for (int64_t step = 1; step <= kSteps; ++step) {
    // A cosine schedule: the rate falls to zero.
    const double rate = 0.5e-2 * (1 + std::cos(std::numbers::pi * static_cast<double>(step) / kSteps));
    static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(rate);
    const auto [points, arm] = sample_spirals(kBatch);
    optimizer.zero_grad();
    const auto loss = model->loss(points, arm);
    loss.backward();
    optimizer.step();
    if (step == 1 || step % 50 == 0) std::cout << "step " << step << "  loss " << loss.item<double>() << "\n";
  }
  const auto [points, arm] = sample_spirals(4096);
  const double accuracy = model->accuracy(points, arm);
  std::cout << "held-out accuracy " << accuracy << "\n";
  if (accuracy < 0.95) {
    std::cerr << "train_classifier: the accuracy must be at least 0.95\n";
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
