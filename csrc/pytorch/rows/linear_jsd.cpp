// linear_jsd_forward(_), linear_jsd_backward and linear_jsd_second on the CPU and on CUDA: matrix products by ATen, in
// chunks, around the row kernels. linear_cross_entropy_second.cpp has the formulas of the last.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "common/division.h"
#include "pytorch/ops/faults.h"
#include "pytorch/rows/jsd_job.h"
#include "pytorch/rows/linear.h"

namespace fusegrad {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

OptionalTensor first_rows(const OptionalTensor& tensor, int64_t count) {
  return tensor.has_value() ? OptionalTensor(part(*tensor, 0, 0, count)) : std::nullopt;
}

/// What forward and backward have alike.
struct Call {
  const Tensor& input;
  const JsdHeads& heads;
  const LinearJsdOptions& linear;
  const Shards& shards;

  /// Rows of the weights that count; of the vocabulary that processes share.
  int64_t vocab = linear.vocab_size.value_or(heads.student_weight.size(0));
  int64_t whole() const { return shards ? shards.vocab() : vocab; }
  int64_t rows() const { return input.size(0); }
  at::ScalarType dtype() const { return product_type(input); }

  /// `more`: logits of the student's side beside one.
  LinearPlan plan(bool weight_grad, int64_t more = 0) const {
    LinearSizes sizes;
    sizes.rows = rows();
    sizes.hidden = input.size(1);
    sizes.vocab = shards ? shards.largest() : vocab;
    sizes.element_size = static_cast<int64_t>(at::elementSize(dtype()));
    sizes.cpu = input.is_cpu();
    sizes.weight_grad = weight_grad;
    sizes.low_precision_result =
        heads.student_weight.scalar_type() != linear.accumulate_dtype.value_or(acc_type(dtype()));
    sizes.by_columns = false;
    sizes.logits_per_row = 1 + more;
    if (heads.teacher_weight.has_value()) {
      ++sizes.logits_per_row;
      // Logits of another dtype are rounded from a buffer of their own.
      const auto size = static_cast<int64_t>(at::elementSize(product_type(heads.teacher)));
      if (product_type(heads.teacher) != dtype()) {
        sizes.logits_per_row += ceil_div(size, sizes.element_size);
      }
    }
    // Some ten tensors of a chunk's logits are held at a time.
    if (shards) sizes.logits_per_row = 10;
    return plan_linear(sizes, budget_bytes(linear.workspace_mib));
  }
};

/// The teacher's logits of chunks, or its log-probabilities.
class TeacherChunks {
 public:
  TeacherChunks(const Call& call, int64_t rows) : input_(call.heads.teacher) {
    if (!call.heads.teacher_weight.has_value()) return;
    const auto product = product_type(input_);
    head_.emplace(part(*call.heads.teacher_weight, 0, 0, call.vocab), first_rows(call.heads.teacher_bias, call.vocab),
                  product);
    logits_ = logits_buffer(rows, call.vocab, input_.options().dtype(call.dtype()));
    if (product != call.dtype()) own_ = logits_buffer(rows, call.vocab, input_.options().dtype(product));
  }

  Tensor rows(int64_t first, int64_t count) const {
    const auto x = part(input_, 0, first, count);
    if (!head_.has_value()) return x;
    const auto z = part(logits_, 0, 0, count);
    const auto own = own_.defined() ? part(own_, 0, 0, count) : z;
    head_->logits(own, x.to(own.scalar_type()), 0);
    if (own_.defined()) z.copy_(own);
    return z;
  }

