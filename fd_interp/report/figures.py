"""Figures of a trace: measured seeds as lines, the theory dashed over them, stages shaded behind."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fd_interp.measures.condensation import condensation_order, row_cosines
from fd_interp.observation import Trace, by_head
from fd_interp.stages import Stage
from fd_interp.training.series import Series

COLOURS = ("#0b4f9e", "#c4501b", "#2d7d46", "#7b4ba0", "#a8861a", "#4aa3b5", "#b03060", "#666666")
SHADES = ("#eef3fa", "#fdf1e7", "#eef7ef", "#f5effa")
INK, GRID = "#222", "#e4e4e4"
LEGEND_LINE, LEGEND_MARK = 75, 9
"""Letters in a line of a legend, and how many of them the mark of an entry takes."""
MOST_TOKENS = 8
"""Tokens that get a line of their own where every token has one."""


class Curve(NamedTuple):
    """One line of a panel: a variable of the trace, at one place of each axis that it has beside the steps."""

    variable: str
    label: str
    at: Mapping[str, int] = {}


class Panel(NamedTuple):
    """One plot over the steps."""

    title: str
    curves: tuple[Curve, ...]
    log_y: bool = False
    levels: tuple[tuple[str, float], ...] = ()
    """Horizontal reference lines, by name."""
    log_x: bool = True
    """Whether steps are drawn on a logarithmic axis; not where all happens late."""


def by_token(
    title: str, variable: str, tokens: Sequence[tuple[int, str]], levels: tuple[tuple[str, float], ...] = ()
) -> Panel:
    """A panel with a curve for each of the first tokens, given with their names."""
    curves = (Curve(variable, name, {"token": token}) for token, name in tokens[:MOST_TOKENS])
    return Panel(title, tuple(curves), levels=levels)


def panel_figure(
    panel: Panel, seeds: Sequence[Trace], stages: Sequence[Stage] = (), predicted: Sequence[Trace] = ()
) -> go.Figure:
    """One panel over the steps.

    The first seed is drawn strongly, the others faintly; the theory is that of the first seed, where it has a curve.
    """
    figure = go.Figure()
    _shade(figure, stages, panel.log_x)
    for number, curve in enumerate(panel.curves):
        colour = COLOURS[number % len(COLOURS)]
        for order, seed in enumerate(seeds):
            figure.add_trace(_line(curve, seed, colour, strong=order == 0))
        for theory in (theory for theory in predicted[:1] if curve.variable in theory):
            figure.add_trace(_line(curve, theory, colour, dash="dash"))
    for name, level in panel.levels:
        figure.add_hline(
            y=level,
            line={"color": "#999", "width": 1, "dash": "dot"},
            annotation={"text": name, "font": {"size": 10, "color": "#777"}},
            annotation_position="top left",
        )
    steps: Any = {"type": "log", "range": np.log10(_range(seeds))} if panel.log_x else {"range": _range(seeds)}
    figure.update_xaxes(gridcolor=GRID, title="step", **steps)
    figure.update_yaxes(type="log" if panel.log_y else "linear", gridcolor=GRID, zeroline=False)
    title = {"text": panel.title, "font": {"size": 14}, "x": 0.02, "y": 1, "yanchor": "top", "pad": {"t": 12}}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 11}}
    lines = _legend_lines([curve.label for curve in panel.curves])
    figure.update_layout(height=310 + 20 * lines, title=title, legend=legend, **_look(top=65 + 20 * lines))
    return figure


def _legend_lines(labels: Sequence[str]) -> int:
    """How many lines a legend above half of a page takes, about."""
    return -(-sum(len(label) + LEGEND_MARK for label in labels) // LEGEND_LINE)


def head_figure(seeds: Sequence[Trace], variables: Sequence[str]) -> go.Figure:
    """A panel for each variable with a line for each layer and head; the first seed strongly, the others faintly."""
    rows = -(-len(variables) // 2)
    titles = [seeds[0][name].attrs.get("long_name", name) for name in variables]
    figure = make_subplots(rows, 2, subplot_titles=titles, vertical_spacing=0.25 / rows)
    for index, name in enumerate(variables):
        row, col = index // 2 + 1, index % 2 + 1
        for order, seed in enumerate(seeds):
            for number, (label, trace) in enumerate(by_head(seed) if "head" in seed[name].dims else [(name, seed)]):
                line = _line(Curve(name, label), trace, COLOURS[number % len(COLOURS)], strong=order == 0)
                figure.add_trace(line.update(showlegend=index == 0 and order == 0), row=row, col=col)
    figure.update_xaxes(type="log", gridcolor=GRID)
    figure.update_yaxes(gridcolor=GRID, zeroline=False)
    return figure.update_layout(height=320 * rows, **_look())


def overview_figure(
    curves: Sequence[Curve],
    title: str,
    groups: Mapping[str, Sequence[Trace]],
    levels: Sequence[tuple[str, float]] = (),
) -> go.Figure:
    """The same curves in several groups of seeds, each in a small panel of its own, on common axes."""
    columns = 3
    rows = -(-len(groups) // columns)
    figure = make_subplots(
        rows,
        columns,
        shared_yaxes=True,
        subplot_titles=list(groups),
        vertical_spacing=0.3 / rows,
        horizontal_spacing=0.04,
    )
    for index, seeds in enumerate(groups.values()):
        cell: Any = {"row": index // columns + 1, "col": index % columns + 1}
        for number, curve in enumerate(curves):
            for order, seed in enumerate(seeds):
                line = _line(curve, seed, COLOURS[number % len(COLOURS)], strong=order == 0)
                figure.add_trace(line.update(showlegend=index == 0 and order == 0), **cell)
        for name, level in levels:
            label: Any = {"annotation": {"text": name, "font": {"size": 9, "color": "#777"}}} if name else {}
            figure.add_hline(y=level, line={"color": "#999", "width": 1, "dash": "dot"}, **label, **cell)
    figure.update_xaxes(type="log", gridcolor=GRID)
    figure.update_yaxes(gridcolor=GRID, zeroline=False)
    figure.update_layout(
        height=220 * rows + 100,
        **_look(top=80),
        title={"text": title, "font": {"size": 14}},
        showlegend=len(curves) > 1,
        legend={"orientation": "h", "y": -0.12, "yanchor": "top", "x": 0},
    )
    return figure


def points_figure(
    title: str,
    x_title: str,
    y_title: str,
    x: Sequence[float | int],
    series: Mapping[str, Sequence[float | int | None]],
) -> go.Figure:
    """Points joined by lines, over a logarithmic axis: how something depends on a setting, a line for each seed."""
    figure = go.Figure()
    for number, (name, y) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        figure.add_trace(go.Scatter(x=list(x), y=list(y), name=name, mode="lines+markers", line={"color": colour}))
    figure.update_xaxes(type="log", gridcolor=GRID, title=x_title)
    figure.update_yaxes(gridcolor=GRID, title=y_title, zeroline=False)
    return figure.update_layout(height=330, title={"text": title, "font": {"size": 14}, "x": 0.02}, **_look(top=60))


def scatter_figure(
    title: str,
    x_title: str,
    y_title: str,
    groups: Mapping[str, Sequence[tuple[float | int, float | int, str]]],
    *,
    diagonal: bool = False,
) -> go.Figure:
    """Points of several kinds, each given with what it says when pointed at; with a line where both axes are equal."""
    figure = go.Figure()
    for number, (name, points) in enumerate(groups.items()):
        if not points:  # its colour is kept for it
            continue
        x, y, labels = zip(*points, strict=True)
        figure.add_trace(
            go.Scatter(
                x=x,
                y=y,
                text=labels,
                name=name,
                mode="markers",
                marker={"color": COLOURS[number % len(COLOURS)], "size": 9, "opacity": 0.75},
                hovertemplate="%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
            )
        )
    if diagonal:
        ends = [point[axis] for points in groups.values() for point in points for axis in (0, 1)] or [0, 1]
        figure.add_shape(
            type="line", x0=min(ends), y0=min(ends), x1=max(ends), y1=max(ends), line={"color": "#999", "dash": "dot"}
        )
    figure.update_xaxes(gridcolor=GRID, title=x_title, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, title=y_title, zeroline=False)
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 11}}
    heading = {"text": title, "font": {"size": 14}, "x": 0.02, "y": 1, "yanchor": "top", "pad": {"t": 12}}
    lines = _legend_lines([name for name, points in groups.items() if points])
    return figure.update_layout(height=380 + 20 * lines, title=heading, legend=legend, **_look(top=65 + 20 * lines))


def row_cosine_figure(series: Series, steps: Sequence[int]) -> go.Figure:
    """Cosines between token embeddings at some steps, tokens ordered by the last of them."""
    cosines = [row_cosines(series.at(step).weights()["embed.W_E"]) for step in steps]
    order = condensation_order(cosines[-1])
    names = [series.inputs.token_strings[token] for token in order]
    figure = make_subplots(1, len(steps), subplot_titles=[f"step {step}" for step in steps], horizontal_spacing=0.03)
    for column, cosine in enumerate(cosines, start=1):
        heat = go.Heatmap(z=cosine[order][:, order].numpy(), x=names, y=names, coloraxis="coloraxis")
        figure.add_trace(heat, row=1, col=column)
        figure.update_yaxes(autorange="reversed", showticklabels=column == 1, type="category", row=1, col=column)
        figure.update_xaxes(type="category", row=1, col=column)
    colours = {"colorscale": "RdBu", "cmin": -1, "cmax": 1, "cmid": 0, "colorbar": {"title": "cosine", "thickness": 12}}
    figure.update_layout(height=320, coloraxis=colours, **_look())
    return figure


def one_head(trace: Trace, layer: int = 0, head: int = 0) -> Trace:
    """A trace without the axes of layers and heads."""
    return trace.isel({dim: index for dim, index in (("layer", layer), ("head", head)) if dim in trace.dims})


def to_html(figure: go.Figure) -> str:
    """A fragment for a page that holds plotly.js once."""
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})


def _line(curve: Curve, trace: Trace, colour: str, *, strong: bool = False, dash: str = "solid") -> go.Scatter:
    values = trace[curve.variable].isel(curve.at)
    name = curve.label if dash == "solid" else f"{curve.label}, theory"
    return go.Scatter(
        x=np.maximum(values.step.values, 1),
        y=values.values,
        name=curve.label,
        legendgroup=curve.label,
        showlegend=strong,
        mode="lines",
        line={"color": colour, "width": 2 if strong or dash == "dash" else 1, "dash": dash},
        opacity=1.0 if strong else 0.6 if dash == "dash" else 0.35,
        hovertemplate="step %{x}: %{y:.4g}<extra>" + name + "</extra>",
    )


def _shade(figure: go.Figure, stages: Sequence[Stage], log_x: bool) -> None:
    for number, stage in enumerate(stages):
        if stage.start is None or stage.end is None:
            continue
        figure.add_vrect(
            x0=max(stage.start, 1),
            x1=stage.end,
            fillcolor=SHADES[number % len(SHADES)],
            layer="below",
            line_width=0,
        )
        start = max(stage.start, 1)
        figure.add_annotation(
            x=np.log10(start) if log_x else start,  # annotations of a logarithmic axis are placed by exponent
            y=1,
            yref="paper",
            text=stage.name.split()[0],
            showarrow=False,
            xanchor="left",
            yanchor="top",
            font={"size": 10, "color": "#888"},
        )


def _range(seeds: Sequence[Trace]) -> tuple[int, int]:
    steps = np.concatenate([seed.step.values for seed in seeds])
    return 1, max(int(steps.max()), 2)


def _look(*, top: int = 50) -> dict[str, Any]:
    return {
        "template": "plotly_white",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "margin": {"l": 50, "r": 20, "t": top, "b": 40},
    }
