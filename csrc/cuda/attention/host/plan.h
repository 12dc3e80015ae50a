// From a call of flex attention to the kernels that it needs, their tiles, and the schemes of the captured buffers'
// gradients. Needs no GPU.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "losses/row_kernels.h"
#include "score_mod/captured.h"

namespace fusegrad::cuda {

/// Portable: mma.sync and cp.async, for sm_80 and later. Hopper: wgmma, the copy engine, warps of their own for copies;
/// sm_90a alone.
enum class FlexFamily : uint8_t { kPortable, kHopper };
enum class FlexKernel : uint8_t { kForward, kBackward, kGradQuery };

/// A score_mod or mask_mod; without a text there is none.
struct FlexMod {
  std::string text;
  std::vector<score_mod::DType> dtypes;  ///< of its buffers
  bool small_buffers = true;             ///< all places in buffers lie below 2^31 elements
  bool small_scalars = true;             ///< all integer scalars lie between -2^30 and 2^30
};

inline constexpr int64_t kSmallLength = int64_t{1} << 21;

/// All that a kernel is compiled for, but lengths, strides, scalars.
struct FlexCase {
  FlexKernel kernel = FlexKernel::kForward;
  DType dtype = DType::kBFloat16;
  int head_size = 0, value_size = 0;
  FlexMod score_mod, mask_mod;
  bool blocks = false;                  ///< there is a block mask
  std::array<int64_t, 2> block_size{};  ///< its blocks: tiles may lie in several of them
  bool small_lengths = true;            ///< B, H, M and N are at most 2^21
  bool split = true;                    ///< float32: full accuracy, by six products in TF32
  bool unscaled = false;                ///< forward: the scale is positive, and there is no score_mod
  bool dropout = false;                 ///< its numbers are arguments, but
  bool most_dropped = false;            ///< whether so many pairs are dropped that numbers are compared otherwise
  // forward
  bool max_scores = false, out_low = false;
  // backward
  std::vector<bool> wants_grad;   ///< of each buffer of the score_mod
  std::vector<int64_t> elements;  ///< of each of them
  bool grad_query = false, grad_key = false, grad_value = false, max_gradient = false;
  bool fixed_point = false;   ///< the buffers' gradients are summed in 64-bit fixed point
  bool partial_sums = false;  ///< those of classes A and B are stored head by head, to be summed later
  bool tall = true;           ///< Hopper: a backward's tall tiles take less time than others

  bool wants_buffers() const { return std::find(wants_grad.begin(), wants_grad.end(), true) != wants_grad.end(); }
};

/// Whether dropout with this p compares numbers the other way round (device::FlexDropoutPairs).
bool drops_most(double dropout_p);

/// Sizes of a kernel's work: see the kernels for what they mean.
struct FlexTileSize {
  int rows = 0, cols = 0, warps = 0, share = 1, stages = 1;
  FlexFamily family = FlexFamily::kPortable;
  int query_stages = 1;     // Hopper: tiles of queries in shared memory
  int key_stages = 1;       // Hopper, backward: tiles of keys in shared memory
  int parts = 1;            // Hopper: of a tile's rows, whose kinds (device::FlexTileKind) are their own
  int gradient_stages = 1;  // portable backward: tiles of dS in shared memory
  int line_bytes = 0;       // Hopper, forward: of shared memory, for lines of what mods read
};

struct FlexPlan {
  FlexTileSize tile;
  std::string schemes;      ///< the class of each contribution, 'A' to 'G'
  std::vector<int> tables;  ///< elements of a buffer of class F, else 0
  int shared_bytes = 0;
};

/// The largest dynamic shared memory of a CTA on GPUs of a capability such as 80 or 90.
int flex_shared_limit(int capability);

/// Whether the Hopper kernels take it, and do not compute too much for head sizes between theirs. `architecture`: as
/// jit::current_architecture has it.
bool takes_hopper(const FlexCase& c, const std::string& architecture);

/// Throws where no tile fits the GPU's shared memory.
FlexPlan plan_flex(const FlexCase& c, const std::string& architecture);

/// The kernels of a backward, in their order, of what they have in common. `needs_grad`: of query, key and value first.
/// The gradient of the queries is of a kernel of its own (kGradQuery) where sums must come in one order, and for D or E
/// above 128 in the Hopper family, where two kernels are faster than one though each computes the scores.
std::vector<FlexCase> backward_kernels(FlexCase c, const std::vector<bool>& needs_grad, bool deterministic,
                                       const std::string& architecture);

/// In how many launches, one batch after the other or all at once, the backward's sums of the buffers' gradients come
/// in one order without fixed point: where each place gets one contribution a launch, and a launch fills the GPU's
/// `processors`, or gets partial sums; else 0. Of key and value so many `batches`, `heads` and `keys`.
int64_t ordered_launches(const FlexCase& c, int64_t batches, int64_t heads, int64_t keys, int64_t processors,
                         const std::string& architecture);

// --- what a kernel's source has too ---------------------------------------------------------------------------

/// Head sizes as the kernels of the tiles' family have them.
int head_cols(const FlexCase& c, const FlexTileSize& t);
int value_cols(const FlexCase& c, const FlexTileSize& t);
/// Whether tiles may lie in several blocks of the block mask.
bool mixed(const FlexCase& c, const FlexTileSize& t);
/// Hopper: a backward's tile of more queries, which needs the registers that a score_mod takes and where the next keys
/// could be. For head sizes of 65 to 128 80 of them instead of 64, each 16 of which have a block of a block mask, so
/// that tiles need not begin where blocks do; for smaller ones without a block mask 144 instead of 128.
std::optional<FlexTileSize> backward_tall_tile(const FlexCase& c);
/// Whether masks are all that is done to scores, and a mask_mod reads no buffer.
bool masks_alone(const FlexCase& c);
/// Hopper forward, of scores that are only scaled and masked: whether exponentials are relative to the first maximum of
/// a row. BFloat16 does not overflow where Float16 would, and at larger head sizes it is slower.
bool first_maximum(const FlexCase& c);
/// Whether a score_mod has reads of each pair by itself.
bool reads_pairs(const FlexMod& mod);
bool has_derivative(const FlexCase& c);
/// The other warpgroup of the Hopper kernels copies.
int computing_warps(const FlexTileSize& t);
/// Backward: both computing warpgroups have the same 64 keys, and one of them the captured buffers' sums.
bool keys_shared(const FlexCase& c, const FlexTileSize& t);
int warps_with_keys(const FlexCase& c, const FlexTileSize& t);
/// Whether the backward gives the gradients of keys and values to the copy engine, which stores them as boxes.
bool stores_boxes(const FlexCase& c, const FlexTileSize& t);
/// Where keys are shared, the queries' gradient is left to a kernel of its own.
bool adds_grad_query(const FlexCase& c, const FlexTileSize& t);

/// For tests.
void force_flex_family(std::optional<FlexFamily> family);
/// For tests: the scheme of contributions for which it is right, instead of the planner's; 0: the planner's.
void force_flex_scheme(char scheme);

}  // namespace fusegrad::cuda
