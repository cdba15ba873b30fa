"""A figure of shares with their intervals: what part of the runs of each point of a grid did something."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from fd_interp.report.figures import COLOURS, GRID, INK

LEAST_RATIO = 8
"""Largest over smallest value from which an axis is logarithmic."""


def share_figure(summary: pd.DataFrame, varied: Sequence[str], title: str, of: str = "share solved") -> go.Figure:
    """Shares over the first varied field, with a line in its own colour for every value of the others.

    Args:
        summary: columns `n`, `solved`, `share`, `low` and `high`, and one for each varied field.
        varied: names of fields; with none there is one point.
    """
    figure = go.Figure()
    horizontal, others = varied[:1], list(varied[1:])
    scale = _scale(summary[horizontal[0]].tolist()) if horizontal else "category"
    lines: Any = summary.groupby(others, sort=False) if others else [((), summary)]
    for number, (values, rows) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        label = ", ".join(f"{_last(name)} {value}" for name, value in zip(others, values, strict=True))
        share, low, high = (rows[column].astype(float) for column in ("share", "low", "high"))
        x = rows[horizontal[0]].tolist() if horizontal else [""] * len(rows)
        error: Any = {"array": high - share, "arrayminus": share - low, "color": colour, "thickness": 1.2}
        figure.add_trace(
            go.Scatter(
                x=x,
                y=share,
                error_y=error,
                name=label,
                mode="markers" if scale == "category" else "lines+markers",
                line={"color": colour},
                customdata=np.stack([rows["solved"], rows["n"]], -1),
                hovertemplate="%{x}: %{customdata[0]} of %{customdata[1]}",
            )
        )
    figure.update_xaxes(title=horizontal[0] if horizontal else "", gridcolor=GRID, type=scale)
    figure.update_yaxes(title=of, range=[-0.03, 1.03], gridcolor=GRID, zeroline=False)
    return figure.update_layout(
        title={"text": title, "font": {"size": 14}, "x": 0.02},
        height=420,
        scattermode="group",
        showlegend=bool(others),
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        margin={"l": 50, "r": 20, "t": 60, "b": 40},
    )


def _last(field: str) -> str:
    return field.rsplit(".", 1)[-1]


def _scale(values: Sequence[Any]) -> str:
    if any(isinstance(value, str | bool) for value in values):
        return "category"
    return "log" if min(values) > 0 and max(values) >= LEAST_RATIO * min(values) else "linear"
