// ATen/functorch/Interpreter.h includes this library, which torch's wheels leave out, for functions that nobody here
// calls. Their declarations are enough. The real header, where there is one, comes first in the search.
#pragma once

#include <string>

#define NLOHMANN_JSON_SERIALIZE_ENUM(...)

namespace nlohmann {
struct json {
  json() = default;
  template <class T>
  explicit json(const T& value);
  std::string dump() const;
  static json parse(const std::string& text);
  template <class T>
  T get() const;
};
}  // namespace nlohmann
