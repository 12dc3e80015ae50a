// The backward of flex_attention: the scores once more, then five products a tile.
//
// The unit of work is a block of keys of one key head, with all query heads that share it: it alone sums the gradients
// of its keys and values. Units are cut into as many consecutive ranges as there are threads ("lanes"), by their cost.
// A lane sums the gradients of the queries it meets by itself; where several lanes meet a head, their sums are added up
// afterwards in the order of the lanes. Who runs a lane does not matter: the result is always the same bits.
#include <algorithm>
#include <limits>
#include <map>

#include "attention/cpu/buffer_sums.h"
#include "attention/cpu/flex_attention.h"

namespace fusegrad::cpu {
namespace {

constexpr int64_t kKeyBlock = 128;
// Lanes that share a head have a sum of its query gradients each; all together at most about this much.
constexpr int64_t kQuerySumBytes = int64_t{256} << 20;

// Which units a lane computes, and in which order they stand.
struct Units {
  int64_t groups, blocks;  // key heads (of all batches), key blocks
  bool block_major;        // unit = block * groups + group, else group * blocks + block

  int64_t count() const { return groups * blocks; }
  int64_t group(int64_t unit) const { return block_major ? unit % groups : unit / blocks; }
  int64_t block(int64_t unit) const { return block_major ? unit / groups : unit % blocks; }
};

template <class T>
class Backward {
 public:
  Backward(const Host& host, const FlexBackwardCall& call)
      : p_(host, call.of),
        call_(call),
        lse_(static_cast<const T*>(call.saved.lse)),
        lse_low_(static_cast<const T*>(call.saved.lse_low)),
        max_(static_cast<const T*>(call.saved.max_scores)),
        sums_(host, call, p_.lengths(), p_.key_batches, p_.key_heads, ceil_div(p_.keys, kKeyBlock)) {
    if (call.grad_out.data != nullptr) grad_out_.emplace(call.grad_out);
    if (call.needs_query) grad_query_.emplace(call.query);
    if (call.needs_key) grad_key_.emplace(call.key);
    if (call.needs_value) grad_value_.emplace(call.value);
    const auto& buffers = call.needs_buffers;
    wants_scores_ = call.needs_query || call.needs_key ||
                    std::any_of(buffers.begin(), buffers.end(), [](bool wanted) { return wanted; });
    if (p_.score_program && wants_scores_) {
      const auto& mod = call.of.score_mod;
      derivative_.emplace(*score_mod::cached_derivative(mod.text, buffers), p_.lengths(), mod.buffers, mod.scalars);
    }
    row_values();
    divide();
  }

  void run();

 private:
  class Lane;
  friend class Lane;

  int64_t group_heads() const { return p_.batches / p_.key_batches * p_.group(); }

  // A group's.
  std::pair<int64_t, int64_t> key_head_of(int64_t group) const {
    if (keeps_) return {group % p_.key_batches, group / p_.key_batches};
    return {group / p_.key_heads, group % p_.key_heads};
  }
  // Query heads of a key head, by number.
  std::pair<int64_t, int64_t> member(int64_t group, int64_t i) const {
    const auto [key_batch, key_head] = key_head_of(group);
    const int64_t b = p_.key_batches == 1 ? i / p_.group() : key_batch;
    return {b, key_head * p_.group() + i % p_.group()};
  }

  void row_values();
  void divide();
  void add_shared_query_sums(const std::vector<std::unique_ptr<Lane>>& lanes);
  void store_query_gradient(int64_t group, const T* sum);

