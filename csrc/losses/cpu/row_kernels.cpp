// The CPU's row kernels: the choice of the instruction set, the split over threads, and the small reductions.
#include <limits>
#include <memory>
#include <type_traits>

#include "common/capability.h"
#include "common/division.h"
#include "common/host.h"
#include "losses/cpu/product.h"
#include "losses/cpu/row_range.h"

namespace fusegrad {
namespace {

const cpu::RowRangeKernels& range_kernels() {
  static const cpu::RowRangeKernels& chosen =
      cpu::for_this_machine(cpu::DEFAULT::kRowRangeKernels, cpu::AVX2::kRowRangeKernels, cpu::AVX512::kRowRangeKernels);
  return chosen;
}

const cpu::RowPartKernels& part_kernels() {
  static const cpu::RowPartKernels& chosen =
      cpu::for_this_machine(cpu::DEFAULT::kRowPartKernels, cpu::AVX2::kRowPartKernels, cpu::AVX512::kRowPartKernels);
  return chosen;
}

cpu::JsdRange jsd_range() {
  static const cpu::JsdRange chosen =
      cpu::for_this_machine(cpu::DEFAULT::kJsdRange, cpu::AVX2::kJsdRange, cpu::AVX512::kJsdRange);
  return chosen;
}

// Rows a thread should at least have: about 32 K elements, the work that is worth a thread.
int64_t grain(int64_t cols) { return 1 + (int64_t{1} << 15) / (cols + 1); }

const cpu::Host& host_of(void* stream) { return *static_cast<const cpu::Host*>(stream); }

template <class Params>
void over_rows(const Params& p, DType dtype, void* stream, void (*kernel)(const Params&, DType, int64_t, int64_t)) {
  cpu::parallel_for(host_of(stream), p.rows, grain(p.cols),
                    [&](int64_t begin, int64_t end) { kernel(p, dtype, begin, end); });
}

int64_t acc_size(DType dtype) { return dtype == DType::kFloat64 ? sizeof(double) : sizeof(float); }
int64_t padded(int64_t cols) { return round_up(cols, cpu::kPadding); }

// Not initialised: pages that nothing needs are never touched.
std::unique_ptr<double[]> scratch_of(int64_t bytes) {
  return std::unique_ptr<double[]>(new double[ceil_div(static_cast<size_t>(bytes), sizeof(double))]);
}

void forward(const RowForward& p, DType dtype, void* stream) {
  cpu::parallel_for(host_of(stream), p.rows, grain(p.cols), [&](int64_t begin, int64_t end) {
    const auto scratch = p.grad != nullptr ? scratch_of(padded(p.cols) * acc_size(dtype)) : nullptr;
    range_kernels().forward(p, dtype, begin, end, scratch.get());
  });
}
void gradient(const RowGradient& p, DType dtype, void* stream) {
  over_rows(p, dtype, stream, range_kernels().gradient);
}
void tangents(const RowTangents& p, DType dtype, void* stream) {
  over_rows(p, dtype, stream, range_kernels().tangents);
}
void scaling(const RowScaling& p, DType dtype, void* stream) { over_rows(p, dtype, stream, range_kernels().scaling); }

void part(const RowPart& p, DType dtype, void* stream) { over_rows(p, dtype, stream, part_kernels().part); }
void whole(const RowWhole& p, DType dtype, void* stream) { over_rows(p, dtype, stream, part_kernels().whole); }

void jsd(const RowJsd& p, DType dtype, void* stream) {
  const int64_t bytes =
      cpu::kJsdBuffers * padded(p.cols) * acc_size(dtype) + 3 * (p.topk + 1) * static_cast<int64_t>(sizeof(double));
  cpu::parallel_for(host_of(stream), p.rows, grain(p.cols),
                    [&](int64_t begin, int64_t end) { jsd_range()(p, dtype, begin, end, scratch_of(bytes).get()); });
}

void jsd_tangents(const RowJsdTangents& p, DType dtype, void* stream) {
  static const cpu::JsdTangentsRange range = cpu::for_this_machine(
      cpu::DEFAULT::kJsdTangentsRange, cpu::AVX2::kJsdTangentsRange, cpu::AVX512::kJsdTangentsRange);
  const int64_t bytes = cpu::kJsdTangentBuffers * padded(p.cols) * acc_size(dtype);
  cpu::parallel_for(host_of(stream), p.rows, grain(p.cols),
                    [&](int64_t begin, int64_t end) { range(p, dtype, begin, end, scratch_of(bytes).get()); });
}

template <class Function>
void with_acc(DType dtype, Function&& function) {
  if (dtype == DType::kFloat64) {
    function(double{});
  } else {
    function(float{});
  }
}

template <class Acc>
double total_of(const Acc* values, int64_t count) {
  double total = 0;
  for (int64_t n = 0; n < count; ++n) total += static_cast<double>(values[n]);
  return total;
}

void scales(const RowScales& p, DType dtype, void*) {
  with_acc(dtype, [&](auto zero) {
    using Acc = decltype(zero);
    const auto& t = p.targets;
    const auto* class_weight = static_cast<const Acc*>(t.class_weight);
    int64_t kept = p.rows;
    double weight = static_cast<double>(p.rows);
    if (t.index != nullptr) {
      kept = 0;
      weight = 0;
      for (int64_t n = 0; n < p.rows; ++n) {
        const int64_t y =
            t.index_is_int32 ? static_cast<const int32_t*>(t.index)[n] : static_cast<const int64_t*>(t.index)[n];
        if (y == t.ignore_index) continue;
        ++kept;
        weight += class_weight != nullptr ? static_cast<double>(class_weight[y]) : 1.0;
      }
    }
    double count = static_cast<double>(kept);
    if (p.normalizer != nullptr) weight = count = static_cast<double>(*static_cast<const Acc*>(p.normalizer));
    count *= p.values_per_row;
    weight *= p.values_per_row;
    auto* out = static_cast<Acc*>(p.out);
    out[0] = p.defer ? Acc(1) : static_cast<Acc>(1 / weight);
    out[1] = p.defer ? static_cast<Acc>(weight / count) : static_cast<Acc>(1 / count);
    out[2] = !p.defer ? Acc(1) : weight == 0 ? Acc(0) : static_cast<Acc>(1 / weight);
    out[3] = static_cast<Acc>(weight);
    if (p.mean_loss != nullptr) {
      const double mean = total_of(static_cast<const Acc*>(p.loss), p.rows) / weight;
      *static_cast<Acc*>(p.mean_loss) = weight == 0 ? std::numeric_limits<Acc>::quiet_NaN() : static_cast<Acc>(mean);
    }
  });
}

void sum(const RowSum& p, DType dtype, void*) {
  with_acc(dtype, [&](auto zero) {
    using Acc = decltype(zero);
    double total = total_of(static_cast<const Acc*>(p.loss), p.rows);
    if (p.factor != nullptr) total *= static_cast<double>(*static_cast<const Acc*>(p.factor));
    if (p.nan_if_zero != nullptr && *static_cast<const Acc*>(p.nan_if_zero) == 0) {
      total = std::numeric_limits<double>::quiet_NaN();
    }
    *static_cast<Acc*>(p.out) = static_cast<Acc>(total);
  });
}

}  // namespace

const RowKernels kCpuRowKernels = {forward,  gradient,     scales, sum,   scaling,         jsd,
                                   tangents, jsd_tangents, part,   whole, cpu::kRowStates, cpu::product};

}  // namespace fusegrad
