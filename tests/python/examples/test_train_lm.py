"""examples/train_lm.py: what must hold whatever the sizes; tiny text, tiny model."""

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# First: it makes `lm` importable.
from lm_support import CONFIG, EXAMPLES, VOCAB_SIZE, command_line, isolated, run_steps, write_text  # isort: skip

import train_lm
from lm import ExampleError, data, demo, program
from lm.attention import ATTENTIONS
from lm.model import LOSSES, generate, loss_function
from lm.training import StopRequest, Trainer


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def corpus(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    return data.load_corpus(text_folder, VOCAB_SIZE, tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def isolation() -> Iterator[None]:
    with isolated():
        yield


# --- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_steps", [1, 3, 7])
@pytest.mark.parametrize("tied", [True, False])
def test_resume_is_bit_exact(corpus: data.Corpus, tmp_path: Path, first_steps: int, tied: bool) -> None:
    config = dataclasses.replace(CONFIG, tied=tied)
    straight = run_steps(Trainer(config, corpus), config.steps)
    assert straight.batches.position > straight.batches.batches_per_epoch

    checkpoint = tmp_path / "checkpoint.pt"
    run_steps(Trainer(config, corpus), first_steps, checkpoint)
    torch.manual_seed(99)
    resumed = Trainer(config, corpus)
    resumed.resume(checkpoint)
    assert resumed.step == first_steps
    run_steps(resumed, config.steps)

    assert resumed.history.losses == straight.history.losses
    assert_equal(resumed.model.state_dict(), straight.model.state_dict())
    assert_equal(resumed.optimizer.state_dict(), straight.optimizer.state_dict())
    assert resumed.held_out_loss() == straight.held_out_loss()


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_dropout_draws_from_the_saved_random_state(corpus: data.Corpus, tmp_path: Path) -> None:
    """Without this the test of bit-exactness would pass with the random state left out."""
    checkpoint = tmp_path / "checkpoint.pt"
    run_steps(Trainer(CONFIG, corpus), 3, checkpoint)
    losses = []
    for reseed in (False, True):
        resumed = Trainer(CONFIG, corpus)
        resumed.resume(checkpoint)
        if reseed:
            torch.manual_seed(99)
        losses.append(run_steps(resumed, CONFIG.steps).history.losses)
    assert losses[0] != losses[1]


def test_resume_refuses_another_configuration(corpus: data.Corpus, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    run_steps(Trainer(CONFIG, corpus), 1, checkpoint)
    other = Trainer(dataclasses.replace(CONFIG, steps=13, learning_rate=1e-4), corpus)
    with pytest.raises(ExampleError, match=r"--learning-rate was 0\.003 and is 0\.0001; --steps was 12 and is 13"):
        other.resume(checkpoint)


def test_resume_needs_a_readable_checkpoint(corpus: data.Corpus, tmp_path: Path) -> None:
    trainer = Trainer(CONFIG, corpus)
    with pytest.raises(ExampleError, match="nothing to resume"):
        trainer.resume(tmp_path / "missing.pt")
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"not a checkpoint")
    with pytest.raises(ExampleError, match="cannot read the checkpoint"):
        trainer.resume(broken)


def test_ctrl_c_saves_and_the_run_goes_on(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command_line(text_folder, tmp_path)
    assert train_lm.main(arguments) == 0
    straight = capsys.readouterr().out

    train_step = Trainer._train_step

    def interrupted_step(trainer: Trainer) -> None:
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        train_step(trainer)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_train_step", interrupted_step)
        assert train_lm.main(arguments) == program.INTERRUPTED
    assert "stopped at step 3" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler

    assert train_lm.main([*arguments, "--resume"]) == 0
    resumed = capsys.readouterr().out
    assert resumed.split("sample:")[1] == straight.split("sample:")[1]


def test_second_ctrl_c_acts_as_before() -> None:
    # A process that a shell started in the background ignores Ctrl-C from the start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt_twice()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_twice() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)


# --- data ---------------------------------------------------------------------------------------------------


def test_split_is_deterministic_and_disjoint() -> None:
    documents = [data.Document(f"{index:03}", "x") for index in range(45)]
    train, held_out = data.split_documents(documents)
    assert [document.name for document in held_out] == ["019", "039"]
    assert sorted(train + held_out, key=lambda document: document.name) == documents


def test_split_of_few_files_and_of_one() -> None:
    first, second = data.Document("a", "0123456789"), data.Document("b", "x")
    assert data.split_documents([first, second]) == ([first], [second])
    train, held_out = data.split_documents([first])
    assert (train[0].text, held_out[0].text) == ("012345678", "9")


def test_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"b",
        "a/c.txt": b"c",
        ".hidden": b"h",
        "binary": b"\xff",
        "zero": b"\0",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert data.read_documents(tmp_path) == [data.Document("a/c.txt", "c"), data.Document("b.txt", "b")]


def test_standard_library_is_the_default() -> None:
    names = [document.name for document in data.read_documents(None)]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name or name.startswith("test/") for name in names)


def test_missing_and_empty_data(tmp_path: Path) -> None:
    with pytest.raises(ExampleError, match=r"no data: .* does not exist"):
        data.read_documents(tmp_path / "missing")
    with pytest.raises(ExampleError, match=r"no data: no UTF-8 text"):
        data.read_documents(tmp_path)


def test_cache_is_used_and_keyed_by_content_and_size(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data.load_corpus(text_folder, VOCAB_SIZE, tmp_path)
    (cached,) = tmp_path.iterdir()
    with monkeypatch.context() as patched:
        patched.delattr(data, "train_tokenizer")
        second = data.load_corpus(text_folder, VOCAB_SIZE, tmp_path)
    assert_equal(second.train, first.train)
    assert_equal(second.held_out, first.held_out)
    assert second.tokenizer.to_str() == first.tokenizer.to_str()

    documents = data.read_documents(text_folder)
    changed = [*documents[:-1], dataclasses.replace(documents[-1], text="other")]
    keys = {first.key, data.corpus_key(documents, VOCAB_SIZE + 1), data.corpus_key(changed, VOCAB_SIZE)}
    assert len(keys) == 3

    cached.write_bytes(cached.read_bytes()[:100])
    with pytest.raises(ExampleError, match="cannot read the cached corpus"):
        data.load_corpus(text_folder, VOCAB_SIZE, tmp_path)


def test_tokens_decode_to_the_text(text_folder: Path, corpus: data.Corpus) -> None:
    train, _ = data.split_documents(data.read_documents(text_folder))
    text = corpus.tokenizer.decode(corpus.train.tolist(), skip_special_tokens=True)
    assert text == "".join(document.text for document in train)
    assert corpus.vocab_size == VOCAB_SIZE


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    data.atomic_save(1, path)
    with pytest.raises(Exception, match="pickle"):
        data.atomic_save(lambda: None, path)
    assert torch.load(path) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_every_epoch_takes_each_window_once() -> None:
    stream = data.BatchStream(torch.arange(41, dtype=torch.int32), batch_size=2, seq_length=4, seed=0)
    epochs = [torch.cat([stream.next()[0] for _ in range(5)]) for _ in range(2)]
    for inputs in epochs:
        assert sorted(inputs[:, 0].tolist()) == list(range(0, 40, 4))
    assert not torch.equal(*epochs)
    inputs, targets = stream.next()
    assert_equal(targets, inputs + 1)


def test_too_little_data() -> None:
    with pytest.raises(ExampleError, match="one batch takes 9 tokens, but there are 8"):
        data.BatchStream(torch.arange(8), batch_size=2, seq_length=4, seed=0)
    with pytest.raises(ExampleError, match="one window takes 5 tokens, but there are 4"):
        data.held_out_batches(torch.arange(4), batch_size=2, seq_length=4, count=1)


# --- losses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_losses_agree(corpus: data.Corpus, dtype: str, tied: bool) -> None:
    pytest.importorskip("fusegrad")
    trainers = [
        run_steps(Trainer(dataclasses.replace(CONFIG, loss=loss, dtype=dtype, tied=tied), corpus), 3) for loss in LOSSES
    ]
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for trainer in trainers[1:]:
        assert trainer.history.losses == pytest.approx(trainers[0].history.losses, abs=tolerance)
        assert trainer.held_out_loss() == pytest.approx(trainers[0].held_out_loss(), abs=tolerance)


def test_missing_fusegrad_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fusegrad", None)
    assert callable(loss_function("eager"))
    with pytest.raises(ExampleError, match=r"--loss fusegrad needs fusegrad .*pip install \."):
        loss_function("fusegrad")


def test_missing_tokenizers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ExampleError, match="pip install tokenizers"):
        data.train_tokenizer([data.Document("a", "text")], VOCAB_SIZE)


def test_generation_repeats_and_leaves_the_random_state(corpus: data.Corpus) -> None:
    model = Trainer(CONFIG, corpus).model
    state = torch.get_rng_state()
    first = generate(model, [1, 2], count=20, seed=0)
    assert_equal(torch.get_rng_state(), state)
    assert first == generate(model, [1, 2], count=20, seed=0)
    assert len(first) == 20
    assert model.training


# --- the program --------------------------------------------------------------------------------------------


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_lm.main([f"--data={tmp_path / 'missing'}"]) == 2
    assert capsys.readouterr().err.startswith("train_lm: no data: ")


def test_demo_options_are_presets() -> None:
    preset = demo.demo_preset("cpu")
    options = train_lm.parse_options(["--demo", "--device=cpu", "--steps=5"])
    assert options.steps == 5
    assert options.learning_rate == preset["learning_rate"]


def report(loss: str, after: float, before: float = 10.0) -> demo.Report:
    return {
        "loss": loss,
        "config": dataclasses.asdict(CONFIG),
        "held_out_before": before,
        "held_out_after": after,
        "description": CONFIG.describe(),
        "held_out_parts": {},
        "train_losses": [before, after],
        "step_seconds": [0.5, 0.25],
        "tokens_per_second": 100.0,
        "peak_memory_bytes": 2**20,
    }


def test_demo_fails_where_losses_differ_or_do_not_fall() -> None:
    good = [report("eager", 6.0), report("fusegrad", 6.0005)]
    assert demo.find_failures(good, 2.0) == []
    for bad in (6.002, 5.998, float("nan")):
        assert "must equal that of eager" in demo.find_failures([good[0], report("fusegrad", bad)], 2.0)[-1]
    assert "must fall" in demo.find_failures([report("eager", 9.0)], 2.0)[0]


def test_demo_table_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    reports = [report("eager", 6.0), report("fusegrad", 6.0), report("fusegrad-inplace", 6.0)]
    lines = demo.format_table(reports).splitlines()
    assert len({len(line) for line in lines}) == 1
    demo.draw(reports, tmp_path / "folder" / "picture.png")
    assert (tmp_path / "folder" / "picture.png").stat().st_size > 1000


def test_peak_memory_sees_what_was_freed() -> None:
    # A process of its own, as the class asks for: what others freed and the allocator kept would not be seen again.
    script = """
import torch
from lm import measure
memory = measure.PeakMemory(torch.device("cpu"))
torch.ones(64 * 2**20)
print(memory.bytes() >> 20)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=EXAMPLES, capture_output=True, text=True, check=True)
    assert 200 <= int(run.stdout) <= 400


@pytest.mark.parametrize("positions", ["embedding", "relative", "alibi"])
def test_both_attentions_train_alike(corpus: data.Corpus, positions: str) -> None:
    pytest.importorskip("fusegrad")
    config = dataclasses.replace(CONFIG, dropout=0.0, positions=positions)
    runs = {name: Trainer(dataclasses.replace(config, attention=name), corpus) for name in ATTENTIONS}
    for trainer in runs.values():
        run_steps(trainer, config.steps)
    sdpa, fusegrad = (trainer.history.losses for trainer in runs.values())
    assert fusegrad == pytest.approx(sdpa, abs=1e-4)
    learned = [dict(t.model.named_parameters()) for t in runs.values()]
    biases = [name for name in learned[0] if name.endswith((".relative", ".slopes"))]
    assert bool(biases) == (positions != "embedding")
    start = dict(Trainer(config, corpus).model.named_parameters())
    for name in biases:
        assert not torch.equal(learned[0][name], start[name])
        torch.testing.assert_close(learned[1][name], learned[0][name], atol=2e-3, rtol=1e-2)
