// Launches of the Jensen-Shannon divergences over whole rows.
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "cuda/losses/device/jsd.cuh"
#include "cuda/losses/device/jsd_cluster.cuh"
#include "cuda/losses/device/jsd_log_probs.cuh"
#include "cuda/losses/device/jsd_topk.cuh"
#include "cuda/losses/host/row_launch.cuh"

namespace fusegrad::cuda {
namespace {

using device::Jsd;
using device::JsdConstants;
using device::JsdOfLogProbs;

/// Whether one split of a row into vectors suits all rows of the call.
bool same_alignments(const RowJsd& p, int64_t size) {
  const auto same = [&](const void* other, int64_t stride) {
    return other == nullptr || same_alignment(p.student, p.student_stride, other, stride, size);
  };
  return (p.teacher_index != nullptr || same(p.teacher, p.teacher_stride)) &&
         same(p.grad_student, p.grad_student_stride) && same(p.grad_teacher, p.grad_teacher_stride);
}

template <class Loss, class T, int kWidth>
void launch_jsd(const RowJsd& p, void* stream) {
  const Rows rows{p.rows, p.cols, p.student, p.student_stride, p.grad_student != nullptr || p.grad_teacher != nullptr};
  launch_rows<Loss, T, kWidth>(rows, p, JsdConstants(p), stream);
}

/// The K logits of each row. Padding, -1, has none; an index out of range gives NaN, which makes the row's loss NaN.
template <class T>
__global__ void gather_kernel(const __grid_constant__ RowJsd p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.rows * p.topk) return;
  const int64_t row = i / p.topk, c = static_cast<const int64_t*>(p.teacher_index)[i];
  const auto* student = static_cast<const T*>(p.student) + row * p.student_stride;
  static_cast<float*>(p.topk_logits)[i] = c >= 0 && c < p.cols ? device::widen(student[c])
                                          : c == -1            ? device::minus_infinity()
                                                               : device::not_a_number();
}

template <class T, int kWidth, bool kPlain>
void launch_topk(const RowJsd& p, void* stream) {
  constexpr int kThreads = 256;
  launch("gather_kernel", gather_kernel<T>, {(p.rows * p.topk + kThreads - 1) / kThreads, kThreads}, stream, p);
  launch_jsd<device::JsdTopK<T, kWidth, kPlain>, T, kWidth>(p, stream);
}

using device::JsdKind;

/// How many clusters are on the device at a time. Asked once for each kind of launch: the answer takes longer than a
/// launch.
int clusters_at_a_time(const void* kernel, const Grid& grid) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int, int>, int> known;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [it, fresh] = known.try_emplace({device, kernel, grid.cluster, grid.shared_bytes}, 0);
  if (fresh) {
    const LaunchConfig launch("jsd_by_cluster", kernel, grid, nullptr);
    check(cudaOccupancyMaxActiveClusters(&it->second, kernel, &launch.config), "cudaOccupancyMaxActiveClusters");
  }
  return it->second;
}

