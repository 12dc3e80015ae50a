#include "cuda/attention/plan/kernel_spec.h"

#include <utility>

#include "cuda/attention/plan/kernel.h"

namespace fusegrad::cuda {
namespace {

void mod(ConfigText& config, const FlexMod& mod, const std::string& name) {
  config.type(name, mod.text.empty() ? "fusegrad::device::NoMod" : "::" + name);
  config.choice("k" + name + "SmallBuffers", mod.small_buffers);
  config.choice("k" + name + "SmallScalars", mod.small_scalars);
  config.numbers("k" + name + "Dtypes", mod.dtypes);
}

std::string render_config(const KernelFacts& f) {
  const Kernel& kernel = kernel_of(f.kernel);
  ConfigText config;
  config.line("struct Config {");
  config.type("Element", (f.dtype == DType::kFloat32 ? "" : "fusegrad::device::") + std::string(element_name(f.dtype)));
  mod(config, f.score_mod, "ScoreMod");
  mod(config, f.mask_mod, "MaskMod");
  config.choice("kSmallLengths", f.small_lengths);
  if (kernel.types != nullptr) kernel.types(f, config);
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
  config.numbers("kColumns", f.columns);
  if (f.few()) config.choice("kKeyBoxes", f.tile.key_boxes);
  config.choice("kDropout", f.dropout);
  kernel.flags(f, config);
  config.line("};");
  return std::move(config).text();
}

}  // namespace

const char* element_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float" : dtype == DType::kFloat16 ? "Float16" : "BFloat16";
}

KernelSpec::KernelSpec(KernelFacts facts) : facts_(std::move(facts)), config_(render_config(facts_)) {
  const KernelNames names = kernel_of(facts_.kernel).names(facts_);
  name_ = names.name;
  header_ = names.header;
  type_ = names.type;
  more_ = names.more;
}

std::string KernelSpec::key() const {
  std::string key = name_;
  key.reserve(key.size() + config_.size() + facts_.score_mod.text.size() + facts_.mask_mod.text.size() + 3);
  (key += '\n') += config_;
  (key += facts_.score_mod.text) += '\n';
  return key += facts_.mask_mod.text;
}

}  // namespace fusegrad::cuda
