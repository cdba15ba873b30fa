"""Trains and observes many runs on all cores, each in a directory of its own, going on where it was interrupted."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import joblib
from tqdm import tqdm

from fd_interp.claims import Verdict
from fd_interp.observe import Probe, Trace, observe
from fd_interp.training.loop import train
from fd_interp.training.run import Run
from fd_interp.training.series import Series, atomic


class Job(NamedTuple):
    """One run to train and observe."""

    case: str
    run: Run
    directory: Path


def traces_of(
    cases: Mapping[str, Run], seeds: Sequence[int], out: Path, probes_of: Callable[[Run], list[Probe]]
) -> dict[str, list[Trace]]:
    """The traces of each case, one for each seed in order.

    A run that `out` already holds is not trained again; one that was interrupted goes on.
    """
    jobs = [
        Job(case, run.model_copy(update={"seed": seed}), out / case / f"seed-{seed}")
        for case, run in cases.items()
        for seed in seeds
    ]
    workers = joblib.Parallel(n_jobs=min(os.cpu_count() or 1, len(jobs)), return_as="generator")
    done = workers(joblib.delayed(_trace_of)(job, probes_of) for job in jobs)
    traces: dict[str, list[Trace]] = {case: [] for case in cases}
    for job, trace in zip(
        jobs, tqdm(done, total=len(jobs), unit="run", desc="train and observe", disable=None), strict=True
    ):
        traces[job.case].append(trace)
    return traces


def _trace_of(job: Job, probes_of: Callable[[Run], list[Probe]]) -> Trace:
    import torch

    torch.set_num_threads(1)  # each worker has one core
    series = train(job.run, job.directory, show_progress=False)
    return observed(series, probes_of(job.run), trace_file(job.directory))


def trace_file(run: Path) -> Path:
    """Where the trace of a run directory, or of a checkpoint file, is kept."""
    return run / "trace.nc" if run.is_dir() else run.with_suffix(".trace.nc")


def observed(series: Series, probes: Sequence[Probe], file: Path, *, show_progress: bool = False) -> Trace:
    """Observes a series and keeps its trace as netCDF, for xarray.load_dataset and everything that reads it."""
    trace = observe(series, probes, show_progress=show_progress)
    with atomic(file) as partial:
        trace.to_netcdf(partial, engine="h5netcdf")
    return trace


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    packages = ("fd-interp", "torch", "transformer-lens", "numpy", "scipy")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def as_json(setting: str, seeds: Sequence[int], verdicts: Sequence[Verdict], seconds: float) -> dict[str, Any]:
    """One object for scripts: what was judged, on what, with what."""
    return {
        "setting": setting,
        "seeds": list(seeds),
        "claims": [verdict._asdict() for verdict in verdicts],
        "versions": versions(),
        "seconds": round(seconds, 1),
    }
