"""When things happen in a trace: onsets, plateaus and change points, and the stages made of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import ruptures
import xarray as xr
from jaxtyping import Bool, Float
from ruptures.costs import CostLinear

SHORTEST_PIECE = 3
"""Snapshots in the shortest straight piece between two change points; two lie on a line whatever they are."""
LEAST_EXPLAINED = 0.01
"""Share of a curve's squared deviation from one straight line that a change point must explain."""
ROUNDING = 1e-12
"""Relative deviation from a straight line up to which a curve is one."""


class Stage(NamedTuple):
    """A stretch of training with a name."""

    name: str
    start: int | None
    """First step, or None when the stage never began."""
    end: int | None
    """Last step, or None when the stage never began."""
    seen: str
    """What was measured there, in one line."""


def first_step(condition: Bool[xr.DataArray, " step"], after: int | None = -1) -> int | None:
    """First kept step later than `after` at which the condition holds; None when there is none, or `after` is None."""
    if after is None:
        return None
    steps = condition.step.values[condition.values & (condition.step.values > after)]
    return int(steps[0]) if len(steps) else None


def first_departure(
    measured: Float[xr.DataArray, " step"], low: float, high: float, after: int | None = -1
) -> tuple[int, int] | None:
    """Where a curve first leaves the band `[low, high]`: the step, and +1 for upwards or -1 for downwards."""
    step = first_step((measured < low) | (measured > high), after)
    return None if step is None else (step, 1 if float(measured.sel(step=step)) > high else -1)


def step_of_maximum(
    measured: Float[xr.DataArray, " step"], after: int | None = -1, before: int | None = None
) -> int | None:
    """The step of the largest value after one step and, if given, before another; None when there is no such step."""
    if after is None:
        return None
    steps = measured.step.values
    inside = measured.values[(steps > after) & (steps < (np.inf if before is None else before))]
    if not len(inside) or np.isnan(inside).all():
        return None
    return int(steps[(steps > after) & (steps < (np.inf if before is None else before))][np.nanargmax(inside)])


class Stretch(NamedTuple):
    """The first and the last kept step of a stretch of training."""

    start: int
    end: int


def stretches(condition: Bool[xr.DataArray, " step"]) -> list[Stretch]:
    """Where a condition holds without a break, in order."""
    steps = condition.step.values
    edges = np.flatnonzero(np.diff(np.concatenate(([False], condition.values, [False])).astype(int)))
    return [Stretch(int(steps[a]), int(steps[b - 1])) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def longest_stay(measured: Float[xr.DataArray, " step"], level: float, tolerance: float) -> Stretch | None:
    """The longest stretch of steps, in ratio of end to start, that a curve spends within a tolerance of a level."""
    near = stretches(abs(measured - level) < tolerance)
    return max(near, key=lambda stretch: stretch.end / max(stretch.start, 1), default=None)


class Dwell(NamedTuple):
    """A head attends mostly to one block, for a while."""

    block: int
    start: int
    end: int


def dwells(mass: Float[xr.DataArray, "step block"], least: float = 0.5) -> list[Dwell]:
    """The stretches in which a head has so much of its attention on one block, in the order of their start.

    At a half blocks that share no position exclude each other. A stretch of a single snapshot counts.
    """
    found = [
        Dwell(block, *stretch)
        for block in range(mass.sizes["block"])
        for stretch in stretches(mass.isel(block=block) >= least)
    ]
    return sorted(found, key=lambda dwell: dwell.start)


def change_points(measured: Float[xr.DataArray, " step"], penalty: float = 6.0) -> list[int]:
    """Steps at which a curve changes its level or its trend: the first step of each straight piece but the first one.

    PELT (Killick et al. 2012) with the squared error of a straight line over the snapshots of each piece. Snapshots
    where the curve is NaN are left out.

    Args:
        penalty: what one more change must explain, in units of the noise variance times the log of the length; the
            noise is estimated from second differences, which no straight line has. The default sees a change in about
            one of a hundred curves of 60 to 100 snapshots that are noise alone. A change must also explain
            `LEAST_EXPLAINED` of what a single line leaves, so that a smooth curve without noise gives few of them.
    """
    steps, values = measured.step.values, np.asarray(measured.values, dtype=float)
    steps, values = steps[~np.isnan(values)], values[~np.isnan(values)]
    if len(values) < 2 * SHORTEST_PIECE:
        return []
    line = np.column_stack([values, np.arange(len(values)), np.ones(len(values))])
    unexplained = CostLinear().fit(line).error(0, len(values))
    if unexplained <= ROUNDING**2 * (values @ values):
        return []
    noise = np.median(np.abs(np.diff(values, n=2))) / (0.6745 * np.sqrt(6))  # second difference of Gaussians
    least = max(penalty * noise**2 * np.log(len(values)), LEAST_EXPLAINED * unexplained)
    ends = ruptures.Pelt(model="linear", min_size=SHORTEST_PIECE, jump=1).fit(line).predict(pen=least)
    return [int(steps[end]) for end in ends[:-1]]


def table(stages: Sequence[Stage]) -> list[dict[str, str | int | None]]:
    """Stages as rows for a report or JSON."""
    return [stage._asdict() for stage in stages]
