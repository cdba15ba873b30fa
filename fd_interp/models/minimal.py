"""The minimal model of arXiv 2602.19143, with TransformerLens' hook and weight names."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fd_interp.models.attention import HeadWeights, attention
from fd_interp.models.config import Minimal
from fd_interp.models.lens import HookPoint
from fd_interp.models.paper_model import (
    EVERY_QUERY,
    HEAD_HOOKS,
    PaperModel,
    Shape,
    Tap,
    attention_block,
    causal_mask,
    parameters,
)


def attention_by_position(
    W_Q: Float[Tensor, "head position position"],
    W_V: Float[Tensor, "head vocab vocab"],
    resid_pre: Float[Tensor, "batch position vocab"],
    mask: Float[Tensor, "position position"],
    *,
    attn_scale: float,
    queries: slice,
    tap: Tap,
    layer: int = 0,
) -> Float[Tensor, "batch query vocab"]:
    """What heads that attend by position alone write together at the positions `queries`.

    Args:
        mask: added to the scores; minus infinity where a query may not look.
        attn_scale: scores are divided by it.
        tap: called with every hook's name and activation.
    """
    block = f"blocks.{layer}."
    attn = f"{block}attn."
    resid_pre = tap(f"{block}hook_resid_pre", resid_pre)
    batch, length, _ = resid_pre.shape
    by_head = torch.matmul(resid_pre.transpose(0, 1).flatten(0, 1), W_V).unflatten(1, (length, batch))
    v = tap(f"{attn}hook_v", by_head.permute(2, 1, 0, 3))
    common = torch.add(mask[queries], W_Q[:, :length, :length][:, queries], alpha=1 / attn_scale)
    scores = common.expand(batch, -1, -1, -1)
    edited = tap(f"{attn}hook_attn_scores", scores)
    common = common.softmax(-1)
    pattern = common.expand(batch, -1, -1, -1) if edited is scores else edited.softmax(-1)
    attended = tap(f"{attn}hook_pattern", pattern)
    if edited is scores and attended is pattern:
        z = _attended_alike(common, v)
    else:
        z = torch.einsum("bhqk,bkhv->bqhv", attended, v)
    attn_out = tap(f"{block}hook_attn_out", tap(f"{attn}hook_z", z).sum(2))
    return tap(f"{block}hook_resid_post", attn_out)


def _attended_alike(
    pattern: Float[Tensor, "head query key"], v: Float[Tensor, "batch key head vocab"]
) -> Float[Tensor, "batch query head vocab"]:
    """Where all sequences have the same pattern, a head is one product over the whole batch."""
    by_head = v.permute(2, 1, 0, 3)
    return torch.bmm(pattern, by_head.flatten(2)).unflatten(-1, by_head.shape[2:]).permute(2, 1, 0, 3)


class MinimalAttention(PaperModel):
    """`Minimal` as a hooked module: use `run_with_cache` and `run_with_hooks` as on any TransformerLens model.

    Heads that attend by position have no `hook_q` and `hook_k`: their scores are the weights themselves.
    """

    mask: Tensor
    one_hot: Tensor
    blocks: Any

    def __init__(self, config: Minimal, d_vocab: int, n_ctx: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.by_position = config.attends_by == "position"
        d_model = d_vocab if self.by_position else d_vocab + n_ctx
        self.cfg = Shape(
            d_model=d_model,
            d_head=d_model,
            n_heads=config.n_heads,
            d_vocab=d_vocab,
            n_ctx=n_ctx,
            attn_scale=config.attn_scale or math.sqrt(d_vocab + n_ctx),
            n_layers=config.n_layers,
        )
        pairs = n_ctx if self.by_position else d_model
        shapes = {"W_Q": (config.n_heads, pairs, pairs), "W_V": (config.n_heads, d_model, d_model)}
        hooks = ("v", "attn_scores", "pattern", "z") if self.by_position else HEAD_HOOKS
        self.hook_embed = HookPoint()
        if not self.by_position:
            self.hook_pos_embed = HookPoint()
        blocks = [attention_block(parameters(dtype, **shapes), hooks) for _ in range(config.n_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.register_buffer("mask", causal_mask(n_ctx, dtype), persistent=False)
        self.register_buffer("one_hot", torch.eye(d_model, dtype=dtype), persistent=False)
        self._heads: list[Any] = [block.attn for block in blocks]  # nn.Module looks names up slowly
        self.setup()

    def forward(
        self, tokens: Int[Tensor, "batch position"], queries: slice = EVERY_QUERY
    ) -> Float[Tensor, "batch query vocab"]:
        """Logits at the positions `queries`, by default all of them."""
        length = tokens.shape[1]
        mask = self.mask[:length, :length]
        resid = self._embedded(tokens)
        last = len(self._heads) - 1
        for layer, heads in enumerate(self._heads):
            asked: Any = {
                "attn_scale": self.cfg.attn_scale,
                "queries": queries if layer == last else EVERY_QUERY,
                "tap": self.tap,
                "layer": layer,
            }
            if self.by_position:
                resid = attention_by_position(heads.W_Q, heads.W_V, resid, mask, **asked)
            else:
                resid = attention(HeadWeights(heads.W_Q, W_V=heads.W_V), resid, mask, **asked)
        return resid[..., : self.cfg.d_vocab]

    def _embedded(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Positions before sequences in memory, which is how heads that attend by position read them."""
        embed = self.one_hot[tokens.T].transpose(0, 1)
        embed = self.tap("hook_embed", embed)
        if self.by_position:
            return embed
        positions = self.one_hot[self.cfg.d_vocab : self.cfg.d_vocab + tokens.shape[1]]
        return embed + self.tap("hook_pos_embed", positions.expand(len(tokens), -1, -1))

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        return self.one_hot[: self.cfg.d_vocab]

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        return self.one_hot[:, : self.cfg.d_vocab]

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Between positions alone where heads attend by position."""
        return torch.stack([heads.W_Q for heads in self._heads])

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Between tokens alone where heads attend by position."""
        return torch.stack([heads.W_V for heads in self._heads])
