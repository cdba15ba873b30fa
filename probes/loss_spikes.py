"""Why does the loss spike?

arXiv 2410.24050: because normalisation is curved. Near a spike the largest eigenvalue of the Hessian (the sharpness)
should shoot up, most of its eigenvector lie in the weight that writes what is normalised, and halving this weight,
which a norm hardly sees, quadruple the sharpness. The training loss is averaged over windows of steps; a window spikes
where it exceeds a multiple of the median of the eight before. Each spike is looked at in three kept snapshots: before,
at, and after. Keep snapshots as often as a spike is long, or there is none at its height.

Sharpness at a spike is no proof: it rises with the loss, also where random changes of the weights raise the loss as
much. What halving does before the spike says whose the curvature is, and the columns of Adam (with keep.moments) say
whether it was too much for the optimizer: the figure has the limit.

    python probes/loss_spikes.py runs/clustering --seeds 8
    python probes/loss_spikes.py runs/clustering/seed-5 --most 20 --floor 1e-3
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fd_interp.models import lens
from fd_interp.observation import Probe, Trace
from fd_interp.probe_script import Question, Row, main
from fd_interp.probes.curvature import adam_with_moments, halving, loss_curvature, movement, stability_limit
from fd_interp.probes.prediction import held_out_loss
from fd_interp.probes.spikes import (
    EPOCH,
    WHEN,
    highest,
    loss_spikes,
    observe_spikes,
    spike_table,
    training_losses,
    window_means,
)
from fd_interp.report.figures import COLOURS, GRID
from fd_interp.training.series import Series

STEPS = {"from": "start", "to": "end", "before": "before", "at": "at"}
LIMIT = "stability_limit"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a spike is, and what is looked at there."""
    add = parser.add_argument
    add("--window-steps", type=int, default=EPOCH, help="steps over which the loss is averaged (default: %(default)s)")
    add("--factor", type=float, default=5.0, help="times the median before that a spike exceeds (default: %(default)s)")
    add("--floor", type=float, default=5e-3, help="loss that a spike exceeds (default: %(default)s)")
    add("--most", type=int, default=5, help="spikes to look at in each run, the highest (default: %(default)s)")
    add("--weight", default="blocks.0.attn.W_V", help="weight that writes what is normalised (default: %(default)s)")
    add("--hook", default="attn_out", help="hook of what is normalised (default: %(default)s)")


def probes(series: Series, arguments: argparse.Namespace) -> list[Probe]:
    """Loss, curvature, what halving the weight does, and what moves at the hook."""
    training_losses(series)  # refuses what has none before anything is computed
    assert series.run is not None
    lens.resolve_hooks(series.build(), [arguments.hook])
    return [
        held_out_loss(series.run.queries),
        loss_curvature(series.run),
        halving(series.run, arguments.weight),
        movement(arguments.hook),
    ]


def look(series: Series, probes: Sequence[Probe], arguments: argparse.Namespace) -> Trace:
    """The trace around the spikes, with the loss of each window and what the table says of the run."""
    losses, window = training_losses(series), arguments.window_steps
    found = highest(
        loss_spikes(losses, series.steps, window, arguments.factor, arguments.floor),
        arguments.most,
    )
    means = window_means(losses, window)
    trace = observe_spikes(series, probes, found, show_progress=not arguments.json)
    adam = series.run and adam_with_moments(series.run)
    return trace.assign(window_loss=("window", means), window=window * np.arange(1, len(means) + 1)).assign_attrs(
        {"weight": arguments.weight} | ({LIMIT: stability_limit(adam)} if adam else {})
    )


def table(trace: Trace, random: Sequence[Trace]) -> list[Row]:
    """A row a spike; a number is missing where no snapshot was kept."""
    short = trace.attrs["weight"].rsplit(".", 1)[-1]
    columns = {
        "height": "height",
        "/ median": "ratio",
        "loss": "loss_at",
        "sharpness before": "sharpness_before",
        "at it": "sharpness_at",
        "ratio": "sharpness_ratio",
        f"on {short}": "sharpness_mass_at",
        "gradient before": "gradient_norm_before",
        "gradient": "gradient_norm_at",
        "shortest": "smallest_norm_at",
        "turned": "angle_change_at",
        f"{short} / 2: sharpness": "halved_sharpness_ratio_before",
        f"{short} / 2: loss": "halved_loss_ratio_before",
        "Adam before": "preconditioned_sharpness_before",
        "Adam": "preconditioned_sharpness_at",
    }
    spikes = spike_table(trace, trace.attrs["weight"])
    kept = {name: column for name, column in columns.items() if column in spikes}
    return [
        {name: _number(row[column], int) for name, column in STEPS.items()}
        | {name: _number(row[column], float) for name, column in kept.items()}
        for row in spikes.to_dict("records")
    ]


def _number(value: float, kind: type[int] | type[float]) -> str | int | float | None:
    """None for what was not measured."""
    return None if np.isnan(value) else kind(value)


def figure(seeds: Sequence[Trace], random: Sequence[Trace]) -> go.Figure:
    """The loss over all steps, and before, at and after each spike what was measured there; a colour for each run."""
    panels = {
        "sharpness": "sharpness",
        "gradient_norm": "gradient norm",
        "preconditioned_sharpness": "sharpness as Adam sees it, and the limit of its stability",
    }
    shown = {name: title for name, title in panels.items() if any(name in seed for seed in seeds)}
    picture = make_subplots(
        1 + len(shown), 1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=["training loss", *shown.values()]
    )
    for number, seed in enumerate(seeds):
        look: dict = {"name": str(seed.attrs["series"]), "legendgroup": str(number)}
        line = {"color": COLOURS[number % len(COLOURS)], "width": 1}
        loss = go.Scatter(x=seed.window.values, y=seed.window_loss.values, line=line, **look)
        picture.add_trace(loss, row=1, col=1)
        for row, name in enumerate(shown, start=2):
            steps, values = _broken(seed, name)
            points = go.Scatter(x=steps, y=values, mode="lines+markers", line=line, showlegend=False, **look)
            picture.add_trace(points, row=row, col=1)
            if name == "preconditioned_sharpness" and LIMIT in seed.attrs:
                dotted = {"color": "#999", "width": 1, "dash": "dot"}
                picture.add_hline(y=seed.attrs[LIMIT], line=dotted, row=row, col=1)  # pyright: ignore[reportArgumentType]
    picture.update_yaxes(type="log", gridcolor=GRID, exponentformat="power")
    picture.update_xaxes(gridcolor=GRID)
    picture.update_xaxes(title="step", row=1 + len(shown), col=1)
    return picture.update_layout(template="plotly_white", title="Around loss spikes", height=260 * (1 + len(shown)))


def _broken(seed: Trace, name: str) -> tuple[list[float | None], list[float | None]]:
    """A line for each spike, with gaps between."""
    spikes = spike_table(seed, seed.attrs["weight"])
    steps: list[float | None] = []
    values: list[float | None] = []
    for row in spikes.to_dict("records") if f"{name}_at" in spikes else ():
        steps += [*(row[when] for when in WHEN), None]
        values += [*(row[f"{name}_{when}"] for when in WHEN), None]
    return steps, values


QUESTION = Question("loss_spikes", probes, table, figure, add_options, look, nothing="no spikes")

if __name__ == "__main__":
    sys.exit(main(QUESTION, __doc__))
