"""Bad input: an error that names the op, what must hold and what came, before anything is written."""

import fusegrad
import pytest
import torch
from coverings import rows_of
from fusegrad import Aux, JSDAux

X, W, T = (8, 5), (7, 5), (8,)
COMMON = [
    ({"reduction": "avg"}, ValueError, "reduction must be 'none', 'mean' or 'sum', but got 'avg'"),
    ({"label_smoothing": -0.1}, ValueError, "label_smoothing must be in [0, 1], but got -0.1"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be in [0, 1], but got 1.5"),
    ({"label_smoothing": float("nan")}, ValueError, "label_smoothing must be in [0, 1], but got nan"),
    ({"z_loss": -1.0}, ValueError, "z_loss must be a finite number >= 0, but got -1"),
    ({"z_loss": float("inf")}, ValueError, "z_loss must be a finite number >= 0, but got inf"),
    ({"softcap": 0.0}, ValueError, "softcap must be a finite number > 0 or None, but got 0"),
    ({"softcap": -3.0}, ValueError, "softcap must be a finite number > 0 or None, but got -3"),
    ({"normalizer": 3.0, "reduction": "sum"}, ValueError, "a normalizer must come with reduction 'mean'"),
    ({"normalizer": torch.ones(2)}, ValueError, "normalizer must be a number or a 0-d tensor, but got shape [2]"),
    ({"normalizer": torch.tensor(1.0, requires_grad=True)}, ValueError, "normalizer must not require grad"),
    ({"weight": torch.ones(3)}, ValueError, "weight must have shape [7], but got [3]"),
    ({"weight": torch.ones(7, 1)}, ValueError, "weight must have shape [7], but got [7, 1]"),
    ({"weight": torch.ones(7, dtype=torch.long)}, TypeError, "weight must be floating-point, but got Long"),
    ({"weight": torch.ones(7, requires_grad=True)}, ValueError, "weight must not require grad"),
    ({"weight": torch.ones(7, device="meta")}, ValueError, "weight must be on the input's device cpu, but got meta"),
    ({"token_weight": torch.ones(3)}, ValueError, "token_weight must have shape [8], but got [3]"),
    ({"token_weight": torch.ones(8, dtype=torch.int)}, TypeError, "token_weight must be floating-point, but got Int"),
    ({"token_weight": torch.ones(8, requires_grad=True)}, ValueError, "token_weight must not require grad"),
    (
        {"target": torch.zeros(5, dtype=torch.long)},
        ValueError,
        "a target of class indices must have shape [8], but got",
    ),
    ({"target": torch.zeros(8, 1, dtype=torch.long)}, ValueError, "a target of class indices must have shape [8]"),
    ({"target": torch.zeros(8, dtype=torch.bool)}, TypeError, "target must be int64, int32 or uint8 class indices"),
    ({"target": torch.zeros(8, dtype=torch.int16)}, TypeError, "target must be int64, int32 or uint8 class indices"),
    ({"target": torch.ones(8, 7), "ignore_index": 3}, ValueError, "an ignore_index >= 0 must come with class indices"),
    ({"target": torch.zeros(8, 3)}, ValueError, "a target of class probabilities must have the shape of the logits"),
    ({"target": torch.zeros(8, dtype=torch.long, device="meta")}, ValueError, "target must be on the input's device"),
    (
        {"target": torch.full((8,), 7)},
        IndexError,
        "target must be in [0, 7) or ignore_index (-100), but got 7 at row 0",
    ),
    ({"target": torch.full((8,), -1)}, IndexError, "target must be in [0, 7) or ignore_index (-100), but got -1"),
    (
        {"target": torch.ones(8, 7), "return_aux": Aux(token_accuracy=True)},
        ValueError,
        "token_accuracy and token_log_prob must come with class indices",
    ),
    ({"input": torch.tensor(1.0)}, ValueError, "input must have shape"),
    ({"input": torch.ones(X, dtype=torch.long)}, TypeError, "input must be float64, float32, bfloat16 or float16"),
    ({"input": torch.ones(X, dtype=torch.complex64)}, TypeError, "input must be float64, float32, bfloat16 or float16"),
]
LINEAR = [
    ({"linear_weight": torch.ones(7, 4)}, ValueError, "linear_weight must have shape [V, H] with the input's H = 5"),
    ({"linear_weight": torch.ones(7)}, ValueError, "linear_weight must have shape [V, H], but got [7]"),
    ({"linear_weight": torch.ones(7, 1, 5)}, ValueError, "linear_weight must have shape [V, H], but got [7, 1, 5]"),
    ({"linear_weight": torch.ones(W, dtype=torch.int)}, TypeError, "linear_weight must be float64"),
    ({"linear_weight": torch.ones(W, dtype=torch.double)}, TypeError, "linear_weight must be float64 where the input"),
    ({"linear_weight": torch.ones(W, device="meta")}, ValueError, "linear_weight must be on the input's device cpu"),
    ({"linear_bias": torch.ones(3)}, ValueError, "linear_bias must have shape [V] = [7], but got [3]"),
    ({"linear_bias": torch.ones(7, dtype=torch.long)}, TypeError, "linear_bias must be float64"),
    ({"linear_bias": torch.ones(7, device="meta")}, ValueError, "linear_bias must be on the input's device cpu"),
    ({"logit_scale": float("inf")}, ValueError, "logit_scale must be a finite number, but got inf"),
    ({"accumulate_dtype": torch.float16}, TypeError, "accumulate_dtype must be Float or linear_weight's dtype Float"),
    ({"workspace_mib": -1}, ValueError, "workspace_mib must be a number of MiB >= 0 or None, but got -1"),
    ({"target": torch.ones(8, 7, requires_grad=True)}, ValueError, "target must not require grad"),
]
CASES = [("cross_entropy", *case) for case in COMMON] + [("linear_cross_entropy", *case) for case in COMMON + LINEAR]

# jsd: student and teacher 8 x 7. linear_jsd: hidden states 8 x 5 and 8 x 3.
GRAD, META = torch.ones(8, requires_grad=True), torch.zeros(8, dtype=torch.long, device="meta")
LABELS = torch.arange(8) % 7
LOG_PROBS = torch.randn(8, 7).log_softmax(1)
TOP = (torch.full((8, 2), -1.0), torch.tensor([[0, 6]] * 8))
DIVERGENCES = [
    ({"beta": -0.1}, ValueError, "beta must be in [0, 1], but got -0.1"),
    ({"beta": 1.5}, ValueError, "beta must be in [0, 1], but got 1.5"),
    ({"beta": float("nan")}, ValueError, "beta must be in [0, 1], but got nan"),
    ({"temperature": 0.0}, ValueError, "temperature must be a finite number > 0, but got 0"),
    ({"temperature": -1.0}, ValueError, "temperature must be a finite number > 0, but got -1"),
    ({"temperature": float("inf")}, ValueError, "temperature must be a finite number > 0, but got inf"),
    ({"reduction": "avg"}, ValueError, "reduction must be 'none', 'mean', 'sum' or 'batchmean', but got 'avg'"),
    ({"tail": "drop"}, ValueError, "tail must be 'bucket' or 'renormalize', but got 'drop'"),
    ({"soft_weight": -1.0}, ValueError, "soft_weight must be a finite number >= 0, but got -1"),
    ({"hard_weight": float("nan")}, ValueError, "hard_weight must be a finite number >= 0, but got nan"),
    ({"hard_weight": 0.5}, ValueError, "labels must be given where the hard loss is wanted, but got hard_weight 0.5"),
    ({"return_aux": JSDAux(hard_loss=True)}, ValueError, "labels must be given where the hard loss is wanted"),
    (
        {"normalizer": 3.0, "reduction": "sum"},
        ValueError,
        "a normalizer must come with reduction 'mean' or 'batchmean'",
    ),
    ({"normalizer": 3.0, "reduction": "none"}, ValueError, "but got reduction 'none'"),
    ({"normalizer": torch.ones(2)}, ValueError, "normalizer must be a number or a 0-d tensor, but got shape [2]"),
    ({"normalizer": GRAD.sum()}, ValueError, "normalizer must not require grad"),
    ({"token_weight": torch.ones(3)}, ValueError, "token_weight must have shape [8], but got [3]"),
    ({"token_weight": torch.ones(8, dtype=torch.int)}, TypeError, "token_weight must be floating-point, but got Int"),
    ({"token_weight": GRAD}, ValueError, "token_weight must not require grad"),
    ({"labels": torch.zeros(5, dtype=torch.long)}, ValueError, "labels must have shape [8], but got [5]"),
    ({"labels": torch.zeros(8)}, TypeError, "labels must be int64 or int32 class indices, but got Float"),
    ({"labels": META}, ValueError, "labels must be on the input's device cpu, but got meta"),
    (
        {"labels": torch.full((8,), 7)},
        IndexError,
        "labels must be in [0, 7) or ignore_index (-100), but got 7 at row 0",
    ),
    ({"labels": LABELS - 1, "ignore_index": 6}, IndexError, "labels must be in [0, 7) or ignore_index (6), but got -1"),
    ({"teacher": (TOP[0], TOP[1].short())}, TypeError, "the teacher's indices must be int64 or int32, but got Short"),
    ({"teacher": (TOP[0], TOP[1][:, :1])}, ValueError, "the teacher's indices must have its log-probabilities' shape"),
    ({"teacher": (TOP[0][:, :0], TOP[1][:, :0])}, ValueError, "of a top-k teacher must have K >= 1, but got [8, 0]"),
    ({"teacher": (TOP[0][:5], TOP[1][:5])}, ValueError, "must have shape [..., K] with rows [8], but got [5, 2]"),
    ({"teacher": (TOP[0].long(), TOP[1])}, TypeError, "must be float64, float32, bfloat16 or float16, but got Long"),
    (
        {"teacher": (TOP[0], TOP[1] + 1)},
        IndexError,
        "indices must be in [0, 7), or -1 as padding, but got 7 at row 0, col",
    ),
    ({"teacher": (TOP[0], TOP[1] - 2)}, IndexError, "indices must be in [0, 7), or -1 as padding, but got -2 at row 0"),
    ({"teacher": (TOP[0] + 2, TOP[1])}, ValueError, "a top-k teacher must be log-probabilities, none above 0, whose"),
    ({"teacher": (TOP[0] + 0.5, TOP[1])}, ValueError, "exponentials sum to at most 1 (within 0.001), but got a sum of"),
    ({"teacher": (TOP[0].exp(), TOP[1])}, ValueError, "at row 0: logits need log_softmax, and probabilities log"),
    ({"teacher": (TOP[0][:, :1] * 0 + 1e-4, TOP[1][:, :1])}, ValueError, "and a largest of 0.0001 at row 0"),
    ({"teacher": TOP, "tail_log_prob": torch.zeros(8)}, ValueError, "sum to at most 1 (within 0.001), but got a sum"),
    ({"teacher": TOP, "tail_log_prob": torch.zeros(7)}, ValueError, "tail_log_prob must have shape [8], but got [7]"),
    ({"teacher": TOP, "tail_log_prob": LABELS}, TypeError, "tail_log_prob must be floating-point, but got Long"),
    ({"teacher": TOP, "tail_log_prob": GRAD - 5}, ValueError, "tail_log_prob must not require grad"),
    (
        {"teacher": TOP, "tail_log_prob": torch.zeros(8) - 5, "tail": "renormalize"},
        ValueError,
        "tail_log_prob must come with tail 'bucket'",
    ),
    ({"tail_log_prob": torch.zeros(8)}, ValueError, "tail_log_prob must come with a top-k teacher"),
    ({"tail": "renormalize"}, ValueError, "tail 'renormalize' must come with a top-k teacher"),
    ({"ignore_index": 3}, ValueError, "an ignore_index must come with labels, whose rows it leaves out, but got 3"),
    ({"teacher": (TOP[0], TOP[1] * 0)}, ValueError, "indices must be distinct in a row, but got 0 twice at row 0"),
    ({"teacher": (TOP[0] * GRAD[:2], TOP[1])}, ValueError, "must not require grad"),
    ({"teacher": (TOP[0].to("meta"), TOP[1])}, ValueError, "must be on the input's device cpu, but got meta"),
    ({"teacher": TOP, "tail": "renormalize", "beta": 1.0}, ValueError, "tail 'renormalize' must come with beta < 1"),
]
LOGITS = [
    ({"teacher": torch.ones(8, 6)}, ValueError, "teacher must have the student's shape [8, 7], but got [8, 6]"),
    ({"teacher": torch.ones(7)}, ValueError, "teacher must have the student's shape [8, 7], but got [7]"),
    ({"teacher": torch.ones(8, 7, dtype=torch.long)}, TypeError, "teacher must be float64, float32, bfloat16 or"),
    ({"teacher": torch.ones(8, 7, device="meta")}, ValueError, "teacher must be on the input's device cpu"),
    ({"log_probs": True, "temperature": 2.0}, ValueError, "log_probs must come with temperature 1"),
    ({"log_probs": True, "hard_weight": 0.5, "labels": LABELS}, ValueError, "log_probs must come without a hard loss"),
    (
        {"log_probs": True, "return_aux": JSDAux(hard_loss=True), "labels": LABELS},
        ValueError,
        "log_probs must come without a hard loss, which is of logits, but got return_aux with hard_loss",
    ),
    ({"log_probs": True, "teacher": TOP}, ValueError, "log_probs must come with a dense teacher"),
    ({"log_probs": True, "student": LOG_PROBS + 0.01}, ValueError, "student must be log-probabilities, none above 0"),
    (
        {"log_probs": True, "student": LOG_PROBS, "teacher": LOG_PROBS - 0.01},
        ValueError,
        "teacher must be log-probabilities, none above 0, whose exponentials sum to 1 (within 0.001), but got a sum of",
    ),
    ({"student": torch.tensor(1.0)}, ValueError, "student must have shape [..., V], but got a 0-d tensor"),
    ({"student": torch.ones(8, 7, dtype=torch.long)}, TypeError, "student must be float64, float32, bfloat16 or"),
]
HEADS = [
    (
        {"student_weight": torch.ones(7, 4)},
        ValueError,
        "student_weight must have shape [V, H] with the student_input's H",
    ),
    ({"student_weight": torch.ones(7)}, ValueError, "student_weight must have shape [V, H], but got [7]"),
    (
        {"student_weight": torch.ones(W).double()},
        TypeError,
        "student_weight must be float64 where the student_input is",
    ),
    ({"student_weight": torch.ones(9, 5)}, ValueError, "teacher_weight must have the student's V = 9 rows"),
    ({"student_bias": torch.ones(3)}, ValueError, "student_bias must have shape [V] = [7], but got [3]"),
    (
        {"teacher_input": torch.ones(8, 4)},
        ValueError,
        "teacher_weight must have shape [V, H] with the teacher_input's H",
    ),
    ({"teacher_input": torch.ones(6, 3)}, ValueError, "teacher_input must have shape [..., H] with rows [8], but got"),
    ({"teacher_input": torch.ones(8, 3).int()}, TypeError, "teacher_input must be float64"),
    (
        {"teacher_weight": None},
        TypeError,
        "teacher_weight must be a tensor, but got None and a teacher that is not top-k",
    ),
    ({"teacher_weight": torch.ones(7, 3).long()}, TypeError, "teacher_weight must be float64"),
    (
        {"teacher_weight": torch.ones(7, 3, device="meta")},
        ValueError,
        "teacher_weight must be on the input's device cpu",
    ),
    ({"teacher_weight": torch.ones(7, 3) * GRAD[:3]}, ValueError, "teacher_weight must not require grad"),
    ({"teacher_bias": torch.ones(1)}, ValueError, "teacher_bias must have shape [V] = [7], but got [1]"),
    ({"teacher_bias": GRAD[:7]}, ValueError, "teacher_bias must not require grad"),
    ({"teacher_input": TOP}, ValueError, "teacher_weight and teacher_bias must be None with a top-k teacher"),
    ({"teacher": TOP, "teacher_temperature": 1.0}, ValueError, "teacher_temperature must be left out with a top-k"),
    ({"teacher": TOP, "teacher_softcap": 30.0}, ValueError, "teacher_softcap must be left out with a top-k teacher"),
    ({"teacher": TOP, "teacher_logit_scale": 2.0}, ValueError, "teacher_logit_scale must be left out with a top-k"),
    ({"teacher_temperature": 0.0}, ValueError, "teacher_temperature must be a finite number > 0 or None, but got 0"),
    ({"student_softcap": 0.0}, ValueError, "student_softcap must be a finite number > 0 or None, but got 0"),
    ({"teacher_softcap": float("nan")}, ValueError, "teacher_softcap must be a finite number > 0 or None, but got nan"),
    ({"student_logit_scale": float("inf")}, ValueError, "student_logit_scale must be a finite number, but got inf"),
    ({"teacher_logit_scale": float("nan")}, ValueError, "teacher_logit_scale must be a finite number, but got nan"),
    ({"vocab_size": 0}, ValueError, "vocab_size must be in [1, 7], the rows of student_weight, but got 0"),
    ({"vocab_size": 8}, ValueError, "vocab_size must be in [1, 7], the rows of student_weight, but got 8"),
    (
        {"vocab_size": 3, "labels": LABELS},
        IndexError,
        "labels must be in [0, 3) or ignore_index (-100), but got 3 at row 3",
    ),
    ({"accumulate_dtype": torch.float16}, TypeError, "accumulate_dtype must be Float or student_weight's dtype Float"),
    ({"workspace_mib": -1}, ValueError, "workspace_mib must be a number of MiB >= 0 or None, but got -1"),
    ({"student_input": torch.ones(X).int()}, TypeError, "student_input must be float64"),
]
CASES += [("jsd", *case) for case in DIVERGENCES + LOGITS] + [("linear_jsd", *case) for case in DIVERGENCES + HEADS]


def arguments_of(op: str, activation: torch.Tensor, change: dict) -> dict:
    """A call that is right but for `change`."""
    if op in ("cross_entropy", "linear_cross_entropy"):
        arguments = {"input": activation, "target": torch.randint(0, 7, T)}
        return arguments | ({} if op == "cross_entropy" else {"linear_weight": torch.randn(W)}) | change
    if op == "jsd":
        return {"student": activation, "teacher": torch.randn(8, 7)} | change
    arguments = {"student_input": activation, "student_weight": torch.randn(W)}
    arguments |= {"teacher_input": torch.randn(8, 3), "teacher_weight": torch.randn(7, 3)}
    if "teacher" in change:
        arguments |= {"teacher_input": change["teacher"], "teacher_weight": None}
    return arguments | {name: value for name, value in change.items() if name != "teacher"}


@pytest.mark.parametrize("inplace", [False, True], ids=["functional", "inplace"])
@rows_of("op, change, error, message", [*CASES])
def test_message(op: str, change: dict, error: type, message: str, inplace: bool) -> None:
    activation = torch.randn(X if op.startswith("linear") else (8, 7), requires_grad=True) * 1
    before = activation.detach().clone()
    with pytest.raises(error) as raised:
        getattr(fusegrad, op)(**arguments_of(op, activation, change), inplace=inplace)
    text = str(raised.value)
    assert text.startswith(f"{op}: "), text
    assert message in text, text
    assert torch.equal(activation, before) and activation._version == 0
