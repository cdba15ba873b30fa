"""How embedding mass moves between tokens along the condensed direction (arXiv 2605.01199, stage III)."""

import torch
from jaxtyping import Float
from torch import Tensor

from fd_interp.measures._precision import at_least_single


def embedding_norms(W_E: Float[Tensor, "*batch vocab d_model"]) -> Float[Tensor, "*batch vocab"]:
    """Length of each token's embedding."""
    return at_least_single(W_E).norm(dim=-1)


def embedding_along_alpha(
    W_E: Float[Tensor, "*batch vocab d_model"], frequencies: Float[Tensor, " vocab"]
) -> Float[Tensor, "*batch vocab"]:
    """gamma: each token's embedding along alpha, the top right singular vector of W_E.

    alpha points to where `sum_i pi_i gamma_i` is positive, so a token whose gamma is negative has turned away from the
    frequent ones.
    """
    W_E = at_least_single(W_E)
    alpha = torch.linalg.svd(W_E, full_matrices=False).Vh[..., 0, :]
    gamma = torch.einsum("...vm,...m->...v", W_E, alpha)
    sign = (gamma @ frequencies.to(gamma)).sign()
    return gamma * torch.where(sign == 0, 1.0, sign)[..., None]


def gamma_perp(gamma: Float[Tensor, "*batch vocab"], frequencies: Float[Tensor, " vocab"]) -> Float[Tensor, "*batch"]:
    """`(1 - pi_1) gamma_1 - pi_1 sum_{i != 1} gamma_i`, token 1 the most frequent; 0 where gamma is proportional to pi.

    Positive when mass has moved to the most frequent token. For equal other tokens it is the paper's
    `(1 - pi_1) gamma_1 - (d - 1) pi_1 gamma_{i != 1}` (Props. 3.6 to 3.8), which grows exponentially in stage III.
    """
    top = int(frequencies.argmax())
    return gamma[..., top] - frequencies[top].to(gamma) * gamma.sum(-1)
