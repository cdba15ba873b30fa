"""What the paper says happens, as claims."""

from itertools import pairwise

from fd_interp.claims import Claim, Evidence, Finding
from fd_interp.papers.focus_dilution.cycle import (
    CONDENSED,
    DILUTED,
    FOCUSED,
    FROZEN,
    NEW_DIRECTION,
    UNFOCUSED,
    cycle,
    growth_of_attention,
    most_focused_head,
)
from fd_interp.stages import first_step, longest_stay, step_of_maximum

PAPER = "arXiv 2605.01199"
"""Known to us by its abstract and by others' notes, from which its theorems are cited."""
NEAR = 0.03
"""Nats within which a loss counts as being at a baseline; the baselines of our chains are 0.17 and more apart."""


def _condensation(evidence: Evidence) -> Finding:
    step = first_step(evidence.trace.W_E_top_share > CONDENSED)
    at = evidence.trace.sel(step=evidence.trace.step[-1] if step is None else step)
    growth, cosine = growth_of_attention(at), float(at.W_E_frequency_cosine)
    holds = step is not None and growth < FROZEN and cosine > 0.95
    return Finding(holds, {"step": step, "W_Q growth": growth, "cosine": cosine})


def _focus(evidence: Evidence) -> Finding:
    events, head = cycle(evidence.trace), most_focused_head(evidence.trace)
    departed = events.departed
    numbers = {
        "departure": departed and departed[0],
        "direction (1 up, -1 down)": departed and departed[1],
        "highest focus ratio": float(head.focus_ratio.max()),
        "lowest": float(head.focus_ratio.min()),
    }
    return Finding(departed is not None and departed[1] > 0, numbers)


def _dilution(evidence: Evidence) -> Finding:
    events, head = cycle(evidence.trace), most_focused_head(evidence.trace)
    return Finding(
        events.diluted is not None,
        {
            "step": events.diluted,
            "rare focus at most": float(head.focus_ratio_rare.max()),
            "at least": float(head.focus_ratio_rare.min()),
        },
    )


def _new_direction(evidence: Evidence) -> Finding:
    events, rank = cycle(evidence.trace), evidence.trace.W_E_effective_rank
    rise = float(rank[-1] - rank.min())
    ratio = float(evidence.trace.W_E_singular_ratio[-1])
    holds = events.new_direction is not None and rise > 0.5
    return Finding(holds, {"step": events.new_direction, "effective rank rises by": rise, "s2/s1 at the end": ratio})


def _order(evidence: Evidence) -> Finding:
    """Every onset is looked for over the whole trace, so that the order is found and not presupposed."""
    trace, head = evidence.trace, most_focused_head(evidence.trace)
    onsets = {
        "condensed": first_step(trace.W_E_top_share > CONDENSED),
        "focused": first_step(head.focus_ratio > FOCUSED),
        "diluting": first_step(head.focus_ratio_rare < UNFOCUSED),
        "new direction": cycle(trace).new_direction,
    }
    happened = [step for step in onsets.values() if step is not None]
    holds = len(happened) == len(onsets) and all(a < b for a, b in pairwise(happened))
    return Finding(holds, onsets)


def _plateau(evidence: Evidence) -> Finding:
    stay = longest_stay(evidence.trace.excess_over_unigram, 0.0, NEAR)
    if stay is None:
        return Finding(False, {"from": None, "to": None})
    start, end = stay
    return Finding(start > 0 and end > 1.5 * start, {"from": start, "to": end})


def _bigram(evidence: Evidence) -> Finding:
    excess = float(evidence.trace.excess_over_best[-1])
    return Finding(abs(excess) < NEAR, {"excess over the bigram": excess, "loss": float(evidence.trace.loss[-1])})


CONDENSATION = Claim(
    "condensation",
    "The embedding condenses onto one direction, that of the token frequencies, while attention is frozen",
    f"{PAPER}, Thm. 3.2, stage I",
    f"top share of W_E > {CONDENSED} while W_Q has grown by < {FROZEN:.0%}, cosine with frequencies > 0.95",
    _condensation,
)
FOCUS = Claim(
    "focus",
    "Attention then moves to the most frequent token, that of frequent queries first and most",
    f"{PAPER}, Thm. 3.4, stage II",
    f"the focus ratio leaves [{UNFOCUSED}, {FOCUSED}] upwards after condensation",
    _focus,
)
DILUTION = Claim(
    "dilution",
    "Rare queries then turn away from the frequent tokens, whether they had turned to them or not",
    f"{PAPER}, Props. 3.6 to 3.8, stage III",
    f"focus ratio of rare queries < {DILUTED} after its peak",
    _dilution,
)
NEW_DIRECTIONS = Claim(
    "new-directions",
    "New embedding directions appear once the first is complete",
    f"{PAPER}, Thm. 3.9, stage IV",
    f"s2/s1 of W_E > {NEW_DIRECTION} after its top share's maximum, effective rank up by > 0.5",
    _new_direction,
)
ORDER = Claim(
    "order",
    "The stages come in order",
    PAPER,
    "condensed, then focused, then rare queries below their share, then a new direction",
    _order,
)
PLATEAU = Claim(
    "plateau",
    "The loss first rests at what the frequencies alone give",
    f"{PAPER}, theta_c^1",
    f"loss within {NEAR} nats of that of the token frequencies over steps whose end is > 1.5 times their start",
    _plateau,
)
BIGRAM = Claim(
    "bigram",
    "The loss ends near the optimum, the bigram",
    "exact",
    f"final loss within {NEAR} nats of the bigram's on the same sequences",
    _bigram,
)


def _text_focus(evidence: Evidence) -> Finding:
    head = most_focused_head(evidence.trace)
    condensed = first_step(evidence.trace.W_E_top_share > CONDENSED)
    peak = step_of_maximum(head.focus_ratio, condensed)
    highest = None if peak is None else float(head.focus_ratio.sel(step=peak))
    return Finding(highest is not None and highest > 1.5, {"peak at": peak, "highest focus ratio": highest})


TEXT_FOCUS = Claim(
    "focus",
    "Attention then moves to the ten most frequent tokens",
    f"{PAPER}, stage II, on text",
    "peak focus ratio > 1.5 after condensation",
    _text_focus,
)

ON_CHAINS = (CONDENSATION, FOCUS, DILUTION, NEW_DIRECTIONS, ORDER, PLATEAU, BIGRAM)
ON_TEXT = (CONDENSATION, TEXT_FOCUS, DILUTION, NEW_DIRECTIONS)
