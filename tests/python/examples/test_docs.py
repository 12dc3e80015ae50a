"""Every Python block of README.md and docs/**/*.md runs as it stands, every C++ block compiles.

The blocks of a page run in their order, in one namespace, on the CPU; those of the pages in ALONE each in its own.
What a page takes for given (a model, a batch) is in BEFORE; what one process without a GPU cannot be asked for is in
INSTEAD. A statement that imports a package which is not installed is left out, and so is what uses the names that it
would have bound. Where the next line is a comment `# SomeError: text`, the statement must raise that.
"""

import ast
import importlib.util
import inspect
import re
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import fusegrad
import pytest
import torch
from coverings import rows_of
from support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# By page: what the reader has already; by (page, number of the block), from 0: what is told between the blocks.
TRAINING = """
import torch, fusegrad
from torch import nn
logits = torch.randn(8, 16, requires_grad=True) * 1
hidden, target = torch.randn(8, 32, requires_grad=True), torch.arange(8)
head, tokens_in_all_microbatches = nn.Linear(32, 16, bias=False), 24
"""
BEFORE = {
    "docs/python.md": TRAINING,
    "docs/distributed.md": TRAINING
    + """
head = nn.Linear(32, 128256, bias=False)
""",
    ("docs/distributed.md", 1): """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
model = nn.Module()
model.head = nn.Linear(32, 16, bias=False)
logits = distribute_tensor(logits.detach(), mesh, [Shard(1)])
""",
    ("docs/distributed.md", 2): """
from torch.nn.attention.flex_attention import create_block_mask
query, key, value = torch.randn(3, 1, 4, 1024, 16).unbind(0)
tokens = torch.arange(1024)[None]
""",
    "docs/post_training.md": TRAINING
    + """
temperature, row_temperature = 0.7, torch.ones(8)
old_log_prob, advantage = torch.zeros(8), torch.randn(8)
""",
    "docs/graph_transformer.md": """
import torch
row_start, distances, bonds = torch.zeros(3, 64, dtype=torch.int64)
spatial, edge = torch.zeros(2, 2, 2)
""",
    "docs/triangle_attention.md": """
import math, torch
n, bias, sizes = 4, torch.zeros(2, 2, 4, 4), torch.tensor([4, 3])
""",
    "docs/meanflow.md": """
import torch, fusegrad
from torch import nn
class Model(nn.Linear):
    def forward(self, z, r, t): return super().forward(z) * (t - r)[:, None, None]
model, (z, velocity), (r, t) = Model(8, 8), torch.randn(2, 4, 8, 8), torch.rand(2, 4)
bias, (query, key, value) = torch.zeros(2, 8, 8), torch.randn(3, 1, 2, 8, 4)
""",
    "docs/compatibility.md": "import torch",
    ("docs/folding.md", 3): """
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
""",
    "docs/thunder.md": TRAINING + "model = nn.Linear(2, 2)",
    "docs/transformers.md": TRAINING
    + """
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(FOLDER + "/model")
name, ids = FOLDER + "/model", torch.arange(16)
dataset = [{"input_ids": ids, "labels": ids}] * 2
arguments = TrainingArguments(FOLDER + "/out", max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
class self: head = head
""",
    ("docs/transformers.md", 2): """
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({str(i): i for i in range(31)} | {"<eos>": 31}, unk_token="0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
import importlib.util
if importlib.util.find_spec("trl"):
    import datasets, trl
    dataset = datasets.Dataset.from_list(dataset)
    arguments = trl.SFTConfig(FOLDER + "/sft", max_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True)
""",
    ("docs/transformers.md", 3): """
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fusegrad")
""",
    ("docs/transformers.md", 4): """
hidden_states, labels, global_valid_tokens = hidden, target, 8
model = nn.Module()
model.lm_head = nn.Linear(32, 16)
""",
    ("docs/transformers.md", 5): "query, key, value = torch.randn(3, 1, 2, 1024, 16).unbind(0)",
}
# Pages each of whose blocks runs by itself, as it is pasted.
ALONE = {"docs/block_masks.md", "docs/flex_attention.md", "docs/jax.md", "docs/score_mod.md"}
INSTEAD = {
    "all": [('device="cuda"', 'device="cpu"'), ('"nccl"', '"gloo"')],
    # What changes a class of trainers would change it for the tests that follow in this process.
    # What changes a package would change it for the tests that follow in this process, and would import all of it.
    "docs/folding.md": [('folding.apply("boltz")', "folding.apply")],
    "docs/post_training.md": [("apply(GRPOTrainer)", "apply(type('Own', (GRPOTrainer,), {}))")],
    "docs/python.md": [("in_features=4096, num_classes=128256", "in_features=64, num_classes=512")],
}
NEEDS_CUDA = {"docs/jit.md", "docs/flex_attention.md"}  # NVRTC, for sm_90a: no GPU


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def of(name: str) -> Path:
    return ROOT / name


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _absent(statement: ast.stmt) -> list[str] | None:
    """The names that an import would bind, if its package is not installed."""
    if not isinstance(statement, (ast.Import, ast.ImportFrom)):
        return None
    modules = [a.name for a in statement.names] if isinstance(statement, ast.Import) else [statement.module or ""]
    if all(importlib.util.find_spec(module.split(".")[0]) for module in modules):
        return None
    return [(a.asname or a.name).split(".")[0] for a in statement.names]


