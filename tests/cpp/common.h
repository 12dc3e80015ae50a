// What the C++ tests share: where they run, the losses made of PyTorch's own ops, and how far apart two may
// be.
#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fusegrad/fusegrad.h"

namespace fusegrad::testing {

using at::Tensor;

inline std::vector<at::Device> devices() {
  std::vector<at::Device> result{at::kCPU};
  if (torch::cuda::is_available()) result.emplace_back(at::kCUDA, 0);
  return result;
}

/// A device and a dtype that the losses take there.
struct Place {
  at::Device device;
  at::ScalarType dtype;
};

inline std::vector<Place> places() {
  std::vector<Place> result{{at::kCPU, at::kDouble}};
  for (const auto& device : devices()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) result.push_back({device, dtype});
  }
  return result;
}

inline std::string name_of(const Place& place) {
  return place.device.is_cpu() ? std::string("Cpu") + at::toString(place.dtype)
                               : std::string("Cuda") + at::toString(place.dtype);
}

inline std::string place_name(const ::testing::TestParamInfo<Place>& info) { return name_of(info.param); }

/// Random values, the same on every device, rounded to the place's dtype.
inline Tensor random(at::IntArrayRef shape, const Place& place, double scale = 1.0) {
  return at::randn(shape, at::kDouble).mul(scale).to(place.dtype).to(place.device);
}

/// Upstream gradients, positive and negative. Powers of two, since a gradient that was computed in the
/// forward is rounded a second time by others, which is documented and not what the bounds here are for.
inline Tensor powers_of_two(at::IntArrayRef shape, const Place& place) {
  const auto exponents = at::randint(-3, 3, shape, at::kDouble);
  return (exponents.exp2() * at::randn(shape, at::kDouble).sign()).to(place.dtype).to(place.device);
}

/// Class indices [rows], every fifth of them ignored.
inline Tensor random_target(int64_t rows, int64_t vocab, const at::Device& device, int64_t ignore_index = -100) {
  auto target = at::randint(vocab, {rows}, at::kLong);
  target.slice(0, 2, rows, 5).fill_(ignore_index);
  return target.to(device);
}

/// The gradients of sum(loss * upstream).
inline std::vector<Tensor> gradients(const Tensor& loss, const std::vector<Tensor>& inputs, const Tensor& upstream,
                                     bool retain_graph = false, bool create_graph = false) {
  return torch::autograd::grad({loss}, inputs, {upstream.to(loss.scalar_type()).expand_as(loss)}, retain_graph,
                               create_graph);
}

/// `tensor` in another dtype, as a leaf of a graph of its own.
inline Tensor leaf(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.detach().to(dtype).clone().requires_grad_();
}

inline double l2(const Tensor& tensor) { return tensor.to(at::kDouble).norm().item<double>(); }

/// Rule 12 of the contract: the error against float64 is at most 1.5 times that of PyTorch in the same dtype,
/// plus 1e-7 of the truth's norm (1e-14 for float64). A single value gets a few more units in the last place,
/// since PyTorch's may be exact by luck.
inline void expect_accurate(const std::string& what, const Tensor& ours, const Tensor& eager, const Tensor& truth) {
  ASSERT_EQ(ours.sizes(), truth.sizes()) << what;
  if (truth.numel() == 0) return;
  const double floor = (ours.scalar_type() == at::kDouble ? 1e-14 : 1e-7) * (truth.numel() == 1 ? 5 : 1);
  const double bound = 1.5 * l2(eager.to(at::kDouble) - truth) + floor * l2(truth);
  EXPECT_LE(l2(ours.to(at::kDouble) - truth), bound) << what;
}

/// fusegrad::cross_entropy made of PyTorch's ops, in the dtype of `input`.
inline Tensor reference_loss(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options) {
  namespace F = torch::nn::functional;
  const auto dtype = input.scalar_type();
  const int64_t class_dim = input.dim() == 1 ? 0 : 1;
  const bool probabilities = target.is_floating_point();
  const auto z = options.softcap() ? *options.softcap() * (input / *options.softcap()).tanh() : input;
  const auto classes = target.to(probabilities ? dtype : at::kLong);
  const auto weight = options.weight() ? options.weight()->to(dtype) : Tensor();
  auto function_options = F::CrossEntropyFuncOptions().weight(weight).ignore_index(options.ignore_index());
  function_options.label_smoothing(options.label_smoothing());

  const auto kept =
      probabilities ? at::ones_like(z.select(class_dim, 0), at::kBool) : classes.ne(options.ignore_index());
  const auto row_weight = options.token_weight() ? options.token_weight()->to(dtype) : at::ones({}, input.options());
  const auto penalty = options.z_loss() * z.logsumexp(class_dim).square() * kept * row_weight;
  const auto rows = F::cross_entropy(z, classes, function_options.reduction(torch::kNone)) * row_weight;
  if (options.reduction() == "none") return rows + penalty;
  if (options.reduction() == "sum") return (rows + penalty).sum();
  if (const auto* number = std::get_if<double>(&options.normalizer())) return (rows + penalty).sum() / *number;
  if (const auto* divisor = std::get_if<Tensor>(&options.normalizer())) return (rows + penalty).sum() / *divisor;
  if (!options.token_weight()) {
    return F::cross_entropy(z, classes, function_options.reduction(torch::kMean)) + penalty.sum() / kept.sum();
  }
  const auto class_weights = weight.defined() && !probabilities
                                 ? (weight.index_select(0, classes.clamp_min(0).flatten()) * kept.flatten()).sum()
                                 : kept.sum();
  return rows.sum() / class_weights + penalty.sum() / kept.sum();
}

