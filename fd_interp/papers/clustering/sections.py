"""The sections of the report on this paper, with what to look for in each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from fd_interp.observation import Trace
from fd_interp.papers import clustering as paper
from fd_interp.papers.clustering.circuits import NAMES, STUCK, Circuit
from fd_interp.report.figures import scatter_figure
from fd_interp.report.page import Section
from fd_interp.report.sections import run_section
from fd_interp.training.series import open_series

TEXTS = {
    "clustering": (
        "One run in eight coordinates",
        "The head is a clustering head when the variance of xi's direction lies between the task's classes (blue, top "
        "right) and only informative symbols move it. That happens first; the classifier follows. A position's two "
        "symbols may change names (a gauge), so the share is that of the best gauge.",
    ),
    "clustering-2d": (
        "One run in two coordinates",
        "The model of the paper, which the sandbox shows in full. The plateau lasts for two hundred epochs; then the "
        "weights of the symbols fall on integers within a few epochs, plus or minus one at informative positions and "
        "zero elsewhere, and loss and accuracy follow.",
    ),
}
D_2_TEXT = (
    "The paper's setting, one point a seed. Left: two ways to solve the task. Clustering heads have nearly all "
    "variance between classes; the others count some spurious symbols twice, which leaves the parity alone, and so "
    "tell apart more than the classes. Right: raw attention does not tell which is which, nor even who has learned "
    "anything: a position that is attended to says nothing if its two symbols lie on one ray through the norm."
)
D_8_TEXT = (
    "The same in eight coordinates, where most seeds solve the task, and a little variance stays off the main axis: "
    "the seed of the named run is the one that has least there. On these seeds attention does tell stuck heads from "
    "others, by a hair; nothing makes it."
)
STAGES_TEXT = (
    "For every seed that solves the task, when its head has the classes that it ends with, and when accuracy passes "
    ".98. The order depends on what counts as having them: the nearest class centroid alone is right in .98 of the "
    "cases only about when the model is. Below the diagonal the classifier came first: in eight coordinates a head "
    "keeps some variance off its main axis, and can reach the .9 that count as its form late."
)


def of_run(directory: Path, case: str, traces: Sequence[Trace], sandbox: str) -> Section:
    """Curves, stages and attention of one of the named runs, and a link to the page of its sandbox."""
    title, text = TEXTS[case]
    section = run_section(paper, title, text, open_series(directory), traces)
    return replace(section, links=[("The sandbox of this run: every tensor, over training", sandbox)])


def of_seeds(title: str, text: str, circuits: Mapping[int, Circuit], mass: Mapping[int, float], chance: str) -> Section:
    """Every seed of a setting: what it has become, and what attention says of it."""
    seeds = circuits.items()
    by_name = {
        name: [(one.f_type, one.accuracy, _label(seed, one)) for seed, one in seeds if one.name == name]
        for name in NAMES
    }
    attended = {
        name: [(mass[seed], one.f_type, _label(seed, one)) for seed, one in seeds if one.name == name] for name in NAMES
    }
    figures = [
        scatter_figure("What the seeds become", "variance between classes, best gauge", "accuracy", by_name),
        scatter_figure(
            "Attention beside it", "attention on informative positions", "variance between classes", attended
        ),
    ]
    return Section(title, f"{text} {counted(list(circuits.values()))} {chance}", figures=figures)


def counted(circuits: Sequence[Circuit]) -> str:
    """How many seeds have become what, in a sentence."""
    names = pd.Series([one.name for one in circuits]).value_counts()
    return "Of " + str(len(circuits)) + " seeds: " + ", ".join(f"{n} {name}" for name, n in names.items()) + "."


def of_stages(paper_setting: Mapping[int, Circuit], wide: Mapping[int, Circuit]) -> Section:
    """When representation and classifier came, in the seeds that solve the task."""
    figures = [_stages_figure("The paper's setting", paper_setting), _stages_figure("Eight coordinates", wide)]
    counts = f"{_first(paper_setting)} in the paper's setting and {_first(wide)} in eight coordinates"
    text = f"{STAGES_TEXT} The representation came first in {counts}."
    return Section("Representation, then classifier", text, figures=figures)


def _first(circuits: Mapping[int, Circuit]) -> str:
    """`9 of 11 solved seeds`: those in which the representation came first."""
    steps = [(one.representation, one.classifier) for one in circuits.values() if one.solved]
    first = sum(head is not None and label is not None and head < label for head, label in steps)
    return f"{first} of {len(steps)} solved seeds"


def _stages_figure(title: str, circuits: Mapping[int, Circuit]) -> go.Figure:
    solved = [(seed, one) for seed, one in circuits.items() if one.solved]
    points = {
        name: [
            (one.representation, one.classifier, _label(seed, one))
            for seed, one in solved
            if one.name == name and one.representation is not None and one.classifier is not None
        ]
        for name in NAMES
    }
    return scatter_figure(title, "step of the representation", "step of the classifier", points, diagonal=True)


def _label(seed: int, one: Circuit) -> str:
    weights = f", weights {' '.join(map(str, one.weights))}" if one.weights and one.name != STUCK else ""
    return f"seed {seed}: {one.name}{weights}"


def table(circuits: Mapping[int, Circuit], case: str) -> pd.DataFrame:
    """A row for each seed."""
    rows = [one._asdict() | {"weights": " ".join(map(str, one.weights))} for one in circuits.values()]
    frame = pd.DataFrame(rows).rename(columns={"name": "circuit"})
    frame.insert(0, "case", case)
    frame.insert(1, "seed", list(circuits))
    return frame
