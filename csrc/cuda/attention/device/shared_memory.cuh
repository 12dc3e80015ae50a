// Where each kernel of flex attention keeps what in shared memory, as constexpr descriptions.
//
// The planner on the host and the kernels compile the same description: the planner for the bytes of a launch and for
// which tiles fit a GPU, a kernel for its addresses. So neither repeats the other's arithmetic. Uses nothing of CUDA.
//
// Sizes are in bytes but for those of tiles, which are in rows and columns. Offsets count from the start of the dynamic
// shared memory, in the Hopper kernels from its first multiple of kSwizzleAlignment.
#pragma once

#include "cuda/attention/captured/scheme.cuh"

namespace fusegrad::device {

/// A swizzled tile of TMA begins at a multiple of it.
constexpr int kSwizzleAlignment = 1024;
/// An mbarrier.
constexpr int kBarrierBytes = 8;
/// FlexRow: lse and delta of a query.
constexpr int kRowStatisticsBytes = 8;

constexpr int round_up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

/// A named part of a CTA's shared memory: `count` equal pieces, such as the stages of a pipeline. Piece i begins at
/// base + offset + i * piece; kernels add in this order, which decides what compilers share.
struct Region {
  int offset = 0, piece = 0, count = 0;
  constexpr int bytes() const { return piece * count; }
  constexpr int end() const { return offset + bytes(); }
  /// The region behind this one.
  constexpr Region then(int piece_bytes, int pieces = 1) const { return {end(), piece_bytes, pieces}; }
};

/// Columns of a swizzled tile of TMA, of 16-bit elements: whole chunks of 64, the last of which may be zeros in part;
/// of a narrow one 32.
constexpr int swizzled_cols(int cols, bool narrow = false) { return round_up_to(cols, narrow ? 32 : 64); }
constexpr int swizzled_tile_bytes(int rows, int cols, bool narrow = false) {
  return rows * swizzled_cols(cols, narrow) * 2;
}

// --- portable kernels ---------------------------------------------------------------------------------------

/// A row of a padded tile (Tile in cuda/device/mma.cuh): an odd multiple of 16 bytes, against bank conflicts.
constexpr int padded_row_bytes(int cols, int element_bytes) { return cols * element_bytes + 16; }
constexpr int padded_tile_bytes(int rows, int cols, int element_bytes) {
  return rows * padded_row_bytes(cols, element_bytes);
}

struct ForwardMemory {
  struct Sizes {
    int rows, cols, head, value, element_bytes, box_bytes, kept_bytes, column_bytes;
  };
  Region query;  // the epilogue's output takes the same place
  Region key, value;
  Region boxes;    // of what a score_mod reads for each pair by itself
  Region kept;     // the same, for all batches
  Region columns;  // of tables (PairColumns)

  constexpr explicit ForwardMemory(const Sizes& s)
      : query{0, padded_tile_bytes(s.rows, s.head > s.value ? s.head : s.value, s.element_bytes), 1},
        key(query.then(padded_tile_bytes(s.cols, s.head, s.element_bytes))),
        value(key.then(padded_tile_bytes(s.cols, s.value, s.element_bytes))),
        boxes(value.then(s.box_bytes)),
        kept(boxes.then(s.kept_bytes)),
        columns(kept.then(s.column_bytes)) {}
  constexpr int bytes() const { return columns.end(); }
};

/// Forward mode: beside each operand its tangent, where it has one.
struct TangentsMemory {
  struct Sizes {
    int rows, cols, head, value, element_bytes;
    bool query_tangent, key_tangent, value_tangent;
  };
  Region query;  // the epilogue's outputs take the same place
  Region query_tangent, key, key_tangent, value, value_tangent;

