"""When things happen in a trace: onsets, plateaus and change points, and the stages made of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import ruptures
import xarray as xr
from jaxtyping import Bool, Float


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


def longest_stay(measured: Float[xr.DataArray, " step"], level: float, tolerance: float) -> tuple[int, int] | None:
    """The longest stretch of steps, in ratio of end to start, that a curve spends within a tolerance of a level."""
    steps = measured.step.values
    inside = np.abs(measured.values - level) < tolerance
    edges = np.flatnonzero(np.diff(np.concatenate(([False], inside, [False])).astype(int)))
    stretches = [(int(steps[a]), int(steps[b - 1])) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return max(stretches, key=lambda stretch: stretch[1] / max(stretch[0], 1), default=None)


def change_points(measured: Float[xr.DataArray, " step"], penalty: float = 3.0) -> list[int]:
    """Steps at which the level of a curve changes, by PELT with a squared-error cost (Killick et al. 2012).

    Args:
        penalty: what one more change must explain, in units of the noise variance times the log of the length; the
            noise is estimated from successive differences, so that a curve with smooth drifts yields few changes.
    """
    values = np.asarray(measured.values, dtype=float)
    if len(values) < 4:
        return []
    noise = np.median(np.abs(np.diff(values))) / 0.954  # of differences of two Gaussians: 0.6745 * sqrt(2)
    if noise == 0:
        noise = np.finfo(float).eps + np.abs(np.diff(values)).mean() / len(values)
    ends = ruptures.Pelt(model="l2", min_size=2, jump=1).fit(values).predict(pen=penalty * noise**2 * np.log(len(values)))
    return [int(measured.step.values[end]) for end in ends[:-1]]


def table(stages: Sequence[Stage]) -> list[dict[str, str | int | None]]:
    """Stages as rows for a report or JSON."""
    return [stage._asdict() for stage in stages]