  const FlexProblem<T> p_;
  const FlexBackwardCall& call_;
  bool wants_scores_;
  const T *lse_, *lse_low_, *max_;
  std::optional<HeadView> grad_out_, grad_query_, grad_key_, grad_value_;
  std::optional<score_mod::TileProgram<T>> derivative_;
  BufferSums<T> sums_;
  Scratch<T> delta_;     // [B, H, M]: sum of grad_out * out, less grad_lse
  Scratch<T> grad_max_;  // [B, H, M]: grad_max_scores / ties, where there is one
  Units units_{};
  bool keeps_ = false;             // a head's batches follow each other, see FlexProblem::keeps_pairs()
  std::vector<Range> lanes_;       // of units
  std::vector<int32_t> visitors_;  // of each group: lanes that meet it
};

template <class T>
void Backward<T>::row_values() {
  const int64_t heads = p_.batches * p_.heads, rows = heads * p_.queries;
  const auto* grad_lse = static_cast<const T*>(call_.grad_lse);
  delta_ = Scratch<T>(rows);
  for (int64_t i = 0; i < rows; ++i) delta_.data()[i] = grad_lse != nullptr ? -grad_lse[i] : T(0);
  if (const auto* grad_max = static_cast<const T*>(call_.grad_max_scores)) {
    const auto* ties = static_cast<const T*>(call_.saved.max_ties);
    grad_max_ = Scratch<T>(rows);
    for (int64_t i = 0; i < rows; ++i) grad_max_.data()[i] = grad_max[i] / ties[i];
  }
  if (!grad_out_ || !wants_scores_) return;
  const HeadView out(call_.saved.out), out_low(call_.saved.out_low);
  parallel_for(p_.host, heads, 1 + (1 << 16) / (p_.queries * (p_.value_size + 1)), [&](int64_t begin, int64_t end) {
    const Scratch<T> dot(p_.queries);
    for (int64_t head = begin; head < end; ++head) {
      const int64_t b = head / p_.heads, h = head % p_.heads;
      const Matrix low = out_low.data != nullptr ? out_low.at(b, h, 0) : Matrix{};
      p_.kernels.row_dot(dot.data(), grad_out_->at(b, h, 0), out.at(b, h, 0), low, p_.queries, p_.value_size);
      p_.kernels.add(delta_.data() + head * p_.queries, dot.data(), p_.queries);
    }
  });
}

template <class T>
void Backward<T>::divide() {
  units_ = {p_.key_batches * p_.key_heads, ceil_div(p_.keys, kKeyBlock), sums_.cut() == LaneCut::kKeys};
  keeps_ = sums_.cut() == LaneCut::kAnywhere && p_.keeps_pairs(kKeyBlock) && group_heads() == 1;
  const int64_t head_bytes = p_.batches * p_.heads / units_.groups * p_.queries * p_.padded_head() * int64_t{sizeof(T)};
  const int64_t lane_bytes = std::max<int64_t>(units_.block_major ? head_bytes * units_.groups : head_bytes, 1);
  const int64_t most =
      std::min({threads(p_.host), sums_.most_lanes(), std::max<int64_t>(kQuerySumBytes / lane_bytes, 2)});

  std::vector<int64_t> cost(static_cast<size_t>(units_.count()) + 1, 0);
  for (int64_t u = 0; u < units_.count(); ++u) {
    const int64_t begin = units_.block(u) * kKeyBlock;
    const Range keys{begin, std::min(begin + kKeyBlock, p_.keys)};
    int64_t pairs = kTileRows * keys.size();
    for (int64_t i = 0; i < group_heads(); ++i) {
      const auto [b, h] = member(units_.group(u), i);
      pairs += p_.blocks.listed_pairs(b, h, {0, p_.queries}, keys);
    }
    cost[static_cast<size_t>(u) + 1] = cost[static_cast<size_t>(u)] + pairs;
  }
  // Where lanes may be cut without meeting in a buffer.
  const int64_t step = sums_.cut() == LaneCut::kAnywhere  ? 1
                       : sums_.cut() == LaneCut::kHeads   ? units_.blocks
                       : sums_.cut() == LaneCut::kBatches ? units_.blocks * p_.key_heads
                                                          : units_.groups;
  int64_t begin = 0;
  for (int64_t lane = 1; lane <= most && begin < units_.count(); ++lane) {
    int64_t end = units_.count();
    if (lane < most) {
      const int64_t target = cost.back() / most * lane;
      end = begin;
      // The nearest cut to the target.
      while (end < units_.count()) {
        const int64_t next = std::min(end + step, units_.count());
        const int64_t middle = (cost[static_cast<size_t>(end)] + cost[static_cast<size_t>(next)]) / 2;
        if (end > begin && middle > target) break;
        end = next;
      }
    }
    lanes_.push_back({begin, end});
    begin = end;
  }
  visitors_.assign(static_cast<size_t>(units_.groups), 0);
  std::vector<int64_t> last(static_cast<size_t>(units_.groups), -1);
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    for (int64_t u = lanes_[lane].begin; u < lanes_[lane].end; ++u) {
      const auto group = static_cast<size_t>(units_.group(u));
      if (last[group] != static_cast<int64_t>(lane)) ++visitors_[group];
      last[group] = static_cast<int64_t>(lane);
    }
  }
}

// What one lane works with.
template <class T>
class Backward<T>::Lane {
 public:
  Lane(Backward& call, size_t lane)
      : c_(call),
        p_(call.p_),
        range_(call.lanes_[lane]),
        sinks_(call.sums_.lane_sinks(lane)),
        query_(kTileRows * p_.head_size),
        query_panels_(kTileRows * p_.padded_head()),
        grad_out_(kTileRows * p_.value_size),
        grad_out_panels_(kTileRows * p_.padded_value()),
        key_transposed_(kPaddedKeys * p_.head_size),
        key_panels_(kKeyBlock * p_.padded_head()),
        value_transposed_(kPaddedKeys * p_.value_size),
        grad_key_(kKeyBlock * p_.padded_head()),
        grad_value_(kKeyBlock * p_.padded_value()),
        score_(kTileRows * kStride),
        probability_(kTileRows * kStride),
        gradient_(kTileRows * kStride),
        alive_(kTileRows * kKeyBlock),
        masker_(p_.blocks, p_.mask(), kTileRows, kKeyBlock, p_.kernels.panel) {
    if (call.grad_max_) max_gradient_ = Scratch<T>(kTileRows * kStride);
    if (p_.dropout) {
      dropout_ = Scratch<T>(kTileRows * kStride);
      kept_ = Scratch<T>(kTileRows * kStride);
    }
    if (p_.score_program) score_mod_.emplace(*p_.score_program, kTileRows, kKeyBlock);
    if (call.derivative_) derivative_.emplace(*call.derivative_, kTileRows, kKeyBlock);
    if (call.keeps_ && score_mod_) score_mod_->keep();
    if (call.keeps_ && derivative_) derivative_->keep();
  }

