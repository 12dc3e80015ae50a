#include "cuda/attention/host/kernel_spec.h"

#include <string_view>
#include <utility>

namespace fusegrad::cuda {
namespace {

/// Renders the members of Config.
class ConfigText {
 public:
  void type(std::string_view name, std::string_view is) { append("  using ", name, is); }
  void number(std::string_view name, int value) { append("  static constexpr int ", name, std::to_string(value)); }
  void choice(std::string_view name, bool value) { append("  static constexpr bool ", name, value ? "true" : "false"); }
  template <class Values, class Text>
  void list(std::string_view type, std::string_view name, const Values& values, const Text& text) {
    ((text_ += "  static constexpr ") += type) += ' ';
    (text_ += name) += "[] = {";
    for (const auto& value : values) (text_ += text(value)) += ", ";
    text_ += "0};\n";
  }
  void line(std::string_view text) { (text_ += text) += '\n'; }
  std::string text() && { return std::move(text_); }

 private:
  void append(std::string_view kind, std::string_view name, std::string_view is) {
    ((text_ += kind) += name) += " = ";
    (text_ += is) += ";\n";
  }
  std::string text_;
};

std::string numeral(int value) { return std::to_string(value); }

void mod(ConfigText& config, const FlexMod& mod, const std::string& name) {
  config.type(name, mod.text.empty() ? "fusegrad::device::NoMod" : "::" + name);
  config.choice("k" + name + "SmallBuffers", mod.small_buffers);
  config.choice("k" + name + "SmallScalars", mod.small_scalars);
  config.list("int", "k" + name + "Dtypes", mod.dtypes,
              [](score_mod::DType dtype) { return numeral(static_cast<int>(dtype)); });
}

std::string render_config(const KernelFacts& f) {
  ConfigText config;
  config.line("struct Config {");
  config.type("Element", (f.dtype == DType::kFloat32 ? "" : "fusegrad::device::") + std::string(element_name(f.dtype)));
  mod(config, f.score_mod, "ScoreMod");
  mod(config, f.mask_mod, "MaskMod");
  config.choice("kSmallLengths", f.small_lengths);
  if (f.kernel == FlexKernel::kTangents) {
    config.type("Tangent", f.score_mod.text.empty() ? "fusegrad::device::NoMod" : "::Tangent");
    config.list("int", "kTangentsOf", f.tangents_of.buffers, [](bool has) { return numeral(has ? 1 : 0); });
    config.choice("kTangentSmallBuffers", f.tangents_of.small_buffers);
    config.choice("kQueryTangent", f.tangents_of.query);
    config.choice("kKeyTangent", f.tangents_of.key);
    config.choice("kValueTangent", f.tangents_of.value);
  }
  if (f.kernel == FlexKernel::kPairTangents) {
    config.type("Curvature", f.has_derivative ? "::Curvature" : "fusegrad::device::NoDerivative");
    config.choice("kGradOutTangent", f.grad_out_tangent);
  }
  if (f.backward()) {
    config.type("Derivative", f.has_derivative ? "::Derivative" : "fusegrad::device::NoDerivative");
    config.list("int", "kWantsGrad", f.wants_grad, [](bool wants) { return numeral(wants ? 1 : 0); });
    config.line("  struct Schemes {");
    config.list("char", "kScheme", f.schemes, [](char scheme) { return std::string{'\'', scheme, '\''}; });
    config.list("int", "kTable", f.tables, numeral);
    config.line("  };");
  }
  config.number("kHead", f.head);
  config.number("kValue", f.value);
  config.number("kRows", f.tile.rows);
  config.number("kCols", f.tile.cols);
  config.number("kWarps", f.warps);
  if (f.hopper()) config.number("kGroups", f.groups);
  config.number("kShare", f.tile.share);
  config.number("kStages", f.tile.stages);
  config.number("kGradientStages", f.tile.gradient_stages);
  config.number("kQueryStages", f.tile.query_stages);
  config.number("kKeyStages", f.tile.key_stages);
  config.number("kParts", f.tile.parts);
  config.choice("kKeySplits", f.key_splits);
  config.choice("kBlocks", f.blocks);
  config.choice("kMixed", f.mixed);
  config.choice("kSplit", f.split);
  config.choice("kMaskAlone", f.mask_alone);
  config.choice("kBoxes", f.tile.boxes);
  config.number("kReadStages", f.tile.read_stages);
  config.number("kMaps", f.tile.maps);
  config.choice("kKeeps", f.tile.keeps);
  config.list("int", "kColumns", f.columns, numeral);
  if (f.few()) config.choice("kKeyBoxes", f.tile.key_boxes);
  config.choice("kDropout", f.dropout);
  if (!f.backward()) {
    config.number("kLineBytes", f.tile.line_bytes);
    config.choice("kUnscaled", f.unscaled);
    config.choice("kFirstMaximum", f.first_maximum);
    config.choice("kSeamless", f.seamless);
    config.choice("kMaxScores", f.max_scores);
    config.choice("kOutLow", f.out_low);
  } else {
    config.choice("kNarrow", f.narrow);
    config.choice("kGradQuery", f.grad_query);
    config.choice("kStoresBoxes", f.stores_boxes);
    config.choice("kOwnPlaces", f.tile.own_places);
    config.choice("kOrdered", f.ordered);
    config.choice("kStoresFirst", f.stores_first);
    config.choice("kWhole", f.whole);
    config.choice("kStoresQuery", f.stores_query);
    config.choice("kGradKey", f.grad_key);
    config.choice("kGradValue", f.grad_value);
    config.choice("kGradScores", f.grad_scores);
    config.choice("kMaxGradient", f.max_gradient);
    config.choice("kFixedPoint", f.fixed_point);
    config.choice("kPartialSums", f.partial_sums);
    config.choice("kGrouped", f.grouped);
  }
  config.line("};");
  return std::move(config).text();
}

struct Names {
  const char *name, *header, *type;
};
Names names_of(const KernelFacts& f) {
  switch (f.kernel) {
    case FlexKernel::kForward:
      if (f.few()) return {"flex_forward_few", "cuda/attention/portable/forward_few.cuh", "FlexForwardFew"};
      return f.hopper() ? Names{"flex_forward_hopper", "cuda/attention/hopper/forward.cuh", "FlexForwardHopper"}
                        : Names{"flex_forward", "cuda/attention/portable/forward.cuh", "FlexForward"};
    case FlexKernel::kGradQuery:
      return f.hopper() ? Names{"flex_grad_query_hopper", "cuda/attention/hopper/grad_query.cuh", "FlexGradQueryHopper"}
                        : Names{"flex_grad_query", "cuda/attention/portable/grad_query.cuh", "FlexGradQuery"};
    case FlexKernel::kGradBuffers:
      return f.hopper()
                 ? Names{"flex_grad_buffers_hopper", "cuda/attention/hopper/grad_buffers.cuh", "FlexGradBuffersHopper"}
                 : Names{"flex_grad_buffers", "cuda/attention/portable/grad_buffers.cuh", "FlexGradBuffers"};
    case FlexKernel::kTangents:
      return f.hopper() ? Names{"flex_tangents_hopper", "cuda/attention/hopper/tangents.cuh", "FlexTangentsHopper"}
                        : Names{"flex_tangents", "cuda/attention/portable/tangents.cuh", "FlexTangents"};
    case FlexKernel::kPairTangents:
      return {"flex_pair_tangents", "cuda/attention/portable/pair_tangents.cuh", "FlexPairTangents"};
    case FlexKernel::kBackward:
      break;
  }
  if (f.keys_shared) {
    return {"flex_backward_wide_hopper", "cuda/attention/hopper/backward_wide.cuh", "FlexBackwardWideHopper"};
  }
  return f.hopper() ? Names{"flex_backward_hopper", "cuda/attention/hopper/backward.cuh", "FlexBackwardHopper"}
                    : Names{"flex_backward", "cuda/attention/portable/backward.cuh", "FlexBackward"};
}

}  // namespace

const char* element_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float" : dtype == DType::kFloat16 ? "Float16" : "BFloat16";
}

KernelSpec::KernelSpec(KernelFacts facts) : facts_(std::move(facts)), config_(render_config(facts_)) {
  const Names names = names_of(facts_);
  name_ = names.name;
  header_ = names.header;
  type_ = names.type;
}

std::string KernelSpec::key() const {
  std::string key = name_;
  key.reserve(key.size() + config_.size() + facts_.score_mod.text.size() + facts_.mask_mod.text.size() + 3);
  (key += '\n') += config_;
  (key += facts_.score_mod.text) += '\n';
  return key += facts_.mask_mod.text;
}

}  // namespace fusegrad::cuda
