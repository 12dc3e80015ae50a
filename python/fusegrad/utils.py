"""Paths for those who build against fusegrad."""

import pathlib

from . import _build

cmake_prefix_path: str = str(pathlib.Path(_build.__file__).parent / "share" / "cmake")
"""To be added to CMAKE_PREFIX_PATH for ``find_package(fusegrad)``, as ``torch.utils.cmake_prefix_path`` is."""
