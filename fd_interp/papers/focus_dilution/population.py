"""What the theory predicts for a run: its own start, followed by the population loss instead of batches."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fd_interp.claims import Claim, Evidence, Finding
from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights
from fd_interp.models.config import OneLayer
from fd_interp.observation import Trace
from fd_interp.papers.focus_dilution.claims import PAPER
from fd_interp.tasks.markov import MarkovChain
from fd_interp.theory import focus_dilution as theory
from fd_interp.training.run import SGD, LogSpaced, Run

STEPS = 20_000
"""Steps of population descent, which costs little; on Zipf's law some starts then still rest 0.03 above the bigram."""
SMALL = 1e-3
"""Initial std of the flow whose rates are compared with the closed forms, which are those of its limit zero."""
TOLERANCE = 0.1
"""Relative error at which a rate counts as predicted."""


class Descent(NamedTuple):
    """The population descent that a run approximates."""

    chain: MarkovChain
    lr: float
    attn_scale: float


def descent_of(run: Run) -> Descent | None:
    """None where the theory does not apply.

    It does for one head with no weight held but W_V and W_O at the identity, and plain gradient descent.
    """
    task, model, optimizer = run.task, run.model, run.training.optimizer
    if not isinstance(task, MarkovChain) or not isinstance(model, OneLayer) or not isinstance(optimizer, SGD):
        return None
    if model.n_heads > 1 or model.fixed != OneLayer().fixed or optimizer.momentum or optimizer.lrs:
        return None
    return Descent(task, optimizer.lr, model.attn_scale)


def predicted(run: Run, seeds: Sequence[int], *, steps: int = STEPS) -> list[Trace]:
    """Population descent from the start and with the rate of each seed's run.

    Empty where the theory does not apply, and where the descent diverges at the run's learning rate.
    """
    descent = descent_of(run)
    if descent is None:
        return []
    start = theory.PopulationWeights.stack([start_of(run, seed) for seed in seeds])
    kept = (step for step in run.kept_steps() if step <= steps)
    keep = sorted({0, steps, *kept, *LogSpaced(count=100).steps_until(steps)})
    try:
        trace = theory.descend(start, descent.chain, lr=descent.lr, keep=keep, attn_scale=descent.attn_scale)
    except InputError:
        return []
    return [trace.isel(seed=index) for index in range(len(seeds))]


def start_of(run: Run, seed: int, **model_fields: float) -> theory.PopulationWeights:
    """The weights with which the run of a seed begins, or would begin with other fields of its model."""
    model = run.model.model_copy(update=model_fields)
    like = lens.weights(build(model, run.task.d_vocab, run.task.n_ctx, run.torch_dtype))
    generator = run.model_copy(update={"seed": seed}).generator("init")
    return theory.PopulationWeights.of(initial_weights(model, like, generator))


def flows(run: Run, seeds: Sequence[int], *, steps: int = 1500) -> list[Trace]:
    """The gradient flow from a small start, integrated by SciPy: for the rates of the first two stages."""
    descent = descent_of(run)
    if descent is None:
        return []
    settings = {"lr": descent.lr, "keep": range(0, steps + 1, 5), "attn_scale": descent.attn_scale}
    return [theory.flow(start_of(run, seed, std=SMALL), descent.chain, **settings) for seed in seeds]


def rate_claims(run: Run) -> list[Claim]:
    """The rates of condensation and focus in the flow against their closed forms."""
    descent = descent_of(run)
    if descent is None:
        return []
    chain, lr, attn_scale = descent
    c = theory.focus_rate(chain, attn_scale=attn_scale)
    return [
        _rate_claim("condensation", "|pi| |pi - u|", theory.condensation_rate(chain), lr, condensation_rate),
        _rate_claim("focus", "c", c, lr, focus_rate),
    ]


def _rate_claim(
    stage: str, formula: str, closed_form: float, lr: float, rate_of: Callable[[Trace, float], float]
) -> Claim:
    def check(evidence: Evidence) -> Finding:
        rate = rate_of(evidence.trace, lr)
        return Finding(abs(rate - closed_form) < TOLERANCE * abs(closed_form), {"rate": rate})

    return Claim(
        f"{stage}-rate",
        f"In the population flow the rate of {stage} is {formula}",
        f"{PAPER}, our derivation",
        f"within {TOLERANCE:.0%} of {closed_form:.4g}",
        check,
    )


def condensation_rate(trace: Trace, lr: float) -> float:
    """Growth rate of alpha's part of W_E and W_U while the loss is still that of the origin."""
    start = float(trace.condensing[0])
    return theory.growth_rate(trace.step.values, trace.condensing.values, lr=lr, between=(3 * start, 30 * start))


def focus_rate(trace: Trace, lr: float) -> float:
    """Growth rate of alpha's part of W_Q + W_K at the condensed saddle, before attention has moved."""
    still = np.abs(trace.focus_ratio.values.squeeze() - 1) < 0.01
    resting = (np.abs(trace.excess_over_unigram.values) < 0.005) & still
    late = resting & (trace.step.values > np.median(trace.step.values[resting]))
    return theory.growth_rate(trace.step.values[late], trace.focusing.values[late], lr=lr, between=(0.0, np.inf))