  constexpr explicit TangentsMemory(const Sizes& s)
      : query{0, padded_tile_bytes(s.rows, s.head > s.value ? s.head : s.value, s.element_bytes), 1},
        query_tangent(query.then(padded_tile_bytes(s.rows, s.head, s.element_bytes), s.query_tangent ? 1 : 0)),
        key(query_tangent.then(padded_tile_bytes(s.cols, s.head, s.element_bytes))),
        key_tangent(key.then(padded_tile_bytes(s.cols, s.head, s.element_bytes), s.key_tangent ? 1 : 0)),
        value(key_tangent.then(padded_tile_bytes(s.cols, s.value, s.element_bytes))),
        value_tangent(value.then(padded_tile_bytes(s.cols, s.value, s.element_bytes), s.value_tangent ? 1 : 0)) {}
  constexpr int bytes() const { return value_tangent.end(); }
};

/// Few queries: each warp has keys of its own, and its own stages of them. Their outputs take the stages' place.
struct FewForwardMemory {
  struct Sizes {
    int rows, cols, head, value, element_bytes, warps, stages;
    bool key_boxes;  // keys and values are swizzled tiles of TMA
    constexpr int stage_bytes() const {
      const int keys = cols / warps;
      return key_boxes ? swizzled_tile_bytes(keys, head) + swizzled_tile_bytes(keys, value)
                       : padded_tile_bytes(keys, head, element_bytes) + padded_tile_bytes(keys, value, element_bytes);
    }
  };
  Region query;
  Region results;   // FlexPartialRow of each warp and row
  Region barriers;  // of each warp and stage, with key_boxes
  Region stages;    // of each warp: each a tile of keys and behind it one of values
  Region outputs;   // of each warp, float32

  /// Floats of a row of `outputs`.
  static constexpr int output_stride(int value) { return value + 4; }
  constexpr explicit FewForwardMemory(const Sizes& s)
      : query{0, padded_tile_bytes(s.rows, s.head, s.element_bytes), 1},
        results(query.then(16 * s.rows, s.warps)),
        barriers(results.then(kBarrierBytes, s.key_boxes ? s.warps * s.stages : 0)),
        stages{round_up_to(barriers.end(), s.key_boxes ? kSwizzleAlignment : 16), s.stage_bytes(), s.warps * s.stages},
        outputs{stages.offset, 4 * s.rows * output_stride(s.value), s.warps} {}
  constexpr int bytes() const { return stages.end() > outputs.end() ? stages.end() : outputs.end(); }
};

struct GradQueryMemory {
  struct Sizes {
    int rows, cols, head, value, element_bytes;
  };
  Region query, grad_out;
  Region stages;  // each a tile of keys and behind it one of values

  constexpr explicit GradQueryMemory(const Sizes& s)
      : query{0, padded_tile_bytes(s.rows, s.head, s.element_bytes), 1},
        grad_out(query.then(padded_tile_bytes(s.rows, s.value, s.element_bytes))),
        stages(grad_out.then(
            padded_tile_bytes(s.cols, s.head, s.element_bytes) + padded_tile_bytes(s.cols, s.value, s.element_bytes),
            2)) {}
  constexpr int bytes() const { return stages.end(); }
};

/// Second derivatives: each operand with its tangent, and the tile that results are stored from.
struct PairTangentsMemory {
  struct Sizes {
    int rows, cols, head, value, element_bytes;
    bool grad_out_tangent;
  };
  Region query, query_tangent, grad_out, grad_out_tangent, key, key_tangent, value, value_tangent, scores;

  constexpr explicit PairTangentsMemory(const Sizes& s)
      : query{0, padded_tile_bytes(s.rows, s.head, s.element_bytes), 1},
        query_tangent(query.then(query.piece)),
        grad_out(query_tangent.then(padded_tile_bytes(s.rows, s.value, s.element_bytes))),
        grad_out_tangent(grad_out.then(grad_out.piece, s.grad_out_tangent ? 1 : 0)),
        key(grad_out_tangent.then(padded_tile_bytes(s.cols, s.head, s.element_bytes))),
        key_tangent(key.then(key.piece)),
        value(key_tangent.then(padded_tile_bytes(s.cols, s.value, s.element_bytes))),
        value_tangent(value.then(value.piece)),
        scores(value_tangent.then(padded_tile_bytes(s.rows, s.cols, s.element_bytes))) {}
  constexpr int bytes() const { return scores.end(); }
};

struct GradBuffersMemory {
  struct Sizes {
    int rows, cols, head, value, element_bytes, kept;
  };
  Region stages;  // each a tile of queries, one of grad_out, one of keys and one of values
  Region kept;    // what the score_mod reads for each pair by itself, in float

