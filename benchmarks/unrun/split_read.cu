// Which way of reading a cache of keys and values reaches DRAM's rate. No arithmetic.
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <cuda_runtime.h>
#define CK(x) do { cudaError_t e_ = (x); if (e_) { printf("%s: %s\n", #x, cudaGetErrorString(e_)); exit(1); } } while (0)
__device__ __forceinline__ void cp16(unsigned to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ void cp16p(unsigned to, const void* from) { asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
template <int n> __device__ __forceinline__ void waitg() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk(unsigned to, const void* from, int bytes, unsigned bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void expect(unsigned bar, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void waitb(unsigned bar, unsigned parity) {
  asm volatile("{\n.reg .pred p;\nL:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ long long now() { long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
struct A { const char *k, *v; int keys, splits; bool strided; long long* end; int delay; };
// mode 0: each warp its own keys (cp.async); 1: the CTA together; 2: bulk by warp; 3: bulk by CTA
template <int kWarps, int kStages, int kKeys, int kMode, int kPrefetch>
__global__ void __launch_bounds__(kWarps * 32) reads(A a) {
  extern __shared__ __align__(128) char mem[];
  const unsigned base = (unsigned)__cvta_generic_to_shared(mem);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int unit = blockIdx.x / a.splits, split = blockIdx.x % a.splits;
  constexpr int kTile = kKeys * kWarps, kRow = 256;
  const int tiles = a.keys / kTile;
  int first, count, step;
  if (a.strided) { first = split; step = a.splits; count = (tiles - split + a.splits - 1) / a.splits; }
  else { const int some = tiles / a.splits, more = tiles % a.splits; first = split * some + min(split, more); count = some + (split < more); step = 1; }
  const char* k = a.k + (long long)unit * a.keys * kRow; const char* v = a.v + (long long)unit * a.keys * kRow;
  constexpr int kPart = kKeys * kRow;             // of a warp
  constexpr int kStage = 2 * kPart * kWarps;      // of the CTA
  __shared__ unsigned long long bars[kWarps * kStages];
  const unsigned bar0 = (unsigned)__cvta_generic_to_shared(bars);
  if (kMode >= 2) {
    if (threadIdx.x < kWarps * kStages) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar0 + 8 * threadIdx.x));
    asm volatile("fence.mbarrier_init.release.cluster;");
    __syncthreads();
  }
  float sum = 0;
  auto load = [&](int i) {
    const int s = i % kStages;
    const long long at = (long long)(first + i * step) * kTile * kRow;
    const unsigned to = base + s * kStage;
    if (kMode == 0) {
#pragma unroll
      for (int j = 0; j < kPart / 512; ++j) { const int off = warp * kPart + j * 512 + lane * 16; if (kPrefetch) cp16p(to + off, k + at + off); else cp16(to + off, k + at + off); }
#pragma unroll
      for (int j = 0; j < kPart / 512; ++j) { const int off = warp * kPart + j * 512 + lane * 16; if (kPrefetch) cp16p(to + kStage / 2 + off, v + at + off); else cp16(to + kStage / 2 + off, v + at + off); }
    } else if (kMode == 1) {
#pragma unroll
      for (int j = 0; j < kPart / 512; ++j) { const int off = j * 512 * kWarps + threadIdx.x * 16; cp16(to + off, k + at + off); }
#pragma unroll
      for (int j = 0; j < kPart / 512; ++j) { const int off = j * 512 * kWarps + threadIdx.x * 16; cp16(to + kStage / 2 + off, v + at + off); }
    } else if (kMode == 2) {
      if (lane == 0) {
        const unsigned b = bar0 + 8 * (warp * kStages + s);
        expect(b, 2 * kPart);
        bulk(to + warp * kPart, k + at + warp * kPart, kPart, b);
        bulk(to + kStage / 2 + warp * kPart, v + at + warp * kPart, kPart, b);
      }
    } else if (kMode == 4) {  // bulk row by row
      const unsigned b = bar0 + 8 * (warp * kStages + s);
      if (lane == 0) expect(b, 2 * kPart);
      __syncwarp();
      for (int j = lane; j < 2 * kKeys; j += 32) { const bool isv = j >= kKeys; const int off = warp * kPart + (j % kKeys) * kRow;
        bulk(to + (isv ? kStage / 2 : 0) + off, (isv ? v : k) + at + off, kRow, b); }
    } else {
      if (threadIdx.x == 0) {
        const unsigned b = bar0 + 8 * s;
        expect(b, kStage);
        bulk(to, k + at, kStage / 2, b);
        bulk(to + kStage / 2, v + at, kStage / 2, b);
      }
    }
    if (kMode < 2) commit();
  };
  for (int i = 0; i < kStages - 1; ++i) { if (i < count) load(i); else if (kMode < 2) commit(); }
  for (int i = 0; i < count; ++i) {
    const int s = i % kStages;
    if (kMode < 2) waitg<kStages - 2>(); else waitb(bar0 + 8 * (kMode == 3 ? s : warp * kStages + s), i / kStages & 1);
    if (kMode == 1 || kMode == 3) __syncthreads(); else __syncwarp();
    if (i + kStages - 1 < count) load(i + kStages - 1); else if (kMode < 2) commit();
    sum += *(float*)(mem + s * kStage + warp * kPart + lane * 16);
    if (a.delay) { const long long t = clock64(); while (clock64() - t < a.delay) {} }
  }
  if (sum == 1.2345e30f) a.end[0] = 0;
  if (threadIdx.x == 0) a.end[blockIdx.x] = now();
}
static char *K, *V; static long long* E;
template <int w, int s, int n, int m, int p = 0>
void run(const char* name, int units, int keys, int splits, bool strided, int delay = 0) {
  auto f = reads<w, s, n, m, p>;
  const int bytes = 2 * n * 256 * w * s;
  CK(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int per = 0; CK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per, f, w * 32, bytes));
  if (splits < 0) splits = std::max(1, -splits * 132 * per / units);
  const size_t size = (size_t)units * keys * 256;
  const int copies = std::max(1, std::min(6, (int)(480000000 / (2 * size)) + 1));
  cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
  std::vector<float> times; std::vector<double> spread;
  for (int r = 0; r < 12; ++r) {
    const int c = r % copies;
    A arg{K + c * size, V + c * size, keys, splits, strided, E, delay};
    cudaEventRecord(a);
    f<<<units * splits, w * 32, bytes>>>(arg);
    cudaEventRecord(b); CK(cudaDeviceSynchronize());
    float ms; cudaEventElapsedTime(&ms, a, b); if (r > 2) times.push_back(ms * 1e3);
    std::vector<long long> e(units * splits); CK(cudaMemcpy(e.data(), E, e.size() * 8, cudaMemcpyDeviceToHost));
    std::sort(e.begin(), e.end()); spread.push_back((e.back() - e[e.size() / 10]) * 1e-3);
  }
  std::sort(times.begin(), times.end()); std::sort(spread.begin(), spread.end());
  printf("%-10s w%d s%d n%-3d per SM %d units %d splits %-3d %s: %.1f us %.2f TB/s, 10%% of CTAs ended %.1f before\n", name, w, s, n, per, units, splits, strided ? "strided" : "ranges ", times[times.size() / 2], 2 * size / times[times.size() / 2] * 1e-6, spread[spread.size() / 2]);
}
void all(int units, int keys) {
  for (int strided = 0; strided < 2; ++strided) {
    for (int sp : {-1, -2, -4}) run<4, 3, 16, 0>("warp", units, keys, sp, strided);
    run<4, 2, 16, 0>("warp", units, keys, -1, strided);
    run<4, 3, 16, 0, 1>("warp L2", units, keys, -1, strided);
    run<4, 2, 32, 1>("CTA", units, keys, -1, strided);
    for (int sp : {-1, -2, -4}) run<4, 3, 16, 1>("CTA", units, keys, sp, strided);
    run<8, 2, 16, 1>("CTA", units, keys, -1, strided);
    for (int sp : {-1, -2, -4}) run<4, 3, 16, 2>("bulk warp", units, keys, sp, strided);
    run<4, 3, 16, 4>("bulk rows", units, keys, -1, strided);
    run<4, 3, 16, 3>("bulk CTA", units, keys, -1, strided);
    run<4, 2, 32, 3>("bulk CTA", units, keys, -1, strided);
    run<4, 3, 8, 3>("bulk CTA", units, keys, -1, strided);
  }
}
int main() {
  CK(cudaMalloc(&K, 1100000000)); CK(cudaMalloc(&V, 1100000000)); CK(cudaMalloc(&E, 1 << 22));
  CK(cudaMemset(K, 0, 1100000000)); CK(cudaMemset(V, 0, 1100000000));
  all(8, 8192); printf("\n"); all(128, 8192); printf("\n"); all(512, 4096);
}
