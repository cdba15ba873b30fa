"""Attention without a residual stream round it, as functions of weights and activations."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fd_interp.models.paper_model import Tap


class HeadWeights(NamedTuple):
    """The matrices of all heads of a layer; a missing one but W_Q is the identity."""

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"] | None = None
    W_V: Float[Tensor, "head d_model d_head"] | None = None
    W_O: Float[Tensor, "head d_head d_model"] | None = None


def attention(
    weights: HeadWeights,
    resid_pre: Float[Tensor, "batch position d_model"],
    mask: Float[Tensor, "position position"],
    *,
    attn_scale: float,
    queries: slice,
    tap: Tap,
    layer: int = 0,
) -> Float[Tensor, "batch query d_model"]:
    """What the heads of a layer write together at the positions `queries`.

    Args:
        mask: added to the scores; minus infinity where a query may not look.
        attn_scale: scores are divided by it.
        tap: called with every hook's name and activation.
    """
    attn, n_heads = f"blocks.{layer}.attn.", weights.W_Q.shape[0]
    x = tap(f"blocks.{layer}.hook_resid_pre", resid_pre).unsqueeze(2)  # b p 1 m
    q = tap(f"{attn}hook_q", to_heads(x[:, queries], weights.W_Q))
    k = tap(f"{attn}hook_k", x.repeat(1, 1, n_heads, 1) if weights.W_K is None else to_heads(x, weights.W_K))
    v = tap(f"{attn}hook_v", x.expand(-1, -1, n_heads, -1) if weights.W_V is None else to_heads(x, weights.W_V))
    scores = _scores(_merged(q), _merged(k), mask[queries], attn_scale).unflatten(0, (-1, n_heads))
    return attended(scores, v, weights.W_O, tap=tap, layer=layer)


def attended(
    scores: Float[Tensor, "batch head query key"],
    v: Float[Tensor, "batch key head d_head"],
    W_O: Float[Tensor, "head d_head d_model"] | None = None,
    *,
    tap: Tap,
    layer: int = 0,
) -> Float[Tensor, "batch query d_model"]:
    """What the heads of a layer write together, given their scores and values."""
    block = f"blocks.{layer}."
    attn, n_heads = f"{block}attn.", scores.shape[1]
    scores = tap(f"{attn}hook_attn_scores", scores)
    pattern = tap(f"{attn}hook_pattern", scores.softmax(dim=-1))
    z = tap(f"{attn}hook_z", _split(torch.bmm(pattern.flatten(0, 1), _merged(v)), n_heads))
    attn_out = tap(f"{block}hook_attn_out", _from_heads(z, W_O))
    return tap(f"{block}hook_resid_post", attn_out)


# In a model this small a view takes as long as a product, so these spare one head the views of several.


def to_heads(
    x: Float[Tensor, "batch position 1 d_model"], weight: Float[Tensor, "head d_model d_head"]
) -> Float[Tensor, "batch position head d_head"]:
    """Each head's own view of x, side by side in memory."""
    n_heads = weight.shape[0]
    if n_heads == 1:
        return torch.matmul(x, weight.squeeze(0))
    return torch.matmul(x, weight.transpose(0, 1).flatten(1)).unflatten(-1, (n_heads, -1)).squeeze(2)


def _merged(x: Float[Tensor, "batch position head d_head"]) -> Float[Tensor, "batch_and_head position d_head"]:
    return x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


def _scores(
    q: Float[Tensor, "batch_and_head query d_head"],
    k: Float[Tensor, "batch_and_head key d_head"],
    mask: Float[Tensor, "query key"],
    attn_scale: float,
) -> Float[Tensor, "batch_and_head query key"]:
    """The gradient of a product's second factor is made transposed and then copied: let that be the smaller one's."""
    if q.shape[1] < k.shape[1]:
        return torch.add(mask, torch.bmm(k, q.mT).mT, alpha=1 / attn_scale)
    return torch.baddbmm(mask, q, k.mT, alpha=1 / attn_scale)


def _split(
    x: Float[Tensor, "batch_and_head position d_head"], n_heads: int
) -> Float[Tensor, "batch position head d_head"]:
    return x.unsqueeze(2) if n_heads == 1 else x.unflatten(0, (-1, n_heads)).transpose(1, 2)


def _from_heads(
    z: Float[Tensor, "batch position head d_head"], W_O: Float[Tensor, "head d_head d_model"] | None
) -> Float[Tensor, "batch position d_model"]:
    if W_O is not None:
        return torch.matmul(z.flatten(2), W_O.flatten(0, 1))
    return z.squeeze(2) if z.shape[2] == 1 else z.sum(2)
