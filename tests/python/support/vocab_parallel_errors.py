"""What is refused: bad arguments, and calls that are not the same in all processes."""

from __future__ import annotations

from typing import Any

import fusegrad
import torch
import torch.distributed as dist
from fusegrad import VocabParallel, reference
from processes import assert_raises
from vocab_parallel_support import (
    DEVICE,
    ROWS,
    H,
    V,
    assert_close,
    case,
)


@case
def bad_input(shards: VocabParallel) -> None:
    group, rank, world = shards.group, shards.rank, shards.world
    for bounds, text in (
        ([(r * 4, r * 4 + 3) for r in range(world)], "nothing covers [3, 4)"),
        ([(r * 4, r * 4 + 5) for r in range(world)], "twice [4, 5)"),
        ([(r * 4 + 1, r * 4 + 5) for r in range(world)], "nothing covers [0, 1)"),
        ([(0, 5)] * world, "twice [0, 5)"),
        ([(3, 1)] * world, "0 <= start <= stop, but got 3 and 1 in rank 0"),
        ([(0.0, 4.0)] * world, "whole numbers with 0 <= start <= stop, but got 0.0"),
    ):
        assert_raises(ValueError, text, lambda b=bounds: VocabParallel(group, *b[rank]))
    outside = dist.GroupMember.NON_GROUP_MEMBER
    assert_raises(ValueError, "group must contain this process", lambda: VocabParallel(outside, 0, 1))

    x, w, target = torch.randn(ROWS, H), torch.randn(shards.size, H), torch.randint(0, V, (ROWS,))
    z = torch.randn(ROWS, shards.size)

    def linear(**changes: Any) -> Any:
        given = {"input": x, "linear_weight": w, "target": target, "vocab_parallel": shards, **changes}
        return lambda: fusegrad.linear_cross_entropy(**given)

    def plain(**changes: Any) -> Any:
        given = {"input": z, "target": target, "vocab_parallel": shards, **changes}
        return lambda: fusegrad.cross_entropy(**given)

    wrong = torch.randn(V + 1, H)
    op = "linear_cross_entropy: "
    assert_raises(ValueError, f"{op}linear_weight must have stop - start = {shards.size}", linear(linear_weight=wrong))
    assert_raises(ValueError, f"{op}linear_bias must have stop - start", linear(linear_bias=torch.ones(V + 1)))
    assert_raises(TypeError, f"{op}vocab_parallel must be a VocabParallel", linear(vocab_parallel=group))
    assert_raises(ValueError, f"{op}label_smoothing must be in [0, 1]", linear(label_smoothing=2.0))
    assert_raises(ValueError, f"{op}weight must have shape [{V}]", linear(weight=torch.ones(V + 1)))
    assert_raises(ValueError, f"{op}a target of class indices", linear(target=target[1:]))
    widest = "float64" if DEVICE == "cpu" else "float32"
    assert_raises(TypeError, f"{op}input must be {widest}", linear(input=target))
    assert_raises(IndexError, f"{op}target must be in [0, {V})", linear(target=torch.full((ROWS,), V)))
    assert_raises(IndexError, "cross_entropy: target must be in [0, ", plain(target=torch.full((ROWS,), -3)))
    assert_raises(ValueError, "cross_entropy: input must have stop - start", plain(input=torch.randn(ROWS, V + 1)))
    assert_raises(ValueError, "weight must not require grad", plain(weight=torch.ones(V, requires_grad=True)))
    probabilities = z.softmax(-1).requires_grad_()
    assert_raises(ValueError, "target must not require grad with vocab_parallel", plain(target=probabilities))
    assert_raises(
        ValueError,
        "jsd: teacher must have stop - start",
        lambda: fusegrad.jsd(z, torch.randn(ROWS, V + 1), vocab_parallel=shards),
    )
    assert_raises(
        ValueError,
        "linear_jsd: vocab_size must be None with vocab_parallel",
        lambda: fusegrad.linear_jsd(x, w, x, w, vocab_size=3, vocab_parallel=shards),
    )
    # Rows of their own, as in data parallelism.
    other = torch.full((ROWS,), shards.rank)
    everywhere = "must be the same in all processes that share a vocabulary"
    assert_raises(ValueError, f"{op}target {everywhere}", linear(target=other))
    assert_raises(ValueError, f"cross_entropy: target {everywhere}", plain(target=other))
    probabilities = probabilities.detach()
    assert_raises(ValueError, f"{op}input {everywhere}", linear(input=x + shards.rank, target=probabilities))
    assert_raises(
        ValueError,
        f"jsd: labels {everywhere}",
        lambda: fusegrad.jsd(z, z, labels=other, vocab_parallel=shards),
    )
    index = torch.zeros(ROWS, 2, dtype=torch.long)
    log_probs = torch.full((ROWS, 2), -1.0)
    if DEVICE == "cpu":  # not checked elsewhere
        assert_raises(
            ValueError,
            "jsd: the teacher's indices must be distinct in a row",
            lambda: fusegrad.jsd(z, (log_probs, index), vocab_parallel=shards),
        )
    index[0, 1] = V
    assert_raises(
        IndexError,
        "jsd: the teacher's indices must be in [0, ",
        lambda: fusegrad.jsd(z, (log_probs, index), vocab_parallel=shards),
    )


