"""First-order Markov chains with a chosen stationary distribution (arXiv 2605.01199, Eqs. 1 and 2)."""

import math
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import PositiveInt, model_validator
from torch import Tensor

from fd_interp.config import Frozen, InputError
from fd_interp.tasks.task import Baseline, Batch

TOLERANCE = 1e-6


class MarkovChain(Frozen):
    """`P = persistence * I + (1 - persistence) * redraw`: keep the token, or draw a new one.

    The paper redraws from the stationary distribution itself, `redraw = 1 pi^T` (Eq. 2), the default here; a matrix
    with stationary distribution `pi` makes any other chain, with `persistence=0` a general transition matrix. The paper
    draws the first token uniformly; ours comes from `pi`, so that every position has the same law and the baselines
    are exact at any context.
    """

    kind: Literal["markov"] = "markov"
    pi: tuple[float, ...]
    """Stationary distribution: positive, sums to one."""
    persistence: float = 0.5
    """Probability (lambda in the paper) of keeping the token, in `[-1/(d_vocab - 1), 1)`."""
    redraw: tuple[tuple[float, ...], ...] | None = None
    """Rows of the matrix that draws a new token; None redraws from `pi`."""
    context: PositiveInt = 32
    """Tokens that the model sees (s in the paper)."""

    @model_validator(mode="after")
    def _is_a_chain(self) -> "MarkovChain":
        d_vocab = len(self.pi)
        if d_vocab < 2:
            raise InputError(f"pi must have at least two tokens, not {d_vocab}")
        if not min(self.pi) > 0:
            raise InputError(f"pi must be positive everywhere, but pi[{self.pi.index(min(self.pi))}] is {min(self.pi)}")
        if abs(sum(self.pi) - 1) > TOLERANCE:
            raise InputError(f"pi must sum to one, not {sum(self.pi):.6g}")
        lowest = -1 / (d_vocab - 1)
        if not lowest - TOLERANCE <= self.persistence < 1:
            raise InputError(f"persistence must be in [{lowest:.4g}, 1) for {d_vocab} tokens, not {self.persistence}")
        if self.redraw is not None:
            _check_stochastic(self.redraw, self.pi)
        least = self.transition.min().item()
        if least < -TOLERANCE:
            raise InputError(
                f"persistence {self.persistence} makes a transition probability {least:.4g}; "
                "take one nearer to zero, or a larger smallest pi"
            )
        return self

    @classmethod
    def paper(cls, *, persistence: float = 0.5, context: int = 32) -> "MarkovChain":
        """The paper's stationary distribution; its persistence is not known to us, ours is 0.5."""
        return cls(pi=(0.75, 0.19, 0.05, 0.01), persistence=persistence, context=context)

    @classmethod
    def zipf(cls, d_vocab: int, *, persistence: float = 0.5, context: int = 32) -> "MarkovChain":
        """`pi_i` proportional to `1 / (i + 1)`."""
        weights = [1 / rank for rank in range(1, d_vocab + 1)]
        return cls(pi=tuple(w / sum(weights) for w in weights), persistence=persistence, context=context)

    @classmethod
    def uniform(cls, d_vocab: int, *, persistence: float = 0.5, context: int = 32) -> "MarkovChain":
        """No token is frequent: the paper's dynamics has nothing to condense on."""
        return cls(pi=tuple(1 / d_vocab for _ in range(d_vocab)), persistence=persistence, context=context)

    @classmethod
    def symmetric_low(cls, d_vocab: int, pi_1: float, *, persistence: float = 0.5, context: int = 32) -> "MarkovChain":
        """One frequent token and equal others: delta = 0 in Eq. 1."""
        low = tuple((1 - pi_1) / (d_vocab - 1) for _ in range(d_vocab - 1))
        return cls(pi=(pi_1, *low), persistence=persistence, context=context)

    @classmethod
    def antitone(cls, pi: tuple[float, ...], *, context: int = 32) -> "MarkovChain":
        """Frequent tokens are followed by rare ones as far as `pi` allows: the opposite of a persistent chain.

        The pair of successive tokens is the antitone coupling of `pi` with itself, so of all chains with stationary
        distribution `pi` this one has the least correlation between the frequencies of neighbours.
        """
        pi = cls(pi=pi).pi  # refuses one that is no law, before the rows are divided by it
        coupling = _antitone_coupling(pi)
        rows = tuple(tuple(mass / p for mass in row) for row, p in zip(coupling, pi, strict=True))
        return cls(pi=pi, persistence=0.0, redraw=rows, context=context)

    @property
    def d_vocab(self) -> int:
        return len(self.pi)

    @property
    def n_ctx(self) -> int:
        return self.context

    @cached_property
    def transition(self) -> Float[Tensor, "vocab vocab"]:
        """`P[i, j]`: probability that token j follows token i."""
        pi = torch.tensor(self.pi, dtype=torch.float64)
        redraw = pi.expand(len(pi), -1) if self.redraw is None else torch.tensor(self.redraw, dtype=torch.float64)
        return self.persistence * torch.eye(len(pi), dtype=torch.float64) + (1 - self.persistence) * redraw

    def token_frequencies(self) -> Float[Tensor, " vocab"]:
        return torch.tensor(self.pi, dtype=torch.float64)

    def token_strings(self) -> list[str]:
        return [str(token) for token in range(self.d_vocab)]

    def sample(self, n: int, generator: torch.Generator) -> Batch:
        uniform = torch.rand(self.context + 1, n, generator=generator, dtype=torch.float64)
        rows = self.transition.cumsum(-1)[:, :-1]
        token = torch.searchsorted(self.token_frequencies().cumsum(-1)[:-1], uniform[0], right=True)
        sequence = [token]
        for u in uniform[1:]:
            token = (u[:, None] >= rows[token]).sum(-1)
            sequence.append(token)
        tokens = torch.stack(sequence, dim=1)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def held_out(self, n: int, generator: torch.Generator) -> Batch:
        return self.sample(n, generator)

    def bayes(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        return self.transition.clamp(min=0).log()[tokens]

    def baselines(self) -> list[Baseline]:
        pi = self.token_frequencies()
        rows = self.transition.clamp(min=0)
        return [
            Baseline("uniform", math.log(self.d_vocab)),
            Baseline("unigram", -torch.xlogy(pi, pi).sum().item()),
            Baseline("bigram", -(pi @ torch.xlogy(rows, rows)).sum().item()),
        ]


def _check_stochastic(rows: tuple[tuple[float, ...], ...], pi: tuple[float, ...]) -> None:
    d_vocab = len(pi)
    if len(rows) != d_vocab or any(len(row) != d_vocab for row in rows):
        raise InputError(f"redraw must be a {d_vocab} x {d_vocab} matrix, as long as pi")
    for index, row in enumerate(rows):
        if min(row) < 0 or abs(sum(row) - 1) > TOLERANCE:
            raise InputError(f"redraw must have rows of probabilities that sum to one, but row {index} is {row}")
    for token in range(d_vocab):
        arriving = sum(pi[source] * rows[source][token] for source in range(d_vocab))
        if abs(arriving - pi[token]) > TOLERANCE:
            raise InputError(
                f"pi must be stationary for redraw, but pi[{token}] is {pi[token]:.6g} and its inflow {arriving:.6g}"
            )


def _antitone_coupling(pi: tuple[float, ...]) -> list[list[float]]:
    """The joint law with both marginals `pi` that pairs the most frequent tokens with the rarest (north-west rule)."""
    order = sorted(range(len(pi)), key=lambda token: -pi[token])
    coupling = [[0.0] * len(pi) for _ in pi]
    left, right = list(pi), list(pi)
    first, second = 0, len(pi) - 1
    while first < len(pi) and second >= 0:
        source, target = order[first], order[second]
        mass = min(left[source], right[target])
        coupling[source][target] += mass
        left[source] -= mass
        right[target] -= mass
        if left[source] <= right[target]:
            first += 1
        else:
            second -= 1
    return coupling