def _must_raise(source: str, statement: ast.stmt) -> str | None:
    """What the comment in the line below says is raised."""
    lines = source.splitlines()[statement.end_lineno :]
    found = re.match(r"# (\w+Error: .*)", lines[0]) if lines else None
    return found[1] if found else None


def run(page: str, number: int, source: str, namespace: dict, left_out: set[str]) -> None:
    for statement in ast.parse(source).body:
        names = _absent(statement)
        if names is not None or left_out & {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}:
            left_out.update(names or ())
            continue
        code = compile(ast.Module([statement], []), f"{page}, block {number}", "exec")
        raised = _must_raise(source, statement)
        if raised is None:
            exec(code, namespace)
        else:
            with pytest.raises(Exception) as caught:
                exec(code, namespace)
            assert f"{type(caught.value).__name__}: {caught.value}".startswith(raised)


def _free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def _with_python() -> Iterator[str]:
    return (_name(page) for page in PAGES if blocks(page, "python"))


@pytest.mark.parametrize("page", list(_with_python()))
def test_python_blocks(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"docs/jax.md": "jax", "docs/thunder.md": "thunder", "docs/transformers.md": "transformers"}.get(page)
    if first == "thunder" and not hasattr(torch.Tensor, "align_as"):
        pytest.skip("lightning-thunder 0.2.6 cannot be imported: it names Tensor.align_as")
    if first is not None:
        pytest.importorskip(first, reason=f"{page} is about {first}, which is not installed")
    if page in NEEDS_CUDA and not fusegrad.build_info()["cuda"]:
        pytest.skip(f"{page} compiles kernels, which needs a build with CUDA")
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    namespace = vars(module)
    namespace |= {
        "FOLDER": str(tmp_path),
    }
    if page == "docs/distributed.md":
        torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "RANK": "0", "WORLD_SIZE": "1"}
        for name, value in torchrun.items():
            monkeypatch.setenv(name, value)
    left_out: set[str] = set()
    sources = blocks(of(page), "python")
    exec(BEFORE.get(page, ""), namespace)
    try:
        for number, source in enumerate(sources):
            if page in ALONE:
                namespace.clear()
            exec(BEFORE.get((page, number), ""), namespace)
            for old, new in INSTEAD["all"] + INSTEAD.get(page, []):
                source = source.replace(old, new)
            run(page, number, source, namespace, left_out)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_the_numbers_of_readme(capsys: pytest.CaptureFixture) -> None:
    """What its first block prints is what stands beside it."""
    source = blocks(ROOT / "README.md", "python")[0]
    run("README.md", 0, source, {"__name__": "docs"}, set())
    told = re.search(r"# (tensor\(.*?\))", source)
    assert told is not None and capsys.readouterr().out.startswith(told[1].removesuffix(")"))


