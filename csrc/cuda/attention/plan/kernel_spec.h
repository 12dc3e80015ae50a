// What one kernel of flex attention is compiled for, as a value.
//
// A KernelSpec is made by the planner (plan.h), never changed, and all that a program is made from (program.h). The
// Config that it renders is its key too, so nothing can be in the source and missing in the key.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "cuda/attention/captured/scheme.cuh"
#include "cuda/attention/plan/case.h"

namespace fusegrad::cuda {

/// Portable: mma.sync and cp.async, for sm_80 and later. Hopper: wgmma, TMA and warp specialization; sm_90a alone. Few:
/// the forward of few queries, as portable, but for copies by TMA on sm_90a.
enum class FlexFamily : uint8_t { kPortable, kHopper, kFew };

/// What tiles of one family alone have.
struct PortableTile {
  int share = 1;            ///< backward: warps that share keys
  int gradient_stages = 1;  ///< backward: tiles of dS
  bool keeps = false;       ///< a CTA stays for many batches, and keeps what a score_mod reads of their pairs
  bool columns = false;     ///< columns of tables that it reads for each pair lie in shared memory

  bool operator==(const PortableTile&) const = default;
};
struct HopperTile {
  int query_stages = 1;     ///< tiles of queries
  int key_stages = 1;       ///< backward: tiles of keys
  int parts = 1;            ///< of a tile's rows, each with a kind (device::FlexTileKind) of its own
  int read_stages = 0;      ///< tiles of what mods read
  int line_bytes = 0;       ///< forward and gradients of buffers: of a stage, for lines
  int maps = 0;             ///< reads of pairs that TMA copies into boxes
  bool own_places = false;  ///< backward: TMA stores dK and dV from places of their own
  bool kept_sums = false;   ///< forward: sums of segments are kept in shared memory, not in global

  bool operator==(const HopperTile&) const = default;
};
struct FewTile {
  bool key_boxes = false;  ///< keys and values come by TMA

  bool operator==(const FewTile&) const = default;
};

/// The tile of a kernel and how many of them it keeps in shared memory.
struct FlexTile {
  int rows = 0;   ///< queries
  int cols = 0;   ///< keys
  int warps = 0;  ///< of a CTA, the producer's warpgroup included
  int stages = 1;
  bool boxes = false;                                     ///< what a score_mod reads of pairs lies in shared memory
  std::variant<PortableTile, HopperTile, FewTile> own{};  ///< in the order of FlexFamily

  bool operator==(const FlexTile&) const = default;
  FlexFamily family() const { return static_cast<FlexFamily>(own.index()); }
  bool is_hopper() const { return family() == FlexFamily::kHopper; }
  /// Throw where it is of another family.
  const PortableTile& portable() const { return std::get<PortableTile>(own); }
  const HopperTile& hopper() const { return std::get<HopperTile>(own); }
  const FewTile& few() const { return std::get<FewTile>(own); }
  PortableTile& portable() { return std::get<PortableTile>(own); }
  HopperTile& hopper() { return std::get<HopperTile>(own); }
  FewTile& few() { return std::get<FewTile>(own); }
  // What other families have one of, or none.
  int parts() const { return is_hopper() ? hopper().parts : 1; }
  int maps() const { return is_hopper() ? hopper().maps : 0; }
  int share() const { return family() == FlexFamily::kPortable ? portable().share : 1; }
  bool keeps() const { return family() == FlexFamily::kPortable && portable().keeps; }
  bool columns() const { return family() == FlexFamily::kPortable && portable().columns; }
  bool key_boxes() const { return family() == FlexFamily::kFew && few().key_boxes; }
};

/// What follows from a case and a tile, and is told by more than the kernel's room; Config has it by a name like its
/// own, which the device headers explain.
struct KernelFacts {
  FlexKernel kernel = FlexKernel::kForward;
  FlexTile tile;
  int head = 0, value = 0;   ///< D and E, rounded up to what the family computes
  int warps = 0;             ///< with keys (backward) or queries of their own
  int groups = 0;            ///< Hopper: consumer warpgroups
  bool keys_shared = false;  ///< Hopper backward: both consumer warpgroups have the same 64 keys
  bool narrow = false;       ///< Hopper backward: chunks of queries, keys and values have 32 columns, not 64
  bool upright = false;      ///< Hopper backward: dQ lies as queries do, not transposed
  bool key_splits = false;   ///< each row of tiles is split over several CTAs
  bool blocks = false;
  // kernels of gradients
  bool grad_query = false;
  bool stores_boxes = false, stores_query = false, stores_first = false, ordered = false, whole = false;
  bool fixed_point = false, partial_sums = false;
  bool places = false;                  ///< a thread has all indices of its pairs in registers (PairPlaces)
  std::vector<bool> wants_grad;         ///< of each buffer of the score_mod
  std::vector<device::Scheme> schemes;  ///< of each contribution
  std::vector<int> tables;              ///< elements of a histogram, else 0
  int resident = 0;                     ///< CTAs of a multiprocessor that registers must allow; 0: any
  int shared_bytes = 0;

  bool hopper() const { return tile.is_hopper(); }
  bool few() const { return tile.family() == FlexFamily::kFew; }
  int threads() const { return hopper() ? 128 * (groups + 1) : 32 * warps; }

  bool operator==(const KernelFacts&) const = default;
};

/// A case with its facts, and what follows from them. Immutable; equal keys are the same program.
class KernelSpec {
 public:
  KernelSpec(FlexCase asked, KernelFacts facts);

  const FlexCase& asked() const { return case_; }
  const KernelFacts& facts() const { return facts_; }
  const FlexTile& tile() const { return facts_.tile; }
  /// The kernel's name, and the header and the class that it is an instance of.
  const char* name() const { return name_; }
  const char* header() const { return header_; }
  const char* type() const { return type_; }
  /// What it takes after the arguments of all families, or null.
  const char* more() const { return more_; }
  /// The struct Config of the source.
  const std::string& config() const { return config_; }
  /// The name, Config, and the texts of the mods.
  std::string key() const;

  bool operator==(const KernelSpec& other) const { return case_ == other.case_ && facts_ == other.facts_; }

 private:
  FlexCase case_;
  KernelFacts facts_;
  const char *name_, *header_, *type_, *more_;
  std::string config_;
};

/// As device code names the type.
const char* element_name(DType dtype);
/// The letters of schemes.
std::string letters(const std::vector<device::Scheme>& schemes);

}  // namespace fusegrad::cuda
