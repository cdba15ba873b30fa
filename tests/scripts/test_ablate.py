import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

TINY = ["--task.length", "5", "--task.k", "2", "--model.d_model", "4", "--training.steps", "8", "--snapshots", "2"]
GRID = ["--vary", "training.optimizer.lr", "1e-3", "1e-2", "--vary", "model.d_mlp", "2", "4"]


class Done:
    """What a command leaves."""

    def __init__(self, returncode: int, stdout: str, stderr: str) -> None:
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


@pytest.fixture
def ablate(
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # a worker takes longer to begin than these runs to train
    ablation = script("scripts/ablate.py")

    def call(*arguments: str) -> Done:
        returncode = ablation.main(arguments)
        return Done(returncode, *capsys.readouterr())

    return call


def test_a_grid_leaves_two_tables_and_a_figure_and_goes_on_with_more_seeds(ablate, tmp_path: Path):
    done = ablate("clustering-2d", *GRID, "--seeds", "2", *TINY)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "ablations" / "clustering-2d-lr-d_mlp"
    runs, shares = (pd.read_csv(folder / name) for name in ("runs.csv", "summary.csv"))
    assert list(runs.columns) == [
        "training.optimizer.lr", "model.d_mlp", "seed", "accuracy", "sequences_tested", "solved", "first_solved",
        "f_type", "influence_share", "circuit", "diverged",
    ]  # fmt: skip
    assert len(runs) == 8
    assert (runs.sequences_tested == 2**5).all()
    assert shares[["training.optimizer.lr", "model.d_mlp"]].values.tolist() == [
        [1e-3, 2],
        [1e-3, 4],
        [1e-2, 2],
        [1e-2, 4],
    ]
    assert (shares.n == 2).all()
    for (_, rows), share in zip(runs.groupby(["training.optimizer.lr", "model.d_mlp"]), shares.share, strict=True):
        assert rows.solved.mean() == share
    page = (folder / "shares.html").read_text(encoding="utf-8")
    assert "d_mlp 2" in page
    assert "plotly" in page
    assert "0.001" in done.stdout
    assert "train and measure" not in done.stdout

    written = {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}
    assert len(written) == 8 * 4  # step 0, 4 and 8, and what to go on from
    more = ablate("clustering-2d", *GRID, "--seeds", "3", *TINY, "--json")
    assert more.returncode == 0, more.stderr
    answer = json.loads(more.stdout)
    assert answer.keys() == {"setting", "varied", "seeds", "summary", "out", "versions", "seconds"}
    assert [point["n"] for point in answer["summary"]] == [3] * 4
    assert all(file.stat().st_mtime_ns == time for file, time in written.items())
    assert len(pd.read_csv(folder / "runs.csv")) == 12


def test_recipes_are_grids_that_options_go_before(ablate, tmp_path: Path):
    done = ablate("clustering", "--recipe", "k", "--vary", "task.k", "1", "2", "--seeds", "1", *TINY[:2], *TINY[4:])
    assert done.returncode == 0, done.stderr
    assert pd.read_csv(tmp_path / "runs" / "ablations" / "clustering-k" / "summary.csv")["task.k"].tolist() == [1, 2]
    sizes = ablate("clustering", "--recipe", "batch-size", "--epochs", "1", "--task.sequences", "3", "--seeds", "1",
                   *TINY[:6], "--out", "sizes")  # fmt: skip
    assert sizes.returncode == 0, sizes.stderr
    steps = {
        run["training"]["batch_size"]: run["training"]["steps"]
        for run in (json.loads(file.read_text(encoding="utf-8")) for file in Path("sizes").rglob("run.json"))
    }
    assert steps == {1: 3, 2: 2} | {2**power: 1 for power in range(2, 12)}


def test_without_anything_varied_there_is_one_point(ablate):
    done = ablate("clustering", "--seeds", "1", *TINY, "--json")
    assert done.returncode == 0, done.stderr
    (point,) = json.loads(done.stdout)["summary"]
    assert point["n"] == 1
    assert (point["low"], point["high"]) != (0, 1)


def test_runs_that_diverge_are_said(ablate):
    fast = ["--training.optimizer.kind", "sgd", "--training.optimizer.lr", "1e30"]
    done = ablate("clustering", "--seeds", "2", *TINY, *fast)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 runs diverged, and count as not solved" in done.stdout


def test_every_recipe_is_a_grid_of_runs(script):
    ablation = script("scripts/ablate.py")
    for name, recipe in ablation.RECIPES.items():
        points = ablation.grid(ablation.SETTINGS["clustering-paper"], recipe.axes, epochs=recipe.epochs)
        assert len(points) == max([1, *map(len, recipe.axes.values())]), name


def test_bad_input_is_one_sentence_and_nothing_is_trained(ablate, tmp_path: Path):
    for arguments, sentence in (
        (["--vary", "model.d_mpl", "2"], "did you mean d_mlp"),
        (["--vary", "model.d_mlp", "2", "none"], "d_mlp"),
        (["--vary", "model.d_mlp"], "--vary model.d_mlp needs values"),
        (["--vary", "task.k", "1", "--vary", "task.k", "2"], "given twice"),
        (["--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--snapshots", "0"], "--snapshots must be at least 1, not 0"),
        (["stray"], "'stray' is not an option"),
    ):
        done = ablate("clustering-2d", *arguments)
        assert done.returncode == 2, done.stderr
        assert sentence in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not list(tmp_path.iterdir())
