"""The panels of the visual sandbox: what is drawn, once; and the arrays that change from frame to frame, by name.

The page and the exported pictures are made of the same panels: the page swaps arrays in JavaScript, `filled` in Python.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32
from plotly.colors import sample_colorscale

from fd_interp.models.config import LearnedQuery
from fd_interp.observation import Trace
from fd_interp.papers.clustering.frames import Frame, View, Window, grid_points, shades, window_of
from fd_interp.report.figures import COLOURS, GRID, INK, one_head
from fd_interp.tasks.modular import SparseModularAddition

CURVES = frozenset({"loss", "accuracy", "f_type_gauge", "influence_share"})
"""Variables of a trace that are drawn."""
FAINT, RED = "#b9b9b5", "#c2281d"
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star", "pentagon")
LETTERS = "●◆■▲✚✖★⬟"
"""Of the answers 0, 1, ..., and the same as letters."""
SHARES = [0, 1.03]
"""Axis of what is at most one."""
RUN_AWAY = 4
"""Length in units of the median, beyond which an embedding leaves the picture."""
MOST_LOSSES = 1000
"""Stretches that the losses of single steps are drawn in, each from its least to its largest."""


class Sandbox(NamedTuple):
    """A run as the sandbox shows it."""

    name: str
    config: LearnedQuery
    task: SparseModularAddition
    view: View
    steps: tuple[int, ...]
    kept: int
    """Snapshots that the series has; no less than are shown."""
    frames: tuple[Frame, ...]
    trace: Trace | None = None
    """Of the run: those of `CURVES` that are there are drawn."""
    losses: tuple[float, ...] = ()
    """Of each step of training."""


class Panel(NamedTuple):
    """One plot. Trace by trace, `swapped` says which array of a frame goes where: `{"x": "xi.x"}`."""

    key: str
    title: str
    hint: str
    traces: list[dict[str, Any]]
    swapped: list[dict[str, str]]
    layout: dict[str, Any]


class Group(NamedTuple):
    """Panels that belong together, and what to look for in them."""

    title: str
    text: str
    panels: list[Panel]


def arrays_of(frame: Frame, step: int, k: int) -> dict[str, np.ndarray]:
    """Everything that is drawn of one frame, by name; lines are separated by NaN.

    Args:
        k: informative positions.
    """
    arrays: dict[str, np.ndarray] = {"marker": np.full(2, step, np.float32)}
    for name in ("tokens", "positions", "sums", "normalized", "values", "xi", "normalized_xi", "mlp_out", "output"):
        arrays |= _by_axis(name, getattr(frame, name))
    for name in ("tokens", "query", "receptors", "assemblers"):
        arrays |= _by_axis(f"{name}.rays", _rays(getattr(frame, name)))
    for name in ("sums", "normalized", "values"):
        of_position = getattr(frame, name).reshape(len(frame.positions), -1, 2)
        arrays |= _by_axis(f"{name}.informative", _lines(of_position[:k]))
        arrays |= _by_axis(f"{name}.spurious", _lines(of_position[k:]))
    for token, of_class in enumerate(frame.probabilities.T):
        arrays[f"probabilities.{token}"] = of_class
    return arrays | {name: getattr(frame, name) for name in ("attention", "xi_levels", "output_levels")}


def filled(panel: Panel, arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The traces of a panel with the arrays of one frame, without change to the panel."""
    return [
        trace | {where: arrays[name] for where, name in swapped.items()}
        for trace, swapped in zip(panel.traces, panel.swapped, strict=True)
    ]