  constexpr explicit GradBuffersMemory(const Sizes& s)
      : stages{0,
               padded_tile_bytes(s.rows, s.head, s.element_bytes) +
                   padded_tile_bytes(s.rows, s.value, s.element_bytes) +
                   padded_tile_bytes(s.cols, s.head, s.element_bytes) +
                   padded_tile_bytes(s.cols, s.value, s.element_bytes),
               2},
        kept(stages.then(4 * s.rows * s.cols, s.kept)) {}
  constexpr int bytes() const { return kept.end(); }
};

struct BackwardMemory {
  struct Sizes {
    int rows, cols, head, value, element_bytes, stages, gradient_stages;
    bool shares_keys;  // warps that share keys exchange probabilities
    int box_bytes;     // of a stage
    int kept_bytes, column_bytes;
    int captured_bytes;  // sums of captured buffers' gradients
  };
  Region key, value;
  Region stages;         // each a tile of queries, one of grad_out and the row statistics
  Region grad_scores;    // dS
  Region probabilities;  // P, where warps share keys
  Region boxes;          // of each stage, what a score_mod reads for each pair by itself
  Region kept;           // the same, for all batches
  Region columns;        // of tables (PairColumns)
  Region captured;

  constexpr explicit BackwardMemory(const Sizes& s)
      : key{0, padded_tile_bytes(s.cols, s.head, s.element_bytes), 1},
        value(key.then(padded_tile_bytes(s.cols, s.value, s.element_bytes))),
        stages(value.then(padded_tile_bytes(s.rows, s.head, s.element_bytes) +
                              padded_tile_bytes(s.rows, s.value, s.element_bytes) + kRowStatisticsBytes * s.rows,
                          s.stages)),
        grad_scores(stages.then(padded_tile_bytes(s.cols, s.rows, s.element_bytes), s.gradient_stages)),
        probabilities(grad_scores.then(padded_tile_bytes(s.cols, s.rows, s.element_bytes), s.shares_keys ? 1 : 0)),
        boxes(probabilities.then(s.box_bytes, s.stages)),
        kept(boxes.then(s.kept_bytes)),
        columns(kept.then(s.column_bytes)),
        captured(columns.then(s.captured_bytes)) {}
  constexpr int bytes() const { return captured.end(); }
};

// --- Hopper kernels, of 16-bit elements ---------------------------------------------------------------------

struct HopperForwardMemory {
  struct Sizes {
    int rows, cols, head, value, stages, query_stages, parts;
    int read_bytes, read_stages;                          // of a stage of what mods read
    int query_tiles = 1, key_tiles = 1, value_tiles = 1;  // of a stage: 2 with a tangent behind
  };
  static constexpr int kWorkStages = 2;
  Region query, key, value;
  Region zeros;     // in place of values of which a part of a tile's queries has none, as those may be infinite
  Region reads;     // what mods read
  Region barriers;  // full and empty of works, queries, keys, values and reads
  Region works;     // the next tiles of queries, from the producer
  Region entries;   // the list entry of each stage of keys

  constexpr explicit HopperForwardMemory(const Sizes& s)
      : query{0, s.query_tiles * swizzled_tile_bytes(s.rows, s.head), s.query_stages},
        key(query.then(s.key_tiles * swizzled_tile_bytes(s.cols, s.head), s.stages)),
        value(key.then(s.value_tiles * swizzled_tile_bytes(s.cols, s.value), s.stages)),
        zeros(value.then(swizzled_tile_bytes(s.cols, s.value), s.parts > 1 ? 1 : 0)),
        reads(zeros.then(s.read_bytes, s.read_stages)),
        barriers(reads.then(kBarrierBytes, 2 * (kWorkStages + s.query_stages + 2 * s.stages + s.read_stages))),
        works(barriers.then(16, kWorkStages)),
        entries(works.then(4, s.stages)) {}
  constexpr int bytes() const { return kSwizzleAlignment + entries.end(); }
};

struct HopperGradQueryMemory {
  struct Sizes {
    int rows, cols, head, value, stages, query_stages;
  };
  Region query;  // each stage a tile of queries and behind it one of grad_out
  Region key;    // a stage more than of values, as dQ needs them for longer
  Region value;
  Region barriers;  // full and empty of queries, keys and values
  Region works;     // whose queries they are; read until after their stage was released
  Region entries;   // the list entry of each stage of keys
  Region lines;     // of what a score_mod reads, or where prefetches write

