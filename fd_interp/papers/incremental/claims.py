"""What the paper says happens, as claims about one seed's trace."""

from itertools import pairwise

import numpy as np

from fd_interp.claims import Claim, Evidence, Finding
from fd_interp.papers.incremental.acquisition import (
    AT_RUNG,
    LEAST_LEARNED,
    acquisitions,
    competitive_interval,
    flattest_steps,
    nearest_rung,
    off_rung,
)

PAPER = "arXiv 2602.19143"
"""Known to us by its abstract, reviews, figures and code; the text of its theorems is not."""
LEARNED = 0.01
"""The same for the end of training."""
STOPPED = 0.05
"""The same for models that stop early: one pattern can mix lags, and then does a little better than its rung."""
LEAST_COMPETITION = 30
"""Steps that a competitive phase lasts at least."""
WITHIN = 0.3
"""Share of the latest detector's step by which they may differ and still agree."""
OWN = 0.5
"""Attention on its top block from which a head has that block."""
OFFSET = 0.1
"""Share of a feature's largest coefficient that a negative one must have to count."""

LAG_1 = "lag 1"
ALONG_SKIP = 0.5
"""Cosine with a feature from which the skip connection counts as holding it."""


def _order(evidence: Evidence) -> Finding:
    steps = [acquired.by_coefficient for acquired in acquisitions(evidence.trace)]
    happened = [step for step in steps if step is not None]
    holds = len(happened) == len(steps) and all(a < b for a, b in pairwise(happened))
    return Finding(holds, {f"block {number + 1}": step for number, step in enumerate(steps)})


def _detectors(evidence: Evidence) -> Finding:
    """Not of the first block: it is learned while everything changes from the very start, within a few snapshots."""
    acquired = acquisitions(evidence.trace)
    apart = [(max(one.seen) - min(one.seen)) / max(max(one.seen), 1) if one.seen else None for one in acquired]
    complete = len(acquired) > 1 and all(len(one.seen) == len(one) for one in acquired)
    close = all(share is not None and share <= WITHIN for share in apart[1:])
    return Finding(complete and close, {f"block {number} apart": share for number, share in enumerate(apart, start=1)})


def _competition(evidence: Evidence) -> Finding:
    phase = competitive_interval(evidence.trace)
    if phase is None:
        return Finding(False, {"from": None, "to": None})
    within = evidence.trace.sel(step=slice(phase.start, phase.end))
    first = bool((within.block_mass.isel(layer=0).argmax("block") == 0).all())
    numbers = {"from": phase.start, "to": phase.end, "competition index": float(within.competition.max())}
    return Finding(first and phase.end - phase.start >= LEAST_COMPETITION, numbers)


def _plateaus(evidence: Evidence) -> Finding:
    trace = evidence.trace
    distances = {
        f"rung {known} off": None if step is None else float(off_rung(trace, known).sel(step=step))
        for known, step in enumerate(flattest_steps(trace), start=1)
    }
    on_rungs = [distance is not None and abs(distance) < AT_RUNG for distance in distances.values()]
    return Finding(bool(on_rungs) and all(on_rungs), distances)


def _final(evidence: Evidence) -> Finding:
    trace = evidence.trace
    off = float(off_rung(trace, trace.sizes["rung"] - 1)[-1])
    return Finding(off < LEARNED, {"above the full model's": off, "loss": float(trace.loss[-1])})


def _solved(evidence: Evidence) -> Finding:
    share = float(evidence.trace.loss[-1] / evidence.trace.loss[0])
    return Finding(share < LEARNED, {"share of the loss left": share})


def _permutation(evidence: Evidence) -> Finding:
    mass = evidence.trace.block_mass.isel(step=-1, layer=-1)
    distinct, least = len(set(mass.argmax("block").values.tolist())), float(mass.max("block").min())
    holds = distinct == mass.sizes["head"] == mass.sizes["block"] and least > OWN
    return Finding(holds, {"different blocks": distinct, "least top mass": least})


def _offsets(evidence: Evidence) -> Finding:
    """In units of the feature's largest coefficient in any head, so that a strong feature does not count more.

    Of a feature that is not learned the coefficients are small and of any sign, and say nothing.
    """
    end = evidence.trace.isel(step=-1)
    offset = end.cooperative_offset / end.value_coefficient.isel(layer=0).max("head")
    offset = offset.where(end.effective_coefficient > LEAST_LEARNED)
    lowest = float(offset.min()) if bool(np.isfinite(offset).any()) else None
    return Finding(lowest is not None and lowest < -OFFSET, {"lowest offset": lowest})