/// sum x (log x - log y) over the last dimension, 0 where x is 0.
inline Tensor reference_kl(const Tensor& log_x, const Tensor& log_y) {
  const auto zero = log_x.isneginf();
  const auto terms = log_x.exp() * (log_x.masked_fill(zero, 0) - log_y.masked_fill(zero, 0));
  return terms.masked_fill(zero, 0).sum(-1);
}

/// fusegrad::jsd made of PyTorch's ops, in the dtype of `student`, over [N, V]; temperatures apart.
inline Tensor reference_divergence(const Tensor& student, const Tensor& teacher, double teacher_temperature,
                                   const JSDOptions& options) {
  const double b = options.beta();
  const auto log_q = options.log_probs() ? student : (student / options.temperature()).log_softmax(-1);
  const auto log_p = options.log_probs() ? teacher : (teacher / teacher_temperature).log_softmax(-1);
  const auto mixture = (1 - b) * log_q.exp() + b * log_p.exp();
  const auto log_m = mixture.masked_fill(mixture.eq(0), 1).log();  // float16's underflows
  const auto soft = b == 0   ? reference_kl(log_p, log_q)
                    : b == 1 ? reference_kl(log_q, log_p)
                             : (1 - b) * reference_kl(log_q, log_m) + b * reference_kl(log_p, log_m);
  auto rows = options.soft_weight() * soft;
  auto kept = at::ones_like(rows, at::kBool);
  if (options.labels()) {
    kept = options.labels()->ne(options.ignore_index());
    const auto labels = options.labels()->to(at::kLong).masked_fill(kept.logical_not(), 0);
    if (!options.log_probs()) {
      rows = rows - options.hard_weight() * student.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1);
    }
  }
  rows = rows.masked_fill(kept.logical_not(), 0);
  if (options.token_weight()) rows = rows * options.token_weight()->to(rows.scalar_type());
  if (options.reduction() == "none") return rows;
  if (options.reduction() == "sum") return rows.sum();
  auto divisor = kept.sum().to(rows.scalar_type());
  if (const auto* number = std::get_if<double>(&options.normalizer())) divisor = at::full_like(divisor, *number);
  if (options.reduction() == "mean") divisor = divisor * student.size(-1);
  return rows.sum() / divisor;
}

/// Any number of backwards gives bitwise the same gradients, whatever is done to those handed out before.
inline void expect_repeatable(const Tensor& loss, const std::vector<Tensor>& inputs, const Tensor& upstream) {
  std::vector<Tensor> first;
  for (int pass = 0; pass < 4; ++pass) {
    const auto again = gradients(loss, inputs, upstream, /*retain_graph=*/pass < 3);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (pass == 0) first.push_back(again[i].clone());
      EXPECT_TRUE(at::equal(again[i], first[i])) << "gradient " << i << ", backward " << pass;
      again[i].zero_();
    }
  }
}

/// The same where the first result becomes .grad, whose buffer the later ones are added to.
inline void expect_accumulates(const Tensor& loss, const std::vector<Tensor>& leaves, const Tensor& upstream) {
  const auto once = gradients(loss, leaves, upstream, /*retain_graph=*/true);
  std::vector<Tensor> expected;
  for (const auto& gradient : once) expected.push_back(gradient + gradient + gradient);
  for (int pass = 0; pass < 3; ++pass) {
    loss.backward(upstream.to(loss.scalar_type()).expand_as(loss), /*retain_graph=*/true);
  }
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(at::equal(leaves[i].grad(), expected[i])) << i;
}

/// Autocast on a device, for as long as this lives.
class Autocast {
 public:
  Autocast(at::Device device, at::ScalarType dtype)
      : device_(device.type()),
        enabled_(at::autocast::is_autocast_enabled(device_)),
        dtype_(at::autocast::get_autocast_dtype(device_)) {
    at::autocast::set_autocast_enabled(device_, true);
    at::autocast::set_autocast_dtype(device_, dtype);
  }
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  bool enabled_;
  at::ScalarType dtype_;
};

}  // namespace fusegrad::testing
