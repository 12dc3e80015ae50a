// What the kernels of a vocabulary that processes share tell each other: functional collectives of torch.distributed,
// by the group's name. A call makes the same ones in all processes, whatever each has.
#pragma once

#include <ATen/ATen.h>

#include "pytorch/ops/arguments.h"

namespace fusegrad {

/// [k, ...] of this process as [processes, k, ...] of all: summed up in the same order everywhere, so that all
/// processes get the same bits.
at::Tensor gather_parts(const at::Tensor& values, const Shards& shards);

/// Begins to sum a contiguous tensor over the processes, in place; it may not be touched before finish_sum().
void start_sum(const at::Tensor& values, const Shards& shards);
void finish_sum(const at::Tensor& values, const Shards& shards);

/// The ops ShardsSum and ShardsUse.
at::Tensor sum_of_parts(const at::Tensor& values, const Shards& shards);
at::Tensor for_own_part(const at::Tensor& values, const Shards& shards);

/// [n] int64, of each part's largest values and their columns, [processes, n]: the first column of the whole vocabulary
/// that has the largest.
at::Tensor first_largest(const at::Tensor& best, const at::Tensor& column, const Shards& shards);

/// [processes, ...] bool: in whose part an index [...] of the whole vocabulary lies.
at::Tensor owned_by(const at::Tensor& index, const Shards& shards);

/// Indices of the whole vocabulary as columns of this process's part; `other` for those of another.
at::Tensor columns_of(const at::Tensor& index, const Shards& shards, int64_t other);

}  // namespace fusegrad
