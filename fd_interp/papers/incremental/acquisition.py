"""When each block is learned, by three detectors, and what the heads do meanwhile."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr

from fd_interp.observation import Trace
from fd_interp.stages import Stage, first_step

AT_RUNG = 0.03
"""Relative distance from a rung's loss within which a model counts as standing on it."""
RISEN = 0.1
"""Share of its later rise up to which a KL counts as still at its minimum."""
LEAST_RISE = 0.05
"""Nats that a KL must rise for its minimum to have an end."""
LEAST_LEARNED = 0.25
"""Share of a block below which it counts as not learned, however it got there."""
AGREEMENT = 0.35
"""Relative difference between the first and the last of the detectors up to which they agree."""


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

    def spread(self) -> float | None:
        """Difference between the latest and the earliest detector ÷ the latest; None where one sees nothing."""
        return None if len(self.seen) < len(self) else (max(self.seen) - min(self.seen)) / max(max(self.seen), 1)


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


class Interval(NamedTuple):
    """The first and the last kept step of a phase."""

    start: int
    end: int


def competitive_interval(trace: Trace) -> Interval | None:
    """The longest stay of a loss on rung 1 while all heads attend most to one and the same block.

    On it: within `AT_RUNG` of the rung's loss. In a model of several layers, the heads of the first.
    """
    if trace.sizes["head"] < 2:
        return None
    top = trace.block_mass.isel(layer=0).argmax("block")
    alike = (top == top.isel(head=0)).all("head")
    return _longest(alike & (abs(off_rung(trace, 1)) < AT_RUNG))


def cooperative_interval(trace: Trace) -> Interval | None:
    """From the step at which heads have different top blocks for good, to the end of training."""
    if trace.sizes["head"] < 2:
        return None
    top = trace.block_mass.isel(layer=0).argmax("block")
    alike = (top == top.isel(head=0)).all("head").values
    if alike[-1]:
        return None
    last_alike = np.flatnonzero(alike)
    start = last_alike[-1] + 1 if len(last_alike) else 0
    return Interval(int(trace.step[start]), int(trace.step[-1]))


def _longest(condition: xr.DataArray) -> Interval | None:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], condition.values, [False])).astype(int)))
    stretches = [
        Interval(int(condition.step[start]), int(condition.step[end - 1]))
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]
    return max(stretches, key=lambda stretch: stretch.end - stretch.start, default=None)


def stages(trace: Trace) -> list[Stage]:
    """One stage for each rung, from the step that its block is learned at, by loss, to the next that is."""
    last = int(trace.step[-1])
    starts: list[int | None] = [0, *(acquired.by_loss for acquired in acquisitions(trace))]
    begun = [start for start in starts if start is not None]
    return [
        Stage(
            _name(trace, known),
            start,
            None if start is None else min((s for s in begun if s > start), default=last),
            _seen(trace, known, start),
        )
        for known, start in enumerate(starts)
    ]


def _name(trace: Trace, known: int) -> str:
    return f"{known} block{'s' * (known != 1)} known"


def _seen(trace: Trace, known: int, start: int | None) -> str:
    nearest = float(abs(off_rung(trace, known)).min())
    if start is None:
        return f"not reached: the loss stays {nearest:.1%} or more from rung {known}"
    parts = [f"loss within {nearest:.1%} of rung {known} at best"]
    if known:
        acquired = acquisitions(trace)[known - 1]
        parts.append(f"learned at {_listed(acquired)}")
    phase = competitive_interval(trace) if known == 1 else None
    if phase:
        parts.append(f"all heads on one block from step {phase.start} to {phase.end}")
    return "; ".join(parts)


def _listed(acquired: Sequence[int | None]) -> str:
    names = ("loss", "KL", "coefficient")
    return ", ".join(f"{step} by {name}" for name, step in zip(names, acquired, strict=True) if step is not None)