  void run() {
    std::map<int64_t, int64_t> left;
    for (int64_t u = range_.begin; u < range_.end; ++u) ++left[c_.units_.group(u)];
    for (int64_t u = range_.begin; u < range_.end; ++u) {
      const int64_t group = c_.units_.group(u);
      unit(group, c_.units_.block(u));
      if (--left[group] > 0 || !c_.call_.needs_query || c_.visitors_[static_cast<size_t>(group)] > 1) continue;
      c_.store_query_gradient(group, query_sums_[group].data());
      query_sums_.erase(group);
    }
    if (derivative_) derivative_->flush(sinks_);
  }

  /// The sum of a head's query gradients, [heads of the group, M, padded head size]; null: this lane never met it.
  T* query_sum(int64_t group) {
    const auto found = query_sums_.find(group);
    return found == query_sums_.end() ? nullptr : found->second.data();
  }

 private:
  static constexpr int64_t kMostPanel = 64;
  static constexpr int64_t kPaddedKeys = kKeyBlock + kMostPanel;
  static constexpr int64_t kStride = kKeyBlock + 16;

  void unit(int64_t group, int64_t block) {
    const auto& kernels = p_.kernels;
    const Range keys{block * kKeyBlock, std::min((block + 1) * kKeyBlock, p_.keys)};
    const auto [b, h] = c_.key_head_of(group);
    const int64_t head = p_.padded_head(), values = p_.padded_value();
    const Matrix key = p_.key.at(b, h, keys.begin), value = p_.value.at(b, h, keys.begin);
    kernels.pack_transposed(key_transposed_.data(), key, keys.size(), p_.head_size);
    if (c_.call_.needs_query) kernels.pack_panels(key_panels_.data(), key, keys.size(), p_.head_size, T(1));
    if (c_.wants_scores_) kernels.pack_transposed(value_transposed_.data(), value, keys.size(), p_.value_size);
    std::fill_n(grad_key_.data(), keys.size() * head, T(0));
    std::fill_n(grad_value_.data(), keys.size() * values, T(0));
    T* query_sum = nullptr;
    if (c_.call_.needs_query) {
      auto& sum = query_sums_[group];
      const int64_t size = c_.group_heads() * p_.queries * head;
      if (!sum) {
        sum = Scratch<T>(size);
        std::fill_n(sum.data(), size, T(0));
      }
      query_sum = sum.data();
    }
    for (int64_t i = 0; i < c_.group_heads(); ++i) {
      const auto [query_b, query_h] = c_.member(group, i);
      for (int64_t q = 0; q < p_.queries; q += kTileRows) {
        tile(query_b, query_h, {q, std::min(q + kTileRows, p_.queries)}, keys,
             query_sum == nullptr ? nullptr : query_sum + (i * p_.queries + q) * head);
      }
    }
    // The queries were scaled when they were packed.
    if (c_.call_.needs_key) {
      kernels.unpack(c_.grad_key_->at(b, h, keys.begin), grad_key_.data(), head, keys.size(), p_.head_size, nullptr,
                     T(1));
    }
    if (c_.call_.needs_value) {
      kernels.unpack(c_.grad_value_->at(b, h, keys.begin), grad_value_.data(), values, keys.size(), p_.value_size,
                     nullptr, T(1));
    }
  }

