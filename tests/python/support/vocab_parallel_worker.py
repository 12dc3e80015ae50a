"""What each process of test_vocab_parallel.py runs: every case on the first 2, 3 and 4 of the processes, against the
unsharded op on the same tensors and against plain formulas. A case that fails says why in its result."""

from __future__ import annotations

import torch.distributed as dist
import vocab_parallel_contract
import vocab_parallel_errors
import vocab_parallel_frameworks
import vocab_parallel_losses
from fusegrad import VocabParallel
from processes import main
from vocab_parallel_support import CASES, CUTS, runs

__all__ = ["CASES", "CUTS", "FILES", "runs"]

# Importing them fills CASES.
FILES = (vocab_parallel_losses, vocab_parallel_contract, vocab_parallel_frameworks, vocab_parallel_errors)

if __name__ == "__main__":
    main(CASES, runs, lambda group: VocabParallel(group, *CUTS[dist.get_world_size(group)][dist.get_rank()]))
