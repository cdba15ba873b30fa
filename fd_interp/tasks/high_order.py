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
from fd_interp.tasks.task import Baseline, Batch

ESTIMATED_ON = 20_000
"""Windows drawn to estimate a ladder with, where there are too many to go through."""


class Rung(NamedTuple):
    """What the `known` most important blocks of lags tell about the next token. Losses in nats."""

    name: str
    additive: float
    """Least loss of a predictor of the model's own form, whose scores are a sum over blocks."""
    teacher: float
    """Loss of the truncated teacher `A_{1:k}`, which knows these blocks and is too sure of what it says."""
    entropy: float | None
    """Entropy of the next token given these lags, the least loss of all; None where it cannot be enumerated."""
    predictor: ladder.Additive
    """The additive predictor itself; where it is fitted to drawn windows, not quite the best."""
    shortfall: float = 0.0
    """By how much the predictor's loss exceeds the least."""


class HighOrderMarkov(Lags):
    """`x_t ~ softmax(sum_k A_k sum_{i in I(k)} alpha_i x_{t-i})`, `A_k = scale ratio^(h - k) O_k / temperature`.

    The paper draws the first `lookback` tokens uniformly and predicts the ones generated after them: `burn_in=0`. With
    a burn-in, the tokens that the model sees come from the chain itself.
    """

    kind: Literal["high_order"] = "high_order"
    temperature: PositiveFloat = 1.0
    """Scores are divided by it. The paper ran with scale 1 at 0.1, which is scale 10 at 1."""
    burn_in: NonNegativeInt = 10
    """Tokens generated from uniform ones before the first that the model sees."""
    sequences: PositiveInt | None = None
    """Size of a finite training set, drawn with replacement; None makes every training sequence a fresh one."""
    data_seed: NonNegativeInt = 0
    """Seed of a finite training set."""

    @property
    def strengths(self) -> tuple[float, ...]:
        """`scale * ratio^(h - k) / temperature`, from the most important block to the least."""
        return tuple(strength / self.temperature for strength in super().strengths)

    @cached_property
    def feature_tables(self) -> Float[Tensor, "lag source target"]:
        """What token i at each lag adds to the score of each next token, in the order of `lags`."""
        return torch.stack([self.tables[lag][-1] for lag in self.lags])

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
        return self._fresh(self.sequences, torch.Generator().manual_seed(self.data_seed))

    def _fresh(self, n: int, generator: torch.Generator) -> Batch:
        first = torch.randint(self.d_vocab, (self.lookback, n), generator=generator)
        uniform = torch.rand(self.burn_in + self.context + 1 - self.lookback, n, generator=generator)
        sequence = list(first)
        for u in uniform:
            sequence.append((u[:, None] >= self._cumulative(sequence)).sum(-1))
        tokens = torch.stack(sequence[-self.context - 1 :], dim=1)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def _cumulative(self, sequence: list[Int[Tensor, " n"]]) -> Float[Tensor, "n vocab_but_one"]:
        """Distribution functions of the token that follows the last ones."""
        if self.enumerable:
            window = sum(sequence[-lag] * self.d_vocab ** (self.lookback - lag) for lag in range(1, self.lookback + 1))
            return self._all_cumulative[window]
        read = [table[sequence[-lag]] for lag, table in zip(self.lags, self.feature_tables, strict=True)]
        return torch.stack(read).sum(0).softmax(-1).cumsum(-1)[:, :-1].float()

    @cached_property
    def _all_cumulative(self) -> Float[Tensor, "window vocab_but_one"]:
        """Of every window, whose number has the token at lag 1 for its first digit."""
        law = torch.from_numpy(self._law).flatten(0, -2)
        return law.cumsum(-1)[:, :-1].float()

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
        """Log-probabilities under the truncated teacher `A_{1:known}`; with all blocks it is the law itself."""
        return self.scores(tokens, known).log_softmax(-1)

    def bayes(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        """The law itself. Before position `lookback - 1` it lacks lags, and there it is no optimum."""
        return self.teacher(tokens, self.n_blocks)

    def windows(self) -> ladder.Windows:
        """All windows, with the probability that a query with full context meets each.

        Raises:
            InputError: they are too many; the message says how many, and the limit.
        """
        queries = self.context - self.lookback + 1
        return ladder.every_window(self._law, burn_in=self.burn_in, queries=queries)

    def drawn_windows(self, n: int, generator: torch.Generator) -> ladder.Windows:
        """Windows that queries of fresh sequences meet, for a ladder that cannot be enumerated."""
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
        rungs = [self._rung(known, windows, windows) for known in range(self.n_blocks + 1)]
        met = [ladder.given(windows, self.lags_of(known)) for known in range(self.n_blocks + 1)]
        return [rung._replace(entropy=ladder.entropy(seen)) for rung, seen in zip(rungs, met, strict=True)]

    def estimated_ladder(self, n: int, generator: torch.Generator) -> list[Rung]:
        """The same from drawn windows, without entropies.

        A predictor fitted to `n` windows is too good on them and, to first order by as much, too bad on others: its
        least loss is taken to lie half-way.
        """
        fitted, judged = (self.drawn_windows(n, generator) for _ in range(2))
        return [self._rung(known, fitted, judged) for known in range(self.n_blocks + 1)]

    def _rung(self, known: int, fitted: ladder.Windows, judged: ladder.Windows) -> Rung:
        read = self.blocks[:known], self.weights[:known]
        fitted, judged = (ladder.given(windows, self.lags_of(known)) for windows in (fitted, judged))
        on_fitted, on_judged = (ladder.design(windows, *read) for windows in (fitted, judged))
        teacher = self._teacher_of(known)
        predictor = teacher if known == self.n_blocks else ladder.best_additive(fitted, on_fitted)
        too_low = ladder.loss(fitted, ladder.log_probabilities(predictor, on_fitted))
        too_high = ladder.loss(judged, ladder.log_probabilities(predictor, on_judged))
        return Rung(
            name=self.rung_name(known),
            additive=(too_low + too_high) / 2,
            teacher=ladder.loss(judged, ladder.log_probabilities(teacher, on_judged)),
            entropy=None,
            predictor=predictor,
            shortfall=0.0 if predictor is teacher else (too_high - too_low) / 2,
        )

    def _teacher_of(self, known: int) -> ladder.Additive:
        strengths = np.array(self.strengths[:known])[:, None, None]
        return ladder.Additive(np.zeros(self.d_vocab), strengths * self.feature_matrices[:known].numpy())

    @cached_property
    def ladder(self) -> list[Rung]:
        """Exact where all windows can be gone through; otherwise estimated, which its lack of entropies tells."""
        if self.enumerable:
            return self.exact_ladder()
        return self.estimated_ladder(ESTIMATED_ON, self._generator())

    def _generator(self) -> torch.Generator:
        """For what is estimated once, and must be the same each time."""
        return torch.Generator().manual_seed(self.feature_seed)

    def rung(self, tokens: Int[Tensor, "batch position"], known: int) -> Float[Tensor, "batch position vocab"]:
        """Log-probabilities under the best additive predictor of `known` blocks, from position `lookback - 1` on."""
        bias, B = (torch.from_numpy(part) for part in self.ladder[known].predictor)
        scores = bias.expand(*tokens.shape, -1).clone()
        for block, alphas, matrix in zip(self.blocks, self.weights, B, strict=False):
            for lag, alpha in zip(block, alphas, strict=True):
                scores[:, lag - 1 :] += alpha * matrix[tokens[:, : tokens.shape[1] - lag + 1]]
        return scores.log_softmax(-1)

    def baselines(self) -> list[Baseline]:
        """Uniform, and the additive rungs, whose last is the law itself."""
        estimated = "" if self.enumerable else ", estimated"
        rungs = [Baseline(rung.name + estimated, rung.additive) for rung in self.ladder]
        return [Baseline("uniform", math.log(self.d_vocab)), *rungs]

    def token_frequencies(self) -> Float[Tensor, " vocab"]:
        """Of the tokens that are predicted with full context; from drawn windows where those are too many."""
        return self._token_frequencies

    @cached_property
    def _token_frequencies(self) -> Float[Tensor, " vocab"]:
        windows = self.windows() if self.enumerable else self.drawn_windows(ESTIMATED_ON, self._generator())
        return torch.from_numpy(windows.weights @ windows.next_token)
