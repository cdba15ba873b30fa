"""Does attention go to frequent tokens, in which heads, and does it turn away from them again?

arXiv 2605.01199, stages II and III: once the embedding has condensed along the token frequencies, queries turn to the
most frequent tokens (focus ratio above 1), frequent queries most; then rare queries turn away from them (below 1). On
chains where frequent tokens are followed by rare ones attention first leaves the frequent tokens instead.

    python probes/frequency_focus.py runs/focus-dilution/zipf-8 --seeds 3
    python probes/frequency_focus.py stories260K.bin --text stories.txt --seeds 3
    python probes/frequency_focus.py focus-dilution --task.persistence 0.3
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from fd_interp.observation import Probe, Trace, by_head
from fd_interp.papers import probes_of
from fd_interp.papers.focus_dilution.cycle import FOCUSED, UNFOCUSED
from fd_interp.probe_script import Question, Row, main
from fd_interp.report.figures import head_figure
from fd_interp.stages import first_departure, first_step, step_of_maximum
from fd_interp.training.series import Series


def probes(series: Series, _arguments: argparse.Namespace) -> list[Probe]:
    """The one probe of this script; on text the ten most frequent tokens count as frequent, on a chain the first."""
    return [probe for probe in probes_of(series.run) if probe.name == "frequency_focus"]


def table(trace: Trace, random: Sequence[Trace]) -> list[Row]:
    """What happened when in each head of a series; of a lone checkpoint, where each head stands."""
    return onsets(trace) if trace.sizes["step"] > 1 else levels(trace, random)


def levels(trace: Trace, random: Sequence[Trace]) -> list[Row]:
    """Each head's numbers, and the range of its slope over random weights."""
    slopes = [dict(by_head(control)) for control in random]
    return [
        {
            "head": label,
            "focus": float(head.focus_ratio[-1]),
            "rare focus": float(head.focus_ratio_rare[-1]),
            "own-token focus": float(head.self_focus[-1]),
            "frequency slope": float(head.frequency_slope[-1]),
            "lowest random slope": min(float(control[label].frequency_slope[-1]) for control in slopes),
            "highest": max(float(control[label].frequency_slope[-1]) for control in slopes),
        }
        for label, head in by_head(trace)
    ]


def onsets(trace: Trace) -> list[Row]:
    """For each layer and head: when attention leaves uniformity and which way, its peak, and dilution after it."""
    return [_onsets_of_head(head, label) for label, head in by_head(trace)]


def _onsets_of_head(head: Trace, label: str) -> Row:
    departed = first_departure(head.focus_ratio, UNFOCUSED, FOCUSED)
    peak = step_of_maximum(head.focus_ratio)
    diluted = first_step(head.focus_ratio_rare < UNFOCUSED, step_of_maximum(head.focus_ratio_rare))
    return {
        "head": label,
        "departs": departed and departed[0],
        "towards": None if departed is None else "frequent" if departed[1] > 0 else "rare",
        "peak focus": None if peak is None else float(head.focus_ratio.sel(step=peak)),
        "at": peak,
        f"rare queries below {UNFOCUSED}": diluted,
        "rare focus, end": float(head.focus_ratio_rare[-1]),
        "frequency slope, end": float(head.frequency_slope[-1]),
        "own-token focus, end": float(head.self_focus[-1]),
    }


def figure(seeds: Sequence[Trace], random: Sequence[Trace]) -> go.Figure:
    """Curves by head over the steps; of a lone checkpoint, the slope of each head beside that of random weights."""
    if seeds[0].sizes["step"] > 1:
        return head_figure(seeds, ["focus_ratio", "focus_ratio_rare", "frequency_slope", "self_focus"])
    return slope_figure(seeds[0], random)


def slope_figure(trace: Trace, random: Sequence[Trace]) -> go.Figure:
    """Bars of the frequency slope by layer and head, and what random weights give there."""
    heads = [label for label, _ in by_head(trace)]
    picture = go.Figure(go.Bar(x=heads, y=trace.frequency_slope[-1].values.ravel(), name="checkpoint"))
    slopes = np.stack([control.frequency_slope[-1].values.ravel() for control in random])
    name = f"random weights, {len(random)} seeds"
    picture.add_trace(go.Scatter(x=heads * len(random), y=slopes.ravel(), mode="markers", name=name))
    return picture.update_layout(
        template="plotly_white", yaxis_title="slope of log attention lift against log frequency"
    )


QUESTION = Question("frequency_focus", probes, table, figure)

if __name__ == "__main__":
    sys.exit(main(QUESTION, __doc__))