def groups_of(sandbox: Sandbox) -> list[Group]:
    """Sixteen panels in four rows. Axes stay the same in all frames, so that things move and not the axes."""
    return [
        Group(
            "What is stored",
            "Every symbol and every position has a vector of its own, and the two are added and scaled to one length, "
            "so only the direction of the sum counts. Circles are the positions that the answer depends on, squares "
            "those that it does not. Look at the lines that join the symbols of one position: where a line has shrunk "
            "to a point, the model cannot tell the symbols apart there, and need not look away.",
            [_tokens(sandbox), _positions(sandbox), _sums(sandbox), _normalized(sandbox)],
        ),
        Group(
            "What the head gathers",
            "The query weighs the positions, and the weighted sum of their values is ξ: one point for each sequence. "
            "Look for points of one colour that come together; they do so before the answers are right. How much "
            "attention the informative positions get is no sign of it: a position that is attended to may say nothing.",
            [_attention(sandbox), _values(sandbox), _xi(sandbox), _xi_levels(sandbox)],
        ),
        Group(
            "How the MLP reads it",
            "The MLP sees the direction of ξ alone. A neuron is on where its receptor points, and then writes its "
            "assembler. Look at the receptors once clusters are there: some grow, and tell neighbours apart.",
            [_normalized_xi(sandbox), _receptors(sandbox), _assemblers(sandbox), _mlp_out(sandbox)],
        ),
        Group(
            "What comes out",
            "The token embedding that has the largest product with the output is the answer. Look at the order: "
            "clusters form first (the share of variance between classes rises), then the loss falls. Later spikes of "
            "the loss move ξ for a moment.",
            [_output_levels(sandbox), _probabilities(sandbox), _loss(sandbox), _measures(sandbox)],
        ),
    ]


def class_colours(count: int) -> list[str]:
    """One for each class, in the order of classes."""
    return list(map(str, sample_colorscale("Viridis", np.linspace(0, 0.95, count).tolist())))


def gauge_text(sandbox: Sandbox) -> str:
    """How the model counts symbols, which says what the classes are."""
    p, k, shifts = sandbox.task.p, sandbox.task.k, sandbox.view.shifts
    moved = [(position + 1, int(shift)) for position, shift in enumerate(shifts) if shift]
    if not moved:
        return f"Sequences of one class have the same first {k} symbols up to their order."
    names = ", ".join(str(position) for position, _ in moved)
    if p == 2:
        change = f"after 0 and 1 have changed places at position {names}"
    else:
        change = "after adding " + ", ".join(f"{shift} at position {position}" for position, shift in moved)
    return (
        f"Sequences of one class have the same first {k} symbols up to their order {change}: of the ways to count that "
        "the answers allow, the one that fits this model best at the last step."
    )


def _tokens(sandbox: Sandbox) -> Panel:
    d_vocab, p = sandbox.task.d_vocab, sandbox.task.p
    colours, names = list(COLOURS[:d_vocab]), [str(token) for token in range(d_vocab)]
    rays = _arrows([f"symbol {name}" for name in names], [colour for colour in colours for _ in range(3)], size=11)
    rays["line"] = {"color": FAINT, "width": 1.5}
    labels = {
        "type": "scatter",
        "mode": "markers+text",
        "marker": {"size": 14, "opacity": 0},
        "text": names,
        "textposition": "top center",
        "hoverinfo": "skip",
    }
    labels["textfont"] = {"size": 15, "color": colours}
    shown = 1.15 * _in_all_frames(sandbox, "tokens")[:, :p]  # the labels need room, too
    unused = ", ".join(str(token) for token in range(p, d_vocab))
    hint = "W_E. The same vectors are what outputs are compared with."
    if unused:
        hint += f" {unused} never occurs: it is only pushed away as an answer, often out of the picture."
    return _plane(
        "tokens", "Token embeddings", hint, [rays, labels], [_xy("tokens.rays"), _xy("tokens")], window_of(shown)
    )


