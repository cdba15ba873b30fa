"""Attention without a residual stream round it, as functions of weights and activations."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fd_interp.models.paper_model import Tap, shown


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
    attn, n_heads = f"blocks.{layer}.attn.", len(weights.W_Q)
    x = tap(f"blocks.{layer}.hook_resid_pre", resid_pre)
    q = to_heads(x[:, queries], weights.W_Q, n_heads)
    k = to_heads(x, weights.W_K, n_heads)
    v = to_heads(x, weights.W_V, n_heads)
    q = shown(tap, f"{attn}hook_q", q, "(h b) q d -> b q h d", h=n_heads)
    k = shown(tap, f"{attn}hook_k", k, "(h b) k d -> b k h d", h=n_heads)
    v = shown(tap, f"{attn}hook_v", v, "(h b) k d -> b k h d", h=n_heads)
    scores = _scores(q, k, mask[queries], attn_scale)
    return attended(scores, v, n_heads, weights.W_O, tap=tap, layer=layer)


def attended(
    scores: Float[Tensor, "head_and_batch query key"],
    v: Float[Tensor, "head_and_batch key d_head"],
    n_heads: int,
    W_O: Float[Tensor, "head d_head d_model"] | None = None,
    *,
    tap: Tap,
    layer: int = 0,
) -> Float[Tensor, "batch query d_model"]:
    """What the heads of a layer write together, given their scores and values."""
    block = f"blocks.{layer}."
    attn = f"{block}attn."
    scores = shown(tap, f"{attn}hook_attn_scores", scores, "(h b) q k -> b h q k", h=n_heads)
    pattern = shown(tap, f"{attn}hook_pattern", scores.softmax(-1), "(h b) q k -> b h q k", h=n_heads)
    z = shown(tap, f"{attn}hook_z", torch.bmm(pattern, v), "(h b) q d -> b q h d", h=n_heads)
    attn_out = tap(f"{block}hook_attn_out", _from_heads(z, n_heads, W_O))
    return tap(f"{block}hook_resid_post", attn_out)


# In memory all sequences of one head come before those of the next, so that each head has products of its own. In one
# that heads share, rounding can depend on the head, and heads that start alike would not stay alike.


def to_heads(
    x: Float[Tensor, "batch position d_model"], weight: Float[Tensor, "head d_model d_head"] | None, n_heads: int
) -> Float[Tensor, "head_and_batch position d_head"]:
    """Each head's own view of x; without a matrix, x itself for each."""
    if n_heads == 1:  # spares views, which take as long as products in a model this small
        return x if weight is None else torch.matmul(x, weight[0])
    if weight is None:
        return x.repeat(n_heads, 1, 1)
    by_head = torch.bmm(x.flatten(0, 1).expand(n_heads, -1, -1), weight)  # head (batch position) d_head
    return by_head.view(-1, x.shape[1], weight.shape[2])


def _scores(
    q: Float[Tensor, "head_and_batch query d_head"],
    k: Float[Tensor, "head_and_batch key d_head"],
    mask: Float[Tensor, "query key"],
    attn_scale: float,
) -> Float[Tensor, "head_and_batch query key"]:
    """The gradient of a product's second factor is made transposed and then copied: one query is the smaller one."""
    if q.shape[1] == 1:
        return torch.add(mask, torch.bmm(k, q.mT).mT, alpha=1 / attn_scale)
    return torch.baddbmm(mask, q, k.mT, alpha=1 / attn_scale)


def _from_heads(
    z: Float[Tensor, "head_and_batch query d_head"], n_heads: int, W_O: Float[Tensor, "head d_head d_model"] | None
) -> Float[Tensor, "batch query d_model"]:
    by_head = z.unflatten(0, (n_heads, -1))
    if W_O is not None:
        return torch.einsum("hbqd,hdm->bqm", by_head, W_O)
    return z if n_heads == 1 else by_head.sum(0)
