"""All cases, in the order of the tables: importing this registers them."""

from . import (  # noqa: F401
    attention,
    backward,
    bad_input,
    captured,
    cuda,
    far_rows,
    functions,
    inplace,
    numbers,
    options,
    transforms,
)
