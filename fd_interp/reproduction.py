"""Trains and observes many runs on all cores, each in a directory of its own, going on where it was interrupted."""

import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import joblib
from tqdm import tqdm

from fd_interp.claims import Claim, Evidence, Verdict, judge
from fd_interp.observation import Probe, Trace, observe
from fd_interp.report.page import Report
from fd_interp.tasks.high_order import HighOrderMarkov
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.ensemble import train_together
from fd_interp.training.loop import train
from fd_interp.training.run import Run
from fd_interp.training.series import Series, atomic

T = TypeVar("T")
TRACE_FILE = "trace.nc"


class Results(NamedTuple):
    """What a reproduction leaves."""

    verdicts: list[Verdict]
    report: Report


class Job(NamedTuple):
    """Runs of one case to train, together if there are several, and observe."""

    case: str
    runs: Sequence[Run]
    directories: Sequence[Path]


def traces_of(
    cases: Mapping[str, Run], seeds: Sequence[int], out: Path, probes_of: Callable[[Run], list[Probe]]
) -> dict[str, list[Trace]]:
    """The traces of each case, one for each seed in order.

    A run that `out` already holds is not trained again; one that was interrupted goes on.
    """
    return traces_of_jobs([job for case, run in cases.items() for job in jobs_of(case, run, seeds, out)], probes_of)


def jobs_of(case: str, run: Run, seeds: Sequence[int], out: Path, *, together: int = 1) -> list[Job]:
    """The seeds of a case, so many of them at a time in one ensemble."""
    groups = [seeds[first : first + together] for first in range(0, len(seeds), together)]
    return [
        Job(case, [seeded(run, seed) for seed in group], [out / case / f"seed-{seed}" for seed in group])
        for group in groups
    ]


def traces_of_jobs(jobs: Sequence[Job], probes_of: Callable[[Run], list[Probe]]) -> dict[str, list[Trace]]:
    """The traces of each case, in the order of the jobs; those that take longest are best given first."""
    # A worker that is used again may have another working directory.
    jobs = [job._replace(directories=[directory.resolve() for directory in job.directories]) for job in jobs]
    workers = joblib.Parallel(n_jobs=min(os.cpu_count() or 1, len(jobs)), return_as="generator")
    done: Any = workers(joblib.delayed(_traces_of_job)(job, probes_of) for job in jobs)
    traces: dict[str, list[Trace]] = {job.case: [] for job in jobs}
    runs = sum(len(job.runs) for job in jobs)
    with tqdm(total=runs, unit="run", desc="train and observe", disable=None) as bar:
        for job, found in zip(jobs, done, strict=True):
            traces[job.case].extend(found)
            bar.update(len(found))
    return traces


def in_parallel(function: Callable[..., T], each: Iterable[Any], **arguments: Any) -> list[T]:
    """What the function makes of each, on all cores; it must be one that another process can import."""
    workers: Any = joblib.Parallel(n_jobs=-1)
    return workers(joblib.delayed(function)(one, **arguments) for one in each)


def seeded(run: Run, seed: int) -> Run:
    """The run with another seed, and where its training set is finite, with another one."""
    task = run.task
    if isinstance(task, HighOrderMarkov | SparseModularAddition) and task.sequences is not None:
        task = task.model_copy(update={"data_seed": seed})
    return run.model_copy(update={"seed": seed, "task": task})


def _traces_of_job(job: Job, probes_of: Callable[[Run], list[Probe]]) -> list[Trace]:
    if len(job.runs) == 1:
        found = [train(job.runs[0], job.directories[0], show_progress=False)]
    else:
        found = train_together(job.runs, job.directories, show_progress=False)
    return [
        observed(series, probes_of(run), directory / TRACE_FILE)
        for run, directory, series in zip(job.runs, job.directories, found, strict=True)
    ]


def results_folder(run: Path) -> Path:
    """Where traces and pages about a run go: its own directory, or for somebody's checkpoint one under `runs/`."""
    return run if run.is_dir() else Path("runs") / run.stem


def observed(series: Series, probes: Sequence[Probe], file: Path, *, show_progress: bool = False) -> Trace:
    """Observes a series and keeps its trace."""
    trace = observe(series, probes, show_progress=show_progress)
    write_trace(trace, file)
    return trace


def write_trace(trace: Trace, file: Path) -> None:
    """Keeps a trace as netCDF, for `xarray.load_dataset` and everything else that reads it."""
    with atomic(file) as partial:
        trace.to_netcdf(partial, engine="h5netcdf")


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints aligned columns; wide ones are folded to the terminal, and left whole where the output is no terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    plain: Any = {"markup": False, "emoji": False}  # a name in square brackets is a name
    console = Console(**plain)
    (console if console.is_terminal else Console(width=200, **plain)).print(table)


def show_json(value: Any) -> None:
    """Prints one JSON value; a number that is missing or infinite, which JSON does not have, is null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    packages = ("fd-interp", "torch", "transformer-lens", "numpy", "scipy")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def evidence_of(traces: Sequence[Trace], run: Run) -> list[Evidence]:
    """The traces of a run's seeds, to be judged."""
    baselines = run.task.baselines()
    return [Evidence.of(trace, baselines) for trace in traces]


def judged(claims: Sequence[Claim], run: Run, seeds: Sequence[Trace], where: str) -> list[Verdict]:
    """Each claim over the seeds of a run; nothing where there is no trace."""
    evidence = evidence_of(seeds, run)
    return [judge(claim, evidence, where=where) for claim in claims] if evidence else []


def summary(verdicts: Sequence[Verdict], over: Sequence[int] | str) -> str:
    """How many claims hold and how many controls fail, in a sentence.

    Args:
        over: the seeds, where all have the same; otherwise what they are over, in words.
    """
    seeds = over if isinstance(over, str) else f"each over {len(over)} seeds"
    claims = [verdict for verdict in verdicts if verdict.control is None]
    controls = [verdict for verdict in verdicts if verdict.control is not None]
    return (
        f"{sum(v.holds for v in claims)} of {len(claims)} claims hold and {sum(v.holds for v in controls)} of "
        f"{len(controls)} controls fail as they must, {seeds}."
    )


def as_json(setting: str, seeds: Sequence[int], verdicts: Sequence[Verdict], seconds: float) -> dict[str, Any]:
    """One object for scripts: what was judged, on what, with what."""
    return {
        "setting": setting,
        "seeds": list(seeds),
        "claims": [verdict._asdict() for verdict in verdicts],
        "versions": versions(),
        "seconds": round(seconds, 1),
    }
