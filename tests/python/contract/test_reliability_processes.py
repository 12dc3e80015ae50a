"""Forks, threads, signals and interrupts: calls beside and after them are right. docs/design/faults.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import fusegrad
import pytest
import torch
from fusegrad import TraceError
from fusegrad._tracing import cache
from fusegrad._tracing.thread_state import ThreadState
from needs import needs_nvrtc
from support import DEVICES, SUPPORT
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, depth: int = 1) -> Tensor:
    """`depth` gives a function, and kernels, of its own."""

    def biased(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = bias[h] * (i - j)
        for _ in range(depth):
            x = x.tanh()
        return s + x

    return fusegrad.flex_attention(q, k, v, biased, deterministic=True)


def leaves(device: str = "cpu", length: int = 300) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 4, length, 16)] * 3 + [(4,)]
    made = [torch.randn(*shape, generator=generator) for shape in shapes]
    return [t.to(device).requires_grad_() for t in made]


def step(given: list[Tensor], depth: int = 1) -> list[Tensor]:
    """Attention with captured gradients and a loss of its output: results and gradients."""
    out = attention(*given, depth=depth)
    logits = out.transpose(1, 2).reshape(-1, 64)
    target = torch.arange(logits.size(0), device=logits.device) % 64
    loss = fusegrad.cross_entropy(logits, target) + fusegrad.jsd(logits, logits.detach().roll(1, 0))
    return [loss.detach(), *torch.autograd.grad(loss, given)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- forks ----------------------------------------------------------------------------------------------------

CHILDREN = """
import os, sys, torch
from test_reliability_processes import leaves, same, step
torch.set_num_threads(2)
given = leaves()
truth = step(given)  # OpenMP's threads are there now

def child(threads):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(threads)
            expected = truth if threads == 2 else None
            found = step(given)
            close = all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(found, truth))
            status = 0 if close and (expected is None or same(found, expected)) else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

print([child(n) for n in map(int, sys.argv[1:])], same(step(given), truth))
"""


def in_process(
    code: str, *arguments: str, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join(filter(None, [here, str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_a_fork_after_use() -> None:
    # As a DataLoader's workers do, a child takes one thread. PyTorch refuses autograd in a child where it sees a GPU.
    done = in_process(CHILDREN, "1", "1", CUDA_VISIBLE_DEVICES="")
    assert done.stdout.splitlines()[-1:] == ["[0, 0] True"], done.stderr


class Rows(torch.utils.data.Dataset):
    """Whose workers call ops."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        given = leaves(length=20 + i)
        return torch.stack([t.double().sum() for t in step(given)])


LOADER = """
import torch
from test_reliability_processes import Rows
dataset = Rows()
here = torch.stack([dataset[i] for i in range(4)])
there = torch.cat(list(torch.utils.data.DataLoader(dataset, num_workers=2)))
torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)
"""


