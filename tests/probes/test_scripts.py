"""The scripts in probes/, on a run, on seeds, on a setting and on a checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import xarray as xr

from tests.test_sources import checkpoint as checkpoint

SCRIPTS = ("frequency_focus", "embedding_condensation")


class Answer(NamedTuple):
    """What a script leaves."""

    returncode: int
    stdout: str
    stderr: str


Ask = Callable[..., Answer]


@pytest.fixture(params=SCRIPTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ask(
    name: str,
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Ask:
    from fd_interp.probe_script import main

    monkeypatch.chdir(tmp_path)
    module = script(f"probes/{name}.py")

    def call(*arguments: str) -> Answer:
        return Answer(main(module.QUESTION, module.__doc__, arguments), *capsys.readouterr())

    return call


def test_a_run_gets_a_table_a_trace_and_a_figure(ask: Ask, name: str, own_directory: Path):
    answer = ask(str(own_directory))
    assert answer.returncode == 0, answer.stderr
    assert "L0H0" in answer.stdout
    assert xr.load_dataset(own_directory / f"{name}-small.nc").sizes["step"] == 4
    assert (own_directory / f"{name}.html").stat().st_size > 1_000_000  # with plotly inside, so that it works offline


def test_json_is_one_object(ask: Ask, name: str, own_directory: Path):
    answer = json.loads(ask(str(own_directory), "--json").stdout)
    assert answer.keys() == {"probe", "table", "traces", "figure"}
    assert answer["probe"] == name
    assert answer["table"][0]["run"] == "small"


def test_seeds_of_a_directory(ask: Ask, small_directory: Path, tmp_path: Path):
    for seed in range(2):
        shutil.copytree(small_directory, tmp_path / "seeds" / f"seed-{seed}")
    table = json.loads(ask("seeds", "--seeds", "2", "--json").stdout)["table"]
    assert {row["run"] for row in table} == {"seed-0", "seed-1"}


def test_a_setting_is_trained_first(ask: Ask, tmp_path: Path):
    short = ["--training.steps", "5", "--keep.held_out", "8"]
    assert ask("focus-dilution", "--seeds", "2", *short, "--json").returncode == 0
    assert (tmp_path / "runs" / "focus-dilution" / "seed-1" / "run.json").exists()


def test_a_checkpoint_is_compared_with_random_weights(ask: Ask, checkpoint: Path, tmp_path: Path):
    answer = ask(str(checkpoint), "--text", str(checkpoint.parent / "tales.txt"), "--seeds", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    assert any("random" in column for column in json.loads(answer.stdout)["table"][0])
    assert (tmp_path / "runs" / "model").is_dir()  # not beside the checkpoint, which may be in a folder of others


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["focus-dilutoin"], "is no file, no directory and no setting; did you mean focus-dilution"),
        (["focus-dilution", "--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["focus-dilution", "--task.persistnce", "0"], "did you mean persistence?"),
        (["{run}", "--task.persistence", "0"], "--task.persistence changes a setting, and"),
        (["{run}", "--seeds", "2"], "holds one seed, not 2"),
    ],
)
def test_bad_input_is_one_sentence(ask: Ask, name: str, small_directory: Path, arguments: list[str], sentence: str):
    answer = ask(*(argument.format(run=small_directory) for argument in arguments))
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"{name}: ")
    assert sentence in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
