// The text of a kernel's Config, member by member.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace fusegrad::cuda {

class ConfigText {
 public:
  void type(std::string_view name, std::string_view is) { append("  using ", name, is); }
  void number(std::string_view name, int value) { append("  static constexpr int ", name, std::to_string(value)); }
  void choice(std::string_view name, bool value) { append("  static constexpr bool ", name, value ? "true" : "false"); }
  /// text(value): one of the values, as device code writes it.
  template <class Values, class Text>
  void list(std::string_view type, std::string_view name, const Values& values, const Text& text) {
    ((text_ += "  static constexpr ") += type) += ' ';
    (text_ += name) += "[] = {";
    for (const auto& value : values) (text_ += text(value)) += ", ";
    text_ += "{}};\n";
  }
  template <class Values>
  void numbers(std::string_view name, const Values& values) {
    list("int", name, values, [](auto value) { return std::to_string(static_cast<int>(value)); });
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

}  // namespace fusegrad::cuda
