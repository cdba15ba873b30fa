"""How well a predictor predicts, and how far two predictors are apart. All of them are log-probabilities."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def cross_entropy(
    log_probabilities: Float[Tensor, "*batch vocab"], targets: Int[Tensor, "*batch"]
) -> Float[Tensor, ""]:
    """Mean of `-log p(target)`, in nats."""
    return -log_probabilities.gather(-1, targets[..., None]).mean()


def kl_divergence(
    reference: Float[Tensor, "*batch vocab"], log_probabilities: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """`KL(reference || model)` in nats: 0 where the two agree; what the model loses on the reference's own samples."""
    p = reference.exp()
    return torch.where(p > 0, p * (reference - log_probabilities), 0.0).sum(-1)
