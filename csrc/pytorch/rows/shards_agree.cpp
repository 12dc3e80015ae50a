// shards_agree on the CPU and on CUDA: each process tells the others a few numbers that stand for what it was given,
// before anything else is sent.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <tuple>

#include "pytorch/ops/faults.h"
#include "pytorch/rows/collectives.h"
#include "pytorch/rows/job.h"

namespace fusegrad {
namespace {

using at::Tensor;

// splitmix64, in int64, which wraps around.
constexpr int64_t kPlace = -0x61C8864680B583EB, kFirst = -0x40A7B892E31B1A47, kSecond = -0x6B2FB644ECCEEE15;
// What a process tells that cannot take part, in place of its numbers.
constexpr int64_t kFailed = -1;

struct Told {
  std::string name, value;
};

int64_t number_of(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325;  // FNV-1a
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001B3;
  hash = (hash ^ (hash >> 30)) * static_cast<uint64_t>(kFirst);
  hash = (hash ^ (hash >> 27)) * static_cast<uint64_t>(kSecond);
  hash ^= hash >> 31;
  int64_t number = 0;
  std::memcpy(&number, &hash, sizeof number);
  return number;
}

Tensor mixed(Tensor bits) {
  bits = bits * kFirst;
  bits = bits.bitwise_xor(bits.bitwise_right_shift(31)) * kSecond;
  return bits.bitwise_xor(bits.bitwise_right_shift(29));
}

// A number that other bits, or the same in another order, change: [1] int64.
Tensor fingerprint(Tensor tensor) {
  if (tensor.is_floating_point()) {
    const auto size = tensor.element_size();
    tensor = tensor.contiguous().view(size == 8   ? at::kLong
                                      : size == 4 ? at::kInt
                                      : size == 2 ? at::kShort
                                                  : at::kChar);
  }
  const auto bits = tensor.reshape({-1}).to(at::kLong);
  return mixed(bits + kPlace * at::arange(1, bits.numel() + 1, bits.options())).sum().reshape({1});
}

// What each argument is, the same text where it is the same.
std::vector<Told> told_of(const ShardsAgree& call) {
  std::vector<Told> told;
  std::istringstream names(call.names), lines(call.told);
  std::string text;
  size_t next = 0;
  for (size_t i = 0; std::getline(names, text, ','); ++i) {
    const int64_t kind = call.kinds.at(i);
    std::ostringstream value;
    if (kind < 0) {
      value << "None";
    } else {
      const auto& tensor = call.given[next++];
      auto sizes = tensor.sizes().vec();
      const int64_t dim = kind / 2 - 1;
      if (dim >= 0 && dim < tensor.dim()) sizes[static_cast<size_t>(dim)] = call.shards.vocab();
      value << tensor.scalar_type() << " " << at::IntArrayRef(sizes) << (kind % 2 == 1 ? " that requires grad" : "");
      if (!call.again) value << " with fingerprint " << fingerprint(tensor).item<int64_t>();
    }
    told.push_back({text, value.str()});
  }
  while (std::getline(lines, text)) {
    const auto colon = text.find(": ");
    told.push_back({text.substr(0, colon), text.substr(colon + 2)});
  }
  return told;
}

// Calls that were compared before: what this process sends, on the device. Never destroyed: the device may be gone by
// then.
class Known {
 public:
  using Key = std::tuple<std::string, std::vector<int64_t>, std::string, std::vector<int64_t>>;
  static Key key(const Shards& shards, const at::Device& device, const std::vector<int64_t>& numbers) {
    return {shards.group, shards.bounds, device.str(), numbers};
  }
  Tensor find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = calls_.find(key);
    return found == calls_.end() ? Tensor() : found->second;
  }
  void add(const Key& key, const Tensor& numbers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (calls_.size() >= 1024) calls_.clear();
    calls_[key] = numbers;
  }

 private:
  std::mutex mutex_;
  std::map<Key, Tensor> calls_;
};

std::string ranks_of(const Tensor& wrong) {
  std::string text;
  for (int64_t r = 0; r < wrong.size(0); ++r) {
    if (wrong[r].item<bool>()) text += (text.empty() ? "" : ", ") + std::to_string(r);
  }
  return text;
}

// Shapes, dtypes and options.
Tensor compare_calls(const ShardsAgree& call, const at::Device& device) {
  const auto told = told_of(call);
  std::vector<int64_t> numbers{call.failed ? kFailed : 0};
  for (const auto& [name, value] : told) numbers.push_back(number_of(value));
  static auto& known = *new Known();
  const auto key = Known::key(call.shards, device, numbers);
  auto mine = known.find(key);
  const bool seen = mine.defined();
  if (!seen) mine = at::tensor(numbers, at::kLong).to(device);
  const auto all = gather_parts(mine, call.shards);
  if (seen && !device.is_cpu() && !check_targets_enabled()) return all.ne(mine).any();
  const auto everyone = all.cpu();
  const auto failures = everyone.select(1, 0).eq(kFailed);
  if (call.failed) return {};
  TORCH_CHECK(!failures.any().item<bool>(), call.op, ": all processes ", call.who,
              " must make the call, but got an error of its own in rank ", ranks_of(failures));
  for (size_t i = 0; i < told.size(); ++i) {
    const auto number = everyone.select(1, static_cast<int64_t>(i) + 1), different = number.ne(number[0]);
    TORCH_CHECK_VALUE(!different.any().item<bool>(), call.op, ": ", told[i].name, " must be the same in all processes ",
                      call.who, ", but got another in rank ", ranks_of(different), " than in rank 0; in this one ",
                      told[i].value.substr(0, 400));
  }
  if (call.again) known.add(key, mine);
  return {};
}

// A number a row, near the row's length: a sum with fixed signs and the length, which is larger than most sums.
Tensor key_of_rows(const Tensor& value) {
  const auto rows = value.reshape({-1, value.size(-1)});
  const auto place = at::arange(rows.size(1), rows.options().dtype(at::kLong));
  const double scale = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(rows.size(1), 1)));
  const auto signs = (mixed(place).bitwise_and(1).to(at::kDouble) * (2 * scale) - scale).to(rows.scalar_type());
  const auto kind = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::mv(rows, signs).to(kind) + 4 * scale * at::linalg_vector_norm(rows, 2, at::IntArrayRef{1}, false, kind);
}

