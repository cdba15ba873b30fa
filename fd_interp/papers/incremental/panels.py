"""What a report of this paper shows of a trace."""

import plotly.graph_objects as go
import torch

from fd_interp.measures.specialization import assigned_blocks
from fd_interp.models.config import LearnedQuery
from fd_interp.observation import Trace
from fd_interp.probes.specialization import block_name
from fd_interp.report.figures import Curve, Panel
from fd_interp.tasks.lags import Lags
from fd_interp.training.series import Series


def shown(trace: Trace) -> Trace:
    """The first layer, its heads in the order of the blocks that they end on, so that seeds lie on each other."""
    trace = trace.isel(layer=0)
    owners = assigned_blocks(torch.from_numpy(trace.block_mass.isel(step=-1).values)).tolist()
    owning = [head for head in owners if head >= 0]
    return trace.isel(head=owning + [head for head in range(trace.sizes["head"]) if head not in owning])


def wide_figures(_series: Series) -> list[go.Figure]:
    """None: everything is in the panels."""
    return []


def panels(series: Series) -> list[Panel]:
    """Loss with its ladder, what each head attends to and holds, and how the heads divide the blocks."""
    run = series.run
    assert run is not None
    assert isinstance(run.task, Lags)
    names = [block_name(block) for block in run.task.blocks]
    assert not isinstance(run.model, LearnedQuery)
    heads = range(run.model.n_heads)
    rungs = tuple(line for line in run.task.baselines() if line.name.startswith("rung"))
    panels = [Panel("Loss", (Curve("loss", "held-out loss"),), levels=rungs)]
    if run.task.kind == "high_order":
        panels.append(Panel("KL to truncated teachers (nats)", _by_rung("teacher_kl", len(names))))
    panels += [
        Panel(f"Attention of head {_ordinal(head, len(heads), len(names))}", _by_block("block_mass", names, head=head))
        for head in heads
    ]
    if getattr(run.model, "n_layers", 1) == 1:
        panels += [
            Panel("Share learned of each block (E_kk)", _by_block("effective_coefficient", names)),
            *(
                Panel(f"Feature of {name} in the values of each head", _by_head("value_coefficient", heads, block))
                for block, name in enumerate(names)
            ),
        ]
    return [*panels, DIVISION, RANK]


DIVISION = Panel(
    "Competition and cooperation of heads",
    (
        Curve("competition", "competition index"),
        Curve("cooperation", "cooperation index"),
        Curve("redundancy", "redundancy"),
    ),
)
RANK = Panel("Different patterns among heads", (Curve("participation_rank", "participation rank"),))


def _by_rung(variable: str, blocks: int) -> tuple[Curve, ...]:
    return tuple(
        Curve(variable, f"{known} block{'s' * (known > 1)} known", {"rung": known}) for known in range(1, blocks + 1)
    )


def _by_block(variable: str, names: list[str], **at: int) -> tuple[Curve, ...]:
    return tuple(Curve(variable, name, {"block": block, **at}) for block, name in enumerate(names))


def _by_head(variable: str, heads: range, block: int) -> tuple[Curve, ...]:
    return tuple(Curve(variable, f"head {head + 1}", {"head": head, "block": block}) for head in heads)


def _ordinal(head: int, heads: int, blocks: int) -> str:
    """Where there are as many heads as blocks, each block has a head; else nobody knows beforehand which have."""
    return f"{head + 1}, the one of block {head + 1} in the end" if head < blocks <= heads else f"{head + 1}"