def test_workers_of_a_data_loader() -> None:
    # In a process where nothing has started the threads of PyTorch's autograd, beside which it refuses to be forked.
    done = in_process(LOADER, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


FORK_BESIDE_A_COMPILATION = """
import os, threading, time
from fusegrad import _C
source = "#include \\"cuda/device/score_mod.cuh\\"\\nextern \\"C\\" __global__ void probe(float* x) {}"
program = _C.jit.Program(source, "90a", name="probe")
_C.jit.nvrtc()
thread = threading.Thread(target=_C.jit.compile, args=(program,))
thread.start()
while _C.jit.stats()["compilations"] == 0:
    time.sleep(0.001)
pid = os.fork()
if pid == 0:
    # What the parent's thread compiles no thread of the child will finish, nor can NVRTC: it must not wait.
    try:
        _C.jit.compile(program)
    except RuntimeError as error:
        os._exit(0 if "forked while another thread" in str(error) else 2)
    os._exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
thread.join()
print(status, len(_C.jit.compile(program)) > 0)
"""


@needs_nvrtc
def test_a_fork_beside_a_compilation(tmp_path) -> None:
    done = in_process(FORK_BESIDE_A_COMPILATION, FUSEGRAD_CACHE_DIR=str(tmp_path))
    assert done.stdout.split() == ["0", "True"], done.stderr


# --- threads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_threads_share_a_first_call(device: str) -> None:
    given = leaves(device)
    for depth in (2, 3, 4):
        cache.clear()
        barrier, found = threading.Barrier(4), []

        def work(depth: int = depth, barrier: threading.Barrier = barrier, found: list = found) -> None:
            barrier.wait()
            if device == "cpu":
                found.append(step(given, depth))
                return
            with torch.cuda.stream(torch.cuda.Stream()):
                result = step(given, depth)
                torch.cuda.current_stream().synchronize()
            found.append(result)

        if device == "cuda":
            torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        truth = step(given, depth)
        assert len(found) == 4 and all(same(f, truth) for f in found)


def test_another_number_of_threads() -> None:
    given, before = leaves(), torch.get_num_threads()
    try:
        found: dict[int, list[Tensor]] = {}
        for threads in (1, 2, 5, 1, 3, 2):
            torch.set_num_threads(threads)
            result = step(given)
            assert same(found.setdefault(threads, result), result)
        for result in found.values():
            torch.testing.assert_close(result, found[1], rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(before)


# --- signals and interrupts -----------------------------------------------------------------------------------


def test_signals_during_a_call() -> None:
    given = leaves(length=700)
    truth = step(given)
    count = 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(3):
            assert same(step(given), truth)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert count > 0


@pytest.fixture
def python_takes_interrupts() -> Iterator[None]:
    """Also where the suite runs in the background, whose shell ignores SIGINT."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.mark.usefixtures("python_takes_interrupts")
def test_an_interrupt_within_a_score_mod() -> None:
    given = leaves(length=20)
    interrupt = True

    def interrupted(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return s + given[3][h]

    with pytest.raises(KeyboardInterrupt):
        fusegrad.flex_attention(*given[:3], interrupted)
    interrupt = False
    out = fusegrad.flex_attention(*given[:3], interrupted)
    assert torch.equal(out, fusegrad.flex_attention(*given[:3], lambda s, b, h, i, j: s + given[3][h]))


@contextmanager
def raising(error: type[BaseException], nth: int, where: str) -> Iterator[list[int]]:
    """Raises at the `nth` line that runs in files of `where` (0: nowhere); yields the count of lines."""
    lines = [0]

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] == nth:
                raise error
        return local

    def tracer(frame: FrameType, event: str, argument: Any) -> Any:
        return local if where in frame.f_code.co_filename else None

    old = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield lines
    finally:
        sys.settrace(old)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_at_any_line_of_tracing(error: type[BaseException]) -> None:
    given = leaves(length=20)
    truth = step(given)
    folder = os.path.join("fusegrad", "_tracing") + os.sep
    cache.clear()
    with raising(error, 0, folder) as lines:
        step(given)
    assert lines[0] > 500
    stops = 0
    for nth in range(1, lines[0], max(1, lines[0] // 60)):
        cache.clear()
        state = ThreadState()
        with raising(error, nth, folder):
            try:
                result = step(given)
            except BaseException as raised:
                stops += 1
                assert isinstance(raised, error | torch.OutOfMemoryError)
            else:
                assert same(result, truth)
        assert ThreadState() == state, nth
        assert same(step(given), truth), nth
    assert stops > 30


@needs_nvrtc
def test_an_interrupt_while_compiling(tmp_path) -> None:
    done = in_process(
        """
import os, signal, threading
from fusegrad import _C
signal.signal(signal.SIGINT, signal.default_int_handler)
jit = _C.jit
source = "#include \\"cuda/device/score_mod.cuh\\"\\nextern \\"C\\" __global__ void probe(float* x) {}"
program = jit.Program(source, "90a", name="probe")
truth = jit.compile(program)
begin = jit.stats()["compilations"]
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:  # longer than until the signal
        jit.forget()
        jit.cache_clear()
        jit.compile(program)
except KeyboardInterrupt:
    during = jit.stats()["compilations"] - begin
right = jit.compile(program) == truth
before = jit.stats()["compilations"]
print(during > 0, right, jit.compile(program) == truth, jit.stats()["compilations"] == before)
""",
        FUSEGRAD_CACHE_DIR=str(tmp_path),
    )
    assert done.stdout.split() == ["True"] * 4, done.stderr


# --- exceptions of the user's ---------------------------------------------------------------------------------


def test_an_exception_in_a_mod() -> None:
    q, k, v, bias = leaves(length=20)
    broken = True

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if broken:
            raise LookupError("of the user's")
        return s + bias[h]

    def recursive(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return recursive(s, b, h, i, j)

    def within(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + fusegrad.flex_attention(q, k, v, mod)[0, 0, 0, 0]

    truth = step([q, k, v, bias])
    with pytest.raises(TraceError, match="LookupError: of the user's") as raised:
        fusegrad.flex_attention(q, k, v, mod)
    assert isinstance(raised.value.__cause__, LookupError)
    with pytest.raises(TraceError, match="RecursionError"):
        fusegrad.flex_attention(q, k, v, recursive)
    with pytest.raises(TraceError, match=r"within: TraceError: .*a value of another score_mod"):
        fusegrad.flex_attention(q, k, v, within)
    broken = False
    out = fusegrad.flex_attention(q, k, v, mod)
    assert torch.equal(out, fusegrad.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h]))
    assert same(step([q, k, v, bias]), truth)


def test_a_mask_whose_function_raises() -> None:
    q, k, v, _ = leaves(length=32)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 32, 32, device="cpu")

    def broken(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        raise KeyError("mask")

    right, mask.mask_mod = mask.mask_mod, broken
    with pytest.raises(TraceError, match="KeyError"):
        fusegrad.flex_attention(q, k, v, block_mask=mask)
    mask.mask_mod = right
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(fusegrad.flex_attention(q, k, v, block_mask=mask), expected)


# --- want of address space ------------------------------------------------------------------------------------

LIMITED = """
import resource, torch, fusegrad
from test_reliability_processes import leaves, same, step
torch.set_num_threads(1)
given = leaves()
truth = step(given)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
x, w = torch.randn(4096, 8, requires_grad=True), torch.randn(100_000, 8, requires_grad=True)
y = torch.randint(0, 100_000, (4096,))
q = torch.randn(1, 1, 60_000, 8, requires_grad=True)
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
told = []
for name, call in {
    "linear_cross_entropy": lambda: fusegrad.linear_cross_entropy(x, w, y, workspace_mib=4096),
    "cross_entropy": lambda: fusegrad.cross_entropy(x.detach() @ w.detach().t()[:, :10_000], y % 10_000),
    "jsd": lambda: fusegrad.jsd(x.repeat(1, 1000), x.detach().repeat(1, 1000)),
    "flex_attention": lambda: fusegrad.flex_attention(q, q, q.expand(1, 1, 60_000, 8).repeat(1, 1, 1, 100)),
}.items():
    try:
        call().sum().backward()
        told.append("went on")
    except RuntimeError as error:
        told.append(name in str(error) or "repeat" in str(error))
    given[0].grad = None
    x.grad = w.grad = q.grad = None
    told.append(same(step(given), truth))
print(told)
"""


def test_a_limit_of_the_address_space() -> None:
    done = in_process(LIMITED)
    told: Callable[[str], Any] = eval
    found = told(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    assert found is not None, done.stderr
    assert found[0] is True and all(found[1::2]), found


# --- compilations that fail -----------------------------------------------------------------------------------


@needs_nvrtc
def test_flags_that_do_not_compile(tmp_path, monkeypatch) -> None:
    jit = fusegrad._C.jit
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path))
    jit.forget()
    program = jit.Program('extern "C" __global__ void probe(float* x) { x[0] *= 3; }', "90a", name="probe")
    for flags in ("--nonsense", "-Dfloat=nonsense --std=c++20"):
        monkeypatch.setenv("FUSEGRAD_JIT_FLAGS", flags)
        with pytest.raises(RuntimeError, match="probe was not compiled for sm_90a") as raised:
            jit.compile(program)
        told = f"FUSEGRAD_JIT_FLAGS must hold flags that every kernel compiles with, but got '{flags}'"
        assert told in str(raised.value)
    monkeypatch.delenv("FUSEGRAD_JIT_FLAGS")
    assert jit.compile(program)[:4] == b"\x7fELF"


@needs_nvrtc
@pytest.mark.parametrize("folder", ["a file", "no home", "unwritable"])
def test_folders_that_cannot_be_used(folder: str, tmp_path, monkeypatch, capfd) -> None:
    jit = fusegrad._C.jit
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FUSEGRAD_CACHE_DIR", raising=False)
    why = "there is no home folder"
    if folder == "a file":
        (tmp_path / "cache").write_text("")
        monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))
        why = "Not a directory"
    elif folder == "no home":
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("FUSEGRAD_CACHE_DIR", "/proc/nowhere/fusegrad")  # for root too
        why = "No such file or directory"
    source = f'extern "C" __global__ void probe(float* x) {{ x[{len(folder)}] *= 3; }}'
    for again in (False, True):
        jit.forget()
        assert jit.compile(jit.Program(source, "90a", name="probe"))[:4] == b"\x7fELF"
        told = capfd.readouterr().err
        assert told.count("compiled kernels are not kept") == (0 if again else 1)
        assert again or why in told
