// The row kernels as XLA's custom calls. python/fusegrad/jax/_rows.py calls them and says what they return; formulas in
// losses/row_kernels.h. An optional array is absent where it has no elements.
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "jax/handler.h"
#include "losses/linear_plan.h"

namespace fusegrad::jax {

// The attributes of the handlers. `op` is who is to blame in errors.
struct Loss {
  std::string_view op;
  int64_t ignore_index;
  double label_smoothing, z_loss, softcap, logit_scale;
};
struct Scaling {
  std::string_view op;
  int64_t rows, vocab, ignore_index;
  double values_per_row;
  bool defer;
};
struct Reduction {
  bool factor, nan_if_zero;
};
struct Divergence {
  std::string_view op;
  int64_t ignore_index;
  double beta, temperature, soft_weight, hard_weight;
  bool log_probs, grad_student, grad_teacher;
};

}  // namespace fusegrad::jax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(fusegrad::jax::Loss, FUSEGRAD_TEXT(op), FUSEGRAD_INT(ignore_index),
                                      FUSEGRAD_REAL(label_smoothing), FUSEGRAD_REAL(z_loss), FUSEGRAD_REAL(softcap),
                                      FUSEGRAD_REAL(logit_scale));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(fusegrad::jax::Scaling, FUSEGRAD_TEXT(op), FUSEGRAD_INT(rows),
                                      FUSEGRAD_INT(vocab), FUSEGRAD_INT(ignore_index), FUSEGRAD_REAL(values_per_row),
                                      FUSEGRAD_BOOL(defer));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(fusegrad::jax::Reduction, FUSEGRAD_BOOL(factor), FUSEGRAD_BOOL(nan_if_zero));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(fusegrad::jax::Divergence, FUSEGRAD_TEXT(op), FUSEGRAD_INT(ignore_index),
                                      FUSEGRAD_REAL(beta), FUSEGRAD_REAL(temperature), FUSEGRAD_REAL(soft_weight),
                                      FUSEGRAD_REAL(hard_weight), FUSEGRAD_BOOL(log_probs), FUSEGRAD_BOOL(grad_student),
                                      FUSEGRAD_BOOL(grad_teacher));

