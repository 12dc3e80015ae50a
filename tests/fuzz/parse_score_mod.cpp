// Fuzzes everything that a text from outside reaches: the parser, and for what it accepts the printer, the verifier,
// the simplifier, the derivative, the planner, the CUDA renderer and the CPU evaluator.
//
// With libFuzzer (clang++ -fsanitize=fuzzer,address,undefined, FUSEGRAD_LIBFUZZER defined) it mutates by itself. Built
// plainly it replays files and folders, then as many seeded mutations of them as --mutations=N says.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "score_mod/derivative.h"
#include "score_mod/evaluate_cpu.h"
#include "score_mod/render_cuda.h"
#include "score_mod/scatter_plan.h"
#include "score_mod/simplify.h"
#include "score_mod/text.h"
#include "score_mod/tile_kernels.h"

namespace fusegrad::score_mod {

// Without PyTorch nothing asks which instruction set the machine has.
const TileKernels& tile_kernels() { return DEFAULT::kTileKernels; }

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

void check_inverse(const Graph& graph) {
  verify(graph);
  const std::string text = print(graph);
  const Graph again = parse(text);
  require(again == graph, "parse(print(g)) == g");
  require(print(again) == text, "print(parse(t)) == t");
}

// Buffers of every storage; small, so that most indices are out of range.
struct Captures {
  std::vector<std::vector<int64_t>> sizes, strides;
  std::vector<std::vector<uint8_t>> data;
  std::vector<Buffer> buffers;
  std::vector<Value> scalars;
  std::vector<DType> dtypes;

  explicit Captures(const Graph& graph) {
    const size_t count = graph.buffers().size();
    sizes.resize(count);
    strides.resize(count);
    data.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const auto [type, rank] = graph.buffers()[i];
      const DType dtype = type == Type::kFloat ? static_cast<DType>(i % 4)
                          : type == Type::kInt ? static_cast<DType>(4 + i % 5)
                                               : DType::kBool;
      int64_t elements = 1;
      for (int k = 0; k < rank; ++k) {
        sizes[i].push_back(1 + (static_cast<int64_t>(i) + k) % 3);
        strides[i].push_back(elements);
        elements *= sizes[i].back();
      }
      data[i].resize(static_cast<size_t>(elements) * 8);
      for (size_t n = 0; n < data[i].size(); ++n) data[i][n] = static_cast<uint8_t>(n % 8 == 0 ? n / 8 + i : n % 3);
      buffers.push_back({data[i].data(), dtype, sizes[i], strides[i]});
      dtypes.push_back(dtype);
    }
    for (size_t i = 0; i < graph.scalars().size(); ++i) {
      const auto n = static_cast<int64_t>(i);
      scalars.push_back(
          {graph.scalars()[i], static_cast<double>(n) - 1.5, graph.scalars()[i] == Type::kBool ? n % 2 : n - 2});
    }
  }
};

template <class T>
void evaluate(const Graph& graph, const Captures& captures) {
  constexpr int64_t kRows = 3, kCols = 21;
  const Lengths lengths{2, 3, 8, 40};
  const TileProgram<T> program(graph, lengths, captures.buffers, captures.scalars);
  TileEvaluator<T> evaluator(program, kRows, kCols);
  std::vector<T> score(kRows * kCols), grad(kRows * kCols, T(0.5)), out(kRows * kCols);
  std::vector<uint8_t> mask(kRows * kCols);
  for (size_t i = 0; i < score.size(); ++i) {
    score[i] = static_cast<T>(i) / 7 - 3;
    mask[i] = i % 5 != 0;
  }
  std::vector<std::vector<double>> sums(captures.buffers.size());
  std::vector<GradientSink<T>> sinks;
  for (size_t i = 0; i < sums.size(); ++i) {
    sums[i].resize(captures.data[i].size() / 8);
    sinks.push_back({nullptr, sums[i].data()});
  }
  for (const Tile& tile : {Tile{1, 2, 5, 19, kRows, kCols}, Tile{0, 0, 0, 0, 1, 2}}) {
    for (const uint8_t* m : {static_cast<const uint8_t*>(nullptr), static_cast<const uint8_t*>(mask.data())}) {
      if (graph.kind() == Kind::kScoreMod) {
        evaluator.score_mod(tile, {score.data(), kCols}, {m, kCols}, {out.data(), kCols});
      } else if (graph.kind() == Kind::kMaskMod) {
        evaluator.mask_mod(tile, {mask.data(), kCols});
      } else {
        evaluator.backward(tile, {score.data(), kCols}, {grad.data(), kCols}, {m, kCols}, {out.data(), kCols}, sinks);
      }
    }
  }
}

