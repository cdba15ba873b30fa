"""Focus and dilution (arXiv 2605.01199): the settings, the stages of a cycle, its claims, and their controls.

The paper's persistence, context, width and learning rate are not known to us; persistence 0.5, 32 tokens, width 16 and
gradient descent at 0.2 from a normal initialisation of 0.01 are our choice.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fd_interp.claims import Claim, Evidence, Finding
from fd_interp.models.config import OneLayer, Transformer
from fd_interp.observe import Probe, Trace
from fd_interp.probes.condensation import EMBEDDING_CONDENSATION
from fd_interp.probes.focus import frequency_focus
from fd_interp.probes.prediction import excess_loss, held_out_loss
from fd_interp.probes.redistribution import REDISTRIBUTION
from fd_interp.stages import Stage, first_departure, first_step, longest_stay, step_of_maximum
from fd_interp.tasks.markov import MarkovChain
from fd_interp.tasks.text import TextCorpus
from fd_interp.training.run import SGD, AdamW, Keep, LogSpaced, Run, Training

PAPER = "arXiv 2605.01199"
TITLE = "Focus and dilution: the multi-stage learning process of attention"

CONDENSED = 0.95
"""Top singular share of W_E from which it counts as condensed; a random start has about 0.2."""
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
NEAR = 0.03
"""Nats within which a loss counts as being at a baseline; the baselines are 0.17 and more apart."""

TOP_TOKENS_OF_TEXT = 10


def _synthetic(task: MarkovChain, *, steps: int, batch_size: int) -> Run:
    return Run(
        task=task,
        model=OneLayer(),
        training=Training(optimizer=SGD(lr=0.2), steps=steps, batch_size=batch_size, loss_on="last"),
        keep=Keep(at=LogSpaced(count=80)),
    )


ZIPF = _synthetic(MarkovChain.zipf(8), steps=4500, batch_size=128)
PAPER_PI = _synthetic(MarkovChain.paper(), steps=3000, batch_size=256)
RESIDUAL = ZIPF.model_copy(
    update={"model": Transformer(std=1e-2), "training": ZIPF.training.model_copy(update={"steps": 2500})}
)
TEXT = Run(
    task=TextCorpus(source="roneneldan/TinyStories", max_documents=20_000),
    model=OneLayer(d_model=32, d_head=32),
    training=Training(optimizer=SGD(lr=1.0, momentum=0.9), steps=1000, batch_size=64, loss_on="all"),
    keep=Keep(at=LogSpaced(count=60), held_out=256),
)

SETTINGS: dict[str, Run] = {
    "focus-dilution": ZIPF,
    "focus-dilution-paper": PAPER_PI,
    "focus-dilution-adam": ZIPF.model_copy(
        update={"training": Training(optimizer=AdamW(lr=1e-3), steps=2000, batch_size=128, loss_on="last")}
    ),
    "focus-dilution-transformer": RESIDUAL,
    "focus-dilution-multihead": RESIDUAL.model_copy(
        update={
            "model": Transformer(n_layers=2, n_heads=4, d_head=8, d_model=32, d_mlp=64, normalization_type="LN"),
            "training": Training(optimizer=AdamW(lr=1e-3), steps=2000, batch_size=128, loss_on="all"),
        }
    ),
    "focus-dilution-text": TEXT,
}


def probes(run: Run) -> list[Probe]:
    """What is measured at every snapshot of a run of this paper."""
    top = TOP_TOKENS_OF_TEXT if isinstance(run.task, TextCorpus) else 1
    loss_on = run.training.loss_on
    return [
        EMBEDDING_CONDENSATION,
        frequency_focus(top),
        REDISTRIBUTION,
        held_out_loss(loss_on),
        excess_loss(run.task, loss_on),
    ]


class Cycle(NamedTuple):
    """The steps at which one cycle's events happen; None for what never happened."""

    condensed: int | None
    departed: tuple[int, int] | None
    """Where the focus ratio first leaves [0.9, 1.1], and +1 for focus, -1 for anti-focus."""
    focus_peak: int | None
    diluting: int | None
    """Rare queries fall below their share after having been focused."""
    diluted: int | None
    new_direction: int | None


