// What the rooms make plans of: the beginning that all calls have, kernels with their lists of tiles.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention/plan/call_plan.h"

namespace fusegrad::cuda {

/// FlexCase's members that follow from what is asked, whatever the kernel; shape and mask of the plan.
void begin_plan(const Asked& asked, CallPlan& plan);

/// About the share of all pairs that a mask_mod without buffers allows; 1 where that is not known.
double share_of_pairs(const Asked& asked);

/// What follows from the score_mod's buffers.
void take_buffers(const AskedMod& score_mod, FlexCase& common);

/// Whether the buffers of the score_mod's boxes whose rows do not lie together at multiples of 16 bytes are copied
/// first, which then takes less time than to read them as they lie; gives the copies regions. Changes what `plan`'s
/// common case says of boxes.
void align_boxes(const Asked& asked, CallPlan& plan);

/// [batches, heads, rows, columns] with rows that kernels read: columns rounded up to 16 bytes.
std::array<int64_t, 4> aligned_strides(const std::array<int64_t, 4>& sizes, DType dtype);
int64_t aligned_bytes(const std::array<int64_t, 4>& sizes, DType dtype);

/// A region for a copy of an operand whose rows do not lie as kernels read them.
void align_operand(const Asked& asked, FlexOperand operand, const std::array<int64_t, 4>& sizes, const char* name,
                   CallPlan& plan);

/// The same of query, key and value.
void align_inputs(const Asked& asked, CallPlan& plan);

/// The program of a launch, with regions for its lists.
std::shared_ptr<const Program> make_program(LaunchPlan launch, CallPlan& plan);

}  // namespace fusegrad::cuda
