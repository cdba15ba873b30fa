"""When each block is learned, by three detectors, and what the heads do meanwhile."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xarray as xr

from fd_interp.observation import Trace
from fd_interp.stages import Stage, Stretch, first_step, stretches

AT_RUNG = 0.03
"""Relative distance from a rung's loss within which a model counts as standing on it."""
RISEN = 0.1
"""Share of its later rise up to which a KL counts as still at its minimum."""
LEAST_RISE = 0.05
"""Nats that a KL must rise for its minimum to have an end."""
LEAST_LEARNED = 0.25
"""Share of a block below which it counts as not learned, however it got there."""


class Acquisition(NamedTuple):
    """The step at which one block is learned, by each detector; None for what it does not see."""

    by_loss: int | None
    """The held-out loss falls below the middle between the two rungs."""
    by_kl: int | None
    """KL to the teacher without the block starts to rise for good."""
    by_coefficient: int | None
    """Half of what is learned of the block's features in the end is there."""

    @property
    def seen(self) -> list[int]:
        return [step for step in self if step is not None]


def acquisitions(trace: Trace) -> list[Acquisition]:
    """Of each block, the most important first."""
    return [_acquisition(trace, block) for block in range(trace.sizes["rung"] - 1)]


def _acquisition(trace: Trace, block: int) -> Acquisition:
    excess = trace.excess_over_rung
    by_loss = first_step(excess.isel(rung=block) + excess.isel(rung=block + 1) < 0)
    by_kl = rise_step(trace.teacher_kl.isel(rung=block)) if "teacher_kl" in trace else None
    by_coefficient = None
    if "effective_coefficient" in trace:
        learned = trace.effective_coefficient.isel(block=block)
        if float(learned[-1]) > LEAST_LEARNED:
            by_coefficient = first_step(learned > learned[-1] / 2)
    return Acquisition(by_loss, by_kl, by_coefficient)


def rise_step(kl: xr.DataArray) -> int | None:
    """The last step at which a KL has not risen by more than `RISEN` of the way from its minimum to its end.

    The paper's rule by eye, made exact; the place of the minimum itself is noise, because it is flat. None where the KL
    does not rise.
    """
    least = float(kl.min())
    rise = float(kl[-1]) - least
    if rise < LEAST_RISE:
        return None
    return int(kl.step[kl.values <= least + RISEN * rise][-1])


def rung_loss(trace: Trace, known: int) -> xr.DataArray:
    """Loss of the best predictor of a rung on the sequences that the trace was measured on."""
    return trace.loss - trace.excess_over_rung.isel(rung=known)


def off_rung(trace: Trace, known: int) -> xr.DataArray:
    """Relative distance of the loss from a rung's, above it if positive."""
    return trace.excess_over_rung.isel(rung=known) / rung_loss(trace, known)


def nearest_rung(trace: Trace) -> xr.DataArray:
    """At every step, the truncated teacher that is nearest in KL; without teachers, the rung that is nearest in loss.

    A KL says more where data are few: then the loss of a model that knows two lags can be that of one that knows one.
    """
    if "teacher_kl" in trace:
        return trace.teacher_kl.argmin("rung")
    return abs(trace.excess_over_rung).argmin("rung")


def flattest_step(trace: Trace, after: int, before: int) -> int | None:
    """The step strictly between two at which the loss changes least; None where fewer than three are kept there.

    Change is measured over two snapshots each way, since the loss on any one is noisy.
    """
    between = trace.loss.sel(step=slice(after + 1, before - 1))
    if between.sizes["step"] < 3:
        return None
    reach = 2 if between.sizes["step"] >= 5 else 1
    values, steps = between.values, between.step.values
    change = np.abs(values[2 * reach :] - values[: -2 * reach])
    return int(steps[reach:-reach][change.argmin()])


def flattest_steps(trace: Trace) -> list[int | None]:
    """Of each plateau between two blocks that are learned, by loss; None where one of them is not."""
    steps = [acquired.by_loss for acquired in acquisitions(trace)]
    return [
        None if after is None or before is None else flattest_step(trace, after, before)
        for after, before in pairwise(steps)
    ]


def competitive_interval(trace: Trace) -> Stretch | None:
    """The longest stay of a loss on rung 1 while all heads attend most to one and the same block.

    On it: within `AT_RUNG` of the rung's loss. In a model of several layers, the heads of the first.
    """
    if trace.sizes["head"] < 2:
        return None
    top = trace.block_mass.isel(layer=0).argmax("block")
    alike = (top == top.isel(head=0)).all("head")
    resting = stretches(alike & (abs(off_rung(trace, 1)) < AT_RUNG))
    return max(resting, key=lambda stretch: stretch.end - stretch.start, default=None)


def cooperative_interval(trace: Trace) -> Stretch | None:
    """From the step at which heads have different top blocks for good, to the end of training."""
    if trace.sizes["head"] < 2:
        return None
    top = trace.block_mass.isel(layer=0).argmax("block")
    alike = (top == top.isel(head=0)).all("head").values
    if alike[-1]:
        return None
    last_alike = np.flatnonzero(alike)
    start = last_alike[-1] + 1 if len(last_alike) else 0
    return Stretch(int(trace.step[start]), int(trace.step[-1]))


def stages(trace: Trace) -> list[Stage]:
    """One stage for each rung, from the step that its block is learned at, by loss, to the next that is."""
    last, acquired = int(trace.step[-1]), acquisitions(trace)
    starts: list[int | None] = [0, *(one.by_loss for one in acquired)]
    ends = [
        None if start is None else _first_from(start, starts[rung + 1 :], last) for rung, start in enumerate(starts)
    ]
    seen = [_seen(trace, known, start, end) for known, (start, end) in enumerate(zip(starts, ends, strict=True))]
    names = [f"{known} block{'s' * (known != 1)} known" for known in range(len(starts))]
    return [Stage(*columns) for columns in zip(names, starts, ends, seen, strict=True)]


def _first_from(start: int, later: Sequence[int | None], last: int) -> int:
    return min((step for step in later if step is not None and step >= start), default=last)


def _seen(trace: Trace, known: int, start: int | None, end: int | None) -> str:
    if start is None or end is None:
        return f"not reached: the loss stays {float(abs(off_rung(trace, known)).min()):.1%} or more from rung {known}"
    parts = []
    flattest = flattest_step(trace, start, end + 1)
    if known and flattest is not None:
        off = float(off_rung(trace, known).sel(step=flattest))
        parts.append(f"flattest at step {flattest}, {abs(off):.1%} {'above' if off > 0 else 'below'} rung {known}")
    if known:
        parts.append(f"learned at {_listed(acquisitions(trace)[known - 1])}")
    phase = {1: competitive_interval(trace), 2: cooperative_interval(trace)}.get(known)
    if phase is not None:
        what = "on one block, on the rung" if known == 1 else "on different blocks"
        parts.append(f"heads {what} from step {phase.start} to {phase.end}")
    return "; ".join(parts) or "before any block"


def _listed(acquired: Sequence[int | None]) -> str:
    names = ("loss", "KL", "coefficient")
    return ", ".join(f"{step} by {name}" for name, step in zip(names, acquired, strict=True) if step is not None)