def _rung_of_heads(evidence: Evidence) -> Finding:
    trace = evidence.trace
    expected = min(trace.sizes["head"], trace.sizes["block"])
    reached = int(nearest_rung(trace)[-1])
    off = float(off_rung(trace, expected)[-1])
    numbers = {"heads": trace.sizes["head"], "rung": reached, "off": off}
    return Finding(reached == expected and abs(off) < STOPPED, numbers)


def _rung_one(evidence: Evidence) -> Finding:
    off = off_rung(evidence.trace, 1)
    spread = float((evidence.trace.block_mass.max("head") - evidence.trace.block_mass.min("head")).max())
    numbers = {"lowest off": float(off.min()), "heads differ by": spread}
    return Finding(float(off.min()) > -STOPPED and spread == 0, numbers)


def _skip(evidence: Evidence) -> Finding:
    cosines = evidence.trace.skip_cosine.isel(step=-1)
    names = [str(name) for name in evidence.trace.block_name.values]
    numbers = dict(zip(names, cosines.values.tolist(), strict=True))
    held = max(numbers, key=lambda name: numbers[name])
    others = [abs(cosine) for name, cosine in numbers.items() if name != held]
    holds = numbers[held] > ALONG_SKIP and all(other < ALONG_SKIP / 2 for other in others)
    return Finding(holds and (held == LAG_1 or LAG_1 not in numbers), numbers)


ORDER = Claim(
    "order",
    "Blocks are learned in the order of their importance, whatever their distance",
    f"{PAPER}, abstract, Figs. 1 and 8",
    "half of each block's coefficient E_kk is there later than half of the one before",
    _order,
)
DETECTORS = Claim(
    "detectors",
    "Loss, KL to truncated teachers, and the coefficient of the features see each block at about the same step",
    f"{PAPER}, stages",
    f"all three see every block, and from the second on within {WITHIN:.0%} of the latest",
    _detectors,
)
COMPETITION = Claim(
    "competition",
    "All heads first take the most important block, and the loss rests at what it alone tells",
    f"{PAPER}, competitive phase",
    f"for {LEAST_COMPETITION} steps every head's top block is the first, loss within {AT_RUNG:.0%} of rung 1",
    _competition,
)
PLATEAUS = Claim(
    "plateaus",
    "Each plateau is about the best predictor from the blocks learned so far; a mixed pattern may do slightly better",
    f"{PAPER}, misspecified models",
    f"at its flattest step the loss is within {AT_RUNG:.0%} of the rung, for every rung but the last",
    _plateaus,
)
FINAL = Claim(
    "final",
    "In the end the whole law is learned",
    "exact",
    f"final loss less than {LEARNED:.0%} above that of the law on the same sequences",
    _final,
)
SOLVED = Claim(
    "solved",
    "In the end everything is learned",
    "exact",
    f"final loss less than {LEARNED:.0%} of the first",
    _solved,
)
PERMUTATION = Claim(
    "permutation",
    "In the end each head attends most to a block of its own, though the last may stay divided",
    f"{PAPER}, cooperative phase",
    f"the heads' top blocks are a permutation of the blocks, each with more than {OWN} of its head's attention",
    _permutation,
)
OFFSETS = Claim(
    "offsets",
    "Heads hold features of other heads with a negative sign, which cancels cross terms",
    f"{PAPER}, Sec. 3.3",
    f"some learned feature is held at less than -{OFFSET:.0%} of its largest coefficient by a head without its block",
    _offsets,
)
RUNG_OF_HEADS = Claim(
    "rung-of-heads",
    "H heads learn min(H, h) of h blocks",
    f"{PAPER}, our derivation",
    f"at the end the nearest rung is min(H, h), and the loss within {STOPPED:.0%} of it",
    _rung_of_heads,
)
RUNG_ONE = Claim(
    "rung-one",
    "Heads that start alike stay alike, and never get beyond the first block",
    f"{PAPER}, Fig. 4",
    f"the loss never falls {STOPPED:.0%} below rung 1, and no head differs from another at any step",
    _rung_one,
)
SKIP = Claim(
    "skip",
    "With a skip connection lag 1, the query's own token, is learned through it and not by a head",
    f"{PAPER}, Fig. 2; later code of its authors leaves that lag out",
    f"W_E W_U has a cosine > {ALONG_SKIP} with the feature of lag 1 and < {ALONG_SKIP / 2} with any other",
    _skip,
)
