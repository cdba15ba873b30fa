"""The regression variant of the high-order chain, of which the gradient flow is known (arXiv 2602.19143, theory)."""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import PositiveFloat
from torch import Tensor

from fd_interp.tasks.lags import Lags, frobenius_orthogonal
from fd_interp.tasks.task import Baseline, Batch


class LagRegression(Lags):
    """Independent uniform tokens, and at each position the vector `sum_k A_k sum_{i in I(k)} alpha_i x_{t-i}`.

    The loss is half the squared distance to it. `A_k = strength_k U_k` with `<U_j, U_k>_F = delta_jk` and `U_k 1 = 0`:
    what the mean token does is nothing, so that one-hot tokens are as good as isotropic inputs of covariance
    `I / d_vocab`, and at positions that see every lag the population loss, like its gradient with respect to values and
    attention, is that of `fd_interp.theory.incremental` divided by `d_vocab`.
    """

    kind: Literal["lag_regression"] = "lag_regression"
    features: Literal["gram_schmidt"] = "gram_schmidt"
    """Always orthogonal to each other, as the theory has it; here also of Frobenius norm one."""
    scale: PositiveFloat = 1.0
    """Strength of the least important block."""

    def _features_from(self, drawn: np.ndarray) -> np.ndarray:
        centred = drawn - drawn.mean(axis=1, keepdims=True)
        orthogonal = frobenius_orthogonal(centred)
        return orthogonal / np.linalg.norm(orthogonal, axis=(1, 2), keepdims=True)

    @property
    def _feature_dimension(self) -> int:
        return self.d_vocab * (self.d_vocab - 1)

    def sample(self, n: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(self.d_vocab, (n, self.context), generator=generator)
        return Batch(tokens, self.bayes(tokens))

    def held_out(self, n: int, generator: torch.Generator) -> Batch:
        return self.sample(n, generator)

    def rung(self, tokens: Int[Tensor, "batch position"], known: int) -> Float[Tensor, "batch position vocab"]:
        """The part of the vector that the `known` most important blocks make: the best prediction from them alone.

        Raises:
            InputError: there are fewer blocks.
        """
        return self.scores(tokens, known)

    def bayes(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        """The vector itself, to which lags before the start add nothing."""
        return self.scores(tokens, self.n_blocks)

    def baselines(self) -> list[Baseline]:
        """The ladder `L_k = 1/2 sum_{j > k} m_j^2 |alpha_j|^2`, divided by `d_vocab`, from no block to all blocks.

        At positions that see every lag.
        """
        parts = [m**2 * sum(a**2 for a in alphas) for m, alphas in zip(self.strengths, self.weights, strict=True)]
        names = [self.rung_name(known) for known in range(self.n_blocks + 1)]
        return [Baseline(name, sum(parts[known:]) / (2 * self.d_vocab)) for known, name in enumerate(names)]

    def token_frequencies(self) -> Float[Tensor, " vocab"]:
        return torch.full((self.d_vocab,), 1 / self.d_vocab, dtype=torch.float64)
