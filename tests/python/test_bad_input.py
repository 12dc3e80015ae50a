"""Bad input: an error that names the op, what must hold and what came, before anything is written."""

import fusegrad
import pytest
import torch
from fusegrad import Aux

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
    ({"target": torch.zeros(8, dtype=torch.bool)}, TypeError, "target must be int64 or int32 class indices"),
    ({"target": torch.zeros(8, dtype=torch.int16)}, TypeError, "target must be int64 or int32 class indices"),
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


@pytest.mark.parametrize("inplace", [False, True], ids=["functional", "inplace"])
@pytest.mark.parametrize("op, change, error, message", CASES, ids=lambda value: str(value)[:60])
def test_message(op: str, change: dict, error: type, message: str, inplace: bool) -> None:
    linear = op == "linear_cross_entropy"
    activation = torch.randn(X if linear else (8, 7), requires_grad=True) * 1
    arguments = {"input": activation, "target": torch.randint(0, 7, T)}
    if linear:
        arguments["linear_weight"] = torch.randn(W)
    arguments |= change
    before = activation.detach().clone()
    with pytest.raises(error) as raised:
        getattr(fusegrad, op)(**arguments, inplace=inplace)
    text = str(raised.value)
    assert text.startswith(f"{op}: "), text
    assert message in text, text
    assert torch.equal(activation, before) and activation._version == 0
