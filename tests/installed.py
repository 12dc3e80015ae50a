"""For an installed package, where there may be nothing but torch: no pytest, no compiler, no source.

tools/test_wheel.py runs it; by hand: `python -I tests/installed.py`. On a GPU too, where there is one.
"""

import ctypes
import importlib.metadata
import pathlib
import sys

import fusegrad
import torch
import torch.nn.functional as F


def close(found: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    assert found is not None and expected is not None, what
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4, msg=lambda text: f"{what}: {text}")


def check_losses(device: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 16, device=device), torch.randn(40, 16, device=device)
    teacher = torch.randn(12, 40, device=device)
    target = torch.randint(0, 40, (12,), device=device)
    mine, theirs = ([one.clone().requires_grad_() for one in (hidden, weight)] for _ in range(2))
    loss, expected = fusegrad.linear_cross_entropy(*mine, target), F.cross_entropy(theirs[0] @ theirs[1].T, target)
    logits = [(one[0] @ one[1].T) for one in (mine, theirs)]
    kl = F.kl_div(logits[1].log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")
    (loss + fusegrad.cross_entropy(logits[0], target) + fusegrad.jsd(logits[0], teacher, beta=0.0)).backward()
    (2 * expected + kl).backward()
    close(loss, expected, "linear_cross_entropy")
    for one, other in zip(mine, theirs, strict=True):
        close(one.grad, other.grad, f"the losses' gradients on {device}")


def check_attention(device: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 70, 16, device=device).unbind(0)
    bias = torch.randn(70, device=device)
    mine, theirs = ([one.clone().requires_grad_() for one in (query, key, value, bias)] for _ in range(2))
    found = fusegrad.flex_attention(*mine[:3], lambda score, b, h, q, kv: score + mine[3][kv])
    expected = F.scaled_dot_product_attention(*theirs[:3], attn_mask=theirs[3].expand(70, 70))
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream)
    # Products of float32 are TF32's on a GPU.
    scale = 1.0 if device == "cpu" else 100.0
    for one, other in zip((found, *(x.grad for x in mine)), (expected, *(x.grad for x in theirs)), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5 * scale, rtol=2e-4 * scale)


def check_jax(library: pathlib.Path) -> None:
    """It loads with the oldest JAX that the package names, and so with all later ones."""
    (wanted,) = (x for x in importlib.metadata.requires("fusegrad") or () if x.startswith("jax") and "extra == 'jax'" in
                 x.replace('"', "'"))  # fmt: skip
    version = ctypes.CDLL(str(library)).fusegrad_jax_jaxlib_version
    version.restype = ctypes.c_char_p
    oldest = wanted.split(">=")[1].split(",")[0].split(";")[0].strip()
    assert version().decode().startswith(oldest), f"built for jaxlib {version().decode()}, but {wanted} is promised"


def main() -> int:
    package = pathlib.Path(fusegrad.__file__).parent
    assert package.is_relative_to(sys.prefix), package
    for file in ("include/fusegrad/fusegrad.h", "share/cmake/fusegrad/fusegradConfig.cmake", "py.typed"):
        assert (package / file).is_file(), file
    assert pathlib.Path(fusegrad.utils.cmake_prefix_path).is_dir()
    check_jax(package / "lib" / "libfusegrad_jax.so")
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        check_losses(device)
        check_attention(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
