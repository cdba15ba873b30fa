"""What a report of this paper shows of a trace."""

import plotly.graph_objects as go

from fd_interp.observation import Trace
from fd_interp.report.figures import Curve, Panel
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.series import Series


def shown(trace: Trace) -> Trace:
    """The first head, as it is and in direction."""
    return trace.isel({dim: 0 for dim in ("layer", "head") if dim in trace.dims})


def wide_figures(_series: Series) -> list[go.Figure]:
    """None: everything is in the panels, and the sandbox has a page of its own."""
    return []


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
    return [*panels, _by_position("lattice_weight", "Weight of each symbol", task)] if task.p == 2 else panels


def _by_position(variable: str, title: str, task: SparseModularAddition) -> Panel:
    """Those that matter, and as many that do not."""
    last = min(task.length, task.k + 3)
    curves = (
        Curve(variable, f"{position + 1}{'' if position < task.k else ', spurious'}", {"position": position})
        for position in range(last)
    )
    return Panel(title, tuple(curves))
