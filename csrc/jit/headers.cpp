#include "jit/headers.h"

#include <set>

namespace fusegrad::jit {
namespace {

// The name between quotes or angle brackets, or nothing if the line includes no file.
std::string_view included(std::string_view line) {
  constexpr std::string_view kInclude = "#include ";
  if (!line.starts_with(kInclude)) return {};
  line.remove_prefix(kInclude.size() + 1);
  return line.substr(0, line.find_first_of("\">"));
}

void append(std::string& out, std::string_view text, std::set<std::string_view>& seen) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    const std::string_view line = text.substr(0, end), name = included(line);
    text.remove_prefix(end);
    const Header* header = nullptr;
    for (const Header& h : headers()) {
      if (name == h.name) header = &h;
    }
    if (header == nullptr) {
      if (!line.starts_with("#pragma once")) out += line;
    } else if (seen.insert(header->name).second) {
      out += "// --- " + std::string(name) + "\n";
      append(out, header->text, seen);
      out += "// --- end of " + std::string(name) + "\n";
    }
  }
}

}  // namespace

const Digest& headers_digest() {
  static const Digest digest = [] {
    Sha256 sum;
    for (const Header& h : headers()) sum.field(h.name).field(h.text);
    return sum.digest();
  }();
  return digest;
}

std::string self_contained(std::string_view source) {
  std::string out;
  std::set<std::string_view> seen;
  append(out, source, seen);
  return out;
}

}  // namespace fusegrad::jit
