"""Sparse modular addition (arXiv 2410.24050): the sum of the first k of L symbols modulo p; the rest is spurious."""

import math
from functools import cached_property
from itertools import product
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor

from fd_interp.config import Frozen, InputError
from fd_interp.tasks.task import Baseline, Batch, generator_for

MOST_ENUMERATED = 2**20
"""Sequences up to which all there are can be gone through."""
MOST_GAUGES = 2**12


class SparseModularAddition(Frozen):
    """`y = (x_1 + ... + x_k) mod p` for independent uniform symbols `x_1, ..., x_L` in `Z_p`.

    The target of every position is the label of the whole sequence. The training set is drawn once with replacement, as
    in the paper, and gone through in an order that is new each time. Two sequences with the same multiset of first k
    symbols are *equivalent*: the label depends on the class alone. It does so after any shift of each position's
    symbols, too (a *gauge*), so a model may count `x_t + b_t` in place of `x_t`.
    """

    kind: Literal["modular"] = "modular"
    p: int = Field(default=2, ge=2)
    """Symbols, and labels."""
    length: PositiveInt = 12
    """Symbols in a sequence (L in the paper)."""
    k: PositiveInt = 5
    """Informative positions: the first k."""
    least_vocab: PositiveInt = 3
    """Rows of the embedding at least; in the paper 3 even for p = 2, so that p = 3 can follow."""
    sequences: PositiveInt | None = 2048
    """Size of the training set; None draws new sequences at each step."""
    data_seed: NonNegativeInt = 0
    """Seed of the training set and of the test set."""
    shuffled: bool = False
    """A control: labels of the training set change places, so that there is nothing to learn but by heart."""

    @model_validator(mode="after")
    def _is_sparse(self) -> "SparseModularAddition":
        if self.k > self.length:
            raise InputError(f"k: {self.k} informative positions need a length of {self.k} or more, not {self.length}")
        if self.shuffled and self.sequences is None:
            raise InputError("shuffled is about a training set; give it a size (sequences)")
        return self

    @property
    def d_vocab(self) -> int:
        return max(self.p, self.least_vocab)

    @property
    def n_ctx(self) -> int:
        return self.length

    def sample(self, n: int, generator: torch.Generator) -> Batch:
        """From the training set without replacement, in a new order each time that it is used up."""
        if self.sequences is None:
            return self.labelled(self._drawn(n, generator))
        passes = -(-n // self.sequences)
        rows = torch.cat([torch.randperm(self.sequences, generator=generator) for _ in range(passes)])[:n]
        tokens, targets = self.training_set
        return Batch(tokens[rows], targets[rows])

    def held_out(self, n: int, generator: torch.Generator) -> Batch:
        """All sequences, each once and in order, where there are no more than n: the *population*.

        Where there are more, n are drawn, in families of a sequence and the L that differ from it in one symbol each,
        so that what one symbol changes is seen as well. Either way some of them may be in the training set.
        """
        if self.enumerated(n):
            return self.population
        founders = self._drawn(-(-n // (self.length + 1)), generator)
        changes = torch.randint(1, self.p, founders.shape, generator=generator).diag_embed()
        families = torch.cat([founders[:, None], (founders[:, None] + changes) % self.p], dim=1)
        return self.labelled(families.flatten(0, 1)[:n])

    def enumerated(self, n: int) -> bool:
        """Whether n held-out sequences are all there are."""
        return n >= self.p**self.length <= MOST_ENUMERATED

    @cached_property
    def population(self) -> Batch:
        """Every sequence once; the number of a sequence has its first symbol for its highest digit.

        Raises:
            InputError: there are more than `MOST_ENUMERATED`.
        """
        count = self.p**self.length
        if count > MOST_ENUMERATED:
            raise InputError(
                f"p = {self.p} and length = {self.length} make {count} sequences, more than the {MOST_ENUMERATED} that "
                "are gone through; draw some with held_out"
            )
        digits = self.p ** torch.arange(self.length).flip(0)
        return self.labelled(torch.arange(count)[:, None] // digits % self.p)

    @cached_property
    def training_set(self) -> Batch:
        """Drawn with replacement."""
        tokens, targets = self._set("training set")
        if self.shuffled:
            targets = targets[torch.randperm(len(targets), generator=generator_for(self.data_seed, "shuffled labels"))]
        return Batch(tokens, targets)

    @cached_property
    def test_set(self) -> Batch:
        """Another draw of the same size; about `1 - (1 - p^-L)^sequences` of it is in the training set too."""
        return self._set("test set")

    def _set(self, purpose: str) -> Batch:
        if self.sequences is None:
            raise InputError("there is no training set and no test set where every step draws new sequences")
        return self.labelled(self._drawn(self.sequences, generator_for(self.data_seed, purpose)))

    def _drawn(self, n: int, generator: torch.Generator) -> Int[Tensor, "n length"]:
        return torch.randint(self.p, (n, self.length), generator=generator)

    def labelled(self, tokens: Int[Tensor, "batch length"]) -> Batch:
        """The sequences with their label at every position."""
        return Batch(tokens, self.labels(tokens)[:, None].expand_as(tokens).contiguous())

    def labels(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, " batch"]:
        """y of each sequence."""
        return tokens[:, : self.k].sum(1) % self.p

    @property
    def informative(self) -> Bool[Tensor, " length"]:
        """Which positions the label depends on."""
        return torch.arange(self.length) < self.k

    def prefixes(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, " batch"]:
        """The number of the first k symbols, in `[0, p^k)`; the first symbol is its highest digit."""
        digits = self.p ** torch.arange(self.k).flip(0)
        return (tokens[:, : self.k] * digits).sum(1)

    def classes(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, " batch"]:
        """The equivalence class of each sequence, in `[0, n_classes)`."""
        return self.gauges[0][self.prefixes(tokens)]

    @property
    def n_classes(self) -> int:
        """Multisets of k symbols out of p: `C(k + p - 1, p - 1)`."""
        return math.comb(self.k + self.p - 1, self.p - 1)

    @cached_property
    def prefix_tokens(self) -> Int[Tensor, "prefix k"]:
        """The symbols of each prefix, in the order of their numbers.

        Raises:
            InputError: there are more than `MOST_ENUMERATED` prefixes.
        """
        if self.p**self.k > MOST_ENUMERATED:
            raise InputError(f"p = {self.p} and k = {self.k} make {self.p**self.k} prefixes, too many to go through")
        return torch.tensor(list(product(range(self.p), repeat=self.k)))

    @cached_property
    def gauges(self) -> Int[Tensor, "gauge prefix"]:
        """In each gauge, the class of each prefix: the multiset of its symbols after a shift of every position.

        To shift the symbols of all positions alike, or to multiply all of them by one unit of `Z_p`, makes the same
        classes, so the first position is not shifted: `p^(k-1)` gauges, of which the first shifts nothing.

        Raises:
            InputError: there are more than `MOST_GAUGES`.
        """
        count = self.p ** (self.k - 1)
        if count > MOST_GAUGES:
            raise InputError(f"p = {self.p} and k = {self.k} make {count} gauges, more than {MOST_GAUGES}")
        shifts = torch.tensor([(0, *rest) for rest in product(range(self.p), repeat=self.k - 1)])
        shifted = (self.prefix_tokens + shifts[:, None]) % self.p  # gauge prefix k
        multisets = self.prefixes(shifted.flatten(0, 1).sort(-1).values)
        return multisets.unique(return_inverse=True)[1].view(count, -1)

    def class_frequencies(self) -> Float[Tensor, " class"]:
        """Share of all sequences in each class; for p = 2 `C(k, s) / 2^k`."""
        return torch.bincount(self.gauges[0], minlength=self.n_classes).double() / self.p**self.k

    def neighbours(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, "length pair two"]:
        """Pairs of sequences of a held-out batch that differ in one symbol, as many at each position.

        Raises:
            InputError: the batch is not one of `held_out`.
        """
        if len(tokens) == self.p**self.length and torch.equal(tokens, self.population.tokens):
            numbers = torch.arange(len(tokens))
            steps = self.p ** torch.arange(self.length).flip(0)
            below = [numbers[tokens[:, position] < self.p - 1] for position in range(self.length)]
            return torch.stack([torch.stack([low, low + step], 1) for low, step in zip(below, steps, strict=True)])
        founders = torch.arange(0, len(tokens) - self.length, self.length + 1)
        pairs = torch.stack([torch.stack([founders, founders + 1 + position], 1) for position in range(self.length)])
        differs = tokens[pairs[..., 0]] != tokens[pairs[..., 1]]
        if not len(founders) or not torch.equal(differs, torch.eye(self.length).bool()[:, None].expand_as(differs)):
            raise InputError("the sequences are no held-out batch of this task, in which some differ in one symbol")
        return pairs

    def memorizer_accuracy(self) -> float:
        """Expected accuracy on all sequences of a model that knows the training set by heart, and guesses otherwise."""
        if self.sequences is None:
            raise InputError("there is no training set to know by heart where every step draws new sequences")
        seen = -math.expm1(self.sequences * math.log1p(-(self.p**-self.length)))
        return seen + (1 - seen) / self.p

    def bayes(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        """All labels alike until the last informative symbol is seen; from then on, the label for certain."""
        law = torch.full((*tokens.shape, self.d_vocab), -math.inf, dtype=torch.float64)
        law[..., : self.p] = -math.log(self.p)
        if tokens.shape[1] >= self.k:
            known = law[:, self.k - 1 :]
            known.fill_(-math.inf)
            known.scatter_(2, self.labels(tokens)[:, None, None].expand(-1, known.shape[1], 1), 0.0)
        return law

    def baselines(self) -> list[Baseline]:
        """Any token of the vocabulary, any label, and the label itself, at positions that see every symbol."""
        return [
            Baseline("uniform", math.log(self.d_vocab)),
            Baseline("labels", math.log(self.p)),
            Baseline("sum", 0.0),
        ]

    def token_frequencies(self) -> Float[Tensor, " vocab"]:
        uniform = torch.full((self.p,), 1 / self.p, dtype=torch.float64)
        return torch.cat([uniform, uniform.new_zeros(self.d_vocab - self.p)])

    def token_strings(self) -> list[str]:
        return [str(token) for token in range(self.d_vocab)]