def cycle(trace: Trace) -> Cycle:
    """The events of the first cycle in a trace of one seed; in a model of many heads, those of its most focused one."""
    head = most_focused_head(trace)
    condensed = first_step(trace.W_E_top_share > CONDENSED)
    departed = first_departure(head.focus_ratio, UNFOCUSED, FOCUSED, condensed)
    focused = departed[0] if departed and departed[1] > 0 else None
    rare_peak = step_of_maximum(head.focus_ratio_rare, condensed)
    diluting = first_step(head.focus_ratio_rare < 1, _later(focused, rare_peak))
    most_condensed = None if condensed is None else step_of_maximum(trace.W_E_top_share)
    return Cycle(
        condensed=condensed,
        departed=departed,
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
    focused = events.departed[0] if events.departed and events.departed[1] > 0 else None
    starts = [
        ("I condensation", None if events.condensed is None else 0, _seen_condensation(trace, events)),
        ("II focus", focused, _seen_focus(head, events)),
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
        f"top share of W_E above {CONDENSED} at step {events.condensed}, W_Q grown by {_growth(at):.1%}, "
        f"cosine with frequencies {float(at.W_E_frequency_cosine):.3f}"
    )


def _seen_focus(head: Trace, events: Cycle) -> str:
    if events.departed is None:
        return f"focus ratio stayed in [{UNFOCUSED}, {FOCUSED}] after condensation"
    step, direction = events.departed
    if direction < 0:
        low = float(head.focus_ratio.min())
        return f"anti-focus: attention leaves the frequent tokens at step {step}, down to {low:.2f} of their share"
    return f"focus ratio above {FOCUSED} at step {step}, at most {float(head.focus_ratio.max()):.2f}"


def _seen_dilution(head: Trace, events: Cycle) -> str:
    rare = head.focus_ratio_rare
    if events.diluting is None:
        return "rare queries did not fall below their share"
    reached = "" if events.diluted is None else f", below {DILUTED} at step {events.diluted}"
    return f"rare queries below their share at step {events.diluting}{reached}, at least {float(rare.min()):.2f}"


def _seen_directions(trace: Trace, events: Cycle) -> str:
    rank = trace.W_E_effective_rank
    ranks = f"effective rank {float(rank.min()):.2f} to {float(rank[-1]):.2f}"
    if events.new_direction is None:
        return f"s2/s1 of W_E did not rise above {NEW_DIRECTION} after condensation, {ranks}"
    return f"s2/s1 of W_E above {NEW_DIRECTION} at step {events.new_direction}, {ranks}"


def _growth(at: Trace) -> float:
    return float(at.W_Q_norm_change.max())


def _condensation(evidence: Evidence) -> Finding:
    step = first_step(evidence.trace.W_E_top_share > CONDENSED)
    at = evidence.trace.sel(step=evidence.trace.step[-1] if step is None else step)
    growth, cosine = _growth(at), float(at.W_E_frequency_cosine)
    holds = step is not None and growth < FROZEN and cosine > 0.95
    return Finding(holds, {"step": step, "W_Q growth": growth, "cosine": cosine})


def _focus(evidence: Evidence) -> Finding:
    events, head = cycle(evidence.trace), most_focused_head(evidence.trace)
    departed = events.departed
    numbers = {
        "departs at": departed and departed[0],
        "upwards (1) or downwards (-1)": departed and departed[1],
        "highest focus ratio": float(head.focus_ratio.max()),
        "lowest": float(head.focus_ratio.min()),
    }
    return Finding(departed is not None and departed[1] > 0, numbers)


def _dilution(evidence: Evidence) -> Finding:
    events, head = cycle(evidence.trace), most_focused_head(evidence.trace)
    return Finding(
        events.diluted is not None, {"step": events.diluted, "lowest rare focus": float(head.focus_ratio_rare.min())}
    )


def _new_direction(evidence: Evidence) -> Finding:
    events, rank = cycle(evidence.trace), evidence.trace.W_E_effective_rank
    rise = float(rank[-1] - rank.min())
    ratio = float(evidence.trace.W_E_singular_ratio[-1])
    holds = events.new_direction is not None and rise > 0.5
    return Finding(holds, {"step": events.new_direction, "effective rank rises by": rise, "s2/s1 at the end": ratio})


def _order(evidence: Evidence) -> Finding:
    events = cycle(evidence.trace)
    focused = events.departed and events.departed[0]
    steps = [events.condensed, focused, events.diluting, events.new_direction]
    happened = [step for step in steps if step is not None]
    holds = len(happened) == len(steps) and all(a <= b for a, b in zip(steps, steps[1:], strict=False))
    names = ("condensed", "focused", "diluting", "new direction")
    return Finding(holds, dict(zip(names, steps, strict=True)))


def _plateau(evidence: Evidence) -> Finding:
    stay = longest_stay(evidence.trace.excess_over_unigram, 0.0, NEAR)
    ratio = None if stay is None else stay[1] / max(stay[0], 1)
    return Finding(ratio is not None and ratio > 1.5, {"from": stay and stay[0], "to": stay and stay[1]})


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
    "Attention then moves to the most frequent tokens",
    f"{PAPER}, Thm. 3.4, stage II",
    f"the focus ratio leaves [{UNFOCUSED}, {FOCUSED}] upwards after condensation",
    _focus,
)
DILUTION = Claim(
    "dilution",
    "Rare queries then turn away from the frequent tokens",
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
    f"within {NEAR} nats of the token frequencies, on the same sequences, over a stretch of steps whose end is > 1.5 times its start",
    _plateau,
)
BIGRAM = Claim(
    "bigram",
    "The model ends at the optimum, the bigram",
    "exact",
    f"final loss within {NEAR} nats of the bigram's on the same sequences",
    _bigram,
)
CLAIMS = (CONDENSATION, FOCUS, DILUTION, NEW_DIRECTIONS, ORDER, PLATEAU, BIGRAM)