  constexpr explicit HopperGradQueryMemory(const Sizes& s)
      : query{0, swizzled_tile_bytes(s.rows, s.head) + swizzled_tile_bytes(s.rows, s.value), s.query_stages},
        key(query.then(swizzled_tile_bytes(s.cols, s.head), s.stages + 1)),
        value(key.then(swizzled_tile_bytes(s.cols, s.value), s.stages)),
        barriers(value.then(kBarrierBytes, 2 * (s.query_stages + 2 * s.stages + 1))),
        works(barriers.then(16, 2 * s.query_stages)),
        entries(works.then(4, s.stages + 1)),
        lines(entries.then(4 * s.rows * (s.head <= 64 && s.value <= 64 ? 10 : 3))) {}
  constexpr int bytes() const { return kSwizzleAlignment + lines.end(); }
};

/// It has no bytes for alignment: the dynamic shared memory itself begins at a multiple.
struct HopperBackwardMemory {
  struct Sizes {
    int rows, cols, head, value, stages, query_stages, key_stages;
    bool narrow;           // tiles of queries, keys and values
    bool adds_grad_query;  // whether the CTA adds to dQ
    bool own_keys;         // each warpgroup has 64 keys of its own
    bool own_places;       // dK and dV have places beside dQ's
    bool has_score_mod, has_dropout;
    int box_bytes, read_stages;  // of what a score_mod reads of pairs
    int captured_bytes;          // sums of captured buffers' gradients
  };
  static constexpr int kPlaces = 8;
  Region key, value, query, grad_out;
  Region grad_scores;    // dS as [query][key], in chunks of 64 keys
  Region grad_query;     // dQ in float32, on its way to global memory; dK and dV too where TMA stores them
  Region key_gradients;  // each warpgroup's dV and dK on their way to global memory, where they have own places
  Region boxes;          // of what a score_mod reads of pairs; multiples of the alignment where TMA copies them
  Region rows;           // row statistics of each stage of grad_out
  Region places;         // whose queries a tile is; read until after the tile's stages were released, with dQ
  Region barriers;       // value empty, key empty, full and empty of queries, of grad_out, of dS and of boxes, empty of
                         // each warpgroup's dK and dV, and full of its sums of dQ
  Region lines;          // of what a score_mod reads, or where prefetches write
  Region drawn;          // of dropout, what a warpgroup draws for a tile; two sets where warpgroups take no turns
  Region captured;

  constexpr explicit HopperBackwardMemory(const Sizes& s)
      : key{0, swizzled_tile_bytes(s.cols, s.head, s.narrow), s.key_stages},
        value(key.then(swizzled_tile_bytes(s.cols, s.value, s.narrow))),
        query(value.then(swizzled_tile_bytes(s.rows, s.head, s.narrow), s.query_stages)),
        grad_out(query.then(swizzled_tile_bytes(s.rows, s.value, s.narrow), s.stages)),
        grad_scores(grad_out.then(s.adds_grad_query ? swizzled_tile_bytes(s.rows, s.cols) : 0, s.stages)),
        grad_query(
            grad_scores.then(s.adds_grad_query ? 4 * s.rows * swizzled_cols(s.head, s.narrow && s.head <= 32) : 0)),
        key_gradients(grad_query.then(
            swizzled_tile_bytes(s.cols, s.head, s.narrow) + swizzled_tile_bytes(s.cols, s.value, s.narrow),
            s.own_places ? 1 : 0)),
        boxes(key_gradients.then(s.box_bytes, s.read_stages)),
        rows(boxes.then(kRowStatisticsBytes * s.rows, s.stages)),
        places(rows.then(16, kPlaces)),
        barriers(places.then(kBarrierBytes, 2 * (s.key_stages + s.query_stages + 2 * s.stages + s.read_stages +
                                                 (s.own_places ? 1 : 0) + 1))),
        lines(barriers.then(s.has_score_mod ? 4 * (s.own_keys ? 512 : 256) : 0)),
        drawn(lines.then(s.has_dropout ? 8 * s.rows : 0, s.own_keys ? 2 : 4)),
        captured(drawn.then(s.captured_bytes)) {}
  constexpr int bytes() const { return captured.end(); }
};

/// As HopperBackwardMemory: it begins at a multiple of the alignment.
struct HopperGradBuffersMemory {
  struct Sizes {
    int rows, cols, head, value, stages;
    bool narrow;
    int line_bytes, kept;
  };
  Region query, grad_out, key, value;
  Region statistics;  // of a stage's rows
  Region lines;       // of a stage, of what the score_mod reads by keys or diagonals
  Region kept;        // what the score_mod reads for each pair by itself, in float
  Region barriers;    // full and empty of stages