// Values whose shapes are the same in all: whole numbers and class weights bit by bit, others within what rounding can
// differ by, those of two dimensions by rows.
Tensor compare_values(const ShardsAgree& call) {
  std::vector<Tensor> keys;
  std::vector<std::string> names;
  std::vector<double> tolerances;
  std::vector<int64_t> counts;
  std::istringstream all_names(call.names);
  std::string name;
  size_t next = 0;
  for (size_t i = 0; std::getline(all_names, name, ','); ++i) {
    const int64_t kind = call.kinds.at(i);
    if (kind < 0) continue;
    const auto value = call.given[next++];
    if (kind >= 2 || value.numel() == 0) continue;
    double tolerance = 0;
    if (!value.is_floating_point() || name == "weight") {
      keys.push_back(fingerprint(value));
    } else if (value.dim() > 1) {
      // bfloat16's roundoff of all elements is a fifteenth of this.
      keys.push_back(key_of_rows(value).to(at::kDouble).view(at::kLong));
      tolerance = 2e-3;
    } else {
      keys.push_back(value.to(at::kDouble).reshape({-1}).contiguous().view(at::kLong));
      const auto type = value.scalar_type();
      tolerance = type == at::kBFloat16 ? 0x1p-6 : type == at::kHalf ? 0x1p-9 : 1e-4;
    }
    names.push_back(name);
    tolerances.push_back(tolerance);
    counts.push_back(keys.back().numel());
  }
  if (keys.empty()) return {};
  const auto mine = at::cat(keys);
  const auto parts = gather_parts(mine, call.shards).split_with_sizes(counts, 1);
  std::vector<Tensor> different;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (tolerances[i] == 0) {
      different.push_back(parts[i].ne(parts[i][0]));
    } else {
      const auto numbers = parts[i].contiguous().view(at::kDouble);
      different.push_back((numbers - numbers[0]).abs().gt(tolerances[i] * (numbers[0].abs() + 1e-6)));
    }
  }
  if (!mine.is_cpu() && !check_targets_enabled()) return at::cat(different, 1).any();
  for (size_t i = 0; i < different.size(); ++i) {
    const auto wrong = different[i].any(1).cpu();
    if (!wrong.any().item<bool>()) continue;
    std::string row;
    if (counts[i] > 1) row = " at row " + std::to_string(different[i].any(0).nonzero()[0].item<int64_t>());
    TORCH_CHECK_VALUE(false, call.op, ": ", names[i], " must be the same in all processes ", call.who,
                      ", but got another in rank ", ranks_of(wrong), " than in rank 0", row,
                      "; a weight that data parallelism sharded must be gathered");
  }
  return {};
}

Tensor shards_agree(const ShardsAgree& call) {
  BelowAutogradAndAutocast below;
  const auto& like = call.given.front();
  const c10::OptionalDeviceGuard device(at::device_of(like));
  const auto calls = compare_calls(call, like.device());
  const auto values = call.failed || !call.again ? Tensor() : compare_values(call);
  if (calls.defined()) return values.defined() ? calls.logical_or(values) : calls;
  return values.defined() ? values : at::zeros({}, like.options().dtype(at::kBool));
}

Tensor shards_agree_meta(const ShardsAgree& call) {
  return at::empty({}, call.given.front().options().dtype(at::kBool).requires_grad(false));
}

}  // namespace

TORCH_LIBRARY_IMPL(fusegrad, CPU, m) { m.impl("shards_agree", TORCH_FN(unpacked<shards_agree>())); }
TORCH_LIBRARY_IMPL(fusegrad, CUDA, m) { m.impl("shards_agree", TORCH_FN(unpacked<shards_agree>())); }
TORCH_LIBRARY_IMPL(fusegrad, Meta, m) { m.impl("shards_agree", TORCH_FN(unpacked<shards_agree_meta>())); }

}  // namespace fusegrad
