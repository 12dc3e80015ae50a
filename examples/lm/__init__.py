"""The parts of `examples/train_lm.py` and `examples/distil_lm.py`: a small language model and real text."""

from typing import Any


class ExampleError(Exception):
    """Something the user can put right; the message says what was wrong and what to do."""


def import_fusegrad(option: str, without: str) -> Any:
    """`fusegrad`, which is imported only where `option` of the command line needs it; the option `without` does not."""
    try:
        import fusegrad
    except ImportError as error:
        raise ExampleError(
            f"{option} needs fusegrad ({error}); install it from the repository's root with "
            f"`pip install .`, or train with {without}"
        ) from error
    return fusegrad
