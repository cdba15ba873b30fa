"""The visual sandbox of arXiv 2410.24050: one page on which every tensor of a learned-query model moves with training.

The page works offline. It holds plotly.js once, each panel's static parts once, and the arrays of all frames.
"""

import base64
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from tqdm import tqdm

from fd_interp.config import InputError
from fd_interp.models.config import LearnedQuery
from fd_interp.papers.clustering.frames import frame, view_of
from fd_interp.report.attention import plotly_script
from fd_interp.report.figures import COLOURS
from fd_interp.report.sandbox_panels import (
    LETTERS,
    Panel,
    Sandbox,
    arrays_of,
    class_colours,
    filled,
    gauge_text,
    groups_of,
)
from fd_interp.report.views import spread_steps
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.series import Series

MOST_STEPS = 200
"""Frames of a page, where a series has more snapshots."""


def recorded(series: Series, *, most: int = MOST_STEPS, show_progress: bool = False) -> Sandbox:
    """A frame of each snapshot, or of so many that are evenly spread among them, still without the run's curves.

    Raises:
        InputError: the series is not of a learned-query model on sparse modular addition, `most` is below one, or as
            `view_of`.
    """
    run = series.run
    if run is None or not isinstance(run.model, LearnedQuery) or not isinstance(run.task, SparseModularAddition):
        found = "a checkpoint without a run" if run is None else f"a {run.model.kind} model on the task {run.task.kind}"
        raise InputError(f"the sandbox shows learned_query models on the task modular, and {series.name} is {found}")
    if most < 1:
        raise InputError(f"the sandbox needs at least one frame, not {most}")
    steps = spread_steps(series, most)
    snapshots = [series.at(step).weights() for step in steps]
    view = view_of(snapshots, run.model, run.task)
    bar = tqdm(snapshots, disable=None if show_progress else True, unit="frame", desc="sandbox")
    frames = tuple(frame(weights, run.model, run.task, view) for weights in bar)
    return Sandbox(series.name, run.model, run.task, view, tuple(steps), len(series), frames)


def sandbox_page(sandbox: Sandbox) -> str:
    """A complete page: a step slider over sixteen panels. It loads nothing from anywhere, and opens at the last step.

    `#step=640` behind its address opens it at the step nearest to 640.
    """
    groups = groups_of(sandbox)
    panels = [panel for group in groups for panel in group.panels]
    data = {
        "steps": list(sandbox.steps),
        "arrays": _packed(sandbox, panels),
        "panels": [panel._asdict() for panel in panels],
    }
    view = sandbox.view
    return _template().render(
        title=f"Sandbox of {Path(sandbox.name).name}",
        task=sandbox.task,
        steps=sandbox.steps,
        groups=groups,
        notes=notes_of(sandbox),
        classes=list(zip(class_colours(len(view.class_names)), view.class_names, view.class_labels, strict=True)),
        colours=COLOURS,
        letters=LETTERS,
        script=Markup(plotly_script()),
        data=Markup(_json(data)),
    )


def notes_of(sandbox: Sandbox) -> list[str]:
    """What a reader must know to read the panels right: the gauge, the planes, and what is left out."""
    config, view = sandbox.config, sandbox.view
    notes = [gauge_text(sandbox)]
    if config.d_model > 2:
        notes.append(
            f"The model has {config.d_model} coordinates, and what is drawn are projections on two planes that are the "
            "same in all frames. Embeddings, up to the normalised ones: the first two principal directions of token + "
            "position at the last step. Values and all that follows: to the right the first principal direction of "
            "the normalised ξ, upwards that of the output, made orthogonal to it. Level sets are those of the plane "
            "through the mean of the points."
        )
    for where, what in (("ln1", "token + position"), ("ln2", "ξ")):
        if where not in config.normalized:
            notes.append(f"This model does not normalise {what}: what is drawn as normalised is the same as before.")
    if len(sandbox.steps) < sandbox.kept:
        notes.append(f"{len(sandbox.steps)} of {sandbox.kept} snapshots are shown, evenly spread among them.")
    if len(view.neurons) < config.d_mlp:
        notes.append(
            f"{len(view.neurons)} of {config.d_mlp} neurons are shown, those of the largest weights at the end."
        )
    return notes


