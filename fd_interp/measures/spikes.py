"""Loss spikes: where a loss shoots up and, mostly, comes back (arXiv 2410.24050); the rule is ours."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fd_interp.config import InputError


class Spike(NamedTuple):
    """Steps in a row whose loss is far above what it was before."""

    start: int
    """Index of the first of them among the losses."""
    end: int
    """Index of the last."""
    highest: int
    """Index of the largest loss."""
    height: float
    """That loss."""
    ratio: float
    """That loss ÷ the median before `start`; infinite when the median is zero."""


def spikes(
    losses: Float[np.ndarray, " step"], window: int = 8, factor: float = 5.0, floor: float = 5e-3
) -> list[Spike]:
    """Where a loss exceeds both a floor and a multiple of the median of the losses right before; in order.

    Each loss is compared with the `window` ones before it, so that the first `window` are never flagged; flagged
    neighbours make one spike. The median forgets: of a rise that lasts, only the first `window / 2` losses (rounded up)
    are flagged, as one spike, and its end does not mean that the loss has come back. With a floor of 0 the places do
    not change with the unit of the loss.

    Args:
        factor: how many times the median a loss must exceed.
        floor: what it must exceed as well: near zero, losses jump by large factors without meaning anything.

    Raises:
        InputError: a loss is NaN, the window is empty or the factor at most 1.
    """
    if window < 1:
        raise InputError(f"the window must hold at least one loss, not {window}")
    if factor <= 1:
        raise InputError(f"the factor must be above 1, not {factor}")
    if np.isnan(losses).any():
        raise InputError(f"the loss at index {int(np.isnan(losses).argmax())} is NaN: give the losses before it")
    if len(losses) <= window:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(losses.astype(float), window)
    medians = np.concatenate([np.full(window, np.inf), np.median(windows[:-1], axis=-1)])
    flagged = (losses > factor * medians) & (losses > floor)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flagged, [False]])))
    return [_spike(losses, medians, int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _spike(losses: Float[np.ndarray, " step"], medians: Float[np.ndarray, " step"], start: int, end: int) -> Spike:
    highest = start + int(losses[start : end + 1].argmax())
    height, before = float(losses[highest]), float(medians[start])
    return Spike(start, end, highest, height, height / before if before else np.inf)
