"""Is this head a clustering head: does it map what the task cannot tell apart to one place?

arXiv 2410.24050: on sparse modular addition a head learns the task's invariants, and a classifier reads the clusters.
On a run of that task: the share of the variance of what each head writes that lies between the task's classes, in the
best gauge; the share of the influence that the informative symbols have; and attention mass beside them, which does not
tell. On any other run or checkpoint: how far the token at each lag decides what a head writes, beside the same with
permuted classes. A head that is near 1 at lag 2 writes one thing for each previous token.

    python probes/clustering_heads.py clustering
    python probes/clustering_heads.py runs/clustering/d-8 --seeds 8
    python probes/clustering_heads.py stories260K.bin --text stories.txt --lags 1 2 3
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from fd_interp.config import InputError
from fd_interp.observation import Probe, Trace, by_head
from fd_interp.papers.clustering.circuits import circuit
from fd_interp.papers.clustering.settings import probes as probes_of_run
from fd_interp.probe_script import Question, Row, main
from fd_interp.probes.clustering import class_of_sum, class_share, token_at_lag
from fd_interp.report.figures import Curve, overview_figure
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.series import Series

LAGS = (1, 2, 3, 4)
BY_SUM = "sum of the first k"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which classes."""
    meaning = f"class inputs by the token at these lags (default: the task's own classes, or lags {LAGS[0]}-{LAGS[-1]})"
    parser.add_argument("--lags", nargs="+", type=int, metavar="LAG", help=meaning)


def probes(series: Series, arguments: argparse.Namespace) -> list[Probe]:
    """On a run of modular addition everything that is known of its classes; elsewhere classes by lag."""
    run = series.run
    if run is not None and isinstance(run.task, SparseModularAddition) and not arguments.lags:
        return [*probes_of_run(run), class_share({BY_SUM: class_of_sum(run.task)})]
    context = series.inputs.held_out.tokens.shape[1]
    for lag in arguments.lags or ():
        if not 1 <= lag <= context:
            raise InputError(f"--lags: a lag is from 1 to {context}, what {series.name} is measured on, not {lag}")
    lags = arguments.lags or [lag for lag in LAGS if lag <= context]
    return [class_share({f"lag {lag}": token_at_lag(lag) for lag in lags})]


def table(trace: Trace, random: Sequence[Trace]) -> list[Row]:
    """What each head tells apart at the last step."""
    if "f_type_gauge" in trace:
        return [_by_task(label, head) for label, head in by_head(trace)]
    controls = [dict(by_head(control)) for control in random]
    return [_by_lag(label, head, [control[label] for control in controls]) for label, head in by_head(trace)]


def _by_task(label: str, head: Trace) -> Row:
    """Of one head on the task; what the run has become is the same for all heads of a model."""
    end, found = head.isel(step=-1), circuit(head)
    return {
        "head": label,
        "accuracy": found.accuracy,
        "becomes": found.name,
        "between classes, best gauge": found.f_type,
        "plain": float(end.class_share.isel(form=1, by=0)),
        "permuted": float(end.class_share_permuted.isel(form=1, by=0)),
        "influence on informative": found.influence_share,
        "weights": " ".join(map(str, found.weights)) or None,
        "attention there (not diagnostic)": float(end.informative_mass),
    }


def _by_lag(label: str, head: Trace, controls: Sequence[Trace]) -> Row:
    """Of one head of any model: the lag whose token decides most of what it writes."""
    share = head.class_share.isel(step=-1, form=0)
    best = int(share.values.argmax())
    row: Row = {"head": label, "most by": str(share.by_name.values[best]), "share": float(share[best])}
    row["permuted"] = float(head.class_share_permuted.isel(step=-1, form=0, by=best))
    random = [float(control.class_share.isel(step=-1, form=0, by=best)) for control in controls]
    row["with random weights"] = max(random, default=None)
    return row | {str(name): float(value) for name, value in zip(share.by_name.values, share.values, strict=True)}


def figure(seeds: Sequence[Trace], random: Sequence[Trace]) -> go.Figure:
    """Curves by head over the steps; of a lone checkpoint, all heads by all classes."""
    if seeds[0].sizes["step"] == 1:
        return share_figure(seeds[0])
    curves = [
        Curve("class_share", f"between classes: {name}", {"form": 0, "by": place})
        for place, name in enumerate(seeds[0].by_name.values)
    ]
    if "f_type_gauge" in seeds[0]:
        curves += [
            Curve("f_type_gauge", "the same in direction and best gauge", {"form": 1}),
            Curve("influence_share", "influence of informative symbols"),
            Curve("informative_mass", "attention on them (not diagnostic)"),
        ]
    by_label = [dict(by_head(seed)) for seed in seeds]
    groups = {label: [seed[label] for seed in by_label] for label in by_label[0]}
    return overview_figure(curves, "What each head tells apart", groups)


def share_figure(trace: Trace) -> go.Figure:
    """Heads down, classes across."""
    heads = [label for label, _ in by_head(trace)]
    share = trace.class_share.isel(step=-1, form=0).values.reshape(len(heads), -1)
    heat = go.Heatmap(z=np.round(share, 3), x=list(trace.by_name.values), y=heads, colorscale="Blues", zmin=0, zmax=1)
    picture = go.Figure(heat).update_yaxes(autorange="reversed", type="category")
    return picture.update_layout(
        template="plotly_white",
        title="Share of what each head writes that the token at a lag decides",
        height=max(300, 24 * len(heads) + 120),
    )


QUESTION = Question("clustering_heads", probes, table, figure, add_options)

if __name__ == "__main__":
    sys.exit(main(QUESTION, __doc__))
