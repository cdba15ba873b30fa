"""What each paper found, as data: settings, stages, claims and controls. One package a paper."""

from types import ModuleType

from fd_interp.config import InputError, nearest
from fd_interp.observation import Probe
from fd_interp.papers import clustering, focus_dilution, incremental
from fd_interp.tasks.lags import Lags
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.run import Run

PAPERS: dict[str, ModuleType] = {
    "focus-dilution": focus_dilution,
    "incremental": incremental,
    "clustering": clustering,
}
"""Name -> package with SETTINGS, probes, stages, claims_about, predicted, and what a report shows."""


def settings() -> dict[str, Run]:
    """Every named run, of all papers."""
    return {name: run for paper in PAPERS.values() for name, run in paper.SETTINGS.items()}


def setting(name: str) -> Run:
    """One named run.

    Raises:
        InputError: there is none; the message offers the nearest names.
    """
    known = settings()
    if name not in known:
        raise InputError(f"there is no setting '{name}', {nearest(name, known)}")
    return known[name]


def paper_of(run: Run) -> ModuleType:
    """The paper whose question a run answers: that of its task."""
    if isinstance(run.task, SparseModularAddition):
        return clustering
    return incremental if isinstance(run.task, Lags) else focus_dilution


def probes_of(run: Run | None) -> list[Probe]:
    """What is measured on a run; without one, on somebody else's checkpoint, what every language model has."""
    return focus_dilution.probes_of_text() if run is None else paper_of(run).probes(run)
