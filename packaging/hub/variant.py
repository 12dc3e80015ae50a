"""fusegrad, loaded by `kernels` from a folder that is not on Python's path."""

import pathlib
import sys

_folder = pathlib.Path(__file__).parent
_loaded = sys.modules.get("fusegrad")
if _loaded is not None and pathlib.Path(str(_loaded.__file__)).parent != _folder / "fusegrad":
    raise ImportError(
        f"fusegrad: only one may be in a process, whose ops have one name, but {_loaded.__file__} is loaded already"
    )
sys.path.insert(0, str(_folder))
try:
    import fusegrad
finally:
    sys.path.remove(str(_folder))
globals().update({name: getattr(fusegrad, name) for name in fusegrad.__all__})
__all__ = fusegrad.__all__
