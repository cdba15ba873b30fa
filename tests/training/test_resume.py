"""Training that is killed, interrupted or out of space at any moment, and then goes on to the same bytes."""

import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from fd_interp import cli
from fd_interp.config import InputError
from fd_interp.models.config import OneLayer, Transformer
from fd_interp.training import loop
from fd_interp.training.loop import Step, train
from fd_interp.training.run import SGD, AdamW, Every, Keep, Run, Training
from fd_interp.training.series import open_series
from tests.training.test_series import listing

OPTIMIZERS = {"momentum": SGD(lr=0.2, momentum=0.9), "adamw": AdamW(lr=1e-2, weight_decay=0.1, lrs={"W_Q": 0.1})}
# A child that is forked needs no second import of torch, and has the patches of the test.
FORK = multiprocessing.get_context("fork")

each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


def a_run(small_run: Run, **fields: object) -> Run:
    training = {"optimizer": fields.pop("optimizer", SGD(lr=0.5)), "steps": fields.pop("steps", 25), "batch_size": 4}
    keep = Keep(at=Every(stride=6), hooks=("pattern",), held_out=4)
    return small_run.model_copy(update={"training": Training(**training), "keep": keep, **fields})


def unbroken(run: Run, directory: Path) -> dict[str, bytes]:
    train(run, directory, show_progress=False)
    return listing(directory)


def child(work: Callable[[], object]) -> Any:
    def quiet() -> None:
        work()
        os._exit(0)

    process = FORK.Process(target=quiet)
    process.start()
    return process


def exit_code_of(work: Callable[[], object]) -> int:
    process = child(work)
    process.join(60)
    return process.exitcode


def wait_for(file: Path) -> None:
    for _ in range(6000):
        if file.exists():
            return
        time.sleep(0.005)
    raise AssertionError(f"{file} did not appear")


def step_of_state(directory: Path) -> int:
    with safe_open(directory / "state" / "latest.safetensors", "pt") as state:
        return int(state.metadata()["step"])


def before_step(number: int, act: Callable[[], object]) -> Callable[..., Iterator[Step]]:
    """The training steps, with something that happens while one of them is taken."""
    training_steps = loop.training_steps

    def steps(*arguments: Any, **more: Any) -> Iterator[Step]:
        for step in training_steps(*arguments, **more):
            if step.step == number:
                act()
            yield step

    return steps


def is_whole(directory: Path, reference: dict[str, bytes]) -> bool:
    """Whether every file that a reader would look at is the one of an unbroken training."""
    return all(
        content == reference[name]
        for name, content in listing(directory).items()
        if name.startswith(("weights/step", "activations/step", "run.json"))
    )


