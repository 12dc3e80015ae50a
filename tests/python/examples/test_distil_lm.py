"""examples/distil_lm.py: both losses agree, the teacher's checkpoint is checked, Ctrl-C; tiny text, tiny models."""

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from coverings import rows_of

# First: it makes `lm` importable.
from lm_support import CONFIG, VOCAB_SIZE, command_line, isolated, run_steps, write_text  # isort: skip

import distil_lm
import train_lm
from lm import ExampleError, data, demo, program
from lm.distillation import DistillationConfig, DistillationTrainer, Teacher, load_teacher
from lm.model import LOSSES
from lm.training import Trainer

STUDENT = DistillationConfig(**{**dataclasses.asdict(CONFIG), "hidden_size": 8, "beta": 0.3, "temperature": 2.0})


@pytest.fixture(autouse=True)
def isolation() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def corpus(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    return data.load_corpus(text_folder, VOCAB_SIZE, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def teacher_checkpoint(corpus: data.Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "eager.pt"
    with isolated():
        run_steps(Trainer(CONFIG, corpus), CONFIG.steps, path)
    return path


@pytest.fixture(scope="module")
def teacher(corpus: data.Corpus, teacher_checkpoint: Path) -> Teacher:
    return load_teacher(teacher_checkpoint, corpus, CONFIG)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@rows_of("beta", [0.0, 0.3, 1.0])
def test_losses_agree(corpus: data.Corpus, teacher: Teacher, beta: float, dtype: str) -> None:
    pytest.importorskip("fusegrad")
    config = dataclasses.replace(STUDENT, beta=beta, dtype=dtype)
    eager, *others = [
        run_steps(DistillationTrainer(dataclasses.replace(config, loss=loss), corpus, teacher), 4) for loss in LOSSES
    ]
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for trainer in others:
        assert trainer.history.losses == pytest.approx(eager.history.losses, abs=tolerance)
        assert trainer.held_out_loss() == pytest.approx(eager.held_out_loss(), abs=tolerance)
        assert trainer.held_out_parts() == pytest.approx(eager.held_out_parts(), abs=tolerance)


def test_loss_is_its_weighted_parts(corpus: data.Corpus, teacher: Teacher) -> None:
    config = dataclasses.replace(STUDENT, soft_weight=0.25, hard_weight=2.0)
    trainer = DistillationTrainer(config, corpus, teacher)
    parts = trainer.held_out_parts()
    assert parts["soft"] > 0
    assert trainer.held_out_loss() == pytest.approx(0.25 * parts["soft"] + 2.0 * parts["hard"], rel=1e-6)


def test_teacher_is_the_trained_model_and_stays_as_it_is(
    corpus: data.Corpus, teacher: Teacher, teacher_checkpoint: Path
) -> None:
    saved = torch.load(teacher_checkpoint)["model"]
    run_steps(DistillationTrainer(STUDENT, corpus, teacher), 3)
    torch.testing.assert_close(dict(teacher.model.state_dict()), dict(saved), rtol=0, atol=0)
    assert not teacher.model.training
    assert all(parameter.grad is None for parameter in teacher.model.parameters())


def test_a_student_of_the_teachers_kind_comes_near_it(corpus: data.Corpus, teacher: Teacher) -> None:
    config = dataclasses.replace(
        STUDENT, hidden_size=16, soft_weight=1.0, hard_weight=0.0, beta=0.0, temperature=1.0, steps=60, dropout=0.0
    )
    trainer = DistillationTrainer(config, corpus, teacher)
    before = trainer.held_out_parts()["soft"]
    run_steps(trainer, config.steps)
    assert trainer.held_out_parts()["soft"] < 0.5 * before


def test_resume_is_bit_exact_and_refuses_another_teacher(corpus: data.Corpus, teacher: Teacher, tmp_path: Path) -> None:
    straight = run_steps(DistillationTrainer(STUDENT, corpus, teacher), STUDENT.steps)
    run_steps(DistillationTrainer(STUDENT, corpus, teacher), 5, tmp_path / "student.pt")
    resumed = DistillationTrainer(STUDENT, corpus, teacher)
    resumed.resume(tmp_path / "student.pt")
    assert run_steps(resumed, STUDENT.steps).history.losses == straight.history.losses
    other = DistillationTrainer(STUDENT, corpus, dataclasses.replace(teacher, key="other"))
    with pytest.raises(ExampleError, match=r"--teacher was .* and is other"):
        other.resume(tmp_path / "student.pt")


def test_unfit_teachers(corpus: data.Corpus, teacher_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ExampleError, match=r"no teacher: .* does not exist"):
        load_teacher(tmp_path / "missing.pt", corpus, STUDENT)
    with pytest.raises(ExampleError, match="another text or vocabulary"):
        load_teacher(teacher_checkpoint, dataclasses.replace(corpus, key="other"), STUDENT)
    with pytest.raises(ExampleError, match="--seq-length must be at most the teacher's, 16, but got 17"):
        load_teacher(teacher_checkpoint, corpus, dataclasses.replace(STUDENT, seq_length=17))


@pytest.mark.parametrize(
    "option", ["beta=-0.1", "beta=1.1", "beta=nan", "temperature=0", "temperature=inf", "soft-weight=-1"]
)
def test_bad_options_are_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert distil_lm.main([f"--{option}"]) == 2
    assert capsys.readouterr().err.startswith(f"distil_lm: --{option.partition('=')[0]} must be ")


# --- the program --------------------------------------------------------------------------------------------


def test_program_trains_a_teacher_and_ctrl_c_resumes(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The teacher's own process would take seconds to start.
    monkeypatch.setattr(distil_lm, "run_child", lambda command: train_lm.main(command[2:]))
    arguments = [*command_line(text_folder, tmp_path, "--hidden-size=8", "--teacher-steps=3")]
    assert distil_lm.main(arguments) == 0
    straight = capsys.readouterr().out
    assert "teacher: hidden size 16; student: 8" in straight

    train_step = Trainer._train_step

    def interrupted_step(trainer: Trainer) -> None:
        if isinstance(trainer, DistillationTrainer) and trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        train_step(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_train_step", interrupted_step)
        assert distil_lm.main(arguments) == program.INTERRUPTED
    assert "stopped at step 3" in capsys.readouterr().err

    assert distil_lm.main([*arguments, "--resume"]) == 0
    resumed = capsys.readouterr().out
    assert resumed.split("sample:")[1] == straight.split("sample:")[1]


def test_student_is_half_the_teachers_width(
    text_folder: Path, teacher_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command_line(text_folder, tmp_path, f"--teacher={teacher_checkpoint}")
    arguments = [argument for argument in arguments if not argument.startswith("--hidden-size")]
    assert distil_lm.main(arguments) == 0
    assert "teacher: hidden size 16; student: 8" in capsys.readouterr().out


def test_demo_options_are_presets() -> None:
    options = distil_lm.parse_options(["--demo", "--device=cpu", "--steps=5"])
    assert options.steps == 5
    assert options.learning_rate == demo.distillation_preset("cpu")["learning_rate"]
    assert options.teacher_steps == demo.demo_preset("cpu")["steps"]
    assert options.hidden_size == 64