def _positions(sandbox: Sandbox) -> Panel:
    task = sandbox.task
    inside = task.informative.tolist()
    points = {
        "type": "scatter",
        "mode": "markers+text",
        "text": [str(position + 1) for position in range(task.length)],
        "textposition": "middle center",
        "textfont": {"size": 10, "color": ["#fff" if known else INK for known in inside]},
        "marker": {
            "symbol": ["circle" if known else "square" for known in inside],
            "size": 17,
            "color": [INK if known else "#ececea" for known in inside],
            "line": {"color": [INK if known else "#999" for known in inside], "width": 1},
        },
        "customdata": [_of_position(position, known) for position, known in enumerate(inside)],
        "hovertemplate": _HOVER,
    }
    window = window_of(_brought_near(_in_all_frames(sandbox, "positions")))
    hint = f"W_pos. Dark circles: the {task.k} positions that are summed; light squares: the others."
    x, y = sandbox.frames[-1].positions.T
    away = np.flatnonzero((x < window.left) | (x > window.right) | (y < window.bottom) | (y > window.top))
    if len(away):
        hint += f" Out of the picture at the last step: {', '.join(str(position + 1) for position in away)}."
    return _plane("positions", "Position embeddings", hint, [points], [_xy("positions")], window)


def _sums(sandbox: Sandbox) -> Panel:
    hint = "Each symbol (colour) at each position. A line joins the symbols of one position."
    return _places(sandbox, "sums", "Token + position", hint)


def _normalized(sandbox: Sandbox) -> Panel:
    panel = _places(
        sandbox, "normalized", "Normalised, and the query", "Attention is large where the red arrow points."
    )
    arrow = _arrows(["query"], RED, size=13) | {"line": {"color": RED, "width": 2.5}}
    shown = _in_all_frames(sandbox, "normalized", "query")
    layout = panel.layout | _ranges(window_of(shown)) | _circle(sandbox, "ln1")
    return panel._replace(traces=[*panel.traces, arrow], swapped=[*panel.swapped, _xy("query.rays")], layout=layout)


def _attention(sandbox: Sandbox) -> Panel:
    task, view = sandbox.task, sandbox.view
    top = float(np.quantile(np.stack([frame.attention for frame in sandbox.frames]), 0.999))
    heat = {
        "type": "heatmap",
        "x": list(range(1, task.length + 1)),
        "zmin": 0,
        "zmax": top,
        "colorscale": [[0, "#fff"], [1, COLOURS[0]]],
        "showscale": False,
        "customdata": [[text] * task.length for text in _of_probes(view)],
        "hovertemplate": "position %{x}: %{z:.3f}<br>%{customdata}<extra></extra>",
    }
    border = {"type": "line", "x0": task.k + 0.5, "x1": task.k + 0.5, "y0": -0.5, "y1": len(view.tokens) - 0.5}
    border |= {"xref": "x", "yref": "y"}
    middles = [float(np.flatnonzero(view.classes == number).mean()) for number in np.unique(view.classes)]
    layout = _layout(
        xaxis={"range": [0.5, task.length + 0.5], "tickvals": list(range(1, task.length + 1)), "showgrid": False}
        | {"title": {"text": "position", "standoff": 4}},
        yaxis={"range": [len(view.tokens) - 0.5, -0.5], "showgrid": False, "tickvals": middles}
        | {"ticktext": [view.class_names[number] for number in np.unique(view.classes)], "automargin": True},
        shapes=[border | {"line": {"color": RED, "width": 2}}],
    )
    if len(middles) > 12:
        layout["yaxis"]["showticklabels"] = False
    hint = f"A row for each sequence, by class; 0 is white, {top:.2f} dark. Left of the line: what is summed."
    return Panel("attention", "Attention", hint, [heat], [{"z": "attention"}], layout)


def _values(sandbox: Sandbox) -> Panel:
    hint = "W_V of the normalised sums. A long line: the symbol there makes a difference."
    return _places(sandbox, "values", "Values", hint)


def _xi(sandbox: Sandbox) -> Panel:
    hint = "The attention-weighted sum of values. A colour for each class, a shape for each answer."
    return _plane("xi", "Gathered: ξ", hint, [_probes(sandbox.view)], [_xy("xi")], sandbox.view.xi_window)


def _xi_levels(sandbox: Sandbox) -> Panel:
    hint = "Shade: what the model would answer there, the darker the surer."
    if sandbox.config.d_model == 2:
        hint += " They are wedges, since the MLP sees directions alone."
    return _levels(sandbox, "xi", "Answers over ξ", hint, sandbox.view.xi_window)


