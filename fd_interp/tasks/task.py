"""What every task offers: sequences with targets, its own optimum, and the exact losses of simpler predictors."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


class Batch(NamedTuple):
    """Sequences and, at each position, the token that follows, or in a regression the vector to predict."""

    tokens: Int[Tensor, "batch position"]
    targets: Int[Tensor, "batch position"] | Float[Tensor, "batch position vocab"]
    """`targets[:, t]` goes with `tokens[:, : t + 1]`."""


class Baseline(NamedTuple):
    """A predictor that knows less than the task's law, and its exact expected loss in nats."""

    name: str
    loss: float


@runtime_checkable
class Task(Protocol):
    """A law of sequences that knows its own optimum.

    Randomness is always an argument, so that a batch is a function of its generator's state.
    """

    @property
    def d_vocab(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...

    def sample(self, n: int, generator: torch.Generator) -> Batch:
        """`n` fresh training sequences."""
        ...

    def held_out(self, n: int, generator: torch.Generator) -> Batch:
        """`n` sequences to measure on, that training never sees (for a sampled law: an independent draw)."""
        ...

    def bayes(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        """What the best predictor that the task knows says: log-probabilities of the next token, or the vector."""
        ...

    def baselines(self) -> list[Baseline]:
        """Predictors in increasing knowledge."""
        ...

    def token_frequencies(self) -> Float[Tensor, " vocab"]:
        """How often each token occurs; sums to one."""
        ...

    def token_strings(self) -> list[str]:
        """Each token as a person reads it."""
        ...


def generator_for(seed: int, purpose: str) -> torch.Generator:
    """One that no caller has by chance, who would then hold out the very sequences that are trained on."""
    words = np.random.SeedSequence([seed, *purpose.encode()]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]))
