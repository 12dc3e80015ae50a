"""Text files -> a BPE vocabulary and token ids (cached) -> batches in an order that can be resumed."""

import hashlib
import os
import pickle
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lm import ExampleError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_FILE = "<|endoftext|>"
# Some distributions leave the tests out of the standard library and others put third-party packages inside.
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
HELD_OUT_STRIDE = 20
# Merges learned from more text than this hardly differ; the time to learn them does.
MAX_BPE_CHARACTERS = 32_000_000
# Part of the cache key: raise it when files of an older layout must not be read.
CACHE_FORMAT = 1


@dataclass(frozen=True)
class Document:
    """One text, by the name that orders it and enters the cache key."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Token ids of the training and held-out text, 1-D int32, and the tokenizer that made them."""

    key: str
    tokenizer: "Tokenizer"
    train: Tensor
    held_out: Tensor

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/fusegrad/train_lm`, or the same under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fusegrad" / "train_lm"


def read_documents(path: Path | None) -> list[Document]:
    """Reads a file, every UTF-8 file of a folder, or (None) the standard library's `*.py`, sorted by name."""
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    if not root.exists():
        raise ExampleError(f"no data: {root} does not exist; give --data a text file or a folder of them")
    if root.is_file():
        names = [Path(root.name)]
        root = root.parent
    else:
        names = _standard_library_names(root) if path is None else _relative_names(root, "*")
    documents = []
    for name in names:
        text = _read_text(root / name)
        if text:
            documents.append(Document(name.as_posix(), text))
    if not documents:
        raise ExampleError(
            f"no data: no UTF-8 text in {root} ({len(names)} files seen); give --data a text file or a folder of them"
        )
    return documents


def _relative_names(root: Path, pattern: str) -> list[Path]:
    """The folder's files in one order everywhere, without the hidden ones."""
    names = (file.relative_to(root) for file in root.rglob(pattern) if file.is_file())
    visible = (name for name in names if not any(part.startswith(".") for part in name.parts))
    return sorted(visible, key=Path.as_posix)


def _standard_library_names(root: Path) -> list[Path]:
    return [name for name in _relative_names(root, "*.py") if NOT_THE_LIBRARY.isdisjoint(name.parts)]


def _read_text(path: Path) -> str | None:
    """The file's text, or None where it is not UTF-8 text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise ExampleError(f"cannot read {path}: {error.strerror}; give --data files you may read") from error
    return None if "\0" in text else text


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Splits into (training, held out): every 20th file is held out, or the last tenth of a single file."""
    if len(documents) == 1:
        (only,) = documents
        cut = len(only.text) * 9 // 10
        return [Document(only.name, only.text[:cut])], [Document(only.name, only.text[cut:])]
    stride = min(HELD_OUT_STRIDE, len(documents))
    held_out = documents[stride - 1 :: stride]
    train = [document for index, document in enumerate(documents) if index % stride != stride - 1]
    return train, held_out


def load_corpus(path: Path | None, vocab_size: int, cache_dir: Path) -> Corpus:
    """The corpus of `path`, from the cache where its content and `vocab_size` were seen before."""
    documents = read_documents(path)
    key = corpus_key(documents, vocab_size)
    cached = cache_dir / f"corpus-{key}.pt"
    if not cached.exists():
        atomic_save(_encode_corpus(documents, vocab_size), cached)
    return _read_corpus(cached, key)


def corpus_key(documents: list[Document], vocab_size: int) -> str:
    """A digest of every name and text and of the vocabulary's size."""
    digest = hashlib.sha256(f"{CACHE_FORMAT}:{vocab_size}".encode())
    for document in documents:
        for part in (document.name.encode(), document.text.encode()):
            # The length keeps ("ab", "c") and ("a", "bc") apart.
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()[:24]


def _encode_corpus(documents: list[Document], vocab_size: int) -> dict[str, Any]:
    train, held_out = split_documents(documents)
    tokenizer = train_tokenizer(train, vocab_size)
    return {
        "tokenizer": tokenizer.to_str(),
        "train": _encode(tokenizer, train),
        "held_out": _encode(tokenizer, held_out),
    }


def _read_corpus(path: Path, key: str) -> Corpus:
    tokenizers = _import_tokenizers()
    try:
        content = torch.load(path, weights_only=True)
        tokenizer = tokenizers.Tokenizer.from_str(content["tokenizer"])
        return Corpus(key, tokenizer, content["train"], content["held_out"])
    except (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        raise ExampleError(f"cannot read the cached corpus {path} ({error}); delete it and run again") from error


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ExampleError("the `tokenizers` package is missing; run: pip install tokenizers") from error
    return tokenizers


def train_tokenizer(documents: list[Document], vocab_size: int) -> "Tokenizer":
    """Learns a byte-level BPE; little text gives fewer than `vocab_size` entries."""
    tokenizers = _import_tokenizers()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 1
    if vocab_size < smallest:
        raise ExampleError(
            f"--vocab-size must be at least {smallest} (all bytes and {END_OF_FILE}), but got {vocab_size}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_FILE], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_texts_up_to(documents, MAX_BPE_CHARACTERS), trainer)
    return tokenizer


def _texts_up_to(documents: list[Document], characters: int) -> Iterator[str]:
    for document in documents:
        if characters <= 0:
            return
        yield document.text[:characters]
        characters -= len(document.text)


def _encode(tokenizer: "Tokenizer", documents: list[Document]) -> Tensor:
    end = torch.tensor([tokenizer.token_to_id(END_OF_FILE)], dtype=torch.int32)
    pieces = []
    for encoding in tokenizer.encode_batch([document.text for document in documents]):
        pieces += [torch.tensor(encoding.ids, dtype=torch.int32), end]
    return torch.cat(pieces)


def atomic_save(content: Any, path: Path) -> None:
    """`torch.save` so that `path` holds the old content or the new one, never a part of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
        try:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


class BatchStream:
    """Endless batches of windows; a fresh permutation of all windows in every epoch.

    The order is a function of the seed and `position` (the number of batches taken), so that setting
    `position` resumes it.
    """

    def __init__(self, tokens: Tensor, batch_size: int, seq_length: int, seed: int) -> None:
        self.tokens = tokens
        self.batch_size = batch_size
        self.seq_length = seq_length
        self.seed = seed
        self.position = 0
        self.windows = count_windows(tokens, seq_length)
        self.batches_per_epoch = self.windows // batch_size
        if self.batches_per_epoch == 0:
            needed = batch_size * seq_length + 1
            raise ExampleError(
                f"too little data: one batch takes {needed} tokens, but there are {tokens.numel()}; "
                "give more text by --data, or a smaller --batch-size or --seq-length"
            )
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [B, S] int64."""
        epoch, index = divmod(self.position, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = torch.randperm(self.windows, generator=generator)
            self._epoch = epoch
        self.position += 1
        chosen = self._order[index * self.batch_size : (index + 1) * self.batch_size]
        return take_windows(self.tokens, chosen, self.seq_length)


def count_windows(tokens: Tensor, seq_length: int) -> int:
    """Windows of `seq_length` inputs that fit, each followed by its last target."""
    return max(tokens.numel() - 1, 0) // seq_length


def take_windows(tokens: Tensor, windows: Tensor, seq_length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, S] int64 of the windows with these numbers [B]."""
    places = windows[:, None] * seq_length + torch.arange(seq_length + 1)
    chunk = tokens[places].to(torch.int64)
    return chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


def held_out_batches(tokens: Tensor, batch_size: int, seq_length: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Up to `count` batches of windows spread evenly over the held-out text."""
    windows = count_windows(tokens, seq_length)
    if windows == 0:
        raise ExampleError(
            f"too little held-out text: one window takes {seq_length + 1} tokens, but there are "
            f"{tokens.numel()}; give more text by --data, or a smaller --seq-length"
        )
    wanted = min(windows, count * batch_size)
    chosen = torch.arange(wanted) * windows // wanted
    return [take_windows(tokens, part, seq_length) for part in chosen.split(batch_size)]