def _normalized_xi(sandbox: Sandbox) -> Panel:
    points = _in_all_frames(sandbox, "normalized_xi")
    hint = "What the MLP reads: ξ scaled to one length."
    traces, swapped, window = [_probes(sandbox.view)], [_xy("normalized_xi")], window_of(points)
    panel = _plane("normalized_xi", "Normalised ξ", hint, traces, swapped, window)
    return panel._replace(layout=panel.layout | _circle(sandbox, "ln2"))


def _receptors(sandbox: Sandbox) -> Panel:
    shown = _in_all_frames(sandbox, "receptors", "normalized_xi")
    points = _probes(sandbox.view) | {"opacity": 0.25, "hoverinfo": "skip"}
    hint = "Columns of W_in: the direction that each neuron listens to. Faint: the normalised ξ."
    return _plane(
        "receptors",
        "MLP receptors",
        hint,
        [points, _neurons(sandbox)],
        [_xy("normalized_xi"), _xy("receptors.rays")],
        window_of(shown),
    )


def _assemblers(sandbox: Sandbox) -> Panel:
    shown = _in_all_frames(sandbox, "assemblers")
    hint = "Rows of W_out: what each neuron adds when it is on."
    return _plane("assemblers", "MLP assemblers", hint, [_neurons(sandbox)], [_xy("assemblers.rays")], window_of(shown))


def _mlp_out(sandbox: Sandbox) -> Panel:
    alone = _probes(sandbox.view)
    alone = alone | {"opacity": 0.3, "marker": alone["marker"] | {"size": 5, "line": {"width": 0}}}
    hint = "Strong: the output, which is ξ plus what the MLP adds. Faint: what the MLP adds."
    window = sandbox.view.output_window
    return _plane(
        "mlp_out",
        "MLP output and residual",
        hint,
        [alone, _probes(sandbox.view)],
        [_xy("mlp_out"), _xy("output")],
        window,
    )


def _output_levels(sandbox: Sandbox) -> Panel:
    hint = "Shade: which answer wins there. Training moves each point into the region of its answer."
    return _levels(sandbox, "output", "Answers over the output", hint, sandbox.view.output_window)


def _probabilities(sandbox: Sandbox) -> Panel:
    view = sandbox.view
    names = [f"{name}<br>→ {label}" for name, label in zip(view.class_names, view.class_labels, strict=True)]
    bars = [
        {
            "type": "bar",
            "x": list(range(len(names))),
            "marker": {"color": COLOURS[token]},
            "name": str(token),
            "customdata": view.class_names,
            "hovertemplate": f"class %{{customdata}}<br>answer {token}: %{{y:.3f}}<extra></extra>",
        }
        for token in range(sandbox.task.d_vocab)
    ]
    few = len(names) <= 8
    layout = _layout(
        xaxis={"showgrid": False, "tickvals": list(range(len(names))) if few else [], "ticktext": names}
        | {"tickangle": 0, "tickfont": {"size": 9}, "range": [-0.6, len(names) - 0.4]},
        yaxis={"range": [0, 1]},
        barmode="stack",
        bargap=0.15,
    )
    hint = "Mean over a class; below it the symbols that it counts, and the right answer. Solved: bars of one colour."
    swapped = [{"y": f"probabilities.{token}"} for token in range(sandbox.task.d_vocab)]
    return Panel("probabilities", "Probabilities of the answers", hint, bars, swapped, layout)


