"""Do the weights condense onto few directions, when, and is attention frozen meanwhile?

arXiv 2605.01199, stages I and IV: from a small start the embedding first condenses onto one direction, that of the
token frequencies, while W_Q and W_K keep their size; after focus and dilution a second direction appears (s2/s1 grows),
and the cycle begins again.

    python probes/embedding_condensation.py runs/focus-dilution/zipf-8 --seeds 3
    python probes/embedding_condensation.py stories260K.bin --text stories.txt
    python probes/embedding_condensation.py focus-dilution --model.std 0.1
"""

import sys
from collections.abc import Sequence

import plotly.graph_objects as go

from fd_interp.observation import Trace, by_head
from fd_interp.papers.focus_dilution.cycle import CONDENSED, NEW_DIRECTION
from fd_interp.probe_script import Question, Row, main
from fd_interp.probes.condensation import EMBEDDING_CONDENSATION
from fd_interp.report.figures import head_figure
from fd_interp.stages import first_step, step_of_maximum


def table(trace: Trace, random: Sequence[Trace]) -> list[Row]:
    """What happened when in each matrix of a series; of a lone checkpoint, where each stands."""
    return onsets(trace) if trace.sizes["step"] > 1 else levels(trace, random)


def levels(trace: Trace, random: Sequence[Trace]) -> list[Row]:
    """Each matrix's share and rank, and what they are for random weights."""
    controls = [{row["weight"]: row for row in onsets(control)} for control in random]
    return [
        {
            "weight": row["weight"],
            "top share": row["end"],
            "effective rank": row["rank, end"],
            "top share, random weights": controls[0][row["weight"]]["end"],
            "rank, random weights": controls[0][row["weight"]]["rank, end"],
        }
        for row in onsets(trace)
    ]


def onsets(trace: Trace) -> list[Row]:
    """For each matrix: when it condensed, when a second direction came, and how its rank and size went."""
    rows = [_onsets_of_matrix(trace, name, name) for name in ("W_E", "W_U")]
    for label, head in by_head(trace):
        rows += [_onsets_of_matrix(head, name, f"{name} {label}") for name in ("W_Q", "W_K")]
    return rows


def _onsets_of_matrix(trace: Trace, name: str, label: str) -> Row:
    share, ratio, rank = (trace[f"{name}_{measure}"] for measure in ("top_share", "singular_ratio", "effective_rank"))
    condensed = first_step(share > CONDENSED)
    growth = trace.W_Q_norm_change.max([dim for dim in trace.W_Q_norm_change.dims if dim != "step"])
    return {
        "weight": label,
        "condensed at": condensed,
        "W_Q growth then": None if condensed is None else float(growth.sel(step=condensed)),
        "second direction at": condensed and first_step(ratio > NEW_DIRECTION, step_of_maximum(share)),
        "top share, highest": float(share.max()),
        "end": float(share[-1]),
        "effective rank, lowest": float(rank.min()),
        "rank, end": float(rank[-1]),
        "norm change, end": float(trace[f"{name}_norm_change"][-1]),
    }


def figure(seeds: Sequence[Trace], random: Sequence[Trace]) -> go.Figure:
    """Shares, ranks and sizes over the steps; of a lone checkpoint, its shares beside those of random weights."""
    names = [f"{weight}_{measure}" for measure in ("top_share", "effective_rank") for weight in ("W_E", "W_Q")]
    if seeds[0].sizes["step"] > 1:
        return head_figure(seeds, [*names, "W_E_frequency_cosine", "W_Q_norm"])
    picture = go.Figure()
    for trace, name in ((seeds[0], "checkpoint"), *((control, "random weights") for control in random)):
        bars = {row["weight"]: row["end"] for row in onsets(trace)}
        picture.add_trace(go.Bar(x=list(bars), y=list(bars.values()), name=name))
    return picture.update_layout(template="plotly_white", yaxis_title="share of the top singular direction")


QUESTION = Question("embedding_condensation", lambda *_: [EMBEDDING_CONDENSATION], table, figure)

if __name__ == "__main__":
    sys.exit(main(QUESTION, __doc__))
