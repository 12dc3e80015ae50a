// The headers that are embedded for NVRTC, and what the compiler reports of kernels.
#include <map>
#include <set>

#include "jit/headers.h"
#include "jit_support.h"

namespace fusegrad::jit {
namespace {

constexpr const char* kArchitectures[] = {"80", "86", "89", "90a", "100", "120"};

/// A kernel with what a header offers. The limits are those of every architecture.
struct HeaderKernel {
  const char* header;
  const char* body;
  int registers;
};
constexpr HeaderKernel kHeaderKernels[] = {
    {"cstdint",
     "uint64_t x = (uint64_t)out; int64_t y = -1; uint32_t z = (uint32_t)(x >> 2); int8_t w = -1;\n"
     "static_assert(sizeof(x) == 8 && sizeof(y) == 8 && sizeof(z) == 4 && sizeof(uint16_t) == 2);\n"
     "out[0] = z + (y < 0) + (w < 0) + (uint8_t)x;",
     16},
    {"cuda/device/bulk.cuh",
     "#if __CUDA_ARCH__ >= 900\n"
     "using namespace fusegrad::device;\n"
     "__shared__ __align__(16) float copy[1024];\n"
     "__shared__ Arrival arrival;\n"
     "if (threadIdx.x == 0) {\n"
     "  arrival.init();\n"
     "  Arrival::fence_init();\n"
     "  arrival.expect(sizeof(copy));\n"
     "  arrival.copy(copy, in, sizeof(copy));\n"
     "}\n"
     "cluster_arrive();\n"
     "cluster_wait();\n"
     "arrival.wait();\n"
     "store_counted(remote_address(copy, 0), uint4{}, remote_address(&arrival, 0));\n"
     "out[threadIdx.x] = copy[threadIdx.x];\n"
     "#endif",
     24},
    {"cuda/device/score_mod.cuh",
     "using namespace fusegrad::device::score_mod;\n"
     "const float x = in[threadIdx.x], y = in[threadIdx.x + 32];\n"
     "const float f = sigmoid(x) + gelu(y) + gelu_tanh(x) + floor_div(x, y) + floor_mod(x, y);\n"
     "const long long i = floor_div(to_int(x), to_int(y)) + shift_left(to_int(x), to_int(y)) + to_int(x > y);\n"
     "const long long size = gridDim.x;\n"
     "const long long at = wrapped(i, size);\n"
     "out[threadIdx.x] = f + maximum(x, minimum(y, f)) + (inside(at, size) ? read(in + at) : 0.0f) +\n"
     "    read((const Float16*)in) + read((const BFloat16*)in) + read((const Bool*)in) + invert(i) + absolute(x);",
     40},
};

std::string source_of(const HeaderKernel& kernel) {
  return "#include <" + std::string(kernel.header) +
         ">\nextern \"C\" __global__ void probe(const float* in, float* out) {\n" + kernel.body + "\n}\n";
}

TEST_F(Jit, EveryHeaderHasAKernelHere) {
  std::set<std::string> embedded, tested;
  for (const Header& header : headers()) embedded.insert(header.name);
  for (const HeaderKernel& kernel : kHeaderKernels) tested.insert(kernel.header);
  EXPECT_EQ(embedded, tested);
}

TEST_F(Jit, HeadersAreTheFilesAndIncludeOnlyOneAnother) {
  std::set<std::string> names;
  for (const Header& header : headers()) names.insert(header.name);
  for (const Header& header : headers()) {
    const bool standard = std::string(header.name) == "cstdint";
    const std::string file = FUSEGRAD_TEST_SOURCE_DIR "/csrc/" + std::string(standard ? "jit/cstdint.h" : header.name);
    EXPECT_EQ(read(file), header.text) << file;
    std::istringstream lines(header.text);
    for (std::string line; std::getline(lines, line);) {
      if (line.find("#include") == std::string::npos) continue;
      const size_t begin = line.find_first_of("\"<") + 1;
      EXPECT_TRUE(names.count(line.substr(begin, line.find_first_of("\">", begin) - begin)))
          << header.name << ": " << line;
    }
  }
}

TEST_F(Jit, HeadersCompileEverywhereWithoutSpills) {
  NEEDS_NVRTC();
  for (const HeaderKernel& kernel : kHeaderKernels) {
    for (const char* architecture : kArchitectures) {
      SCOPED_TRACE(std::string(kernel.header) + " for sm_" + architecture);
      const Compiled compiled = compile_uncached({"probe", source_of(kernel), architecture, {}, ""});
      EXPECT_EQ(compiled.log.find("warning"), std::string::npos) << compiled.log;
      const auto found = resources(compiled.log);
      ASSERT_TRUE(found.count("probe")) << compiled.log;
      EXPECT_GT(found.at("probe").registers, 0);
      EXPECT_LE(found.at("probe").registers, kernel.registers);
      for (const auto& [function, of] : found) {
        EXPECT_EQ(of.spill_store_bytes + of.spill_load_bytes + of.stack_bytes, 0) << function;
      }
    }
  }
}

TEST_F(Jit, ResourcesAreThoseOfTheReport) {
  NEEDS_NVRTC();
  // More values live at once than registers are allowed, an array indexed at run time, shared memory.
  const Program spills{"probe",
                       "extern \"C\" __global__ void spilling(float* out, int n) {\n"
                       "  float x[96];\n#pragma unroll\n  for (int i = 0; i < 96; ++i) x[i] = out[i * n];\n"
                       "  __syncthreads();\n"
                       "#pragma unroll\n  for (int i = 0; i < 96; ++i) out[i * n + 1] = x[95 - i] * x[i];\n}\n"
                       "extern \"C\" __global__ void sharing(float* out) {\n"
                       "  __shared__ float x[256];\n  x[threadIdx.x] = out[threadIdx.x];\n  __syncthreads();\n"
                       "  out[threadIdx.x] = x[255 - threadIdx.x];\n}\n",
                       "80",
                       {"--maxrregcount=32"},
                       ""};
  const auto found = resources(compile_uncached(spills).log);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_GT(found.at("spilling").spill_store_bytes, 0);
  EXPECT_GT(found.at("spilling").spill_load_bytes, 0);
  EXPECT_GT(found.at("spilling").stack_bytes, 0);
  EXPECT_LE(found.at("spilling").registers, 32);
  EXPECT_EQ(found.at("spilling").shared_bytes, 0);
  EXPECT_EQ(found.at("sharing").shared_bytes, 1024);
  EXPECT_EQ(found.at("sharing").spill_store_bytes, 0);
}

TEST_F(Jit, SelfContainedSourceHasEachHeaderOnce) {
  const std::string text =
      self_contained("#include \"cuda/device/bulk.cuh\"\n#include <cstdint>\n#include <other>\nint x;");
  EXPECT_EQ(text.find("class Arrival"), text.rfind("class Arrival"));
  EXPECT_EQ(text.find("using uint32_t"), text.rfind("using uint32_t"));
  EXPECT_NE(text.find("using uint32_t"), std::string::npos);
  EXPECT_NE(text.find("#include <other>\nint x;"), std::string::npos);
  EXPECT_EQ(text.find("#include <cstdint>"), std::string::npos);
  NEEDS_NVRTC();
  for (const HeaderKernel& kernel : kHeaderKernels) {
    EXPECT_EQ(compile_uncached({"probe", self_contained(source_of(kernel)), "90a", {}, ""}).cubin,
              compile_uncached({"probe", source_of(kernel), "90a", {}, ""}).cubin);
  }
}

}  // namespace
}  // namespace fusegrad::jit