 private:
  Tensor input_;
  std::optional<Head> head_;
  Tensor logits_, own_;
};

LinearGradients compute(JsdJob& job, const Call& call, std::array<bool, 3> needs_grad, bool inplace) {
  const auto plan = call.plan(needs_grad[1]);
  const bool any_gradient = needs_grad[0] || needs_grad[1] || needs_grad[2];
  ChunkGradients gradients(call.input, call.heads.student_weight, call.heads.student_bias, call.vocab, plan, needs_grad,
                           inplace);
  gradients.set_shards(call.shards, call.linear.accumulate_dtype);
  if ((call.vocab != 0 || call.shards) && call.rows() != 0) {
    const Head head(part(call.heads.student_weight, 0, 0, call.vocab), first_rows(call.heads.student_bias, call.vocab),
                    call.dtype());
    const int64_t chunk = std::min(plan.rows, call.rows());
    const TeacherChunks teacher(call, chunk);
    const auto buffer = logits_buffer(chunk, call.vocab, call.input.options().dtype(call.dtype()));
    for (int64_t first = 0; first < call.rows(); first += chunk) {
      const int64_t count = std::min(chunk, call.rows() - first);
      const auto z = part(buffer, 0, 0, count);
      const auto x = part(call.input, 0, first, count).to(call.dtype());
      head.logits(z, x, 0);
      job.run(z, teacher.rows(first, count), first, any_gradient ? z : Tensor(), Tensor());
      if (any_gradient) gradients.add(head, x, z, first);
    }
  }
  return gradients.finish();
}

template <bool inplace>
LinearJsdTuple linear_jsd_forward(const LinearJsdForward& arguments) {
  BelowAutogradAndAutocast below;
  const auto& [input, heads, rows, settings, linear, needs_grad, shards, different] = arguments;
  const c10::OptionalDeviceGuard device(at::device_of(input));
  const Call call{input, heads, linear, shards};
  if (rows.labels.has_value()) {
    check_target_range("linear_jsd", *rows.labels, call.whole(), settings.ignore_index, "labels");
  }
  if (rows.teacher_index.has_value()) check_top_k("linear_jsd", heads.teacher, rows, settings, call.whole());
  JsdJob job(rows, settings, call.rows(), call.whole(), call.dtype(), input);
  job.set_shards("linear_jsd", shards, different);
  const bool any_gradient = needs_grad[0] || needs_grad[1] || needs_grad[2];
  job.begin_forward(/*defer=*/any_gradient && input.scalar_type() == at::kHalf);
  auto gradients = compute(job, call, needs_grad, inplace);
  const auto out = job.finish_forward();
  if (inplace) gradients.input = Tensor();
  return std::tuple_cat(std::make_tuple(out.loss, out.stats, out.scales),
                        to_tuple(gradients, input, heads.student_weight, heads.student_bias));
}

LinearGradientTuple linear_jsd_backward(const LinearJsdBackward& arguments) {
  BelowAutogradAndAutocast below;
  const auto& [grad_loss, input, heads, rows, scales, settings, linear, needs_grad, shards, different] = arguments;
  const c10::OptionalDeviceGuard device(at::device_of(input));
  const Call call{input, heads, linear, shards};
  JsdJob job(rows, settings, call.rows(), call.whole(), call.dtype(), input);
  job.set_shards("linear_jsd", shards, different);
  job.begin_backward(scales, grad_loss);
  return to_tuple(compute(job, call, needs_grad, /*inplace=*/false), input, heads.student_weight, heads.student_bias);
}

LinearSecondTuple linear_jsd_second(const LinearJsdSecond& arguments) {
  BelowAutogradAndAutocast below;
  const auto& [input, heads, input_tangent, weight_tangent, bias_tangent, upstream, settings, hard, linear,
               needs_grad] = arguments;
  const c10::OptionalDeviceGuard device(at::device_of(input));
  const Shards whole;
  const Call call{input, heads, linear, whole};
  const auto plan = call.plan(needs_grad[1], /*more=*/2);
  const auto in = [&](const OptionalTensor& t) { return t ? part(*t, 0, 0, call.vocab).to(call.dtype()) : Tensor(); };
  const auto weight_moved = in(weight_tangent), bias_moved = in(bias_tangent);
  ChunkGradients chunks(input, heads.student_weight, heads.student_bias, call.vocab, plan, needs_grad,
                        /*inplace=*/false);
  const auto values = at::zeros({2, call.rows()}, upstream.options());
  const bool any_gradient = needs_grad[0] || needs_grad[1] || needs_grad[2];
  const bool more = weight_moved.defined() || input_tangent.has_value();
  const int64_t most = std::min(plan.rows, call.rows());
  const Head head(part(heads.student_weight, 0, 0, call.vocab), first_rows(heads.student_bias, call.vocab),
                  call.dtype());
  const TeacherChunks teacher(call, most);
  const auto options = input.options().dtype(call.dtype());
  const auto buffer = logits_buffer(most, call.vocab, options), moved = logits_buffer(most, call.vocab, options);
  for (int64_t first = 0; first < call.rows(); first += plan.rows) {
    const int64_t count = std::min(plan.rows, call.rows() - first);
    const auto rows_of = [&](const Tensor& t, int64_t dim = 0) { return part(t, dim, first, count); };
    const auto x = rows_of(input).to(call.dtype()), z = part(buffer, 0, 0, count), z_moved = part(moved, 0, 0, count);
    const auto x_moved = input_tangent ? rows_of(*input_tangent).to(call.dtype()) : Tensor();
    head.logits(z, x, 0);
    logits_tangent(z_moved, x, x_moved, head.weight, weight_moved, bias_moved);
    const auto of_teacher = teacher.rows(first, count);
    auto s = settings;
    if (s.labels) s.labels = rows_of(*s.labels);
    const auto u = rows_of(upstream, 1), found = rows_of(values, 1);
    const std::array student_alone{true, false};
    found[0].copy_(dispatch::jsd_soft(JsdSoftTangent{z, of_teacher, z_moved, std::nullopt, s}));
    Tensor g, g_moved;
    if (any_gradient) {
      g_moved = dispatch::jsd_soft(
          JsdSoftSecond{z, of_teacher, u[0], z_moved, std::nullopt, std::nullopt, student_alone, s})[0];
      if (more) g = dispatch::jsd_soft(JsdSoftGradient{z, of_teacher, u[0], student_alone, s})[0];
    }
    if (hard) {
      const RowSettings of_label{
          .target = *s.labels, .weight = {}, .ignore_index = s.ignore_index, .softcap = s.student_softcap};
      const auto stats = std::get<1>(dispatch::cross_entropy_rows(CrossEntropyRows{z, of_label}));
      found[1].copy_(
          dispatch::cross_entropy_rows(CrossEntropyRowsTangent{z, z_moved, stats, of_label})[kRowCrossEntropy]);
      auto v = at::zeros({kRowValues, count}, upstream.options());
      v[kRowCrossEntropy].copy_(u[1]);
      if (g_moved.defined()) {
        g_moved.add_(
            dispatch::cross_entropy_rows(CrossEntropyRowsSecond{z, v, z_moved, std::nullopt, stats, of_label}));
      }
      if (g.defined()) g.add_(dispatch::cross_entropy_rows(CrossEntropyRowsGradient{z, v, stats, of_label}));
    }
    if (g_moved.defined()) chunks.add(head, x, g_moved, first);
    if (g.defined()) chunks.add_more(weight_moved, x_moved, g, first);
  }
  return std::tuple_cat(std::tuple(values), to_tuple(chunks.finish(), input, heads.student_weight, heads.student_bias));
}

void implement_linear_jsd(torch::Library& m) {
  m.impl("linear_jsd_forward", named_kernel<"linear_jsd", unpacked<linear_jsd_forward<false>>()>());
  m.impl("linear_jsd_forward_", named_kernel<"linear_jsd", unpacked<linear_jsd_forward<true>>()>());
  m.impl("linear_jsd_second", named_kernel<"linear_jsd", unpacked<linear_jsd_second>()>());
  m.impl("linear_jsd_backward", named_kernel<"linear_jsd", unpacked<linear_jsd_backward>()>());
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { implement_linear_jsd(m); }
#ifdef FUSEGRAD_WITH_CUDA
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { implement_linear_jsd(m); }
#endif

}  // namespace fusegrad