@each_optimizer
@each_dtype
def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: SGD | AdamW, dtype: str
) -> None:
    run, directory = a_run(small_run, optimizer=optimizer, dtype=dtype, steps=25), tmp_path / "killed"
    reference = unbroken(run, tmp_path / "unbroken")
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_STATES", 0.0)
    kills = 0
    while not kills or process.exitcode != 0:
        process = child(lambda: train(run, directory, show_progress=False))
        wait_for(directory / "weights" / "step_00000000.safetensors")
        kills += 1
        time.sleep(random.uniform(0, 0.1 * kills))  # longer and longer, so that it ends
        process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        assert is_whole(directory, reference)
        assert open_series(directory).steps[0] == 0
    assert kills > 1
    assert listing(directory) == reference


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_at_each_write_it_ends_with_the_same_bytes(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Each child dies at a later write than the one before it, just before a file takes its place or just after."""
    run, directory = a_run(small_run, optimizer=OPTIMIZERS["adamw"], steps=12), tmp_path / "killed"
    reference = unbroken(run, tmp_path / "unbroken")
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_STATES", 0.0)
    replace = Path.replace

    def dying_at(number: int) -> Callable[[Path, Path], Path]:
        remaining = iter(range(number))

        def replace_or_die(partial: Path, file: Path) -> Path:
            last = next(remaining) == number - 1
            if last and moment == "before":
                partial.write_bytes(partial.read_bytes()[:10])  # a kill in the middle of the write
                os._exit(9)
            replace(partial, file)
            if last:
                os._exit(9)
            return file

        return replace_or_die

    codes = []
    while not codes or codes[-1]:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", dying_at(len(codes) + 1))
            codes.append(exit_code_of(lambda: train(run, directory, show_progress=False)))
        assert is_whole(directory, reference)
    assert set(codes) == {0, 9}
    assert len(codes) > 4
    assert listing(directory) == reference


@each_optimizer
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, 17, 25])
def test_interrupted_it_finishes_the_step_and_goes_on_from_there(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: SGD | AdamW, number: int, at: int
) -> None:
    run, directory = a_run(small_run, optimizer=optimizer), tmp_path / "interrupted"
    with monkeypatch.context() as patched:
        patched.setattr(loop, "training_steps", before_step(at, lambda: signal.raise_signal(number)))
        with pytest.raises(KeyboardInterrupt):
            train(run, directory, show_progress=False)
    assert step_of_state(directory) == at
    assert open_series(directory).steps == [step for step in run.kept_steps() if step <= at]
    taken: list[int] = []
    with monkeypatch.context() as patched:
        batch_loss = loop.batch_loss
        patched.setattr(loop, "batch_loss", lambda *given: taken.append(1) or batch_loss(*given))
        train(run, directory, show_progress=False)
    assert len(taken) == 25 - at
    assert listing(directory) == unbroken(run, tmp_path / "unbroken")


@pytest.mark.parametrize(
    "model",
    [OneLayer(d_model=5, d_head=3, n_heads=2, fixed={"W_K": "init"}), Transformer(n_layers=2, d_mlp=4, d_model=6)],
    ids=["one layer", "transformer"],
)
def test_any_model_goes_on_from_an_interruption(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: OneLayer | Transformer
) -> None:
    run, directory = a_run(small_run, optimizer=OPTIMIZERS["adamw"], model=model), tmp_path / "interrupted"
    for at in (9, 10, 20):
        with monkeypatch.context() as patched:
            patched.setattr(loop, "training_steps", before_step(at, lambda: signal.raise_signal(signal.SIGINT)))
            with pytest.raises(KeyboardInterrupt):
                train(run, directory, show_progress=False)
    assert unbroken(run, directory) == unbroken(run, tmp_path / "unbroken")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_stops_on_a_signal_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    directory = tmp_path / "run"
    command = ["train", "focus-dilution", "--training.steps", "150", "--training.batch-size", "4"]
    command += ["--task.context", "4", "--keep.at.kind", "every", "--keep.at.stride", "10"]
    with monkeypatch.context() as patched:
        batch_loss = loop.batch_loss
        patched.setattr(loop, "batch_loss", lambda *given: time.sleep(0.01) or batch_loss(*given))
        process = child(lambda: os._exit(cli.main([*command, "--out", str(directory)])))
        wait_for(directory / "weights" / "step_00000010.safetensors")
        os.kill(process.pid, number)
        process.join(60)
    assert process.exitcode == 130
    output = capfd.readouterr()
    assert output.err == "fd-interp: interrupted; the same command goes on from here\n"
    assert output.out == ""
    assert 10 <= step_of_state(directory) < 150

    assert cli.main([*command, "--out", str(directory)]) == 0
    assert cli.main([*command, "--out", str(tmp_path / "unbroken")]) == 0
    assert listing(directory) == listing(tmp_path / "unbroken")


def test_interrupted_before_the_first_step_it_starts_again(small_run: Run, tmp_path: Path, monkeypatch) -> None:
    run = a_run(small_run)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "new_model", lambda run: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()
    assert unbroken(run, tmp_path / "run") == unbroken(run, tmp_path / "unbroken")


def test_a_disk_that_is_really_full_is_one_sentence(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own limit on the size of a file, which fails a write as a full disk does."""
    run, directory = a_run(small_run), tmp_path / "run"
    reference = unbroken(run, tmp_path / "unbroken")
    said = tmp_path / "said"

    def work() -> None:
        try:
            train(run, directory, show_progress=False)
        except InputError as error:
            message = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
            said.write_text(message, encoding="utf-8")

    with monkeypatch.context() as patched:
        no_more = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))  # noqa: E731
        patched.setattr(loop, "training_steps", before_step(10, no_more))
        assert exit_code_of(work) == 0
    message = said.read_text(encoding="utf-8")
    assert message.startswith(f"{directory / 'activations' / 'step_00000012.safetensors'} could not be written (")
    assert message.endswith("; what was kept before is whole")
    assert "\n" not in message
    assert open_series(directory).steps == [0, 6]
    assert is_whole(directory, reference)
    assert not list(directory.rglob("*.partial"))
    assert unbroken(run, directory) == reference