@dataclass(frozen=True)
class Control:
    """A run that lacks what a claim needs, so that the claim must fail on it."""

    name: str
    taken_away: str
    run: Run
    must_fail: tuple[Claim, ...]


def _with(run: Run, **update: object) -> Run:
    return Run(**{**run.model_dump(), **update})


CONTROLS = (
    Control("persistence-0", "tokens are independent", _with(ZIPF, task=MarkovChain.zipf(8, persistence=0.0)), (FOCUS,)),
    Control(
        "symmetric-low",
        "all tokens but one are equally frequent",
        _with(ZIPF, task=MarkovChain.symmetric_low(4, 0.55)),
        (NEW_DIRECTIONS,),
    ),
    Control("uniform", "no token is frequent", _with(ZIPF, task=MarkovChain.uniform(8)), (CONDENSATION, FOCUS)),
    Control(
        "frozen-attention",
        "W_Q and W_K are held at their start",
        _with(ZIPF, model=OneLayer(fixed={"W_V": "identity", "W_O": "identity", "W_Q": "init", "W_K": "init"})),
        (FOCUS, DILUTION),
    ),
    Control(
        "residual",
        "the standard transformer, whose residual stream learns the bigram directly",
        RESIDUAL,
        (FOCUS, DILUTION),
    ),
    Control(
        "anti-focus",
        "frequent tokens are followed by rare ones (S < 0)",
        _with(ZIPF, task=MarkovChain.antitone(ZIPF.task.pi)),
        (FOCUS,),
    ),
)
