"""The scripts in probes/, on a run, on seeds, on a setting and on a checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import xarray as xr

from tests.test_sources import checkpoint as checkpoint

SCRIPTS = ("frequency_focus", "embedding_condensation", "head_specialization")


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


specialization = pytest.mark.parametrize("name", ["head_specialization"], indirect=True)
SHORT = ["--training.steps", "3", "--training.batch_size", "8", "--keep.held_out", "16", "--keep.at.stride", "1"]


@pytest.fixture(scope="module")
def history() -> xr.Dataset:
    """Heads by hand: one moves from lag 3 to lag 1, one stays in the middle, one loses what it had."""
    lag_3 = np.array([[0.9, 0.6, 0.2, 0.1], [0.4] * 4, [0.7, 0.1, 0.6, 0.3]])
    lag_1 = np.array([[0.1, 0.4, 0.8, 0.9], [0.3] * 4, [0.1, 0.1, 0.1, 0.2]])
    of_layer = {name: (("step", "layer"), [[0.0]] * 3 + [[last]]) for name, last in INDICES.items()}
    mass = np.stack([lag_3, lag_1], -1).swapaxes(0, 1)[:, None]
    return xr.Dataset(
        {"block_mass": (("step", "layer", "head", "block"), mass), **of_layer},
        coords={"step": [0, 10, 20, 30], "block_name": ("block", ["lag 3", "lag 1"])},
    )


INDICES = {"competition": 0.25, "cooperation": 0.5, "redundancy": 0.75}


def test_a_table_of_a_run_says_where_each_head_has_been(script: Callable[[str], ModuleType], history: xr.Dataset):
    rows = script("probes/head_specialization.py").table(history, [])
    seen = {"layer: competition": 0.25, "cooperation": 0.5, "redundancy": 0.75}
    assert all(row.items() >= seen.items() for row in rows)
    columns = ("head", "most on", "mass", "at 0.5 since", "before that")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("L0H0", "lag 1", 0.9, 20, "lag 3 from 0 to 10"),
        ("L0H1", "lag 3", 0.4, None, None),
        ("L0H2", "lag 3", 0.3, None, "lag 3 from 0 to 0, lag 3 from 20 to 20"),
    ]


def test_a_head_on_blocks_that_overlap_is_on_the_one_that_has_most(script: Callable[[str], ModuleType]):
    mass = np.array([[0.6, 0.2], [0.9, 0.6], [0.9, 0.7]])[:, None, None]
    trace = xr.Dataset(
        {"block_mass": (("step", "layer", "head", "block"), mass)}
        | {name: (("step", "layer"), [[0.0]] * 3) for name in INDICES},
        coords={"step": [0, 10, 20], "block_name": ("block", ["lags 1-2", "lags 2-3"])},
    )
    (row,) = script("probes/head_specialization.py").table(trace, [])
    assert (row["most on"], row["at 0.5 since"], row["before that"]) == ("lags 1-2", 0, None)


def test_a_table_of_a_checkpoint_has_the_most_that_random_weights_do(
    script: Callable[[str], ModuleType], history: xr.Dataset
):
    module, last = script("probes/head_specialization.py"), history.isel(step=[-1])
    random = [last.assign(block_mass=factor * last.block_mass) for factor in (0.2, 0.5, 0.3)]
    moved, divided, _ = module.table(last, random)
    assert (moved["most on"], moved["mass"], moved["with random weights"]) == ("lag 1", 0.9, 0.45)
    assert (divided["most on"], divided["mass"], divided["with random weights"]) == ("lag 3", 0.4, 0.2)
    assert module.table(last, [])[0]["with random weights"] is None


@specialization
def test_a_task_of_lags_is_asked_about_its_blocks(ask: Ask):
    blocks = ["--task.d_vocab", "4", "--task.blocks", "[[5],[2,1]]"]
    answer = ask("incremental", "--seeds", "2", *blocks, *SHORT, "--json")
    assert answer.returncode == 0, answer.stderr
    rows, traces = map(json.loads(answer.stdout).get, ("table", "traces"))
    assert [(row["run"], row["head"]) for row in rows] == [
        (f"seed-{seed}", f"L0H{head}") for seed in range(2) for head in range(3)
    ]
    assert {row["most on"] for row in rows} == {"lags 1-2"}  # of nearly uniform attention two lags have the more
    assert [xr.load_dataset(trace).block_name.values.tolist() for trace in traces] == [["lag 5", "lags 1-2"]] * 2

    again = ask("runs/incremental", "--seeds", "2", "--json")
    assert json.loads(again.stdout)["table"] == rows


@specialization
def test_lags_can_be_named(ask: Ask, own_directory: Path):
    answer = ask(str(own_directory), "--lags", "1", "3-5", "--json")
    assert answer.returncode == 0, answer.stderr
    trace = xr.load_dataset(own_directory / "head_specialization-small.nc")
    assert trace.block_name.values.tolist() == ["lag 1", "lags 3-5"]
    assert ask(str(own_directory), "--json").returncode == 0
    every = xr.load_dataset(own_directory / "head_specialization-small.nc")
    assert every.block_name.values.tolist() == [f"lag {lag}" for lag in range(1, 7)]  # the context has six
    far = every.block_mass_last.isel(block=slice(2, 5)).sum("block")
    np.testing.assert_allclose(trace.block_mass_last.isel(block=1), far, rtol=1e-6)


@specialization
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("7", "--lags: lag 7 reaches beyond the 6 tokens that"),
        ("2-9", "--lags: lag 9 reaches beyond the 6 tokens that"),
        ("0", "--lags: a lag is a number from 1 on"),
        ("1-3", "--lags: 1 1-3 names a lag twice"),
    ],
)
def test_lags_that_are_not_there_are_refused_in_one_sentence(
    ask: Ask, small_directory: Path, wrong: str, sentence: str
):
    answer = ask(str(small_directory), "--lags", "1", wrong)
    assert answer.returncode == 2
    assert sentence in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


@specialization
@pytest.mark.parametrize("wrong", ["x", "3-", "5-2", "1.5", "", "2,3"])
def test_what_is_no_lag_is_refused(ask: Ask, small_directory: Path, wrong: str):
    answer = ask(str(small_directory), "--lags", wrong)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert f"--lags: a lag is a number from 1 on, like 3, or a span like 4-8, not {wrong!r}" in answer.stderr


@specialization
def test_heads_of_a_real_model_look_at_the_token_before_as_random_ones_do_not(ask: Ask, shared_data: Path):
    folder = shared_data / "stories260K"
    text = shared_data / "tinystories" / "valid_head.txt"
    options = ["--text", str(text), "--tokenizer", str(folder / "tok512_hf"), "--lags", "1", "2", "3", "4-8"]
    answer = ask(str(folder / "stories260K.bin"), *options, "--seeds", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    before = [row for row in json.loads(answer.stdout)["table"] if row["most on"] == "lag 2"]
    assert len(before) >= 10
    assert max(row["mass"] for row in before) > 0.6
    assert all(row["mass"] > 10 * row["with random weights"] for row in before)