def _loss(sandbox: Sandbox) -> Panel:
    traces: list[dict[str, Any]] = []
    if sandbox.losses:
        x, y = _envelope(sandbox.losses)
        traces.append(_curve(x, y, "each batch", "#c9c9c5", width=1))
    if sandbox.trace is not None and "loss" in sandbox.trace:
        traces.append(_curve(sandbox.trace.step, sandbox.trace["loss"], "loss", COLOURS[0]))
    reach = [value for trace in traces for value in trace["y"] if value and np.isfinite(value) and value > 0]
    if sandbox.trace is not None and "accuracy" in sandbox.trace:
        accuracy = _curve(sandbox.trace.step, sandbox.trace["accuracy"], "accuracy", COLOURS[1])
        traces.append(accuracy | {"yaxis": "y2"})
    low, high = np.log10([max(min(reach), 1e-9), max(reach)]) if reach else (-3, 0)
    layout = _layout(
        xaxis=_steps_axis(sandbox),
        yaxis={"type": "log", "range": [low - 0.1, high + 0.1], "exponentformat": "power"}
        | {"dtick": max(round((high - low) / 6), 1), "tickfont": {"size": 10, "color": COLOURS[0]}},
        yaxis2={
            "range": SHARES,
            "tickvals": [0, 0.5, 1],
            "overlaying": "y",
            "side": "right",
            "showgrid": False,
            "zeroline": False,
        }
        | {"tickfont": {"size": 10, "color": COLOURS[1]}},
    )
    layout["margin"] = layout["margin"] | {"r": 30}
    hint = (
        "Blue, left: loss on a logarithmic axis (grey: single batches). Orange, right: accuracy on held-out sequences."
    )
    return _with_marker(Panel("loss", "Loss and accuracy", hint, traces, [{}] * len(traces), layout), "y2")


def _measures(sandbox: Sandbox) -> Panel:
    traces, trace = [], None if sandbox.trace is None else one_head(sandbox.trace)
    if trace is not None and "f_type_gauge" in trace:
        forms = {"xi": ("ξ", COLOURS[2]), "normalized": ("normalised ξ", COLOURS[3])}
        for number, form in enumerate(trace["form_name"].values.tolist()):
            name, colour = forms.get(form, (form, COLOURS[5]))
            values = trace["f_type_gauge"].isel(form=number)
            traces.append(_curve(trace.step, values, f"variance between classes, {name}", colour))
    if trace is not None and "influence_share" in trace:
        values = trace["influence_share"]
        for index in np.ndindex(values.shape[1:]):
            at = dict(zip(values.dims[1:], index, strict=True))
            traces.append(
                _curve(trace.step, values.isel(at), "influence of informative positions", COLOURS[4], dash="dot")
            )
    layout = _layout(xaxis=_steps_axis(sandbox), yaxis={"range": SHARES})
    hint = (
        "Share of the variance between classes: of ξ (green), of normalised ξ (purple). Dotted: the informative "
        "positions' share of influence. 1 for a clustering head."
        if traces
        else "Nothing was measured on this run; fd-interp observe measures it."
    )
    panel = Panel("measures", "Clustering and influence", hint, traces, [{}] * len(traces), layout)
    return _with_marker(panel, "y")


_HOVER = "%{customdata}<br>(%{x:.3g}, %{y:.3g})<extra></extra>"


def _plane(
    key: str, title: str, hint: str, traces: list[dict[str, Any]], swapped: list[dict[str, str]], window: Window
) -> Panel:
    """A panel with one scale in both directions; grey lines cross at the origin."""
    layout = _layout(**_ranges(window))
    return Panel(key, title, hint, traces, swapped, layout)


def _ranges(window: Window) -> dict[str, Any]:
    zero = {"zeroline": True, "zerolinecolor": "#c4c4c0", "zerolinewidth": 1.2, "nticks": 6}
    across = {"range": [window.left, window.right], "constrain": "domain"}
    up = {"range": [window.bottom, window.top], "constrain": "domain", "scaleanchor": "x"}
    return {"xaxis": _AXIS | zero | across, "yaxis": _AXIS | zero | up}


def _in_all_frames(sandbox: Sandbox, *names: str) -> Float32[np.ndarray, "frame point 2"]:
    return np.stack([np.concatenate([getattr(frame, name) for name in names]) for frame in sandbox.frames])


