"""Markov chains of high order with a few lags that matter, each through its own features (arXiv 2602.19143, Sec. 2)."""

import math
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fd_interp.tasks import ladder
from fd_interp.tasks.lags import Lags
from fd_interp.tasks.task import Baseline, Batch, generator_for

ESTIMATED_ON = 20_000
"""Windows in each of the two draws that a ladder is estimated from, where all are too many to go through."""
EXACT, ESTIMATED = 1e-7, 1e-5
"""Length of the gradient where a fit stops: its loss is then within some 1e-8 or 1e-5 nats of the least."""


class Rung(NamedTuple):
    """What the `known` most important blocks of lags tell about the next token. Losses in nats."""

    name: str
    additive: float
    """Least loss of a predictor of the model's own form, whose scores are a sum over blocks; of all blocks, the law."""
    teacher: float
    """Loss of the truncated teacher `A_{1:k}`, which forgets the other blocks, and so is too sure of what it says."""
    entropy: float | None
    """Entropy of the next token given these lags, the least loss of all; None where it cannot be enumerated."""
    predictor: ladder.Additive
    """The additive predictor itself; where it is fitted to drawn windows, not quite the best."""
    shortfall: float = 0.0
    """By how much the predictor's loss exceeds the least."""


class HighOrderMarkov(Lags):
    """`x_t ~ softmax(sum_k A_k sum_{i in I(k)} alpha_i x_{t-i})`, `A_k = scale ratio^(h - k) O_k / temperature`.

    A sequence starts with `lookback` uniform tokens, and the chain generates the rest. The model sees `context` tokens
    from the `burn_in`-th on and predicts the one after each. In the paper `burn_in = 0`, and only generated tokens are
    predicted, which is `loss_on="full_context"`. From `burn_in = lookback` on, all tokens come from the chain.
    """

    kind: Literal["high_order"] = "high_order"
    temperature: PositiveFloat = 1.0
    """Scores are divided by it. The paper ran with scale 1 at 0.1, which is scale 10 at 1."""
    burn_in: NonNegativeInt = 10
    """Tokens at the start of a sequence that the model does not see."""
    sequences: PositiveInt | None = None
    """Size of a finite training set, from which batches are drawn with replacement; None draws fresh sequences."""
    data_seed: NonNegativeInt = 0
    """Seed of a finite training set, which stays the same whatever the seed of a run."""

    @property
    def strengths(self) -> tuple[float, ...]:
        """`scale * ratio^(h - k) / temperature`, from the most important block to the least."""
        return tuple(strength / self.temperature for strength in super().strengths)

    @cached_property
    def feature_tables(self) -> Float[Tensor, "lag source target"]:
        """What token i at each lag adds to the score of each next token, in the order of `lags`."""
        tables = torch.zeros(len(self.lags), self.d_vocab, self.d_vocab, dtype=torch.float64)
        for block, alphas, matrix in zip(self.blocks, self.weights, self.matrices, strict=True):
            for lag, alpha in zip(block, alphas, strict=True):
                tables[self.lags.index(lag)] += alpha * matrix
        return tables

    def sample(self, n: int, generator: torch.Generator) -> Batch:
        if self.sequences is None:
            return self._fresh(n, generator)
        tokens, targets = self._training_set
        rows = torch.randint(self.sequences, (n,), generator=generator)
        return Batch(tokens[rows], targets[rows])

    def held_out(self, n: int, generator: torch.Generator) -> Batch:
        return self._fresh(n, generator)

    @cached_property
    def _training_set(self) -> Batch:
        assert self.sequences is not None
        return self._fresh(self.sequences, generator_for(self.data_seed, "training set"))

    def _fresh(self, n: int, generator: torch.Generator) -> Batch:
        first = torch.randint(self.d_vocab, (self.lookback, n), generator=generator)
        uniform = torch.rand(
            self.burn_in + self.context + 1 - self.lookback, n, generator=generator, dtype=torch.float64
        )
        sequence = list(first)
        for u in uniform:
            sequence.append(self._drawn(sequence, u))
        tokens = torch.stack(sequence[-self.context - 1 :], dim=1)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def _drawn(self, sequence: list[Int[Tensor, " n"]], u: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The token that follows the last ones, where u falls in its distribution function."""
        if self.enumerable:
            window = sum(sequence[-lag] * self.d_vocab ** (self.lookback - lag) for lag in range(1, self.lookback + 1))
            found = torch.searchsorted(self._all_cumulative, window + u, right=True)
            return (found - window * self.d_vocab).clamp(max=self.d_vocab - 1)  # window + u can be rounded up
        read = [table[sequence[-lag]] for lag, table in zip(self.lags, self.feature_tables, strict=True)]
        cumulative = torch.stack(read).sum(0).softmax(-1).cumsum(-1)[:, :-1].contiguous()
        return torch.searchsorted(cumulative, u[:, None], right=True).squeeze(1)

    @cached_property
    def _all_cumulative(self) -> Float[Tensor, " window_and_vocab"]:
        """Distribution functions of all windows, each one higher than the one before, so that one search finds all.

        The number of a window has the token at lag 1 for its first digit.
        """
        law = torch.from_numpy(self._law).flatten(0, -2)
        cumulative = law.cumsum(-1)
        cumulative[:, -1] = 1
        return (cumulative + torch.arange(len(law))[:, None]).flatten()

    @property
    def enumerable(self) -> bool:
        """Whether all windows of `lookback` tokens can be gone through."""
        return ladder.enumerable(self.d_vocab, self.lookback)

    @cached_property
    def _law(self) -> np.ndarray:
        """Law of the next token, with an axis for the token at lag 1, at lag 2, ... before its own."""
        ladder.check_enumerable(self.d_vocab, self.lookback)
        scores = torch.zeros(*[self.d_vocab] * (self.lookback + 1), dtype=torch.float64)
        for lag, table in zip(self.lags, self.feature_tables, strict=True):
            shape = [1] * (self.lookback + 1)
            shape[lag - 1] = shape[-1] = self.d_vocab
            scores = scores + table.view(shape)
        return scores.softmax(-1).numpy()

    def teacher(self, tokens: Int[Tensor, "batch position"], known: int) -> Float[Tensor, "batch position vocab"]:
        """Log-probabilities under the truncated teacher `A_{1:known}`: uniform with no block, the law itself with all.

        Raises:
            InputError: there are fewer blocks.
        """
        return self.scores(tokens, known).log_softmax(-1)

    def bayes(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        """The law itself; before position `lookback - 1` it lacks lags, and there it is no optimum."""
        return self.teacher(tokens, self.n_blocks)

    def windows(self) -> ladder.Windows:
        """All windows, with the probability that a query with full context meets each.

        Raises:
            InputError: they are too many; the message says how many, and the limit.
        """
        queries = self.context - self.lookback + 1
        return ladder.every_window(self._law, burn_in=self.burn_in, queries=queries)

    def drawn_windows(self, n: int, generator: torch.Generator) -> ladder.Windows:
        """Windows that queries of fresh sequences meet, `n` or a few more, for a ladder that cannot be enumerated."""
        queries = self.context - self.lookback + 1
        tokens, _ = self._fresh(math.ceil(n / queries), generator)
        seen = tokens.unfold(1, self.lookback, 1).flip(-1).flatten(0, 1)
        law = self.bayes(tokens)[:, self.lookback - 1 :].flatten(0, 1).exp()
        lags = tuple(range(1, self.lookback + 1))
        return ladder.Windows(lags, seen.numpy(), np.full(len(seen), 1 / len(seen)), law.numpy())

    def exact_ladder(self) -> list[Rung]:
        """Every rung, from no lag to all lags, by enumeration.

        Raises:
            InputError: as `windows`.
        """
        windows = self.windows()
        return [self._exact_rung(known, windows) for known in range(self.n_blocks + 1)]

    def _exact_rung(self, known: int, windows: ladder.Windows) -> Rung:
        reading = self._reading(windows, known)
        predictor = self._best(reading, known, EXACT)
        return Rung(
            name=self.rung_name(known),
            additive=ladder.loss(predictor, reading),
            teacher=ladder.loss(self._teacher_of(known), reading),
            entropy=ladder.entropy(reading.windows),
            predictor=predictor,
        )

    def estimated_ladder(self, n: int, generator: torch.Generator) -> list[Rung]:
        """The same from two draws of `n` windows, without entropies.

        A predictor fitted to some windows is too good on them and, to first order by as much, too bad on others: the
        least loss is taken to lie half-way. One is fitted to each draw and both are judged on both, so that it does not
        matter which draw is harder to predict.
        """
        draws = [self.drawn_windows(n, generator) for _ in range(2)]
        return [self._estimated_rung(known, draws) for known in range(self.n_blocks + 1)]

    def _estimated_rung(self, known: int, draws: list[ladder.Windows]) -> Rung:
        readings = [self._reading(windows, known) for windows in draws]
        predictors = [self._best(reading, known, ESTIMATED) for reading in readings]
        too_low = np.mean(list(map(ladder.loss, predictors, readings)))
        too_high = np.mean(list(map(ladder.loss, predictors, reversed(readings))))
        return Rung(
            name=self.rung_name(known),
            additive=float(too_low + too_high) / 2,
            teacher=float(np.mean([ladder.loss(self._teacher_of(known), reading) for reading in readings])),
            entropy=None,
            predictor=predictors[0],
            shortfall=float(too_high - too_low) / 2,
        )

    def _reading(self, windows: ladder.Windows, known: int) -> ladder.Reading:
        return ladder.read(windows, self.blocks[:known], self.weights[:known])

    def _best(self, reading: ladder.Reading, known: int, tolerance: float) -> ladder.Additive:
        return self._teacher_of(known) if known == self.n_blocks else ladder.best_additive(reading, tolerance)

    def _teacher_of(self, known: int) -> ladder.Additive:
        return ladder.Additive(np.zeros(self.d_vocab), self.matrices[:known].numpy())

    @cached_property
    def ladder(self) -> list[Rung]:
        """Exact where all windows can be gone through; otherwise estimated, which its lack of entropies tells."""
        return self.exact_ladder() if self.enumerable else self.estimated_ladder(ESTIMATED_ON, self._estimation())

    def _estimation(self) -> torch.Generator:
        """For what is estimated once, and must be the same each time."""
        return generator_for(self.feature_seed, "estimation")

    def rung(self, tokens: Int[Tensor, "batch position"], known: int) -> Float[Tensor, "batch position vocab"]:
        """Log-probabilities under the best additive predictor of `known` blocks, from position `lookback - 1` on.

        Raises:
            InputError: there are fewer blocks.
        """
        self._check_known(known)
        bias, B = (torch.from_numpy(part) for part in self.ladder[known].predictor)
        return (bias + self.read(tokens, B)).log_softmax(-1)

    def baselines(self) -> list[Baseline]:
        """Uniform, and the additive rungs, whose last is the law itself, at positions that see every lag."""
        estimated = "" if self.enumerable else ", estimated"
        rungs = [Baseline(rung.name + estimated, rung.additive) for rung in self.ladder]
        return [Baseline("uniform", math.log(self.d_vocab)), *rungs]

    def token_frequencies(self) -> Float[Tensor, " vocab"]:
        """Of the tokens that follow positions that see every lag; from drawn windows where all are too many."""
        return self._token_frequencies

    @cached_property
    def _token_frequencies(self) -> Float[Tensor, " vocab"]:
        windows = self.windows() if self.enumerable else self.drawn_windows(ESTIMATED_ON, self._estimation())
        return torch.from_numpy(windows.weights @ windows.next_token)
