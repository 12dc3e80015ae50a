"""What README and docs print runs: a page's Python blocks in their order are one program, C++ blocks compile,
links lead somewhere, pages that the sources name exist.

Nothing is supplied: the program runs in a process of its own, in an empty folder. A block whose first line is a comment
`# on a GPU, with PACKAGE` runs where both are.
"""

import importlib.util
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fusegrad
import pytest
import torch
from copies import Copies
from coverings import rows_of
from support import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# The pages for users, all that the site's navigation shows above Contributing.
FOR_USERS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ("index.md", "reference.md")]
# What a page is about, where tests may run without it.
ABOUT = {"docs/jax.md": "jax", "docs/integrations.md": "transformers", "docs/quickstart.md": "transformers"}
ABOUT |= {"README.md": "transformers", "docs/design/learned_biases.md": "transformers"}
NEEDS_CUDA = {"docs/design/jit.md"}  # NVRTC, for sm_90a: no GPU


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _runs_here(block: str) -> bool:
    needs = re.match(r"# on a GPU, with (\S+)", block)
    return needs is None or (
        torch.cuda.is_available() and importlib.util.find_spec(needs[1].replace("-", "_")) is not None
    )


def program(page: Path) -> str:
    """Its Python blocks, in their order."""
    return "\n".join(block for block in blocks(page, "python") if _runs_here(block))


@pytest.fixture(scope="module")
def copies() -> Iterator[Copies]:
    with Copies() as made:
        yield made


@pytest.mark.parametrize("page", [_name(page) for page in PAGES if blocks(page, "python")])
def test_python_blocks(page: str, tmp_path: Path, copies: Copies) -> None:
    if page in ABOUT:
        pytest.importorskip(ABOUT[page], reason=f"{page} is about {ABOUT[page]}, which is not installed")
    if page in NEEDS_CUDA and not fusegrad.build_info()["cuda"]:
        pytest.skip(f"{page} compiles kernels, which needs a build with CUDA")
    (tmp_path / "page.py").write_text(program(ROOT / page))
    status, printed, errors = copies.run(tmp_path / "page.py")
    assert status == 0, errors[-4000:]
    for told in re.findall(r"^print\(.*\)  # (\S.*)$", program(ROOT / page), re.M):
        assert told in printed, f"{page} says that {told} is printed, but it prints {printed}"


# In place of what a design page takes for given. Each block becomes a function, all of them one source file.
GIVEN = "at::Tensor bias_tensor, offset_tensor;\n"


def test_cpp_blocks_compile(tmp_path: Path) -> None:
    """A page's blocks are one function: a block may go on with what stands above it."""
    from torch.utils.cpp_extension import include_paths

    includes, functions = "", ""
    pages = [page for page in PAGES if blocks(page, "cpp")]
    assert pages
    for number, page in enumerate(pages):
        lines = "".join(blocks(page, "cpp")).splitlines(keepends=True)
        includes += "".join(line for line in lines if line.startswith("#include"))
        body = "".join(line for line in lines if not line.startswith("#include"))
        functions += f'void page_{number}() {{ {GIVEN}\n#line 1 "{_name(page)}"\n{body}}}\n'
    source = tmp_path / "blocks.cpp"
    source.write_text("#include <cmath>\n" + includes + functions)
    folders = [str(ROOT / "csrc/include"), *include_paths()]
    command = ["g++", "-std=c++20", "-fsyntax-only", *(f"-I{folder}" for folder in folders), str(source)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-4000:]


def test_every_block_is_looked_at() -> None:
    """No other spelling of a language hides a block."""
    for page in PAGES:
        for language in re.findall(r"^```(\S+)$", page.read_text(), re.M):
            assert language in ("python", "cpp", "cmake", "sh", "{toctree}", "{eval-rst}"), (page, language)


def test_pages_for_users_are_few_and_short() -> None:
    words = {_name(page): len(page.read_text().split()) for page in FOR_USERS}
    assert len(words) <= 12 and sum(words.values()) <= 15_000, words
    assert len((ROOT / "docs/performance.md").read_text().splitlines()) <= 160


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
        text = page.read_text()
        for link in [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r' (?:src|srcset)="([^"]+)"', text)]:
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{_name(page)}: {link}"
            assert not anchor or anchor in _anchors(target), f"{_name(page)}: {link}"


def test_pages_that_sources_name_exist() -> None:
    folders = ("csrc", "python", "tests", "tools", "examples", "benchmarks", "cmake")
    named = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".h", ".cpp", ".cuh", ".cu", ".cmake", ".md"):
            named |= {(_name(path), page) for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text())}
    assert len(named) > 20
    assert not [one for one in named if not (ROOT / one[1]).exists()]
