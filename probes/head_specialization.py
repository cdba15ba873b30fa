"""Which head attends to which lag, since when, and do the heads of a layer compete or cooperate?

arXiv 2602.19143: on a Markov chain of high order all heads first take the most important lag (competition near 1),
then leave it one by one for the next (cooperation rising to 1). Lag 1 is the query's own token, lag 2 the token
before it, where a previous-token head looks. Attention is averaged over the queries that see every lag asked about; a
span counts with all its lags, so compare it with random weights.

    python probes/head_specialization.py incremental --seeds 2
    python probes/head_specialization.py runs/incremental/m-1.7 --seeds 5
    python probes/head_specialization.py stories260K.bin --text stories.txt --lags 1 2 3 4-8
"""

import argparse
import re
import sys
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from fd_interp.config import InputError
from fd_interp.observation import Probe, Trace, by_head
from fd_interp.probe_script import Question, Row, main
from fd_interp.probes.specialization import head_specialization
from fd_interp.report.figures import Curve, overview_figure
from fd_interp.stages import Dwell, dwells
from fd_interp.tasks.lags import Lags
from fd_interp.training.series import Series

MOST_LAGS = 8
"""Lags that are asked about where none are named and the task has none."""
FOCUSED = 0.5
"""Attention from which a head counts as attending to a block."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which lags."""
    meaning = f"lags, or spans of them like 4-8 (default: those of the task, or 1 to {MOST_LAGS})"
    parser.add_argument("--lags", nargs="+", metavar="LAG", help=meaning)


def probes(series: Series, arguments: argparse.Namespace) -> list[Probe]:
    """The one probe of this script."""
    context = series.inputs.held_out.tokens.shape[1]
    blocks = [_block(text) for text in arguments.lags] if arguments.lags else _blocks_of(series, context)
    lags = [lag for block in blocks for lag in block]
    if max(lags) > context:
        raise InputError(
            f"--lags: lag {max(lags)} reaches beyond the {context} tokens that {series.name} is measured on"
        )
    if arguments.lags and len(set(lags)) < len(lags):
        raise InputError(f"--lags: {' '.join(arguments.lags)} names a lag twice; give each once")
    return [head_specialization(blocks)]


def _block(text: str) -> tuple[int, ...]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise InputError(f"--lags: a lag is a number from 1 on, like 3, or a span like 4-8, not {text!r}")
    return tuple(range(first, last + 1))


def _blocks_of(series: Series, context: int) -> tuple[tuple[int, ...], ...]:
    if series.run is not None and isinstance(series.run.task, Lags):
        return series.run.task.blocks
    return tuple((lag,) for lag in range(1, min(MOST_LAGS, context) + 1))


def table(trace: Trace, random: Sequence[Trace]) -> list[Row]:
    """What each head of a series has attended to, and since when; of a lone checkpoint, what it attends to."""
    return histories(trace) if trace.sizes["step"] > 1 else levels(trace, random)


def histories(trace: Trace) -> list[Row]:
    """For each head: its block at the end, since when, and the blocks before; and the indices of its layer."""
    return [
        {
            "head": label,
            "most on": _top(head),
            "mass": float(head.block_mass[-1].max()),
            f"at {FOCUSED} since": _since(head),
            "before that": _before(head) or None,
        }
        | _indices(head)
        for label, head in by_head(trace)
    ]


def levels(trace: Trace, random: Sequence[Trace]) -> list[Row]:
    """For each head: its block, how much of its attention that has, and how much with random weights at most."""
    controls = [dict(by_head(control)) for control in random]
    return [
        {
            "head": label,
            "most on": _top(head),
            "mass": float(head.block_mass[-1].max()),
            "with random weights": max(
                (float(control[label].block_mass[-1, _top_block(head)]) for control in controls), default=None
            ),
        }
        | _indices(head)
        for label, head in by_head(trace)
    ]


def _indices(head: Trace) -> Row:
    return {
        "layer: competition": float(head.competition[-1]),
        "cooperation": float(head.cooperation[-1]),
        "redundancy": float(head.redundancy[-1]),
    }


def _top_block(head: Trace) -> int:
    return int(head.block_mass[-1].values.argmax())


def _top(head: Trace) -> str:
    return str(head.block_name.values[_top_block(head)])


def _current(head: Trace) -> Dwell | None:
    """The stay on its block that lasts until the end, if there is one."""
    stays = [dwell for dwell in dwells(head.block_mass, FOCUSED) if dwell.block == _top_block(head)]
    return stays[-1] if stays and _lasts(stays[-1], head) else None


def _lasts(dwell: Dwell, head: Trace) -> bool:
    return dwell.end == int(head.step[-1])


def _since(head: Trace) -> int | None:
    current = _current(head)
    return None if current is None else current.start


def _before(head: Trace) -> str:
    past = [dwell for dwell in dwells(head.block_mass, FOCUSED) if not _lasts(dwell, head)]
    return ", ".join(f"{head.block_name.values[dwell.block]} from {dwell.start} to {dwell.end}" for dwell in past)


def figure(seeds: Sequence[Trace], random: Sequence[Trace]) -> go.Figure:
    """Curves by head over the steps; of a lone checkpoint, all heads' attention to all lags."""
    if seeds[0].sizes["step"] == 1:
        return mass_figure(seeds[0])
    names = [str(name) for name in seeds[0].block_name.values]
    curves = [Curve("block_mass", name, {"block": block}) for block, name in enumerate(names)]
    by_label = [dict(by_head(seed)) for seed in seeds]
    return overview_figure(
        curves, "Attention of each head", {label: [seed[label] for seed in by_label] for label in by_label[0]}
    )


def mass_figure(trace: Trace) -> go.Figure:
    """Heads down, blocks of lags across."""
    heads = [label for label, _ in by_head(trace)]
    mass = trace.block_mass[-1].values.reshape(len(heads), -1)
    heat = go.Heatmap(z=np.round(mass, 3), x=list(trace.block_name.values), y=heads, colorscale="Blues", zmin=0, zmax=1)
    picture = go.Figure(heat).update_yaxes(autorange="reversed", type="category")
    return picture.update_layout(
        template="plotly_white", title="Attention on each block of lags", height=max(300, 24 * len(heads) + 120)
    )


QUESTION = Question("head_specialization", probes, table, figure, add_options)

if __name__ == "__main__":
    sys.exit(main(QUESTION, __doc__))