def picture(
    sandbox: Sandbox, number: int, panels: Sequence[Panel], *, columns: int = 4, side: int = 300
) -> dict[str, Any]:
    """One frame as one plotly figure, as plain data: all panels in a grid, each with its title.

    Args:
        panels: those of `groups_of`, which are the same for all frames.
        side: of each panel, in pixels.
    """
    arrays = arrays_of(sandbox.frames[number], sandbox.steps[number], sandbox.task.k)
    rows = -(-len(panels) // columns)
    width, height, head = columns * side, rows * (side + 24) + 60, 60
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    annotations: list[dict[str, Any]] = [_headline(sandbox, number)]
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        top = 1 - (head + row * (side + 24) + 24) / height
        x = [column / columns + 40 / width, (column + 1) / columns - 14 / width]
        y = [top - (side - 34) / height, top]
        axes = {name: f"{name[0]}{name[5:]}" for name in panel.layout if name.startswith(("xaxis", "yaxis"))}
        own = {short: f"{short[0]}{10 * place + int(short[1:] or 1)}" for short in axes.values()}
        for name, short in axes.items():
            axis = dict(panel.layout[name])
            for reference in ("overlaying", "scaleanchor"):
                if reference in axis:
                    axis[reference] = own[axis[reference]]
            is_x = short[0] == "x"
            axis |= {"domain": x if is_x else y, "anchor": own["y" if is_x else "x"]}
            layout[f"{short[0]}axis{own[short][1:]}"] = axis
        for trace in filled(panel, arrays):
            data.append(trace | {"xaxis": own["x"], "yaxis": own[trace.get("yaxis", "y")]})
        for shape in panel.layout.get("shapes", []):
            layout.setdefault("shapes", []).append(shape | {"xref": own["x"], "yref": own["y"]})
        annotations.append(_text(panel.title, x[0], top + 4 / height, 13, yanchor="bottom"))
    common = {key: panels[0].layout[key] for key in ("font", "showlegend", "plot_bgcolor")}
    margin = {"margin": {"l": 0, "r": 0, "t": 0, "b": 0}, "barmode": "stack", "bargap": 0.15, "paper_bgcolor": "#fff"}
    size = {"width": width, "height": height}
    return {"data": data, "layout": common | margin | size | layout | {"annotations": annotations}}


def _headline(sandbox: Sandbox, number: int) -> dict[str, Any]:
    names = sandbox.view.class_names
    colours = class_colours(len(names))
    marks = "  ".join(
        f'<span style="color:{colour}">●</span> {name}' for colour, name in zip(colours, names, strict=True)
    )
    classes = f"      classes: {marks}" if len(names) <= 8 else ""
    return _text(f"<b>step {sandbox.steps[number]:,}</b>{classes}", 0.01, 1.0, 16, yanchor="top", yshift=-14)


def _text(text: str, x: float, y: float, size: int, **more: Any) -> dict[str, Any]:
    where = {"x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "showarrow": False}
    return {"text": text, "font": {"size": size}, "align": "left"} | where | more


def _packed(sandbox: Sandbox, panels: Sequence[Panel]) -> dict[str, Any]:
    """The arrays that panels use, those of all frames together: a name, the shape of one frame, and base64."""
    used = {name for panel in panels for swapped in panel.swapped for name in swapped.values()}
    frames = [arrays_of(frame, step, sandbox.task.k) for frame, step in zip(sandbox.frames, sandbox.steps, strict=True)]
    return {
        name: {
            "bytes": frames[0][name].dtype == np.uint8,
            "shape": list(frames[0][name].shape),
            "data": base64.b64encode(np.stack([arrays[name] for arrays in frames]).tobytes()).decode("ascii"),
        }
        for name in sorted(used)
    }


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@lru_cache
def _template() -> Any:
    return Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True).get_template(
        "sandbox.html.jinja"
    )
