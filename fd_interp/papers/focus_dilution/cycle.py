"""The events of a cycle in a trace, and the four stages made of them."""

from typing import NamedTuple

import numpy as np

from fd_interp.observation import Trace
from fd_interp.stages import Stage, first_departure, first_step, step_of_maximum

CONDENSED = 0.95
"""Top singular share of W_E from which it counts as condensed; a random start has 0.2 to 0.45."""
FROZEN = 0.15
"""Largest relative growth of W_Q at which attention counts as frozen; focus doubles it."""
FOCUSED = 1.1
"""Focus ratio from which attention counts as focused; where attention stays uniform it stays within 0.02 of one."""
UNFOCUSED = 0.9
"""Focus ratio below which attention counts as turned away from frequent tokens."""
DILUTED = 0.5
"""Focus ratio of rare queries below which they count as diluted."""
NEW_DIRECTION = 0.1
"""s_2 / s_1 of W_E from which a second direction counts as there."""


class Cycle(NamedTuple):
    """The steps at which one cycle's events happen; None for what never happened."""

    condensed: int | None
    departed: tuple[int, int] | None
    """Where the focus ratio first leaves [0.9, 1.1], and +1 for focus, -1 for anti-focus."""
    focused: int | None
    """The focus ratio rises above 1.1, whatever it did before."""
    focus_peak: int | None
    diluting: int | None
    """Rare queries fall clearly below their share after their highest focus, which may be slight."""
    diluted: int | None
    new_direction: int | None


def cycle(trace: Trace) -> Cycle:
    """The events of the first cycle in a trace of one seed; in a model of many heads, those of its most focused one."""
    head = most_focused_head(trace)
    condensed = first_step(trace.W_E_top_share > CONDENSED)
    departed = first_departure(head.focus_ratio, UNFOCUSED, FOCUSED, condensed)
    focused = first_step(head.focus_ratio > FOCUSED, condensed)
    rare_peak = step_of_maximum(head.focus_ratio_rare, condensed)
    diluting = first_step(head.focus_ratio_rare < UNFOCUSED, _later(focused, rare_peak))
    most_condensed = None if condensed is None else step_of_maximum(trace.W_E_top_share)
    return Cycle(
        condensed=condensed,
        departed=departed,
        focused=focused,
        focus_peak=None if focused is None else step_of_maximum(head.focus_ratio, after=focused - 1),
        diluting=diluting,
        diluted=first_step(head.focus_ratio_rare < DILUTED, diluting - 1 if diluting is not None else None),
        new_direction=first_step(trace.W_E_singular_ratio > NEW_DIRECTION, most_condensed),
    )


def most_focused_head(trace: Trace) -> Trace:
    """The trace of the layer and head whose focus ratio rises highest."""
    peaks = trace.focus_ratio.max("step")
    layer, head = np.unravel_index(int(np.nanargmax(peaks.values)), peaks.shape)
    return trace.isel(layer=layer, head=head)


def _later(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else max(first, second)


def stages(trace: Trace) -> list[Stage]:
    """The four stages of the first cycle, each from its onset to the onset of the next that began."""
    events, head, last = cycle(trace), most_focused_head(trace), int(trace.step[-1])
    starts = [
        ("I condensation", None if events.condensed is None else 0, _seen_condensation(trace, events)),
        ("II focus", events.focused, _seen_focus(head, events)),
        ("III dilution", events.diluting, _seen_dilution(head, events)),
        ("IV new directions", events.new_direction, _seen_directions(trace, events)),
    ]
    begun = [start for _, start, _ in starts if start is not None]
    return [
        Stage(name, start, None if start is None else min((s for s in begun if s > start), default=last), seen)
        for name, start, seen in starts
    ]


def _seen_condensation(trace: Trace, events: Cycle) -> str:
    if events.condensed is None:
        return f"top share of W_E never above {CONDENSED}, at most {float(trace.W_E_top_share.max()):.2f}"
    at = trace.sel(step=events.condensed)
    return (
        f"top share of W_E above {CONDENSED} at step {events.condensed}, W_Q grown by {growth_of_attention(at):.1%}, "
        f"cosine with frequencies {float(at.W_E_frequency_cosine):.3f}"
    )


def _seen_focus(head: Trace, events: Cycle) -> str:
    if events.condensed is None:
        return "not looked for, because W_E never condensed"
    if events.departed is None:
        return f"focus ratio stayed in [{UNFOCUSED}, {FOCUSED}] after condensation"
    step, direction = events.departed
    before = ""
    if direction < 0:
        lowest = float(head.focus_ratio.sel(step=slice(step, events.focused)).min())
        before = f"anti-focus first: attention leaves the frequent tokens at step {step}, down to {lowest:.2f}; "
    if events.focused is None:
        return f"{before}focus ratio never above {FOCUSED}"
    return f"{before}focus ratio above {FOCUSED} at step {events.focused}, at most {float(head.focus_ratio.max()):.2f}"


def _seen_dilution(head: Trace, events: Cycle) -> str:
    rare = head.focus_ratio_rare
    if events.diluting is None:
        return f"rare queries did not fall below {UNFOCUSED} of their share"
    reached = "" if events.diluted is None else f", below {DILUTED} at step {events.diluted}"
    below = f"rare queries below {UNFOCUSED} of their share at step {events.diluting}{reached}"
    return f"{below}, at least {float(rare.min()):.2f}"


def _seen_directions(trace: Trace, events: Cycle) -> str:
    rank = trace.W_E_effective_rank
    ranks = f"effective rank {float(rank.min()):.2f} to {float(rank[-1]):.2f}"
    if events.condensed is None:
        return f"not looked for, because W_E never condensed, {ranks}"
    if events.new_direction is None:
        return f"s2/s1 of W_E did not rise above {NEW_DIRECTION} after condensation, {ranks}"
    return f"s2/s1 of W_E above {NEW_DIRECTION} at step {events.new_direction}, {ranks}"


def growth_of_attention(at: Trace) -> float:
    """Largest relative growth of W_Q in any layer and head, at one step."""
    return float(at.W_Q_norm_change.max())
