"""Grids of runs on sparse modular addition: how often the task is solved, by what is varied, over seeds."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import joblib
import numpy as np
import pandas as pd
from tqdm import tqdm

from fd_interp.config import InputError
from fd_interp.models.config import LearnedQuery
from fd_interp.observation import Probe, observe
from fd_interp.overrides import override
from fd_interp.papers.clustering.circuits import CLUSTERING_HEAD, SOLVED_FROM, circuit
from fd_interp.papers.clustering.claims import share_of
from fd_interp.probes.clustering import clustering_head, lattice_of_head
from fd_interp.probes.prediction import accuracy
from fd_interp.stages import first_step
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.ensemble import train_together
from fd_interp.training.loop import train
from fd_interp.training.run import Every, Run
from fd_interp.training.series import Series, atomic, claim_directory, open_series
from fd_interp.training.state import DivergedError

MOST_TOGETHER = 16
"""Seeds that are trained as one."""
MOST_TESTED = 2**16
"""Sequences up to which a run is tested on all there are."""
MOST_COUNTED = 2**24
"""Gauges times prefixes times classes up to which the best gauge is looked for."""
SNAPSHOTS = 20
"""How often the accuracy is looked at on the way."""
OUTCOME_FILE = "outcome.json"
DIVERGED = "diverged"


class Point(NamedTuple):
    """One place of a grid."""

    values: dict[str, Any]
    """What is varied, by the names of the fields."""
    run: Run
    """Its run at seed 0."""

    @property
    def name(self) -> str:
        """Of its directory."""
        parts = [f"{field}={quote(str(value), safe='')}" for field, value in self.values.items()]
        return ",".join(parts) or "base"


class Outcome(NamedTuple):
    """What has become of one run."""

    accuracy: float | None
    """On `sequences_tested`; None, like all that is measured, for a run that has diverged."""
    sequences_tested: int
    """All sequences where there are no more than `MOST_TESTED`, otherwise so many drawn ones."""
    solved: bool
    """Whether the accuracy is above .98."""
    first_solved: int | None
    """The first kept step at which it was; by default every twentieth of the run is looked at."""
    f_type: float | None
    """Share of the variance of xi's direction between classes, in the best gauge; None too where there are too many
    gauges to look at. The largest, where there are several heads."""
    influence_share: float | None
    """Share of the squared influence that the informative positions have; the largest again."""
    circuit: str | None
    """What the model of the paper has become; None for another model, and where there is no `f_type`."""
    diverged: bool


class Job(NamedTuple):
    """One run of a grid, and where it is kept."""

    run: Run
    directory: Path


def grid(
    setting: Run,
    axes: Mapping[str, Sequence[str]],
    overrides: Sequence[str] = (),
    *,
    epochs: int | None = None,
    snapshots: int = SNAPSHOTS,
) -> list[Point]:
    """Every combination of values, each with the run that the setting becomes.

    Args:
        axes: the values of each field that is varied, as words of a command line.
        overrides: changes to all of them, `--path.to.field value`.
        epochs: passes through the training set in place of the setting's number of steps, which is otherwise the same
            for all, whatever the batch size.
        snapshots: how often the accuracy is looked at on the way; 1 keeps the start and the end alone.

    Raises:
        InputError: a field that does not exist or is not to be varied, or a value that does not fit, or occurs twice;
            the task is another one than `SparseModularAddition`.
    """
    axes = {_dashless(field): values for field, values in axes.items()}
    named = [*axes, *(_dashless(word[2:].partition("=")[0]) for word in overrides if word.startswith("--"))]
    _check_named(named, epochs)
    points = []
    for words in product(*axes.values()):
        changes = [word for field, value in zip(axes, words, strict=True) for word in (f"--{field}", value)]
        run = override(setting, [*overrides, *changes])
        values = {field: _value(run, field) for field in axes}
        points.append(Point(values, _scheduled(run, named, epochs, snapshots)))
    names = [point.name for point in points]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"a value is given twice: there are two runs with {twice}")
    return points


def outcomes(points: Sequence[Point], seeds: Sequence[int], out: Path) -> pd.DataFrame:
    """Trains and measures what `out` does not hold yet, on all cores; one row for each run, in the order of the points.

    Raises:
        InputError: `out` holds other runs under the same names, which is said before anything is trained.
    """
    out = out.resolve()  # a worker that is used again may have another working directory
    jobs = {point.name: [_job(point, seed, out) for seed in seeds] for point in points}
    of_all = [job for of_point in jobs.values() for job in of_point]
    for job in of_all:
        claim_directory(job.directory, job.run)
    pending = {
        name: [job for job in of_point if not (job.directory / OUTCOME_FILE).exists()]
        for name, of_point in jobs.items()
    }
    _carry_out([group for of_point in pending.values() for group in _groups(of_point)], len(of_all))
    rows = [
        point.values | {"seed": seed} | _read(job)._asdict()
        for point in points
        for seed, job in zip(seeds, jobs[point.name], strict=True)
    ]
    return pd.DataFrame(rows, dtype=object).infer_objects().astype({"first_solved": "Int64"})


def summary(points: Sequence[Point], runs: pd.DataFrame) -> pd.DataFrame:
    """One row for each point: how many runs, how many solved, their share and its 95 % interval (Wilson's).

    A run that has diverged counts as one that is not solved.
    """
    rows = []
    per_point = len(runs) // len(points)
    for index, point in enumerate(points):
        of_point = runs.iloc[index * per_point : (index + 1) * per_point]
        solved = int(of_point.solved.sum())
        low, high = share_of(solved, per_point)
        steps = of_point.first_solved[of_point.solved.astype(bool)].dropna()
        rows.append(
            point.values
            | {"n": per_point, "solved": solved, "share": solved / per_point, "low": low, "high": high}
            | {
                "clustering_heads": int((of_point.circuit == CLUSTERING_HEAD).sum()),
                "median_first_solved": float(steps.median()) if len(steps) else None,
                "sequences_tested": int(of_point.sequences_tested.max()),
                "diverged": int(of_point.diverged.sum()),
            }
        )
    return pd.DataFrame(rows, dtype=object).infer_objects()


def seeded(run: Run, seed: int) -> Run:
    """The run with this seed for its weights and its batches, and for its training set."""
    task = run.task.model_copy(update={"data_seed": seed})
    return run.model_copy(update={"seed": seed, "task": task})


def _dashless(field: str) -> str:
    return field.replace("-", "_")


def _check_named(fields: Sequence[str], epochs: int | None) -> None:
    for field in fields:
        if field in ("seed", "task.data_seed"):
            raise InputError(f"{field} differs from run to run anyway; --seeds says how many there are")
        if field == "keep.at" or field.startswith("keep.at."):
            raise InputError(f"{field} cannot be chosen here; --snapshots says how often the accuracy is looked at")
        if field == "training.steps" and epochs is not None:
            raise InputError("--epochs and training.steps both say how long to train; give one of them")


def _value(run: Run, field: str) -> Any:
    """As it stands in a table: a number or a word."""
    value: Any = run.model_dump(mode="json")
    for name in field.split("."):
        value = value[name]
    if isinstance(value, dict) and "kind" in value:
        return value["kind"]
    return value if isinstance(value, int | float | str) else json.dumps(value)


def _scheduled(run: Run, named: Sequence[str], epochs: int | None, snapshots: int) -> Run:
    """With as many steps as asked for, and with the whole population to be tested on where it is small enough."""
    task, training, keep = run.task, run.training, run.keep
    if not isinstance(task, SparseModularAddition):
        raise InputError(f"grids are of runs on modular, not on {task.kind}")
    if epochs is not None:
        if task.sequences is None:
            raise InputError("--epochs needs a training set; give it a size with task.sequences")
        training = training.model_copy(update={"steps": epochs * -(-task.sequences // training.batch_size)})
    if "keep.held_out" not in named and task.p**task.length <= MOST_TESTED:
        keep = keep.model_copy(update={"held_out": task.p**task.length})
    keep = keep.model_copy(update={"at": Every(stride=-(-training.steps // snapshots))})
    return run.model_copy(update={"training": training, "keep": keep})


def _job(point: Point, seed: int, out: Path) -> Job:
    return Job(seeded(point.run, seed), out / point.name / f"seed-{seed}")


def _groups(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Those that are trained as one: runs of a point, where their model has a form with a leading axis."""
    if not jobs:
        return
    run = jobs[0].run
    most = MOST_TOGETHER if isinstance(run.model, LearnedQuery) and not (run.keep.hooks or run.keep.gradients) else 1
    for start in range(0, len(jobs), most):
        yield list(jobs[start : start + most])


def _carry_out(groups: list[list[Job]], count: int) -> None:
    """All groups over all cores, the longest first."""
    done = count - sum(map(len, groups))
    with tqdm(total=count, initial=done, unit="run", desc="train and measure", disable=None) as bar:
        if not groups:
            return
        workers: Any = joblib.Parallel(
            n_jobs=min(os.cpu_count() or 1, len(groups)), return_as="generator_unordered", pre_dispatch="all"
        )
        for finished in workers(joblib.delayed(_keep_outcomes)(group) for group in sorted(groups, key=_work)):
            bar.update(finished)


def _work(group: list[Job]) -> float:
    """Minus what a group roughly takes: a step costs about as much as a hundred thousand products."""
    run = group[0].run
    width = run.model.d_mlp if isinstance(run.model, LearnedQuery) else 128
    return -run.training.steps * (1e5 + len(group) * run.training.batch_size * width)


def _keep_outcomes(group: list[Job]) -> int:
    for job, series in zip(group, _trained(group), strict=True):
        with atomic(job.directory / OUTCOME_FILE) as partial:
            partial.write_text(json.dumps(outcome(series)._asdict(), indent=2), encoding="utf-8")
    return len(group)


def _trained(group: list[Job]) -> list[Series]:
    if isinstance(group[0].run.model, LearnedQuery) and len(group) > 1:
        return train_together([job.run for job in group], [job.directory for job in group], show_progress=False)
    (job,) = group
    try:
        return [train(job.run, job.directory, show_progress=False)]
    except DivergedError:
        return [open_series(job.directory)]


def _read(job: Job) -> Outcome:
    return Outcome(**json.loads((job.directory / OUTCOME_FILE).read_text(encoding="utf-8")))


def outcome(series: Series) -> Outcome:
    """What has become of a run on sparse modular addition; one whose last snapshot is missing has diverged."""
    run = series.run
    assert run is not None
    tested = len(series.inputs.held_out.tokens)
    if series.steps[-1] < run.training.steps:
        return Outcome(None, tested, False, None, None, None, DIVERGED, True)
    right = observe(series, [accuracy(run.queries)]).accuracy
    last, solved = float(right[-1]), bool(right[-1] > SOLVED_FROM)
    first = first_step(right > SOLVED_FROM)
    asked = _probes_of_head(run)
    if not asked:
        return Outcome(last, tested, solved, first, None, None, None, False)
    end = observe(replace(series, snapshots=series.snapshots[-1:]), [accuracy(run.queries), *asked])
    f_type, influence = _largest(end.isel(form=1).f_type_gauge), _largest(end.influence_share)
    name = circuit(end).name if isinstance(run.model, LearnedQuery) else None
    return Outcome(last, tested, solved, first, f_type, influence, name, False)


def _largest(values: Any) -> float | None:
    """None where no head writes anything that varies."""
    largest = float(np.nanmax(values.values)) if np.isfinite(values.values).any() else math.nan
    return largest if math.isfinite(largest) else None


def _probes_of_head(run: Run) -> list[Probe]:
    task = run.task
    assert isinstance(task, SparseModularAddition)
    if task.p ** (2 * task.k - 1) * task.n_classes > MOST_COUNTED:
        return []
    return [clustering_head(task), *([lattice_of_head(task)] if task.p == 2 else [])]
