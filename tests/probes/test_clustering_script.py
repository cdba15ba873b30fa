"""The script probes/clustering_heads.py: on runs of its own task, on other runs and on checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xarray as xr

from fd_interp.models.config import LearnedQuery, Transformer
from fd_interp.papers.clustering.ideal import ideal_weights
from fd_interp.probe_script import main
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.loop import train
from fd_interp.training.run import AdamW, Every, Keep, Run, Training
from fd_interp.training.series import open_series, write_tensors
from tests.papers.test_clustering import HEAD, LATTICE, staged
from tests.test_sources import checkpoint as checkpoint

TASK = SparseModularAddition(length=6, k=3, sequences=32)
RUN = Run(
    task=TASK,
    model=LearnedQuery(),
    training=Training(optimizer=AdamW(), steps=8, batch_size=8, loss_on="last"),
    keep=Keep(at=Every(stride=4), held_out=64),
)
COLUMNS = [
    "run",
    "head",
    "accuracy",
    "becomes",
    "between classes, best gauge",
    "plain",
    "permuted",
    "influence on informative",
    "weights",
    "attention there (not diagnostic)",
]


class Answer(NamedTuple):
    """What the script leaves."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        assert self.returncode == 0, self.stderr
        return json.loads(self.stdout)["table"]


Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps of the paper's model."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    train(RUN, folder, show_progress=False)
    return folder


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "own"))


@pytest.fixture
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("probes/clustering_heads.py")


