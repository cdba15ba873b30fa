"""What the tasks of arXiv 2602.19143 have in common: blocks of lags, each with a feature matrix and a strength."""

from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator
from torch import Tensor

from fd_interp.config import Frozen, InputError

Block = tuple[PositiveInt, ...]


class Lags(Frozen):
    """Blocks of lags I(1), ..., I(h) in the order of their importance, each read through a matrix of its own.

    What is predicted at position t depends on `sum_k A_k sum_{i in I(k)} alpha_i x_{t-i}`, x one-hot, with
    `A_k = strength_k O_k`. Lag 1 is the token right before the predicted one, which is the query's own.
    """

    d_vocab: int = Field(default=16, ge=2)
    """Tokens (d in the paper)."""
    blocks: tuple[Block, ...] = ((3,), (1,), (2,))
    """Sets of lags, the most important first; on a command line `[[3],[1],[2]]`."""
    overlapping: bool = False
    """Whether blocks may share lags; the paper's are disjoint in all experiments but one."""
    ratio: float = Field(default=1.7, ge=1)
    """How many times as strong a block is as the next one (m in the paper); 1 makes them equal."""
    scale: PositiveFloat = 4.0
    """Strength of the least important block."""
    alphas: tuple[tuple[PositiveFloat, ...], ...] | None = None
    """Weight of each lag, block by block; None weighs all by one, as the paper's code does."""
    features: Literal["orthogonal", "gram_schmidt", "shared", "low_rank"] = "orthogonal"
    """The matrices O_k: independent random orthogonal ones; these after Gram–Schmidt in the Frobenius product, each of
    the same norm as before; one of them for all blocks; or partial isometries of rank `rank`."""
    rank: PositiveInt | None = None
    """Rank of low-rank features, from 1 to `d_vocab`; None for all others."""
    feature_seed: NonNegativeInt = 0
    """Seed of the features, which stay the same whatever the seed of a run."""
    context: PositiveInt = 12
    """Tokens that the model sees."""

    @field_validator("blocks", mode="before")
    @classmethod
    def _are_lists(cls, blocks: Any) -> Any:
        """Told in one sentence, and not guessed: `3, 1` may be meant as one block or as two."""
        lists = (list, tuple)
        if not isinstance(blocks, lists) or not blocks or not all(isinstance(b, lists) and b for b in blocks):
            raise InputError(f"each block is a list of lags, as in [[3], [1, 2]], not {blocks}")
        return blocks

    @model_validator(mode="after")
    def _is_consistent(self) -> "Lags":
        for block in self.blocks:
            if len(set(block)) < len(block):
                raise InputError(f"blocks: a block is a set of different lags, not {list(block)}")
        if not self.overlapping and len(self.lags) < sum(map(len, self.blocks)):
            raise InputError(
                f"blocks {_listed(self.blocks)} share lags; make them disjoint, or set overlapping to true"
            )
        if self.lookback > self.context:
            raise InputError(
                f"blocks: lag {self.lookback} reaches beyond the context of {self.context} tokens; "
                f"take a context of {self.lookback} or more"
            )
        if self.alphas is not None and list(map(len, self.alphas)) != list(map(len, self.blocks)):
            raise InputError(
                f"alphas must have one weight for each lag of {_listed(self.blocks)}, not {_listed(self.alphas)}"
            )
        self._check_features()
        return self

    def _check_features(self) -> None:
        if self.features != "low_rank" and self.rank is not None:
            raise InputError(f"rank is for low_rank features; with {self.features} features leave it out")
        if self.features == "low_rank" and not 1 <= (self.rank or 0) <= self.d_vocab:
            raise InputError(f"rank must be from 1 to d_vocab, {self.d_vocab}, for low_rank features, not {self.rank}")
        if self.features == "gram_schmidt" and self.n_blocks > self._feature_dimension:
            raise InputError(
                f"blocks: there are at most {self._feature_dimension} gram_schmidt features of {self.d_vocab} tokens, "
                f"not {self.n_blocks}; take fewer blocks or more tokens"
            )

    @property
    def _feature_dimension(self) -> int:
        """Of the space that Gram–Schmidt works in."""
        return self.d_vocab**2

    @property
    def n_ctx(self) -> int:
        return self.context

    @property
    def n_blocks(self) -> int:
        """h in the paper."""
        return len(self.blocks)

    @cached_property
    def lags(self) -> tuple[int, ...]:
        """Every lag that matters, each once, in the order of importance."""
        return self.lags_of(self.n_blocks)

    @property
    def lookback(self) -> int:
        """Tokens that one must see to predict the next one (w in the paper, where lags have no gaps)."""
        return max(self.lags)

    @property
    def strengths(self) -> tuple[float, ...]:
        """`scale * ratio^(h - k)`, from the most important block to the least."""
        return tuple(self.scale * self.ratio**power for power in reversed(range(self.n_blocks)))

    @property
    def weights(self) -> tuple[tuple[float, ...], ...]:
        """alpha of every lag in every block."""
        return self.alphas or tuple(tuple(1.0 for _ in block) for block in self.blocks)

    def lags_of(self, known: int) -> tuple[int, ...]:
        """The lags of the `known` most important blocks.

        Raises:
            InputError: there are fewer blocks.
        """
        self._check_known(known)
        return tuple(dict.fromkeys(lag for block in self.blocks[:known] for lag in block))

    def _check_known(self, known: int) -> None:
        if not 0 <= known <= self.n_blocks:
            raise InputError(f"a predictor can know 0 to {self.n_blocks} blocks, not {known}")

    @cached_property
    def feature_matrices(self) -> Float[Tensor, "block source target"]:
        """`O_k^T`: row i holds what token i, at a lag of block k, adds to the score of each next token."""
        rng = np.random.default_rng(self.feature_seed)
        drawn = rng.standard_normal((self.n_blocks, self.d_vocab, self.d_vocab))
        return torch.from_numpy(self._features_from(drawn))

    def _features_from(self, drawn: np.ndarray) -> np.ndarray:
        left, _, right = np.linalg.svd(drawn)
        if self.features == "low_rank":
            return left[..., : self.rank] @ right[:, : self.rank]
        isometries = left @ right
        if self.features == "shared":
            return np.repeat(isometries[:1], self.n_blocks, axis=0)
        return frobenius_orthogonal(isometries) if self.features == "gram_schmidt" else isometries

    @cached_property
    def matrices(self) -> Float[Tensor, "block source target"]:
        """`A_k^T = strength_k O_k^T`."""
        return torch.tensor(self.strengths, dtype=torch.float64)[:, None, None] * self.feature_matrices

    def scores(self, tokens: Int[Tensor, "batch position"], known: int) -> Float[Tensor, "batch position vocab"]:
        """`sum_{k <= known} A_k sum_{i in I(k)} alpha_i x_{t-i}` of what follows each position.

        Lags before the start add nothing, so the first `lookback - 1` positions lack some.

        Raises:
            InputError: there are fewer blocks.
        """
        self._check_known(known)
        return self.read(tokens, self.matrices[:known])

    def read(
        self, tokens: Int[Tensor, "batch position"], matrices: Float[Tensor, "known source target"]
    ) -> Float[Tensor, "batch position vocab"]:
        """The same through other matrices than `A_k^T`, of the most important blocks."""
        scores = torch.zeros(*tokens.shape, self.d_vocab, dtype=torch.float64)
        for block, alphas, matrix in zip(self.blocks, self.weights, matrices, strict=False):
            for lag, alpha in zip(block, alphas, strict=True):
                with_lag = max(tokens.shape[1] - lag + 1, 0)
                scores[:, lag - 1 :] += alpha * matrix[tokens[:, :with_lag]]
        return scores

    def token_strings(self) -> list[str]:
        return [str(token) for token in range(self.d_vocab)]

    def rung_name(self, known: int) -> str:
        """Of the predictor that knows so many blocks: `rung 2: lags 3, 1`."""
        lags = self.lags_of(known)
        what = f"lag{'s' * (len(lags) > 1)} {', '.join(map(str, lags))}" if lags else "no lag"
        return f"rung {known}: {what}"


def spans(sizes: tuple[int, ...], *, farthest_first: bool = False) -> tuple[Block, ...]:
    """Neighbouring blocks of these sizes from lag 1 on, as in the paper: `(2, 2)` gives `((1, 2), (3, 4))`.

    The nearest, which has the first of the sizes, is the most important, unless `farthest_first`.
    """
    ends = np.cumsum((0, *sizes)).tolist()
    blocks = tuple(tuple(range(start + 1, end + 1)) for start, end in pairwise(ends))
    return blocks[::-1] if farthest_first else blocks


def frobenius_orthogonal(matrices: Float[np.ndarray, "block rows columns"]) -> Float[np.ndarray, "block rows columns"]:
    """Gram–Schmidt in the product `Tr(A^T B)`, in order, each keeping its Frobenius norm.

    The matrices must be linearly independent.
    """
    flat = matrices.reshape(len(matrices), -1)
    directions, triangle = np.linalg.qr(flat.T)
    signed = directions * np.sign(np.diag(triangle))
    return (signed.T * np.linalg.norm(flat, axis=1, keepdims=True)).reshape(matrices.shape)


def _listed(blocks: tuple[tuple[int | float, ...], ...]) -> str:
    return ", ".join(str(list(block)) for block in blocks)