/// Whether a kernel of persistent clusters took the rows: 16-bit rows too long for a CTA's registers that a cluster can
/// hold. The caller has checked that T and the options suit it.
template <class T, JsdKind kKind, bool kLogProbs>
bool launched_by_cluster(const RowJsd& p, void* stream) {
  constexpr int kWidth = 16 / sizeof(T), kWarps = device::kJsdWarps, kVectors = 32 * device::kJsdVectors;
  // A multiple of a warp's vectors; logits go by steps of a warp.
  constexpr int kStep = kLogProbs ? 8 : 32;
  const auto& gpu = current_device();
  const bool lines = is_aligned(p.student, p.student_stride, sizeof(T), device::kLineBytes);
  const int64_t vectors = (p.cols + kWidth - 1) / kWidth + (lines ? 0 : device::kLineBytes / 16);
  Grid grid{0, 32 * kWarps, 2};
  const auto span = [&] {
    const int64_t step = kStep * kWarps * grid.cluster;
    return (vectors + step - 1) / step * kStep;
  };
  // Larger clusters leave multiprocessors idle; rows that start anywhere cost warps with cut vectors their uniformity.
  // Log-probabilities, whose merge nothing waits for, bear both.
  const int most = kLogProbs ? gpu.cluster : std::min(gpu.cluster, device::kJsdMaxCluster);
  if (!kLogProbs && !is_aligned(p.student, p.student_stride, sizeof(T), device::kUnitBytes)) return false;
  while (grid.cluster < most && span() > kVectors) grid.cluster *= 2;
  // Few rows are each spread over multiprocessors that would idle.
  while (grid.cluster < std::min(gpu.cluster, kPortableCluster) && p.rows * grid.cluster * 2 <= gpu.multiprocessors &&
         span() > 32) {
    grid.cluster *= 2;
  }
  if (most < grid.cluster || span() > kVectors) return false;
  if (p.rows > INT32_MAX / 4) return false;  // counted in 32 bits
  const auto launch_kernel = [&](auto* kernel, const auto& split) {
    const int clusters = clusters_at_a_time(reinterpret_cast<const void*>(kernel), grid);
    if (clusters == 0) return false;
    grid.blocks = std::min<int64_t>(p.rows, clusters) * grid.cluster;
    launch("jsd_by_cluster", kernel, grid, stream, p, JsdConstants(p), split);
    return true;
  };
  grid.blocks = grid.cluster;
  const int width = static_cast<int>(span());
  if constexpr (kLogProbs) {
    constexpr int kStatic = 10 << 10;  // its own shared memory, and what each CTA takes beside
    const int slot_bytes = 2 * kWarps * width * 16;
    if (slot_bytes + kStatic > gpu.shared_bytes) return false;
    const int room = gpu.shared_of_multiprocessor / device::kJsdCtas - kStatic;
    const int slots = std::clamp(room / slot_bytes, 1, device::kJsdMaxSlots);
    grid.shared_bytes = slots * slot_bytes;
    return launch_kernel(device::log_prob_jsd_by_cluster<T, kKind>, device::JsdSlots{width, slots});
  } else {
    grid.shared_bytes = device::kJsdSharedBytes;
    if (grid.shared_bytes > gpu.shared_bytes) return false;
    return launch_kernel(device::jsd_by_cluster<T, kKind>, device::JsdSplit{width, lines});
  }
}

/// Whether jsd_by_cluster took aligned rows with plain transforms.
template <class T, bool kLogProbs>
bool launched_by_cluster(const RowJsd& p, void* stream) {
  if constexpr (sizeof(T) == 2) {
    if (p.cols <= device::kShortRowThreads * device::kShortRowVectors * 16 / sizeof(T)) return false;
    if (p.beta == 0.0) return launched_by_cluster<T, JsdKind::kForward, kLogProbs>(p, stream);
    if (p.beta == 1.0) return launched_by_cluster<T, JsdKind::kReverse, kLogProbs>(p, stream);
    return launched_by_cluster<T, JsdKind::kMixed, kLogProbs>(p, stream);
  }
  return false;
}

}  // namespace

void row_jsd(const RowJsd& p, DType dtype, void* stream) {
  if (p.rows == 0 || p.cols == 0) return;
  check_columns("jsd", p.cols);
  const auto is_plain = [](const LogitTransform& t) { return t.cap == 0.0 && t.scale > 0.0; };
  const bool plain = is_plain(p.student_transform) && is_plain(p.teacher_transform) && p.grad_teacher == nullptr &&
                     ((p.hard_weight == 0.0 && p.hard == nullptr) || p.student_temperature == 1.0);
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = 16 / sizeof(T);
    // What is fast for 16 bits has no digits for so small a loss.
    const bool fast = sizeof(T) == 4 || !JsdConstants::is_near_end(p.beta);
    const bool aligned = same_alignments(p, sizeof(T));
    if (p.teacher_index != nullptr) {
      if (plain && aligned) return launch_topk<T, kWidth, true>(p, stream);
      aligned ? launch_topk<T, kWidth, false>(p, stream) : launch_topk<T, 1, false>(p, stream);
    } else if (p.log_probs) {
      if (fast && aligned && p.grad_teacher == nullptr && launched_by_cluster<T, true>(p, stream)) return;
      aligned ? launch_jsd<JsdOfLogProbs<T>, T, kWidth>(p, stream) : launch_jsd<JsdOfLogProbs<T>, T, 1>(p, stream);
    } else if (fast && plain && aligned) {
      if (!launched_by_cluster<T, false>(p, stream)) launch_jsd<Jsd<T, true>, T, kWidth>(p, stream);
    } else {
      aligned ? launch_jsd<Jsd<T, false>, T, kWidth>(p, stream) : launch_jsd<Jsd<T, false>, T, 1>(p, stream);
    }
  });
}

}  // namespace fusegrad::cuda