void check(std::string_view text) {
  Graph graph(Kind::kScoreMod);
  try {
    graph = parse(text);
  } catch (const ParseError& error) {
    require(error.line >= 1 && error.column >= 1, "an error has a position");
    return;
  }
  check_inverse(graph);
  const Graph simple = simplify(graph);
  check_inverse(simple);
  // Evaluation and rendering of the largest graphs would make a fuzzer slow.
  if (graph.nodes().size() > 400 || steps(graph) > 1 << 12) return;
  require(simplify(simple) == simple, "simplify is idempotent");

  const Captures captures(graph);
  std::vector<Graph> graphs{lowered(graph), lowered(simple)};
  if (graph.kind() == Kind::kScoreMod) {
    std::vector<bool> wants_grad;
    for (const BufferDeclaration& b : graph.buffers()) wants_grad.push_back(b.type == Type::kFloat);
    graphs.push_back(differentiate(graph, wants_grad));
    check_inverse(graphs.back());
    plan_scatter(graphs.back());
  }
  for (const Graph& g : graphs) {
    RenderOptions options;
    options.dtypes = captures.dtypes;
    try {
      const std::string source = render_cuda(g, options);
      for (const char c : source) require((c >= 32 && c < 127) || c == '\n', "the CUDA source is plain text");
    } catch (const GraphError&) {
      require(g.kind() == Kind::kDerivative, "only a derivative from outside cannot be rendered");
    }
    evaluate<float>(g, captures);
    evaluate<double>(g, captures);
  }
}

}  // namespace
}  // namespace fusegrad::score_mod

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fusegrad::score_mod::check({reinterpret_cast<const char*>(data), size});
  return 0;
}

#ifndef FUSEGRAD_LIBFUZZER
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string_view>

namespace {

std::string random_word(std::mt19937& random) {
  static const std::vector<std::string> words = [] {
    std::vector<std::string> all = {
        "score_mod", "mask_mod", "derivative", "1",     "buffer", "scalar",   "f",      "i64",
        "bool",      "return",   "scatter",    "load",  "=",      "@0",       "@1",     "$0",
        "%0",        "%1",       "%2",         "score", "b",      "h",        "q_idx",  "kv_idx",
        "grad",      "0",        "-1",         "^0",    "^1",     "backward", "custom", "2.5",
        "inf",       "nan",      "-0.0",       "true",  "#",      "\n",       "1e308",  "9223372036854775807"};
    for (const auto& p : fusegrad::score_mod::kPrimitives) all.emplace_back(p.name);
    return all;
  }();
  return words[random() % words.size()];
}

// A few words or bytes changed, dropped, added or taken from elsewhere.
std::string mutated(std::string text, const std::vector<std::string>& corpus, std::mt19937& random) {
  const unsigned steps = 1 + random() % 4;
  for (unsigned step = 0; step < steps && !text.empty(); ++step) {
    const size_t at = random() % text.size();
    const size_t begin = text.find_last_of(" \n", at) == std::string::npos ? 0 : text.find_last_of(" \n", at) + 1;
    const size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    switch (random() % 6) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, 1 + random() % 8);
        break;
      case 2: {
        const std::string& other = corpus[random() % corpus.size()];
        if (!other.empty()) text.insert(at, other.substr(random() % other.size(), random() % 64));
        break;
      }
      case 3:
        text.insert(begin, random_word(random) + " ");
        break;
      default:
        text.replace(begin, end - begin, random_word(random));
    }
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> corpus;
  long mutations = 0;
  const auto read = [&](const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  };
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--mutations=")) {
      mutations = std::strtol(argv[i] + 12, nullptr, 10);
    } else if (std::filesystem::is_directory(argument)) {
      std::vector<std::filesystem::path> paths;
      for (const auto& entry : std::filesystem::directory_iterator(argument)) paths.push_back(entry.path());
      std::sort(paths.begin(), paths.end());
      for (const auto& path : paths) read(path);
    } else {
      read(argument);
    }
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "usage: %s [--mutations=N] FILE_OR_FOLDER...\n", argv[0]);
    return 2;
  }
  for (const std::string& text : corpus) fusegrad::score_mod::check(text);
  std::mt19937 random(1);
  for (long i = 0; i < mutations; ++i) {
    fusegrad::score_mod::check(mutated(corpus[random() % corpus.size()], corpus, random));
  }
  std::printf("%zu texts and %ld mutations\n", corpus.size(), mutations);
  return 0;
}
#endif