def _brought_near(points: Float32[np.ndarray, "frame point 2"]) -> Float32[np.ndarray, "frame point 2"]:
    """With those that have run away moved towards the origin: for one of them, all others would be small."""
    lengths = np.linalg.norm(points, axis=-1, keepdims=True)
    return points * np.minimum(1, RUN_AWAY * np.median(lengths) / np.maximum(lengths, 1e-9))


def _circle(sandbox: Sandbox, where: str) -> dict[str, Any]:
    """On which normalised vectors of two coordinates lie."""
    if sandbox.config.d_model > 2 or where not in sandbox.config.normalized:
        return {}
    edge = {"x0": -(2**0.5), "x1": 2**0.5, "y0": -(2**0.5), "y1": 2**0.5, "xref": "x", "yref": "y"}
    return {"shapes": [{"type": "circle", "layer": "below", "line": {"color": "#dcdcd8", "width": 1}} | edge]}


def _places(sandbox: Sandbox, name: str, title: str, hint: str) -> Panel:
    """All pairs of a position and a symbol, those of one position joined."""
    task = sandbox.task
    pairs = [(position, symbol) for position in range(task.length) for symbol in range(task.p)]
    inside = [position < task.k for position, _ in pairs]
    colours = [COLOURS[symbol] for _, symbol in pairs]
    joined = {"type": "scatter", "mode": "lines", "hoverinfo": "skip"}
    points = {
        "type": "scatter",
        "mode": "markers",
        "marker": {
            "symbol": ["circle" if known else "square" for known in inside],
            "size": 9,
            "color": [colour if known else "#fff" for colour, known in zip(colours, inside, strict=True)],
            "line": {"color": colours, "width": 1.5},
        },
        "customdata": [
            f"symbol {symbol} at {_of_position(position, known)}"
            for (position, symbol), known in zip(pairs, inside, strict=True)
        ],
        "hovertemplate": _HOVER,
    }
    traces = [
        joined | {"line": {"color": "#d5d5d0", "width": 1.5, "dash": "dot"}},
        joined | {"line": {"color": "#8a8a86", "width": 1.5}},
        points,
    ]
    shown = _brought_near(_in_all_frames(sandbox, name))
    swapped = [_xy(f"{name}.spurious"), _xy(f"{name}.informative"), _xy(name)]
    return _plane(name, title, hint, traces, swapped, window_of(shown))


def _levels(sandbox: Sandbox, name: str, title: str, hint: str, window: Window) -> Panel:
    columns, rows = grid_points(window)
    d_vocab = sandbox.task.d_vocab
    degrees, most = shades(d_vocab), shades(d_vocab) * d_vocab - 1
    scale = []
    for token, colour in enumerate(COLOURS[:d_vocab]):
        scale += [[token * degrees / most, _tint(colour, 0.04)]]
        scale += [[((token + 1) * degrees - 1) / most, _tint(colour, 0.62)]]
    heat = {
        "type": "heatmap",
        "x": columns.tolist(),
        "y": rows.tolist(),
        "zmin": 0,
        "zmax": most,
        "colorscale": scale,
        "showscale": False,
        "hoverinfo": "skip",
    }
    swapped = [{"z": f"{name}_levels"}, _xy(name)]
    return _plane(f"{name}_levels", title, hint, [heat, _probes(sandbox.view)], swapped, window)


def _probes(view: View) -> dict[str, Any]:
    colours = np.array(class_colours(len(view.class_names)))[view.classes]
    return {
        "type": "scatter",
        "mode": "markers",
        "marker": {
            "symbol": [SYMBOLS[label] for label in view.labels],
            "size": 8,
            "color": colours.tolist(),
            "line": {"color": "#fff", "width": 0.7},
        },
        "customdata": _of_probes(view),
        "hovertemplate": _HOVER,
    }


def _neurons(sandbox: Sandbox) -> dict[str, Any]:
    names = [f"neuron {neuron}" for neuron in sandbox.view.neurons.tolist()]
    return _arrows(names, COLOURS[3], size=8) | {"line": {"color": COLOURS[3], "width": 1}, "opacity": 0.75}