@case
def other_calls(shards: VocabParallel) -> None:
    """Each argument and option that is another in one process alone is an error in all that names it."""
    rank, last = shards.rank, shards.world - 1
    mine = slice(shards.start, shards.stop)
    index = torch.randint(0, V, (ROWS,))
    changed = index.clone()
    changed[3] = (index[3] + 1) % V
    x, other_x = torch.randn(ROWS, H), torch.randn(ROWS, H)
    one_row, ones = x.clone(), torch.ones(ROWS)
    one_row[2] = other_x[2]
    logits, weight, classes = torch.randn(ROWS, V), torch.randn(V, H), torch.rand(V)
    ids = torch.arange(ROWS * 3).view(ROWS, 3) % V
    top = torch.full((ROWS, 3), 0.2).log()
    count = torch.tensor(1000.0)
    options = {
        "z_loss": (0.1, 0.2),
        "label_smoothing": (0.1, 0.0),
        "softcap": (None, 30.0),
        "reduction": ("mean", "sum"),
    }
    options |= {"ignore_index": (-100, 1), "token_weight": (ones, 2 * ones), "normalizer": (count, count + 1)}
    classed = {"weight": (classes, classes.flip(0)), "target": (index, changed), **options}
    kinds = {"beta": (0.5, 0.3), "temperature": (1.0, 2.0), "hard_weight": (0.5, 0.4)}
    kinds |= {"labels": (index, changed), "token_weight": (ones, 2 * ones), "normalizer": (count, count + 1)}
    hidden = {"input": (x, one_row), "logit_scale": (1.0, 2.0), "workspace_mib": (None, 1)}
    scales = {"row_scale": (ones, ones.flip(0) + torch.arange(ROWS))}
    part = weight[mine]
    trained = part.clone().requires_grad_()
    calls: list[tuple[str, dict[str, Any], dict[str, tuple[Any, Any]]]] = [
        ("cross_entropy", {"input": logits[:, mine], "target": index}, classed),
        ("linear_cross_entropy", {"input": x, "linear_weight": part, "target": index}, classed | hidden),
        (
            "linear_cross_entropy",
            {"input": x, "linear_weight": part, "target": index},
            {"linear_weight": (part, trained)},
        ),
        (
            "cross_entropy",
            {"input": logits[:, mine], "target": ids[:, 0], "support": ids},
            {"support": (ids, ids.flip(1))},
        ),
        ("jsd", {"student": logits[:, mine], "teacher": logits[:, mine], "labels": index}, kinds),
        (
            "linear_jsd",
            {"student_input": x, "student_weight": part, "teacher_input": x, "teacher_weight": part, "labels": index},
            {
                **kinds,
                "student_softcap": (None, 30.0),
                "student_input": (x, one_row),
                "teacher_input": (x, other_x),
                "student_logit_scale": (1.0, 2.0),
            },
        ),
    ]
    for op, given, changes in calls:
        for name, (ours, theirs) in changes.items():
            call = {**given, name: theirs if rank == last else ours, "vocab_parallel": shards}
            text = f"{op}: {name} must be the same in all processes that share a vocabulary, but got another in rank"
            assert_raises(ValueError, f"{text} {last}", lambda op=op, c=call: getattr(fusegrad, op)(**c))
    scale = scales["row_scale"][rank == last]
    text = "linear_cross_entropy: row_scale must be the same"
    given = {"input": x, "linear_weight": part, "target": index, "vocab_parallel": shards}
    assert_raises(ValueError, text, lambda: fusegrad.linear_cross_entropy(**given, logit_scale=scale))
    student = logits[:, mine]
    for where, theirs in (("values", (top - 0.5, ids)), ("indices", (top, ids.flip(1)))):
        teacher = theirs if rank == last else (top, ids)
        name = "teacher_indices" if where == "indices" else "teacher"
        text = f"jsd: {name} must be the same in all"
        assert_raises(ValueError, text, lambda t=teacher: fusegrad.jsd(student, t, vocab_parallel=shards))
    # An error of one process alone ends the call in all.
    wrong = {**given, "linear_weight": torch.randn(V + 1, H)} if rank == last else given
    error = ValueError if rank == last else RuntimeError
    text = "linear_weight must have stop - start" if rank == last else "that share a vocabulary must make the call, but"
    assert_raises(error, text, lambda: fusegrad.linear_cross_entropy(**wrong))
    assert_close(
        fusegrad.linear_cross_entropy(**given), reference.linear_cross_entropy(x, weight, index)[0], "after errors"
    )
