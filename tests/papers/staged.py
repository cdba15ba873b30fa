"""A trace made by hand, of three heads that learn three blocks one by one as arXiv 2602.19143 says."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from fd_interp.observation import Trace

STEPS = np.arange(0, 1001, 10)
RUNGS = np.array([2.8, 1.5, 1.0, 0.8])
"""Losses of the best predictors from no block to all three."""
LEARNED = (100, 300, 600)


def staged(learned: Sequence[int | None] = LEARNED) -> Trace:
    """The loss is on a rung at every step; each block is learned all at once, at its step or never.

    Head k takes block k when it is learned. Until then, and for ever if it never is, it attends to the first block.
    """
    is_known = STEPS[:, None] >= np.array([np.inf if step is None else step for step in learned])
    known = is_known.sum(1)
    excess = RUNGS[known][:, None] - RUNGS
    mass = np.full((len(STEPS), 1, 3, 3), 0.05)
    for head in range(3):
        mass[:, 0, head, 0] = np.where(is_known[:, head] & (head > 0), 0.05, 0.85)
        mass[:, 0, head, head] = np.where(is_known[:, head] | (head == 0), 0.85, 0.05)
    values = np.where(np.eye(3, dtype=bool), 10.0, -2.0) * is_known[:, None, None, :]
    per_head = ("step", "layer", "head", "block")
    return xr.Dataset(
        {
            "loss": ("step", RUNGS[known]),
            "excess_over_rung": (("step", "rung"), excess),
            "teacher_kl": (("step", "rung"), 0.1 + 0.5 * np.abs(known[:, None] - np.arange(4))),
            "effective_coefficient": (("step", "block"), is_known.astype(float)),
            "block_mass": (per_head, mass),
            "competition": (("step", "layer"), mass.min(2).max(-1)),
            "value_coefficient": (per_head, values),
            "cooperative_offset": (("step", "block"), -2.0 * is_known),
            "skip_cosine": (("step", "block"), np.tile([0.1, 0.9, 0.05], (len(STEPS), 1))),
        },
        coords={
            "step": STEPS,
            "layer": [0],
            "head": range(3),
            "block": range(3),
            "rung": range(4),
            "block_name": ("block", ["lag 3", "lag 1", "lag 2"]),
        },
    )


def off(trace: Trace, distance: float, start: int = 0, end: int = 1000) -> Trace:
    """The same with another loss on a stretch of steps, so much higher in relation to the rung that it stood on."""
    inside = (trace.step >= start) & (trace.step <= end)
    higher = trace.loss * xr.where(inside, 1 + distance, 1)
    return trace.assign(loss=higher, excess_over_rung=trace.excess_over_rung + higher - trace.loss)


def at(trace: Trace, variable: str, value: object, **where: object) -> Trace:
    """The same with other numbers in one variable at some places: an index, a slice or a list for each axis named."""
    changed = trace[variable].copy()
    changed[where] = value
    return trace.assign({variable: changed})


def from_step(step: int) -> slice:
    """The snapshots from a step on, by number."""
    return slice(int(np.searchsorted(STEPS, step)), None)