@pytest.fixture
def ask(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Answer:
        return Answer(main(module.QUESTION, module.__doc__, arguments), *capsys.readouterr())

    return call


def with_last(folder: Path, **weights: torch.Tensor) -> None:
    """Writes other weights into the last snapshot."""
    file = folder / "weights" / f"step_{RUN.training.steps:08d}.safetensors"
    whole = open_series(folder)[-1].weights()
    assert weights.keys() <= whole.keys()
    write_tensors(file, whole | weights)


def test_a_run_of_the_task_is_asked_about_its_classes(ask: Ask, own: Path):
    (row,) = ask(str(own), "--json").rows
    assert list(row) == COLUMNS
    assert (row["run"], row["head"], row["becomes"], row["weights"]) == ("own", "L0H0", "stuck", None)
    trace = xr.load_dataset(own / "clustering_heads-own.nc")
    assert trace.step.values.tolist() == [0, 4, 8]
    end = trace.isel(step=-1, layer=0, head=0)
    assert row["between classes, best gauge"] == float(end.f_type_gauge.sel(form=1))
    assert row["plain"] == pytest.approx(float(end.f_type.sel(form=1)))
    assert row["permuted"] == float(end.class_share_permuted.sel(form=1).squeeze())
    assert trace.by_name.values.tolist() == ["sum of the first k"]
    assert (own / "clustering_heads.html").stat().st_size > 1_000_000


def test_a_head_that_counts_is_seen_in_the_table(ask: Ask, own: Path):
    """Its classes are those of the task, and its influence and weights informative, though nothing reads them yet."""
    with_last(own, **ideal_weights(TASK, 20.0))
    (row,) = ask(str(own), "--json").rows
    assert row["between classes, best gauge"] == pytest.approx(1, abs=1e-4)
    assert row["plain"] == pytest.approx(1, abs=1e-4)
    assert row["permuted"] < 0.5
    assert row["influence on informative"] == pytest.approx(1, abs=1e-4)
    assert row["weights"] == "1 1 1 0 0 0"
    assert row["attention there (not diagnostic)"] == pytest.approx(1, abs=1e-4)
    assert row["becomes"] in {"stuck", "partly learned"}
    table = ask(str(own))
    assert table.returncode == 0
    assert "L0H0" in table.stdout
    assert "1 1 1 0 0 0" in table.stdout


def test_a_run_of_the_task_can_be_asked_about_lags(ask: Ask, own: Path):
    """Its query stands behind the sequence, so that the first symbol of six is at lag 6."""
    weights = ideal_weights(TASK, 60.0)
    weights["pos_embed.W_pos"][:, 1] = torch.tensor([1.0, -1, -1, -1, -1, -1])
    with_last(own, **weights)
    (row,) = ask(str(own), "--lags", "1", "3", "6", "--json").rows
    assert (row["head"], row["most by"]) == ("L0H0", "lag 6")
    assert row["share"] == row["lag 6"] == pytest.approx(1)
    assert row["lag 1"] == pytest.approx(0, abs=1e-6)
    assert row["with random weights"] is None
    assert xr.load_dataset(own / "clustering_heads-own.nc").by_name.values.tolist() == ["lag 1", "lag 3", "lag 6"]


def test_a_transformer_has_a_row_for_each_head(ask: Ask, tmp_path: Path):
    deep = Transformer(n_layers=2, n_heads=2, d_model=4, d_head=3, d_mlp=4, std=0.5)
    train(RUN.model_copy(update={"model": deep}), tmp_path / "deep", show_progress=False)
    rows = ask("deep", "--json").rows
    assert [row["head"] for row in rows] == ["L0H0", "L0H1", "L1H0", "L1H1"]
    assert len({row["between classes, best gauge"] for row in rows}) == 4
    assert len({row["accuracy"] for row in rows}) == 1
    by_lag = ask("deep", "--lags", "1", "2", "--json").rows
    assert [row["head"] for row in by_lag] == ["L0H0", "L0H1", "L1H0", "L1H1"]
    assert all(row["share"] == max(row["lag 1"], row["lag 2"]) for row in by_lag)


def test_another_run_is_asked_about_lags(ask: Ask, own_directory: Path):
    (row,) = ask(str(own_directory), "--json").rows
    assert [name for name in row if name.startswith("lag")] == ["lag 1", "lag 2", "lag 3", "lag 4"]
    assert row["share"] == max(row[f"lag {lag}"] for lag in range(1, 5))
    assert row["permuted"] < 1
    (other,) = ask(str(own_directory), "--lags", "6", "--json").rows
    assert other["most by"] == "lag 6"


@pytest.mark.parametrize("wrong", ["0", "-1", "7"])
def test_lags_that_are_not_there_are_refused_in_one_sentence(
    ask: Ask, trained: Path, small_directory: Path, wrong: str
):
    for folder in (trained, small_directory):
        answer = ask(str(folder), "--lags", "1", wrong)
        assert answer.returncode == 2
        assert f"--lags: a lag is from 1 to 6, what {folder} is measured on, not {wrong}" in answer.stderr
        assert len(answer.stderr.strip().splitlines()) == 1


def test_seeds_are_asked_one_by_one_and_as_one_object(ask: Ask, trained: Path, tmp_path: Path):
    for seed in range(2):
        shutil.copytree(trained, tmp_path / "seeds" / f"seed-{seed}")
    with_last(tmp_path / "seeds" / "seed-1", **ideal_weights(TASK))
    answer = json.loads(ask("seeds", "--seeds", "2", "--json").stdout)
    assert answer.keys() == {"probe", "table", "traces", "figure"}
    assert answer["probe"] == "clustering_heads"
    assert [(row["run"], row["weights"]) for row in answer["table"]] == [("seed-0", None), ("seed-1", "1 1 1 0 0 0")]
    assert [Path(trace).name for trace in answer["traces"]] == [f"clustering_heads-seed-{seed}.nc" for seed in (0, 1)]


def test_a_setting_is_trained_first(ask: Ask, tmp_path: Path):
    short = ["--training.steps", "3", "--task.length", "6", "--task.k", "2", "--keep.held_out", "64"]
    (row,) = ask("clustering", *short, "--json").rows
    assert row["run"] == "seed-12"
    assert (tmp_path / "runs" / "clustering" / "seed-12" / "run.json").exists()


def test_a_checkpoint_is_compared_with_random_weights(ask: Ask, checkpoint: Path, tmp_path: Path):
    answer = ask(str(checkpoint), "--text", str(checkpoint.parent / "tales.txt"), "--seeds", "2", "--json")
    rows = answer.rows
    assert [row["head"] for row in rows] == [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    assert list(rows[0])[2:] == ["most by", "share", "permuted", "with random weights"] + [
        f"lag {lag}" for lag in range(1, 5)
    ]
    assert all(0 < row["permuted"] < row["share"] <= 1 for row in rows)
    assert all(0 <= row["with random weights"] <= 1 for row in rows)
    assert (tmp_path / "runs" / "model" / "clustering_heads.html").exists()


def test_heads_of_a_real_model_write_one_thing_for_each_previous_token(ask: Ask, shared_data: Path):
    folder, text = shared_data / "stories260K", shared_data / "tinystories" / "valid_head.txt"
    options = ["--text", str(text), "--tokenizer", str(folder / "tok512_hf"), "--lags", "1", "2"]
    rows = ask(str(folder / "stories260K.bin"), *options, "--json").rows
    before = [row for row in rows if row["most by"] == "lag 2"]
    assert len(before) >= 10
    assert max(row["share"] for row in before) > 0.6
    assert all(row["share"] > 2 * row["permuted"] for row in before)
    assert all(row["share"] > 2 * row["with random weights"] for row in before)


# The table and the figure, of traces made by hand.


def with_sums(trace: xr.Dataset) -> xr.Dataset:
    """What the script has beside the probes of a run."""
    shares = trace.f_type_gauge.expand_dims(by=["sum"], axis=-1).assign_coords(by=[0])
    return trace.assign(class_share=0.9 * shares, class_share_permuted=0.01 * shares).assign_coords(
        by_name=("by", ["sum of the first k"])
    )


def test_a_table_says_what_each_head_has_become(module: ModuleType):
    (row,) = module.table(with_sums(HEAD), [])
    assert row["becomes"] == "clustering head"
    assert (row["accuracy"], row["between classes, best gauge"], row["influence on informative"]) == (1.0, 0.99, 0.995)
    assert (row["plain"], row["permuted"]) == pytest.approx((0.9 * 0.99, 0.01 * 0.99))
    assert (row["weights"], row["attention there (not diagnostic)"]) == ("1 1 1 1 1 0 0 0 0 0 0 0", 0.6)
    (row,) = module.table(with_sums(LATTICE), [])
    assert (row["becomes"], row["weights"]) == ("another lattice", "1 -1 3 1 1 2 0 0 -2 0 0 0")
    (row,) = module.table(with_sums(staged(representation=None, classifier=None)), [])
    assert (row["becomes"], row["weights"]) == ("stuck", None)


def by_lags(*shares: float) -> xr.Dataset:
    """One head whose share at lags 1, 2, ... is given; in direction it has half as much."""
    values = np.stack([shares, np.array(shares) / 2])[None, None, None]
    dims = ("step", "layer", "head", "form", "by")
    return xr.Dataset(
        {"class_share": (dims, values), "class_share_permuted": (dims, values / 10)},
        coords={"step": [0], "by_name": ("by", [f"lag {lag + 1}" for lag in range(len(shares))])},
    )


def test_a_table_of_a_checkpoint_has_the_most_that_random_weights_do(module: ModuleType):
    (row,) = module.table(by_lags(0.2, 0.8), [by_lags(0.9, 0.1), by_lags(0.5, 0.3)])
    assert row == {
        "head": "L0H0",
        "most by": "lag 2",
        "share": 0.8,
        "permuted": pytest.approx(0.08),
        "with random weights": 0.3,
        "lag 1": 0.2,
        "lag 2": 0.8,
    }


def test_a_lone_checkpoint_is_drawn_as_heads_by_lags_and_a_run_as_curves(module: ModuleType):
    (heat,) = module.figure([by_lags(0.2, 0.8)], []).data
    assert (list(heat.x), list(heat.y)) == (["lag 1", "lag 2"], ["L0H0"])
    np.testing.assert_allclose(heat.z, [[0.2, 0.8]])
    lines = module.figure([with_sums(HEAD), with_sums(LATTICE)], []).data
    assert len(lines) == 2 * 4
    assert {line.name for line in lines} == {
        "between classes: sum of the first k",
        "the same in direction and best gauge",
        "influence of informative symbols",
        "attention on them (not diagnostic)",
    }
    strong = {line.name: line.y for line in lines if line.opacity == 1}
    np.testing.assert_allclose(strong["between classes: sum of the first k"], 0.9 * HEAD.f_type_gauge.squeeze()[:, 0])
    np.testing.assert_allclose(strong["the same in direction and best gauge"], HEAD.f_type_gauge.squeeze()[:, 1])
