#include "cuda/attention/plan/kernel_spec.h"

#include <utility>

#include "cuda/attention/plan/case_facts.h"
#include "cuda/attention/plan/kernel.h"

namespace fusegrad::cuda {
namespace {

void mod(ConfigText& config, const FlexMod& mod, const std::string& name) {
  config.type(name, "::" + name);
  config.choice("k" + name + "SmallBuffers", mod.small_buffers);
  config.choice("k" + name + "SmallScalars", mod.small_scalars);
  config.numbers("k" + name + "Dtypes", mod.dtypes);
}

std::string render_config(const FlexCase& c, const KernelFacts& f) {
  ConfigText config;
  config.line("struct Config {");
  config.type("Element", (c.dtype == DType::kFloat32 ? "" : "fusegrad::device::") + std::string(element_name(c.dtype)));
  mod(config, c.score_mod, "ScoreMod");
  mod(config, c.mask_mod, "MaskMod");
  config.choice("kSmallLengths", c.small_lengths);
  config.number("kHead", f.head);
  config.number("kValue", f.value);
  config.number("kRows", f.tile.rows);
  config.number("kCols", f.tile.cols);
  config.choice("kBlocks", c.blocks);
  config.choice("kMixed", planner::mixed(c, f.tile));
  config.choice("kDropout", c.dropout);
  kernel_of(c.kernel).config(c, f, config);
  config.line("};");
  return std::move(config).text();
}

}  // namespace

const char* element_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float" : dtype == DType::kFloat16 ? "Float16" : "BFloat16";
}

std::string letters(const std::vector<device::Scheme>& schemes) {
  std::string text;
  for (const device::Scheme scheme : schemes) text += static_cast<char>(scheme);
  return text;
}

KernelSpec::KernelSpec(FlexCase asked, KernelFacts facts)
    : case_(std::move(asked)), facts_(std::move(facts)), config_(render_config(case_, facts_)) {
  const KernelNames names = kernel_of(facts_.kernel).names(facts_);
  name_ = names.name;
  header_ = names.header;
  type_ = names.type;
  more_ = names.more;
}

std::string KernelSpec::key() const {
  std::string key = name_;
  key.reserve(key.size() + config_.size() + case_.score_mod.text.size() + case_.mask_mod.text.size() + 3);
  (key += '\n') += config_;
  (key += case_.score_mod.text) += '\n';
  return key += case_.mask_mod.text;
}

}  // namespace fusegrad::cuda
