"""The parts of `examples/train_lm.py` and `examples/distil_lm.py`: a small language model and real text."""


class ExampleError(Exception):
    """Something the user can put right; the message says what was wrong and what to do."""
