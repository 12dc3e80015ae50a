// The rendered CUDA source of every example and of every primitive compiles with NVRTC, without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "common/error.h"
#include "jit/compile.h"
#include "pytorch/score_mod/tensors.h"
#include "score_mod/derivative.h"
#include "score_mod/render_cuda.h"
#include "score_mod/text.h"
#include "score_mod_primitive_examples.h"

namespace fusegrad::score_mod {
namespace {

// A struct for the graph, and a kernel that uses all of it.
class Source {
 public:
  explicit Source(Unread unread = Unread::kBranch, bool fast_math = false) : unread_(unread), fast_math_(fast_math) {}

  void add(const Graph& graph, const std::vector<DType>& dtypes, bool touch = false) {
    RenderOptions options;
    options.name = "Mod" + std::to_string(count_);
    options.dtypes = dtypes;
    options.unread = unread_;
    options.fast_math = fast_math_;
    text_ += "\n" + render_cuda(graph, options);
    const std::string arguments = "threadIdx.z, blockIdx.z, threadIdx.x, threadIdx.y, blockIdx.y < 3";
    std::string body;
    if (graph.kind() == Kind::kDerivative) {
      body = "  float value[" + options.name + "::kContributions + 1];\n  out[0] += " + options.name +
             "::apply(c, score[0], score[1], " + arguments + ", value);\n";
      for (size_t k = 0; k < graph.contributions().size(); ++k) {
        const std::string number = std::to_string(k);
        if (graph.open_axes(graph.contributions()[k]) != 0) continue;
        body += "  out[" + options.name + "::offset_" + number + "(c, score[0], " + arguments + ")] += value[" +
                number + "] + " + options.name + "::kContribution[" + number + "].buffer;\n";
      }
    } else if (graph.kind() == Kind::kMaskMod) {
      body = "  out[0] = " + options.name + "::apply(c, " + arguments + ");\n";
    } else {
      body = "  out[0] = " + options.name + "::apply(c, score[0], " + arguments + ");\n";
      if (touch) body += "  " + options.name + "::touch(c, " + arguments + ", __float_as_uint(score[1]));\n";
    }
    text_ += "extern \"C\" __global__ void kernel" + std::to_string(count_++) + "(const " + options.name +
             "::Captured c, const float* score, float* out) {\n" + body + "}\n";
  }

  void check() const {
    try {
      jit::Nvrtc::get();
    } catch (const RuntimeError& error) {
      GTEST_SKIP() << error.what();
    }
    for (const char* architecture : {"80", "90a"}) {
      const jit::Compiled compiled = jit::compile_uncached({"score_mods", text_, architecture, {}, ""});
      EXPECT_EQ(compiled.log.find("warning"), std::string::npos) << compiled.log;
      const auto resources = jit::resources(compiled.log);
      EXPECT_EQ(resources.size(), static_cast<size_t>(count_)) << compiled.log;
      for (const auto& [kernel, of] : resources) {
        SCOPED_TRACE(kernel + " for sm_" + architecture);
        EXPECT_EQ(of.spill_store_bytes + of.spill_load_bytes + of.stack_bytes, 0);
        EXPECT_LE(of.registers, kRegisters);
      }
    }
  }

 private:
  // For a kernel that does nothing else: with an attention tile's values beside it, more would spill.
  static constexpr int kRegisters = 64;

