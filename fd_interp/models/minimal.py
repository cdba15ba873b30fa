"""The minimal model of arXiv 2602.19143, with TransformerLens' hook and weight names."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from fd_interp.models.attention import HeadWeights, attended, attention, to_heads
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
    tap: Tap | None,
    layer: int = 0,
) -> Float[Tensor, "batch query vocab"]:
    """What heads that attend by position alone write together at the positions `queries`.

    Args:
        mask: added to the scores; minus infinity where a query may not look.
        attn_scale: scores are divided by it.
        tap: called with every hook's name and activation; None where nobody listens.
    """
    batch, length, _ = resid_pre.shape
    scores = torch.add(mask[queries], W_Q[:, :length, :length][:, queries], alpha=1 / attn_scale)
    if tap is None:
        return _attended_alike(scores.softmax(-1), W_V, resid_pre)
    block = f"blocks.{layer}."
    resid_pre = tap(f"{block}hook_resid_pre", resid_pre)
    v = tap(f"{block}attn.hook_v", to_heads(resid_pre.unsqueeze(2), W_V))
    return attended(scores.repeat(batch, 1, 1, 1), v, tap=tap, layer=layer)


def attention_by_token_and_position(
    W_Q: Float[Tensor, "head d_model d_model"],
    W_V: Float[Tensor, "head d_model d_model"],
    resid_pre: Float[Tensor, "batch position d_model"],
    mask: Float[Tensor, "position position"],
    *,
    attn_scale: float,
    queries: slice,
    tap: Tap | None,
    layer: int = 0,
) -> Float[Tensor, "batch query d_model"]:
    """The same for heads whose queries are read from tokens and positions; keys are tokens and positions themselves."""
    if tap is None:
        return _attended_together(W_Q, W_V, resid_pre, mask, attn_scale, queries)
    weights = HeadWeights(W_Q, W_V=W_V)
    return attention(weights, resid_pre, mask, attn_scale=attn_scale, queries=queries, tap=tap, layer=layer)


# Where nobody asks for values, heads mix tokens first and write afterwards: what they mix needs no copy for each head.


def _attended_alike(
    pattern: Float[Tensor, "head query key"],
    W_V: Float[Tensor, "head vocab vocab"],
    x: Float[Tensor, "batch key vocab"],
) -> Float[Tensor, "batch query vocab"]:
    """All sequences with one pattern: a product over the whole batch, which lies behind the positions in memory."""
    n_heads, n_queries, _ = pattern.shape
    batch, _, d_vocab = x.shape
    mixed = torch.mm(pattern.flatten(0, 1), x.transpose(0, 1).flatten(1))  # (head query) (batch vocab)
    written = torch.bmm(mixed.view(n_heads, -1, d_vocab), W_V).sum(0)
    return written.view(n_queries, batch, d_vocab).transpose(0, 1)


def _attended_together(
    W_Q: Float[Tensor, "head d_model d_model"],
    W_V: Float[Tensor, "head d_model d_model"],
    x: Float[Tensor, "batch key d_model"],
    mask: Float[Tensor, "key key"],
    attn_scale: float,
    queries: slice,
) -> Float[Tensor, "batch query d_model"]:
    """The queries of all heads in one product with the keys they share."""
    q = to_heads(x[:, queries].unsqueeze(2), W_Q)
    of_each_head = mask[queries].repeat_interleave(len(W_Q), dim=0)
    scores = torch.baddbmm(of_each_head, q.flatten(1, 2), x.mT, alpha=1 / attn_scale)  # batch (query head) key
    mixed = torch.bmm(scores.softmax(-1), x)
    return torch.matmul(mixed.view(*q.shape[:2], -1), W_V.flatten(0, 1))


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
        attend = attention_by_position if self.by_position else attention_by_token_and_position
        tap = self.tap if self.is_heard else None
        last = len(self._heads) - 1
        resid = self._embedded(tokens)
        for layer, heads in enumerate(self._heads):
            resid = attend(
                heads.W_Q,
                heads.W_V,
                resid,
                mask,
                attn_scale=self.cfg.attn_scale,
                queries=queries if layer == last else EVERY_QUERY,
                tap=tap,
                layer=layer,
            )
        return resid[..., : self.cfg.d_vocab]

    def _embedded(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Heads that attend by position read positions before sequences in memory."""
        if self.by_position:
            return self.tap("hook_embed", functional.embedding(tokens.T, self.W_E).transpose(0, 1))
        embed = self.tap("hook_embed", functional.embedding(tokens, self.W_E))
        positions = self.one_hot[self.cfg.d_vocab : self.cfg.d_vocab + tokens.shape[1]]
        return embed + self.tap("hook_pos_embed", positions.repeat(len(tokens), 1, 1))

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
