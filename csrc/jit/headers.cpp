#include "jit/headers.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

namespace fusegrad::jit {
namespace {

// The name between quotes or angle brackets, or nothing if the line includes no file.
std::string_view included(std::string_view line) {
  constexpr std::string_view kInclude = "#include ";
  if (!line.starts_with(kInclude)) return {};
  line.remove_prefix(kInclude.size() + 1);
  return line.substr(0, line.find_first_of("\">"));
}

std::vector<std::string_view> all_included(std::string_view text) {
  std::vector<std::string_view> names;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    if (const std::string_view name = included(text.substr(0, end)); !name.empty()) names.push_back(name);
    text.remove_prefix(end);
  }
  return names;
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

Digest headers_digest(std::string_view source) {
  static const auto includes = [] {
    std::map<std::string_view, std::vector<std::string_view>> found;
    for (const Header& h : headers()) found[h.name] = all_included(h.text);
    return found;
  }();
  std::set<std::string_view> names;
  std::vector<std::string_view> pending = all_included(source);
  while (!pending.empty()) {
    const std::string_view name = pending.back();
    pending.pop_back();
    const auto of = includes.find(name);
    if (of == includes.end() || !names.insert(name).second) continue;
    pending.insert(pending.end(), of->second.begin(), of->second.end());
  }
  Sha256 sum;
  for (const Header& h : headers()) {
    if (names.contains(h.name)) sum.field(h.name).field(h.text);
  }
  return sum.digest();
}

std::string self_contained(std::string_view source) {
  std::string out;
  std::set<std::string_view> seen;
  append(out, source, seen);
  return out;
}

}  // namespace fusegrad::jit