  const Unread unread_;
  const bool fast_math_;
  std::string text_ = "#include \"cuda/device/score_mod.cuh\"\n";
  int count_ = 0;
};

std::vector<DType> dtypes_of(const ScoreMod& mod) {
  std::vector<DType> dtypes;
  for (const at::Tensor& buffer : mod.buffers) dtypes.push_back(dtype_of(buffer));
  return dtypes;
}

TEST(RenderCuda, ExamplesCompile) {
  Source source;
  for (const auto& example : score_mod_examples()) {
    const Graph graph = parse(example.mod.text);
    source.add(graph, dtypes_of(example.mod));
    source.add(differentiate(graph, std::vector<bool>(example.mod.buffers.size(), true)), dtypes_of(example.mod));
  }
  for (const auto& example : mask_mod_examples()) source.add(parse(example.mod.text), dtypes_of(example.mod));
  source.check();
}

TEST(RenderCuda, EveryPrimitiveCompiles) {
  for (const bool fast_math : {false, true}) {
    Source source(Unread::kBranch, fast_math);
    for (const auto& example : score_mod_primitive_examples())
      source.add(parse(example.mod.text), dtypes_of(example.mod));
    source.check();
  }
}

TEST(RenderCuda, EveryStorageCompiles) {
  for (const Unread unread : {Unread::kBranch, Unread::kPredicate, Unread::kElsewhere}) {
    Source source(unread);
    for (int dtype = 0; dtype <= static_cast<int>(DType::kBool); ++dtype) {
      const auto storage = static_cast<DType>(dtype);
      const std::string type(type_name(type_of(storage)));
      const Graph graph = parse("score_mod 1\nbuffer @0 " + type + " 3\nscalar $0 bool\nscalar $1 i64\nscalar $2 f\n" +
                                "%0 = sub q_idx kv_idx\n%1 = load @0 %0 $1 -2\n%2 = to_int %1\n%3 = add %2 $0\n" +
                                "%4 = mul %3 $2\nreturn %4\n");
      source.add(graph, {storage});
    }
    source.check();
  }
}

// What is read for many pairs of a tile, and where is known before their scores.
TEST(RenderCuda, Touches) {
  Source source;
  const auto touches = [&](const std::string& body) {
    const Graph graph = parse("score_mod 1\nbuffer @0 f 1\nbuffer @1 f 2\nbuffer @2 i64 1\n" + body);
    const std::vector<DType> dtypes{DType::kFloat32, DType::kFloat32, DType::kInt64};
    source.add(graph, dtypes, true);
    RenderOptions options;
    options.dtypes = dtypes;
    const std::string text = render_cuda(graph, options);
    const auto flag = [&](const std::string& name) { return text.find(name + " = true") != std::string::npos; };
    size_t reads = 0;
    for (size_t at = 0; (at = text.find("touch_if(", at)) != std::string::npos; ++at) ++reads;
    const size_t bytes = text.find("kPairBytes = ") + std::string("kPairBytes = ").size();
    return std::tuple(flag("kTouchesKeys"), flag("kTouchesDiagonals"), text[bytes] - '0', reads);
  };
  const std::tuple none(false, false, 0, size_t{0});
  EXPECT_EQ(touches("%0 = load @0 kv_idx\nreturn %0\n"), std::tuple(true, false, 0, size_t{1}));
  EXPECT_EQ(touches("%0 = sub q_idx kv_idx\n%1 = load @1 h %0\nreturn %1\n"), std::tuple(true, true, 0, size_t{1}));
  // The place of a place is read there, and touched too.
  EXPECT_EQ(touches("%0 = load @2 kv_idx\n%1 = load @0 %0\nreturn %1\n"), std::tuple(true, false, 0, size_t{2}));
  // Or is a line elsewhere.
  EXPECT_EQ(touches("%0 = load @0 kv_idx\n%1 = to_int %0\n%2 = load @1 %1 h\nreturn %2\n"),
            std::tuple(true, false, 0, size_t{2}));
  EXPECT_EQ(touches("%0 = load @0 kv_idx\n%1 = to_int %0\n%2 = load @1 %1 q_idx\nreturn %2\n"),
            std::tuple(true, false, 4, size_t{2}));
  EXPECT_EQ(touches("%0 = load @0 q_idx\nreturn %0\n"), none);
  EXPECT_EQ(touches("%0 = load @0 h\nreturn %0\n"), none);
  EXPECT_EQ(touches("%0 = load @1 q_idx kv_idx\nreturn %0\n"), std::tuple(false, false, 4, size_t{1}));
  EXPECT_EQ(touches("%0 = add q_idx kv_idx\n%1 = load @2 %0\n%2 = to_float %1\nreturn %2\n"),
            std::tuple(false, false, 8, size_t{1}));
  // Where one is, another one of the pair says.
  EXPECT_EQ(touches("%0 = add q_idx kv_idx\n%1 = load @2 %0\n%2 = load @0 %1\nreturn %2\n"),
            std::tuple(false, false, 8, size_t{1}));
  EXPECT_EQ(touches("%0 = load @2 q_idx\n%1 = load @1 %0 kv_idx\nreturn %1\n"), std::tuple(false, false, 4, size_t{1}));
  EXPECT_EQ(touches("%0 = to_int score\n%1 = add kv_idx %0\n%2 = load @0 %1\nreturn %2\n"), none);
  source.check();
}

// What of them are lines, and that a derivative has the same.
TEST(RenderCuda, Lines) {
  Source source;
  const auto lines = [&](const std::string& body) {
    const Graph graph = parse("score_mod 1\nbuffer @0 f 1\nbuffer @1 f 2\nbuffer @2 i64 1\n" + body);
    RenderOptions options;
    options.dtypes = {DType::kFloat32, DType::kFloat32, DType::kInt64};
    source.add(graph, options.dtypes, true);
    const std::string text = render_cuda(graph, options);
    const Graph derivative = differentiate(graph, {true, true, false});
    options.score_mod = &graph;
    const std::string of_derivative = render_cuda(derivative, options);
    source.add(derivative, options.dtypes);
    const auto after = [&](const std::string& name) {
      const size_t from = text.find(name) + name.size();
      return text.substr(from, text.find_first_of(";}", from) - from);
    };
    std::string read;
    for (size_t at = 0; (at = of_derivative.find("reads.template read<", at)) != std::string::npos;) {
      at = of_derivative.find('<', at) + 1;
      read += of_derivative[at];
    }
    std::sort(read.begin(), read.end());
    read.erase(std::unique(read.begin(), read.end()), read.end());  // places of contributions are lines too
    std::string by;
    const std::string all = text.substr(text.find("kLine[] = {"), text.find("kTouches") - text.find("kLine[] = {"));
    for (size_t at = 0; (at = all.find("LineBy::k", at)) != std::string::npos; ++at) by += all[at + 9];
    return std::tuple(by, after("kTouchesBesides = "), read);
  };
  using Lines = std::tuple<std::string, std::string, std::string>;
  EXPECT_EQ(lines("%0 = load @0 kv_idx\n%1 = mul score %0\nreturn %1\n"), Lines("K", "false", "0"));
  EXPECT_EQ(lines("%0 = load @0 kv_idx\n%1 = sub q_idx kv_idx\n%2 = load @1 h %1\n%3 = mul score %0\n"
                  "%4 = mul %3 %2\nreturn %4\n"),
            Lines("KD", "false", "01"));
  // The last read of a chain, and others where they count for themselves.
  EXPECT_EQ(lines("%0 = load @2 kv_idx\n%1 = load @0 %0\n%2 = mul score %1\nreturn %2\n"), Lines("K", "false", "0"));
  EXPECT_EQ(lines("%0 = sub kv_idx q_idx\n%1 = load @2 %0\n%2 = load @1 %1 h\n%3 = mul score %2\nreturn %3\n"),
            Lines("D", "false", "0"));
  EXPECT_EQ(lines("%0 = load @0 kv_idx\n%1 = to_int %0\n%2 = load @2 %1\n%3 = load @1 %2 h\n%4 = mul score %3\n"
                  "return %4\n"),
            Lines("K", "false", "0"));
  EXPECT_EQ(lines("%0 = load @0 kv_idx\n%1 = to_int %0\n%2 = load @1 %1 h\n%3 = mul score %2\n%4 = mul %3 %0\n"
                  "return %4\n"),
            Lines("KK", "false", "01"));
  EXPECT_EQ(lines("%0 = load @2 kv_idx\n%1 = load @0 %0\n%2 = mul score %1\n%3 = to_float %0\n%4 = mul %2 %3\n"
                  "return %4\n"),
            Lines("K", "true", "0"));
  // Each pair's own; its place may be a line.
  EXPECT_EQ(lines("%0 = load @0 kv_idx\n%1 = to_int %0\n%2 = load @1 %1 q_idx\n%3 = mul score %2\nreturn %3\n"),
            Lines("K", "false", "0"));
  EXPECT_EQ(lines("%0 = load @1 q_idx kv_idx\n%1 = mul score %0\nreturn %1\n"), Lines("", "false", ""));
  EXPECT_EQ(lines("%0 = load @0 q_idx\n%1 = mul score %0\nreturn %1\n"), Lines("", "false", ""));
  source.check();
}

TEST(RenderCuda, Literals) {
  const Graph graph = parse(
      "score_mod 1\n%0 = neg -1.5\n%1 = sub score -0.0\n%2 = mul %1 1e300\n%3 = add %2 1e-30\n%4 = add %3 nan\n"
      "%5 = add %4 -inf\n%6 = add q_idx -9223372036854775808\n%7 = sub %6 -2147483648\n%8 = to_float %7\n"
      "%9 = add %5 %8\n%10 = add %9 %0\nreturn %10\n");
  Source source;
  source.add(graph, {});
  source.check();
}

TEST(RenderCuda, CapturedWords) {
  const Graph graph =
      parse("score_mod 1\nbuffer @0 f 2\nscalar $0 f\nscalar $1 i64\n%0 = load @0 h q_idx\nreturn %0\n");
  const float data[6] = {};
  const int64_t sizes[] = {2, 3}, strides[] = {3, 1};
  const Buffer buffer{data, DType::kFloat32, sizes, strides};
  const Value scalars[] = {{Type::kFloat, 1.0, 0}, {Type::kInt, 0, -7}};
  EXPECT_EQ(pack_captured(graph, {&buffer, 1}, scalars),
            (std::vector<int64_t>{reinterpret_cast<int64_t>(data), 2, 3, 3, 1, 0x3FF0000000000000, -7}));
  EXPECT_EQ(pack_captured(parse("score_mod 1\nreturn score"), {}, {}), std::vector<int64_t>{0});
  EXPECT_THROW(pack_captured(graph, {}, scalars), GraphError);
}

}  // namespace
}  // namespace fusegrad::score_mod
