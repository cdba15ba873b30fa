"""From a configuration to a model with its initial weights."""

import torch
from torch import Tensor, nn

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.config import LearnedQuery, Minimal, ModelConfig, Normal, OneLayer, Uniform
from fd_interp.models.learned_query import LearnedQueryAttention
from fd_interp.models.minimal import MinimalAttention
from fd_interp.models.one_layer import OneLayerAttention


def build(config: ModelConfig, d_vocab: int, n_ctx: int, dtype: torch.dtype = torch.float32) -> lens.Model:
    """A model of the configured shape whose weights are still to be loaded."""
    if isinstance(config, OneLayer):
        return OneLayerAttention(config, d_vocab, n_ctx, dtype)
    if isinstance(config, Minimal):
        return MinimalAttention(config, d_vocab, n_ctx, dtype)
    if isinstance(config, LearnedQuery):
        return LearnedQueryAttention(config, d_vocab, n_ctx, dtype)
    return lens.build_transformer(config, d_vocab, n_ctx, dtype)


def initial_weights(config: ModelConfig, like: lens.Weights, generator: torch.Generator) -> lens.Weights:
    """Draws each weight of `like` from the law that the configuration has for it; normalisation starts at one.

    Weights are drawn in the order of their names and in double precision, so that a seed gives the same model whatever
    the version of TransformerLens, the dtype, or the weights that are held fixed.

    Raises:
        InputError: a weight that is not square is to be held at the identity.
    """
    return {name: _initial(config, name, like[name], generator) for name in sorted(like)}


def _initial(config: ModelConfig, name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    short = name.rsplit(".", 1)[-1]
    if short == "w":
        return torch.ones_like(like)
    law = None if short == "b" else config.law(short)
    if law is None:
        return torch.zeros_like(like)
    drawn = _drawn(law, like.shape, generator)
    match config.fixed.get(short):
        case "identity":
            if like.shape[-1] != like.shape[-2]:
                raise InputError(f"{name} cannot be held at the identity: it is {tuple(like.shape)}, and not square")
            return torch.eye(like.shape[-1]).to(like).expand_as(like).clone()
        case "zero":
            return torch.zeros_like(like)
    return drawn.to(like)


def _drawn(law: Normal | Uniform, shape: torch.Size, generator: torch.Generator) -> Tensor:
    if isinstance(law, Normal):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * law.std
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * law.bound


def trained(config: ModelConfig, model: lens.Model) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by canonical name; those held fixed stop asking for gradients."""
    live = lens.trainable(model)
    for name, parameter in live.items():
        parameter.requires_grad_(name.rsplit(".", 1)[-1] not in config.fixed)
    return {name: parameter for name, parameter in live.items() if parameter.requires_grad}