def _arrows(names: Sequence[str], colour: str | list[str], size: int) -> dict[str, Any]:
    """From the origin, for arrays of `_rays`."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "marker": {"symbol": "arrow", "angleref": "previous", "size": size, "color": colour},
        "customdata": [text for name in names for text in ("origin", name, "")],
        "hovertemplate": _HOVER,
    }


def _curve(x: Any, y: Any, name: str, colour: str, *, width: int = 2, dash: str = "solid") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": np.asarray(x).tolist(),
        "y": [float(value) if np.isfinite(value) else None for value in np.asarray(y)],
        "line": {"color": colour, "width": width, "dash": dash},
        "hovertemplate": f"step %{{x}}: %{{y:.4g}}<extra>{name}</extra>",
    }


def _with_marker(panel: Panel, axis: str) -> Panel:
    """The panel with an upright line at the step that is shown."""
    line = {"type": "scatter", "mode": "lines", "y": SHARES, "yaxis": axis, "hoverinfo": "skip"}
    line["line"] = {"color": INK, "width": 1}
    return panel._replace(traces=[*panel.traces, line], swapped=[*panel.swapped, {"x": "marker"}])


def _steps_axis(sandbox: Sandbox) -> dict[str, Any]:
    last = max(sandbox.steps[-1], 1)
    return {"range": [-0.01 * last, 1.01 * last], "title": {"text": "step", "standoff": 4}, "nticks": 5}


_AXIS = {"gridcolor": GRID, "zeroline": False, "ticks": "", "tickfont": {"size": 10, "color": "#777"}}


def _layout(**more: Any) -> dict[str, Any]:
    axes = {name: _AXIS | value if name.startswith(("xaxis", "yaxis")) else value for name, value in more.items()}
    return {
        "margin": {"l": 34, "r": 8, "t": 6, "b": 30},
        "font": {"family": "system-ui, sans-serif", "size": 11, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": "zoom",
        "uirevision": "kept",  # what a reader has zoomed into, from frame to frame
    } | axes


def _envelope(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Least and largest of each stretch of steps, so that spikes are seen however many steps there are."""
    x, y = [], []
    for stretch in np.array_split(np.arange(len(losses)), min(MOST_LOSSES, len(losses))):
        values = np.asarray(losses)[stretch]
        x += [int(stretch[0]) + 1] * 2
        y += [float(values.min()), float(values.max())]
    return x, y


def _of_position(position: int, known: bool) -> str:
    return f"position {position + 1}" + ("" if known else ", which does not matter")


def _of_probes(view: View) -> list[str]:
    k = len(view.shifts)
    texts = ["".join(map(str, tokens)) for tokens in view.tokens.tolist()]
    return [
        f"<b>{text[:k]}</b> {text[k:]}<br>class {view.class_names[number]}, right answer {label}"
        for text, number, label in zip(texts, view.classes, view.labels, strict=True)
    ]


def _xy(name: str) -> dict[str, str]:
    return {"x": f"{name}.x", "y": f"{name}.y"}


def _by_axis(name: str, points: Float[np.ndarray, "point 2"]) -> dict[str, np.ndarray]:
    x, y = np.ascontiguousarray(points.T)
    return {f"{name}.x": x, f"{name}.y": y}


def _rays(ends: Float[np.ndarray, "ray 2"]) -> Float[np.ndarray, "point 2"]:
    """From the origin to each end."""
    return _lines(np.stack([np.zeros_like(ends), ends], 1))


def _lines(points: Float[np.ndarray, "line point 2"]) -> Float[np.ndarray, "points 2"]:
    return np.concatenate([points, np.full_like(points[:, :1], np.nan)], 1).reshape(-1, 2)


def _tint(colour: str, strength: float) -> str:
    """A colour mixed with white."""
    channels = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
    mixed = (255 - strength * (255 - channels)).round().astype(int)
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