namespace fusegrad::jax {
namespace {

DType dtype_of(const Array& array) {
  switch (array.element_type()) {
    case ffi::F32:
      return DType::kFloat32;
    case ffi::BF16:
      return DType::kBFloat16;
    case ffi::F16:
      return DType::kFloat16;
    case ffi::F64:
      return DType::kFloat64;
    default:
      throw std::invalid_argument("fusegrad.jax: a custom call must get floating logits");
  }
}

struct Matrix {
  int64_t rows, cols;
  explicit Matrix(const Array& array) {
    require(array.dimensions().size() == 2, "a matrix of logits");
    rows = array.dimensions()[0];
    cols = array.dimensions()[1];
  }
};

bool is_floating(const Array& array) { return array.element_type() != ffi::S32 && array.element_type() != ffi::S64; }

int64_t index_at(const Array& index, int64_t n) {
  return index.element_type() == ffi::S32 ? index.typed_data<int32_t>()[n] : index.typed_data<int64_t>()[n];
}

// The CPU's kernels use an index without a check.
void check_range(const Device& device, std::string_view op, const char* name, const Array& index, int64_t vocab,
                 int64_t ignore_index) {
  if (!device.cpu) return;
  for (int64_t n = 0; n < static_cast<int64_t>(index.element_count()); ++n) {
    const int64_t y = index_at(index, n);
    if (y == ignore_index || (y >= 0 && y < vocab)) continue;
    throw std::out_of_range(std::string(op) + ": " + name + " must be in [0, " + std::to_string(vocab) +
                            ") or ignore_index (" + std::to_string(ignore_index) + "), but got " + std::to_string(y));
  }
}

RowTargets targets(const Array& target, const Array& class_weight, const Array& token_weight, const Loss& loss,
                   DType logits) {
  RowTargets t;
  if (is_floating(target)) {
    const auto dtype = dtype_of(target);
    t.probability = data(target);
    t.probability_is_acc = dtype != logits || dtype == DType::kFloat32 || dtype == DType::kFloat64;
    t.probability_stride = Matrix(target).cols;
  } else {
    t.index = data(target);
    t.index_is_int32 = target.element_type() == ffi::S32;
  }
  t.class_weight = data(class_weight);
  t.token_weight = data(token_weight);
  t.ignore_index = loss.ignore_index;
  t.smoothing = loss.label_smoothing;
  t.dense = is_floating(target) || (t.class_weight != nullptr && loss.label_smoothing > 0.0);
  return t;
}

void forward(const Device& device, const Loss& loss, Array logits, Array target, Array class_weight, Array token_weight,
             Array scales, Result row_loss, Result lse, Result lse_low, Result mass, ffi::RemainingRets gradient) {
  const Matrix shape(logits);
  const auto dtype = dtype_of(logits);
  RowForward p;
  p.rows = shape.rows;
  p.cols = shape.cols;
  p.targets = targets(target, class_weight, token_weight, loss, dtype);
  if (p.targets.index != nullptr) check_range(device, loss.op, "target", target, p.cols, loss.ignore_index);
  p.logits = data(logits);
  p.logits_stride = p.cols;
  if (!gradient.empty()) {
    p.grad = data(**gradient.get<Array>(0));
    p.grad_stride = p.cols;
  }
  p.transform = {loss.logit_scale, loss.softcap};
  p.z_loss = loss.z_loss;
  p.scales = data(scales);
  p.loss = data(*row_loss);
  p.lse = data(*lse);
  p.lse_low = data(*lse_low);
  p.mass = data(*mass);
  device.kernels->forward(p, dtype, device.stream);
}

void gradient(const Device& device, const Loss& loss, Array logits, Array target, Array class_weight,
              Array token_weight, Array scales, Array lse, Array lse_low, Array mass, Array grad_loss, Result grad) {
  const Matrix shape(logits);
  const auto dtype = dtype_of(logits);
  RowGradient p;
  p.rows = shape.rows;
  p.cols = p.vocab = shape.cols;
  p.logits = data(logits);
  p.logits_stride = p.cols;
  p.grad = data(*grad);
  p.grad_stride = p.cols;
  p.targets = targets(target, class_weight, token_weight, loss, dtype);
  p.transform = {loss.logit_scale, loss.softcap};
  p.z_loss = loss.z_loss;
  p.scales = data(scales);
  p.lse = data(lse);
  p.lse_low = data(lse_low);
  p.mass = data(mass);
  p.grad_loss = data(grad_loss);
  p.grad_loss_stride = grad_loss.dimensions().size() == 0 ? 0 : 1;
  device.kernels->gradient(p, dtype, device.stream);
}

void scales(const Device& device, const Scaling& s, Array index, Array class_weight, Array normalizer, Result out) {
  RowScales p;
  p.rows = s.rows;
  p.cols = s.vocab;
  p.targets.index = data(index);
  p.targets.index_is_int32 = index.element_type() == ffi::S32;
  p.targets.class_weight = data(class_weight);
  p.targets.ignore_index = s.ignore_index;
  if (p.targets.index != nullptr) check_range(device, s.op, "target", index, p.cols, s.ignore_index);
  p.normalizer = data(normalizer);
  p.values_per_row = s.values_per_row;
  p.defer = s.defer;
  p.out = data(*out);
  device.kernels->scales(p, dtype_of(*out), device.stream);
}

void sum(const Device& device, const Reduction& r, Array loss, Array scales, Result out) {
  RowSum p;
  p.rows = static_cast<int64_t>(loss.element_count());
  p.loss = data(loss);
  const auto dtype = dtype_of(*out);
  const int64_t size = dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  const auto* four = static_cast<const char*>(data(scales));
  require(four != nullptr || !(r.factor || r.nan_if_zero), "scales");
  if (r.factor) p.factor = four + 2 * size;
  if (r.nan_if_zero) p.nan_if_zero = four + 3 * size;
  p.out = data(*out);
  device.kernels->sum(p, dtype, device.stream);
}

void jsd(const Device& device, const Divergence& d, Array student, Array teacher, Array labels, Array token_weight,
         Array scales, Result row_loss, ffi::RemainingRets gradients) {
  const Matrix shape(student);
  RowJsd p;
  p.rows = shape.rows;
  p.cols = shape.cols;
  p.student = data(student);
  p.teacher = data(teacher);
  p.student_stride = p.teacher_stride = p.grad_student_stride = p.grad_teacher_stride = p.cols;
  p.log_probs = d.log_probs;
  p.student_temperature = p.teacher_temperature = d.temperature;
  p.beta = d.beta;
  p.soft_weight = d.soft_weight;
  p.hard_weight = d.hard_weight;
  p.label = data(labels);
  p.label_is_int32 = labels.element_type() == ffi::S32;
  p.ignore_index = d.ignore_index;
  if (p.label != nullptr) check_range(device, d.op, "labels", labels, p.cols, d.ignore_index);
  p.token_weight = data(token_weight);
  p.scales = data(scales);
  size_t next = 0;
  if (d.grad_student) p.grad_student = data(**gradients.get<Array>(next++));
  if (d.grad_teacher) p.grad_teacher = data(**gradients.get<Array>(next++));
  p.loss = data(*row_loss);
  device.kernels->jsd(p, dtype_of(student), device.stream);
}

}  // namespace
}  // namespace fusegrad::jax

FUSEGRAD_EXPORT(forward)
FUSEGRAD_EXPORT(gradient)
FUSEGRAD_EXPORT(scales)
FUSEGRAD_EXPORT(sum)
FUSEGRAD_EXPORT(jsd)

// The jaxlib whose headers these handlers were compiled with. Older ones refuse them.
extern "C" const char* fusegrad_jax_jaxlib_version() { return FUSEGRAD_JAXLIB_VERSION; }

// Rows of logits that linear_cross_entropy holds at a time. See losses/linear_plan.h; a budget below 0 is none.
extern "C" int64_t fusegrad_jax_plan(int64_t rows, int64_t hidden, int64_t vocab, int64_t element_size, bool cpu,
                                     bool weight_grad, bool low_precision_result, int64_t workspace_mib) {
  fusegrad::LinearSizes sizes;
  sizes.rows = rows;
  sizes.hidden = hidden;
  sizes.vocab = vocab;
  sizes.element_size = element_size;
  sizes.cpu = cpu;
  sizes.weight_grad = weight_grad;
  sizes.low_precision_result = low_precision_result;
  sizes.by_columns = false;
  const auto budget = workspace_mib < 0 ? std::nullopt : std::optional<int64_t>(workspace_mib);
  return fusegrad::plan_linear(sizes, fusegrad::budget_bytes(budget)).rows;
}
