"""Grids of runs: which points there are, what is trained, and what the tables say."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from fd_interp import ablation
from fd_interp.ablation import DIVERGED, OUTCOME_FILE, Outcome, grid, outcome, outcomes, summary
from fd_interp.config import InputError
from fd_interp.models.config import LearnedQuery, Transformer
from fd_interp.papers.clustering.circuits import CLUSTERING_HEAD, STUCK
from fd_interp.papers.clustering.settings import CLUSTERING, CLUSTERING_2D
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.run import Run
from fd_interp.training.series import open_series, read_run

TINY = ["--task.length", "4", "--task.k", "2", "--model.d_model", "4", "--training.steps", "6"]
TINY_GRID = {"model.d_mlp": ("2", "4")}


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes longer to begin than these runs to train."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def modular(run: Run) -> SparseModularAddition:
    assert isinstance(run.task, SparseModularAddition)
    return run.task


def test_a_grid_has_every_combination_in_order():
    points = grid(CLUSTERING_2D, {"training.optimizer.lr": ("1e-3", "0.01"), "model.d_mlp": ("8", "16")})
    assert [tuple(point.values.values()) for point in points] == [(0.001, 8), (0.001, 16), (0.01, 8), (0.01, 16)]
    for point in points:
        assert isinstance(point.run.model, LearnedQuery)
        assert point.values == {
            "training.optimizer.lr": point.run.training.optimizer.lr,
            "model.d_mlp": point.run.model.d_mlp,
        }
    assert len({point.name for point in points}) == 4
    assert [point.values for point in grid(CLUSTERING_2D, {})] == [{}]


def test_steps_stay_when_the_batch_size_changes_unless_epochs_are_given():
    sizes = {"training.batch-size": ("1", "100", "4096")}
    assert {point.run.training.steps for point in grid(CLUSTERING_2D, sizes)} == {CLUSTERING_2D.training.steps}
    by_epoch = grid(CLUSTERING_2D, sizes, epochs=3)
    assert [point.run.training.steps for point in by_epoch] == [3 * 2048, 3 * 21, 3]
    assert [point.run.training.batch_size for point in by_epoch] == [1, 100, 4096]


def test_runs_are_tested_on_the_population_where_it_is_small():
    points = grid(CLUSTERING_2D, {"task.length": ("5", "12", "16", "17")})
    assert [point.run.keep.held_out for point in points] == [2**5, 2**12, 2**16, 4096]
    assert [grid(CLUSTERING_2D, {"task.p": (p,)})[0].run.keep.held_out for p in ("3", "4")] == [4096, 4096]
    (chosen,) = grid(CLUSTERING_2D, {"task.length": ("5",)}, ["--keep.held-out", "8"])
    assert chosen.run.keep.held_out == 8


@pytest.mark.parametrize("snapshots", [1, 3, 20])
def test_so_many_snapshots_are_kept_on_the_way(snapshots: int):
    (point,) = grid(CLUSTERING_2D, {}, ["--training.steps", "100"], snapshots=snapshots)
    kept = point.run.kept_steps()
    assert (kept[0], kept[-1], len(kept)) == (0, 100, snapshots + 1)


@pytest.mark.parametrize(
    ("axes", "overrides", "epochs", "sentence"),
    [
        ({"training.optimzer.lr": ("1",)}, [], None, "optimzer"),
        ({"model.d_mlp": ("8", "-3")}, [], None, "d_mlp"),
        ({"model.d_mlp": ("8", "eight")}, [], None, "eight"),
        ({"training.optimizer.lr": ("0.001", "1e-3")}, [], None, "given twice"),
        ({"task.length": ("12", "3")}, [], None, "need a length of 5"),
        ({}, ["--model.dmlp", "3"], None, "did you mean"),
        ({"seed": ("1", "2")}, [], None, "--seeds"),
        ({}, ["--task.data-seed=4"], None, "--seeds"),
        ({"keep.at.stride": ("1",)}, [], None, "--snapshots"),
        ({"training.steps": ("1",)}, [], 3, "give one of them"),
        ({}, ["--task.sequences", "none"], 3, "needs a training set"),
    ],
)
def test_what_cannot_be_varied_is_named(
    axes: dict[str, Sequence[str]], overrides: list[str], epochs: int | None, sentence: str
):
    with pytest.raises(InputError, match=sentence):
        grid(CLUSTERING_2D, axes, overrides, epochs=epochs)


def test_only_sparse_modular_addition_is_looked_at(small_run: Run):
    with pytest.raises(InputError, match="not on markov"):
        grid(small_run, {})


def test_each_point_is_trained_on_each_seed_with_its_own_training_set(tmp_path: Path):
    points = grid(CLUSTERING, TINY_GRID, TINY)
    table = outcomes(points, range(2), tmp_path)
    assert table[["model.d_mlp", "seed"]].values.tolist() == [[2, 0], [2, 1], [4, 0], [4, 1]]
    runs = [read_run(tmp_path / point.name / f"seed-{seed}") for point in points for seed in range(2)]
    assert [(run.seed, modular(run).data_seed) for run in runs] == [(0, 0), (1, 1)] * 2
    assert [run.model.d_mlp for run in runs if isinstance(run.model, LearnedQuery)] == [2, 2, 4, 4]
    for row, point, seed in zip(table.itertuples(), np.repeat(range(2), 2), [0, 1, 0, 1], strict=True):
        assert row.accuracy == outcome(open_series(tmp_path / points[point].name / f"seed-{seed}")).accuracy


def test_what_is_there_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    points = grid(CLUSTERING, TINY_GRID, TINY)
    before = outcomes(points, range(2), tmp_path)
    trained = []
    train_together, train = ablation.train_together, ablation.train
    monkeypatch.setattr(
        ablation,
        "train_together",
        lambda runs, *rest, **more: trained.extend(runs) or train_together(runs, *rest, **more),
    )
    monkeypatch.setattr(ablation, "train", lambda run, *rest, **more: trained.append(run) or train(run, *rest, **more))
    pd.testing.assert_frame_equal(outcomes(points, range(2), tmp_path), before)
    assert not trained
    after = outcomes(points, range(4), tmp_path)
    assert [run.seed for run in trained] == [2, 3, 2, 3]
    pd.testing.assert_frame_equal(after[after.seed < 2].reset_index(drop=True), before)


def test_another_run_under_the_same_name_is_refused_before_anything_is_trained(tmp_path: Path):
    outcomes(grid(CLUSTERING, {"model.d_mlp": ("4",)}, TINY), range(1), tmp_path)
    longer = grid(CLUSTERING, TINY_GRID, [*TINY[:-1], "8"])
    with pytest.raises(InputError, match="differs in"):
        outcomes(longer, range(1), tmp_path)
    assert not list(tmp_path.glob("*=2/seed-0/weights/*"))


def test_runs_that_solve_the_task_are_said_to_and_when(tmp_path: Path):
    """Two of six symbols: four seeds of four did, all of them with a clustering head."""
    small = ["--task.length", "6", "--task.k", "2", "--model.d_model", "4", "--training.optimizer.lr", "0.03"]
    (point,) = grid(CLUSTERING, {}, [*small, "--training.steps", "150"])
    table = outcomes([point], range(4), tmp_path)
    solved = table[table.solved]
    assert len(solved) >= 2
    assert (solved.accuracy > 0.98).all()
    assert solved.first_solved.between(1, 150).all()
    heads = solved[solved.circuit == CLUSTERING_HEAD]
    assert len(heads)
    assert (heads.f_type > 0.9).all()
    assert (heads.influence_share > 0.9).all()
    assert (table.sequences_tested == 64).all()
    assert summary([point], table).clustering_heads.tolist() == [len(heads)]


def test_a_run_that_has_learned_nothing_is_stuck(tmp_path: Path):
    (row,) = outcomes(grid(CLUSTERING, {}, ["--training.steps", "1"]), range(1), tmp_path).itertuples()
    assert (row.circuit, row.solved, row.sequences_tested) == (STUCK, False, 4096)
    assert row.accuracy < 0.6
    assert row.f_type < 0.4


def test_runs_that_diverge_are_said_and_their_neighbours_go_on(tmp_path: Path):
    points = grid(CLUSTERING, {"training.optimizer.lr": ("1e-3", "1e30")}, [*TINY, "--training.optimizer.kind", "sgd"])
    table = outcomes(points, range(2), tmp_path)
    assert table.diverged.tolist() == [False, False, True, True]
    assert table.circuit.tolist()[2:] == [DIVERGED, DIVERGED]
    assert table.accuracy.isna().tolist() == [False, False, True, True]
    assert summary(points, table).diverged.tolist() == [0, 2]
    assert not table.solved[2:].any()
    alone = outcomes(points, range(3), tmp_path)  # the third by itself
    assert alone.diverged.tolist() == [False] * 3 + [True] * 3


def test_other_models_are_trained_one_by_one_and_have_no_circuit(tmp_path: Path):
    model = Transformer(n_heads=2, d_model=8, d_head=4, d_mlp=8, std=0.2)
    points = grid(CLUSTERING.model_copy(update={"model": model}), {"model.n_heads": ("1", "2")}, TINY[:4] + TINY[-2:])
    table = outcomes(points, range(2), tmp_path)
    assert table.circuit.isna().all()
    assert table.f_type.between(0, 1).all()


def test_larger_alphabets_are_tested_on_a_draw_and_too_many_gauges_are_left_out(tmp_path: Path):
    points = grid(CLUSTERING, {"task.p": ("3", "5")}, ["--training.steps", "1", "--keep.held_out", "64"])
    table = outcomes(points, range(1), tmp_path)
    assert table.sequences_tested.tolist() == [64, 64]
    assert table.f_type.isna().tolist() == [False, True]
    assert table.circuit.isna().tolist() == [False, True]


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Solved by hand: |share - q| = z sqrt(q (1 - q) / n)."""
    z = norm.ppf(0.975)
    centre, width = hits + z**2 / 2, z * math.sqrt(hits * (of - hits) / of + z**2 / 4)
    return (centre - width) / (of + z**2), (centre + width) / (of + z**2)