  constexpr explicit HopperGradBuffersMemory(const Sizes& s)
      : query{0, swizzled_tile_bytes(s.rows, s.head, s.narrow), s.stages},
        grad_out(query.then(swizzled_tile_bytes(s.rows, s.value, s.narrow), s.stages)),
        key(grad_out.then(swizzled_tile_bytes(s.cols, s.head, s.narrow), s.stages)),
        value(key.then(swizzled_tile_bytes(s.cols, s.value, s.narrow), s.stages)),
        statistics(value.then(kRowStatisticsBytes * s.rows, s.stages)),
        lines(statistics.then(s.line_bytes, s.stages)),
        kept(lines.then(4 * s.rows * s.cols, s.kept)),
        barriers(kept.then(kBarrierBytes, 2 * s.stages)) {}
  constexpr int bytes() const { return barriers.end(); }
};

/// A tile of boxes (PairBoxes) of elements of so many bytes each; 0: no box.
constexpr int box_tile_bytes(int rows, int cols, int element_bytes) {
  return element_bytes == 0 ? 0 : padded_tile_bytes(rows, cols, element_bytes);
}

/// Tensor maps that a kernel takes for boxes.
constexpr int kMostBoxMaps = 2;
/// A tile of boxes that comes by TMA, in whole chunks whose rows have 128 bytes.
constexpr int mapped_tile_bytes(int rows, int cols, int element_bytes) {
  return rows * round_up_to(cols * element_bytes, 128);
}
/// Boxes of which `mapped` bytes, tiles that come by TMA, lie in front of `others`.
constexpr int mapped_box_bytes(int mapped, int others) {
  return mapped == 0 ? others : round_up_to(mapped + others, kSwizzleAlignment);
}

// --- sums of captured buffers' gradients --------------------------------------------------------------------

/// A column of a table (PairColumns) of so many elements; 0: none.
constexpr int column_bytes(int elements) { return elements == 0 ? 0 : 4 * (2 * elements + 4); }

/// What the backward keeps for each contribution to a captured buffer (FlexBufferSums).
struct CapturedMemory {
  int warps;    // that have keys of their own
  int teams;    // warps of a team sum up a tile together
  int sets;     // 2: a tile's sums are read until after the next one's pairs have begun
  int queries;  // of a warp's part of a tile
  int keys;     // of a warp's part of a tile

  /// A line of floats of class D, 10 or 26 more than a multiple of 32, so that what a warp stores together lies in 32
  /// banks.
  constexpr int diagonal_line() const { return (queries + keys + 4) / 16 * 16 + 10; }
  /// A team's histogram of class F: 16 bytes, then a high and a low word of each element.
  static constexpr int histogram_bytes(int elements) { return 16 + round_up_to(elements * 8, 16); }
  constexpr int bytes(Scheme scheme, int elements) const {
    return scheme == Scheme::kQ             ? warps * sets * queries * 4
           : scheme == Scheme::kDiagonal    ? warps * 4 * diagonal_line() * 4
           : scheme == Scheme::kSmallTable  ? teams * histogram_bytes(elements)
           : scheme == Scheme::kOverBatches ? warps * queries * keys * 4
                                            : 0;
  }
};

}  // namespace fusegrad::device