  void tile(int64_t b, int64_t h, Range queries, Range keys, T* query_sum) {
    const auto& kernels = p_.kernels;
    const TileMask mask = masker_.mask(b, h, queries, keys);
    if (mask.begin == mask.end) return;
    const int64_t rows = queries.size(), cols = mask.end - mask.begin, panel = kernels.panel;
    const int64_t row = (b * p_.heads + h) * p_.queries + queries.begin;
    const score_mod::Tile where{b, h, queries.begin, keys.begin + mask.begin, rows, cols};
    const ScoreTile<T> scores{probability_.data(), kStride, mask.bytes, mask.stride, rows, cols};
    const Matrix query = p_.query.at(b, h, queries.begin);

    // P = exp(score_mod(scale * Q K^T) - lse)
    kernels.pack_rows(query_.data(), p_.head_size, query, rows, p_.head_size, p_.scale);
    T* raw = score_mod_ ? score_.data() : probability_.data();
    kernels.multiply(rows, cols, p_.head_size, query_.data(), p_.head_size, 1,
                     key_transposed_.data() + mask.begin * p_.head_size, panel * p_.head_size, raw, kStride, false);
    if (score_mod_) {
      const bool in_range =
          score_mod_->score_mod(where, {raw, kStride}, {mask.bytes, mask.stride}, {probability_.data(), kStride});
      FUSEGRAD_CHECK(IndexError, in_range, "flex_attention: score_mod: ", score_mod_->out_of_range().message());
    }
    if (max_gradient_) {
      std::fill_n(max_gradient_.data(), rows * kStride, T(0));
      kernels.add_max_gradient(max_gradient_.data(), scores, c_.max_ + row, c_.grad_max_.data() + row);
    }
    const bool infinite = kernels.probabilities(scores, c_.lse_ + row, c_.lse_low_ + row);

    if (p_.dropout) {
      kernels.dropout(dropout_.data(), kStride, p_.dropout_of(b, h), queries.begin, where.kv, rows, cols);
      kernels.drop(kept_.data(), probability_.data(), dropout_.data(), kStride, rows, cols);
    }

    // dV += P^T dO, of what dropout makes of P
    if (c_.grad_out_ && c_.call_.needs_value) {
      kernels.pack_panels(grad_out_panels_.data(), c_.grad_out_->at(b, h, queries.begin), rows, p_.value_size, T(1));
      kernels.multiply(cols, p_.value_size, rows, p_.dropout ? kept_.data() : probability_.data(), 1, kStride,
                       grad_out_panels_.data(), rows * panel, grad_value_.data() + mask.begin * p_.padded_value(),
                       p_.padded_value(), true);
    }
    if (!c_.wants_scores_) return;

    // dS' = P (dO V^T - delta), then through the score_mod
    if (c_.grad_out_) {
      kernels.pack_rows(grad_out_.data(), p_.value_size, c_.grad_out_->at(b, h, queries.begin), rows, p_.value_size,
                        T(1));
      kernels.multiply(rows, cols, p_.value_size, grad_out_.data(), p_.value_size, 1,
                       value_transposed_.data() + mask.begin * p_.value_size, panel * p_.value_size, gradient_.data(),
                       kStride, false);
      if (p_.dropout) kernels.drop(gradient_.data(), gradient_.data(), dropout_.data(), kStride, rows, cols);
    } else {
      std::fill_n(gradient_.data(), rows * kStride, T(0));
    }
    kernels.score_gradient(gradient_.data(), probability_.data(), kStride, rows, cols, c_.delta_.data() + row);
    if (max_gradient_) {
      for (int64_t r = 0; r < rows; ++r) {
        kernels.add(gradient_.data() + r * kStride, max_gradient_.data() + r * kStride, cols);
      }
    }
    if (derivative_) {
      // A score that the score_mod made -inf behaves as one that is masked.
      score_mod::Rectangle<const uint8_t> takes_part{mask.bytes, mask.stride};
      if (infinite) {
        kernels.alive(alive_.data(), kKeyBlock, probability_.data(), kStride, rows, cols);
        takes_part = {alive_.data(), kKeyBlock};
      }
      const bool in_range = derivative_->backward(where, {raw, kStride}, {gradient_.data(), kStride}, takes_part,
                                                  {gradient_.data(), kStride}, sinks_);
      FUSEGRAD_CHECK(IndexError, in_range, "flex_attention: score_mod: ", derivative_->out_of_range().message());
    }

    // dK += dS^T Q, dQ += dS K
    if (c_.call_.needs_key) {
      kernels.pack_panels(query_panels_.data(), query, rows, p_.head_size, p_.scale);
      kernels.multiply(cols, p_.head_size, rows, gradient_.data(), 1, kStride, query_panels_.data(), rows * panel,
                       grad_key_.data() + mask.begin * p_.padded_head(), p_.padded_head(), true);
    }
    if (query_sum != nullptr) {
      kernels.multiply(rows, p_.head_size, cols, gradient_.data(), kStride, 1, key_panels_.data() + mask.begin * panel,
                       keys.size() * panel, query_sum, p_.padded_head(), true);
    }
  }