# In place of what a page takes for given. Each block becomes a function, all of them one source file.
GIVEN = "at::Tensor hidden, target, query, key, value, bias_tensor, offset_tensor, ends;\n"
GIVEN += "struct { at::Tensor weight; }* head = nullptr; (void)head;\n"


def test_cpp_blocks_compile(tmp_path: Path) -> None:
    from torch.utils.cpp_extension import include_paths

    text, count = "", 0
    for page in PAGES:
        for block in blocks(page, "cpp"):
            lines = block.splitlines(keepends=True)
            text = "".join(line for line in lines if line.startswith("#include")) + text
            body = "".join(line for line in lines if not line.startswith("#include"))
            text += f'void block_{count}() {{ {GIVEN}\n#line 1 "{_name(page)}"\n{body}}}\n'
            count += 1
    assert count >= 3
    source = tmp_path / "blocks.cpp"
    source.write_text("#include <cmath>\n" + text)
    folders = [str(ROOT / "csrc/include"), *include_paths()]
    command = ["g++", "-std=c++20", "-fsyntax-only", *(f"-I{folder}" for folder in folders), str(source)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-4000:]


def test_every_block_is_looked_at() -> None:
    """No other spelling of a language hides a block, and the registry names pages and blocks that are there."""
    for page in PAGES:
        for language in re.findall(r"^```(\S+)$", page.read_text(), re.M):
            assert language in ("python", "cpp", "cmake", "sh", "{toctree}", "{eval-rst}"), (page, language)
    for key in [*BEFORE, *INSTEAD, *ALONE]:
        page, number = key if isinstance(key, tuple) else (key, 0)
        assert page == "all" or len(blocks(of(page), "python")) > number, key


def _documented() -> Iterator[tuple[str, object, set[str]]]:
    """All that is public, with the parts that its docstring must have."""
    from fusegrad.integrations import folding, lazy_logits, torchtitan, vllm

    public = {name: getattr(fusegrad, name) for name in fusegrad.__all__}
    public["torchtitan.LinearCrossEntropyLoss"] = torchtitan.LinearCrossEntropyLoss
    public["lazy_logits.lazy_linear"] = lazy_logits.lazy_linear
    public["vllm.top_log_probs"] = vllm.top_log_probs
    if importlib.util.find_spec("transformers"):
        from fusegrad.integrations import transformers

        public |= {"transformers.apply": transformers.apply, "transformers.remove": transformers.remove}
    public |= {"folding.apply": folding.apply, "folding.remove": folding.remove}
    public |= {"gather_bias": fusegrad.distributed.gather_bias, "whole_bias": fusegrad.distributed.whole_bias}
    for name, value in public.items():
        if inspect.isclass(value) and not issubclass(value, (Exception, tuple)):
            yield name, value, {"Args:", "Raises:"} if "__init__" in vars(value) else set()
            for method in ("forward", "__call__"):
                if method in vars(value) and value is not fusegrad.ScoreMod:
                    yield f"{name}.{method}", vars(value)[method], {"Args:", "Returns:", "Raises:"}
        elif inspect.isfunction(value):
            arguments = bool(inspect.signature(value).parameters)
            returns = inspect.signature(value).return_annotation not in (None, "None")
            yield (
                name,
                value,
                ({"Raises:"} if arguments else set()) | ({"Returns:"} if arguments and returns else set()),
            )


@rows_of("name, value, parts", [*_documented()])
def test_docstrings_say_what_is_returned_and_raised(name: str, value: object, parts: set[str]) -> None:
    text = inspect.getdoc(value) or ""
    # A dataclass has Attributes, which are its arguments.
    missing = {part for part in parts if part not in text and not (part == "Args:" and "Attributes:" in text)}
    assert text and not missing, f"{name}: the docstring lacks {missing or 'everything'}"


def _anchors(page: Path) -> set[str]:
    """The headings of a page as anchors, as repositories' browsers and Sphinx make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks/results/README.md"]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{_name(page)}: {link}"
            assert not anchor or anchor in _anchors(target), f"{_name(page)}: {link}"
