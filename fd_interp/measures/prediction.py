"""How well a predictor predicts, and how far two are apart: log-probabilities, or in a regression vectors."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def cross_entropy(
    log_probabilities: Float[Tensor, "*batch vocab"], targets: Int[Tensor, "*batch"]
) -> Float[Tensor, ""]:
    """Mean of `-log p(target)`, in nats."""
    return -log_probabilities.gather(-1, targets[..., None]).mean()


def half_squared_distance(
    predicted: Float[Tensor, "*batch vocab"], targets: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, ""]:
    """Mean of `|predicted - target|^2 / 2`, the loss of a regression."""
    return (predicted - targets).square().sum(-1).mean() / 2


def kl_divergence(
    reference: Float[Tensor, "*batch vocab"], log_probabilities: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """`KL(reference || model)` in nats: 0 where the two agree; what the model loses on the reference's own samples."""
    p = reference.exp()
    return torch.where(p > 0, p * (reference - log_probabilities), 0.0).sum(-1)