  Backward& c_;
  const FlexProblem<T>& p_;
  Range range_;
  std::vector<score_mod::GradientSink<T>> sinks_;
  Scratch<T> query_, query_panels_, grad_out_, grad_out_panels_, key_transposed_, key_panels_, value_transposed_,
      grad_key_, grad_value_, score_, probability_, gradient_, max_gradient_, dropout_, kept_;
  Scratch<uint8_t> alive_;
  TileMasker masker_;
  std::optional<score_mod::TileEvaluator<T>> score_mod_, derivative_;
  std::map<int64_t, Scratch<T>> query_sums_;
};

template <class T>
void Backward<T>::store_query_gradient(int64_t group, const T* sum) {
  for (int64_t i = 0; i < group_heads(); ++i) {
    const auto [b, h] = member(group, i);
    p_.kernels.unpack(grad_query_->at(b, h, 0), sum + i * p_.queries * p_.padded_head(), p_.padded_head(), p_.queries,
                      p_.head_size, nullptr, p_.scale);
  }
}

template <class T>
void Backward<T>::add_shared_query_sums(const std::vector<std::unique_ptr<Lane>>& lanes) {
  const int64_t size = group_heads() * p_.queries * p_.padded_head();
  for (int64_t group = 0; group < units_.groups; ++group) {
    if (visitors_[static_cast<size_t>(group)] < 2) continue;
    T* sum = nullptr;
    for (const auto& lane : lanes) {
      T* part = lane->query_sum(group);
      if (sum == nullptr) {
        sum = part;
      } else if (part != nullptr) {
        parallel_for(p_.host, size, 1 << 15,
                     [&](int64_t begin, int64_t end) { p_.kernels.add(sum + begin, part + begin, end - begin); });
      }
    }
    store_query_gradient(group, sum);
  }
}

template <class T>
void Backward<T>::run() {
  sums_.prepare(lanes_.size());
  std::vector<std::unique_ptr<Lane>> lanes(lanes_.size());
  if (call_.begin_writing != nullptr) call_.begin_writing();
  share_tasks(p_.host, static_cast<int64_t>(lanes_.size()), [&](const auto& next) {
    while (const auto lane = next()) {
      auto& state = lanes[static_cast<size_t>(*lane)];
      state = std::make_unique<Lane>(*this, static_cast<size_t>(*lane));
      state->run();
    }
  });
  if (call_.needs_query) add_shared_query_sums(lanes);
  lanes.clear();
  sums_.finish();
}

}  // namespace

void attention_backward(const Host& host, const FlexBackwardCall& call) {
  if (call.of.query.dtype == DType::kFloat64) {
    Backward<double>(host, call).run();
  } else {
    Backward<float>(host, call).run();
  }
}

}  // namespace fusegrad::cpu
