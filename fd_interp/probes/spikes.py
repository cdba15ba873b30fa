"""Where the loss of a run spikes, and what its snapshots around each spike say of why (arXiv 2410.24050)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from fd_interp.config import InputError
from fd_interp.measures.spikes import Spike, spikes
from fd_interp.observation import Probe, Trace, observe
from fd_interp.training.series import Series
from fd_interp.training.state import losses_of

EPOCH = 64
"""Steps of an epoch in the paper: 2048 sequences in batches of 32."""
WHEN = ("before", "at", "after")
CLEAR = 10
"""Windows between a quiet one and every spike."""


class LossSpike(NamedTuple):
    """A spike of the training loss, averaged over windows, and the kept snapshots around it."""

    start: int
    """Steps taken when its first window began."""
    end: int
    """Steps taken when its last window ended."""
    height: float
    """Largest mean over a window."""
    ratio: float
    """That ÷ the median of the windows before."""
    before: int | None
    """Step of the last snapshot that is a window or more older than the spike, since windows say late that it begins.
    """
    at: int | None
    """Step of the snapshot within the spike round which the training loss is highest; None where none was kept."""
    after: int | None
    """Step of the first snapshot at its end or later."""


def training_losses(series: Series) -> np.ndarray:
    """The loss of each training step.

    Raises:
        InputError: it is somebody's checkpoint, and no run directory.
    """
    if series.run is None:
        raise InputError(f"{series.name} is a checkpoint: only a run directory has the losses in which to find spikes")
    return np.array(losses_of(Path(series.name)))


def window_means(losses: Float[np.ndarray, " step"], window_steps: int = EPOCH) -> Float[np.ndarray, " window"]:
    """Mean loss over windows of so many steps; an incomplete last one is left out.

    Raises:
        InputError: a window has no step.
    """
    if window_steps < 1:
        raise InputError(f"a window must have at least one step, not {window_steps}")
    whole = len(losses) // window_steps
    return losses[: whole * window_steps].reshape(whole, window_steps).mean(1)


def loss_spikes(
    losses: Float[np.ndarray, " step"],
    kept: Sequence[int],
    window_steps: int = EPOCH,
    factor: float = 5.0,
    floor: float = 5e-3,
) -> list[LossSpike]:
    """The spikes of a training loss, in order, each with the snapshots around it.

    Args:
        losses: of each training step.
        kept: steps of the snapshots, in order.
        factor: how many times the median of the eight windows before a window's loss must exceed.
        floor: what it must exceed as well.
    """
    found = spikes(window_means(losses, window_steps), factor=factor, floor=floor)
    return [_with_snapshots(spike, losses, np.asarray(kept), window_steps) for spike in found]


def _with_snapshots(spike: Spike, losses: np.ndarray, kept: np.ndarray, window_steps: int) -> LossSpike:
    start, end = spike.start * window_steps, (spike.end + 1) * window_steps
    earlier, within, later = kept[kept <= start - window_steps], kept[(kept > start) & (kept <= end)], kept[kept >= end]
    near = max(window_steps // 4, 1)
    around = [losses[max(step - near, 0) : step + near].mean() for step in within]
    return LossSpike(
        start,
        end,
        spike.height,
        spike.ratio,
        before=int(earlier[-1]) if len(earlier) else None,
        at=int(within[int(np.argmax(around))]) if len(within) else None,
        after=int(later[0]) if len(later) else None,
    )


def quiet_windows(
    losses: Float[np.ndarray, " step"],
    kept: Sequence[int],
    most: int,
    seed: int = 0,
    window_steps: int = EPOCH,
    factor: float = 5.0,
    floor: float = 5e-3,
) -> list[LossSpike]:
    """The control: windows where nothing spikes, in the form of spikes, in order; at most so many, drawn at random.

    Their loss is below the floor, so that a spike could be seen, and they are `CLEAR` windows from every spike.
    """
    means = window_means(losses, window_steps)
    calm = means < floor
    calm[:CLEAR] = False  # there must be something before
    for spike in spikes(means, factor=factor, floor=floor):
        calm[max(spike.start - CLEAR, 0) : spike.end + CLEAR + 1] = False
    places = np.flatnonzero(calm)
    drawn = np.sort(np.random.default_rng(seed).choice(places, min(most, len(places)), replace=False)).tolist()
    alike = [Spike(place, place, place, float(means[place]), 1.0) for place in drawn]
    return [_with_snapshots(window, losses, np.asarray(kept), window_steps) for window in alike]


def highest(found: Sequence[LossSpike], most: int) -> list[LossSpike]:
    """The highest spikes, at most so many, in order."""
    if most < 1:
        raise InputError(f"at least one spike must be looked at, not {most}")
    return sorted(sorted(found, key=lambda spike: -spike.height)[:most])


def observe_spikes(
    series: Series, probes: Sequence[Probe], found: Sequence[LossSpike], *, show_progress: bool = False
) -> Trace:
    """The trace of the snapshots around the spikes alone, with the spikes (axis `spike`) as variables.

    Without spikes there is no step in it, and no variable of the probes.
    """
    steps = {step for spike in found for step in (spike.before, spike.at, spike.after) if step is not None}
    around = replace(series, snapshots=tuple(series.at(step) for step in sorted(steps)))
    trace = observe(around, probes, show_progress=show_progress) if steps else xr.Dataset(coords={"step": []})
    return trace.assign_attrs(series=series.name).assign(
        {
            f"spike_{name}": ("spike", np.array([getattr(spike, name) for spike in found], dtype=float))
            for name in LossSpike._fields
        }
    )


def spike_table(trace: Trace, weight: str) -> pd.DataFrame:
    """One row a spike: the fields of `LossSpike`, and what each probe measured before, at and after it.

    A measurement is a column for each of these (`sharpness_before`); NaN where no snapshot was kept. Of what has a
    value for each weight, the column is that of `weight`; of what has one for each layer, the smallest of smallest
    norms and the largest of others; what has more axes is left out. `sharpness_ratio` is that at the spike ÷ before.
    """
    columns = {name: trace[f"spike_{name}"].values for name in LossSpike._fields}
    measured = {str(name): of_step for name, of_step in trace.items() if "step" in of_step.dims}
    for name, of_step in measured.items():
        numbers = _one_a_step(of_step, weight)
        columns |= {f"{name}_{when}": _at(numbers, columns[when]) for when in WHEN if numbers is not None}
    if "sharpness" in measured:
        columns["sharpness_ratio"] = columns["sharpness_at"] / columns["sharpness_before"]
    return pd.DataFrame(columns)


def _one_a_step(of_step: xr.DataArray, weight: str) -> xr.DataArray | None:
    match of_step.dims:
        case ("step",):
            return of_step
        case ("step", "layer"):
            return of_step.min("layer") if of_step.name == "smallest_norm" else of_step.max("layer")
        case ("step", "weight") if weight in of_step.weight_name.values:
            return of_step.isel(weight=list(of_step.weight_name.values).index(weight))
    return None


def _at(numbers: xr.DataArray, steps: Float[np.ndarray, " spike"]) -> Float[np.ndarray, " spike"]:
    """The number of each step; NaN for no step."""
    of_step = dict(zip(numbers.step.values.tolist(), numbers.values.tolist(), strict=True))
    return np.array([of_step[step] if np.isfinite(step) else np.nan for step in steps], dtype=float)
