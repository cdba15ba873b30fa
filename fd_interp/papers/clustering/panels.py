"""What a report of this paper shows of a trace."""

import numpy as np
import plotly.graph_objects as go
import torch

from fd_interp.models import lens
from fd_interp.models.learned_query import LearnedQueryAttention
from fd_interp.observation import Trace
from fd_interp.report.figures import Curve, Panel
from fd_interp.report.views import spread_steps
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.series import Series

PATTERN = "blocks.0.attn.hook_pattern"
MOST_ROWS = 60
"""Steps in the figure of attention."""


def shown(trace: Trace) -> Trace:
    """The first head, as it is and in direction."""
    return trace.isel({dim: 0 for dim in ("layer", "head") if dim in trace.dims})


def wide_figures(series: Series) -> list[go.Figure]:
    """Where the query of the paper's model looks: the mean attention on each position, over the steps."""
    model, tokens = series.build(), series.inputs.held_out.tokens
    if not isinstance(model, LearnedQueryAttention):
        return []
    steps, rows = spread_steps(series, most=MOST_ROWS), []
    for step in steps:
        lens.load_weights(model, series.at(step).weights())
        rows.append(lens.run_and_cache(model, tokens, [PATTERN]).activations[PATTERN].mean((0, 1, 2)))
    return [_attention_figure(torch.stack(rows, 1).numpy(), steps)]


def _attention_figure(attention: np.ndarray, steps: list[int]) -> go.Figure:
    positions = [str(position + 1) for position in range(len(attention))]
    heat = go.Heatmap(z=attention, x=steps, y=positions, colorscale="Blues", zmin=0, colorbar={"thickness": 12})
    figure = go.Figure(heat).update_yaxes(autorange="reversed", type="category", title="position")
    title = {"text": "Mean attention on each position (not diagnostic)", "font": {"size": 14}, "x": 0.02}
    return figure.update_layout(template="plotly_white", height=340, title=title).update_xaxes(title="step")


def panels(series: Series) -> list[Panel]:
    """Loss and accuracy, how the variance divides, which symbols speak, and attention beside them."""
    run = series.run
    assert run is not None
    task = run.task
    assert isinstance(task, SparseModularAddition)
    panels = [
        Panel("Loss (nats)", (Curve("loss", "held-out loss"),), log_y=True),
        Panel(
            "Accuracy, and that of the nearest class",
            (Curve("accuracy", "accuracy"), Curve("representation_accuracy", "nearest class centroid, no MLP")),
            levels=(("chance", 1 / task.p),),
        ),
        Panel(
            "Variance of the direction of xi",
            (
                Curve("f_type_gauge", "between classes, best gauge", {"form": 1}),
                Curve("f_type", "between classes, plain", {"form": 1}),
                Curve("f_permutation", "order of symbols", {"form": 1}),
                Curve("f_suffix", "spurious symbols", {"form": 1}),
            ),
        ),
        Panel(
            "Informative positions",
            (
                Curve("influence_share", "share of the influence"),
                Curve("informative_mass", "attention (not diagnostic)"),
            ),
            levels=(("even", task.k / task.length),),
        ),
        _by_position("influence", "Influence of each symbol", task),
    ]
    if task.p == 2:
        panels.append(_by_position("lattice_weight", "Weight of each symbol", task))
    return [panel._replace(log_x=False) for panel in panels]


def _by_position(variable: str, title: str, task: SparseModularAddition) -> Panel:
    """Those that matter, and as many that do not."""
    last = min(task.length, task.k + 3)
    title = title if last == task.length else f"{title} (the first {last})"
    curves = (
        Curve(variable, f"{position + 1}{'' if position < task.k else ', spurious'}", {"position": position})
        for position in range(last)
    )
    return Panel(title, tuple(curves))
