// A score_mod for every primitive on every combination of types.
#pragma once

#include <string>
#include <vector>

#include "score_mod/text.h"
#include "score_mod_examples.h"

namespace fusegrad {

/// Operands are bools, integers of 32 bits and of 64 (from a captured table) and floats. Combinations that the type
/// rules refuse are left out.
inline std::vector<ScoreModExample> score_mod_primitive_examples() {
  using namespace score_mod;
  const std::string operands[] = {"%0", "%1", "%2", "%3"};
  const at::Tensor table = at::arange(128) % 7 - 3;
  std::vector<ScoreModExample> examples;
  for (const Primitive& p : kPrimitives) {
    if (p.op == Op::kWithin) {  // an error on the CPU out of range
      const std::string text = print(parse("score_mod 1\n%0 = within kv_idx 4096\nreturn %0\n"));
      examples.push_back({"within kv_idx 4096", {text, {}, {}}, ""});
      continue;
    }
    for (int types = 0; types >> (2 * p.arity) == 0; ++types) {
      std::string statement = std::string(p.name);
      for (int i = 0; i < p.arity; ++i) statement += " " + operands[(types >> (2 * i)) & 3];
      std::string text =
          "score_mod 1\nbuffer @0 i64 1\n%0 = ge q_idx kv_idx\n%1 = sub q_idx 64\n%2 = load @0 kv_idx\n"
          "%3 = mul score 0.5\n%4 = " +
          statement + "\n";
      try {
        text = print(parse(text + "%5 = to_float %4\nreturn %5\n"));
      } catch (const GraphError&) {
        continue;
      }
      examples.push_back({statement, {text, {table}, {}}, ""});
    }
  }
  return examples;
}

}  // namespace fusegrad