def test_a_summary_counts_what_is_solved_with_its_interval():
    points = grid(CLUSTERING, TINY_GRID, TINY)
    good = Outcome(1.0, 16, True, 4, 0.99, 0.99, CLUSTERING_HEAD, False)
    other = good._replace(circuit="another lattice", first_solved=8)
    bad = Outcome(0.5, 16, False, None, 0.1, 0.2, STUCK, False)
    lost = Outcome(None, 16, False, 2, None, None, DIVERGED, True)
    of_points = [[good, other, bad, lost], [bad, bad, bad, bad]]
    rows = [
        point.values | {"seed": seed} | one._asdict()
        for point, found in zip(points, of_points, strict=True)
        for seed, one in enumerate(found)
    ]
    first, second = summary(points, pd.DataFrame(rows)).to_dict("records")
    assert (first["low"], first["high"]) == pytest.approx(wilson(2, 4))
    assert (second["low"], second["high"]) == pytest.approx(wilson(0, 4))
    expected = {"model.d_mlp": 2, "n": 4, "solved": 2, "share": 0.5, "clustering_heads": 1, "diverged": 1}
    assert {name: first[name] for name in expected} == expected
    assert first["median_first_solved"] == 6
    assert (second["solved"], second["share"], second["diverged"]) == (0, 0, 0)


def test_an_outcome_is_read_as_it_was_written(tmp_path: Path):
    (point,) = grid(CLUSTERING, {}, TINY)
    table = outcomes([point], range(1), tmp_path)
    stored = json.loads((tmp_path / "base" / "seed-0" / OUTCOME_FILE).read_text(encoding="utf-8"))
    assert Outcome(**stored).accuracy == table.accuracy[0]
