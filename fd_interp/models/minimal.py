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
    shown,
    silent,
)


def attention_by_position(
    W_Q: Float[Tensor, "head n_ctx n_ctx"],
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
    length, n_heads = resid_pre.shape[1], len(W_Q)
    scores = torch.add(mask[queries], W_Q[:, :length, :length][:, queries], alpha=1 / attn_scale)
    if tap is silent:
        return _attended_alike(scores.softmax(-1), W_V, resid_pre)
    block = f"blocks.{layer}."
    x = tap(f"{block}hook_resid_pre", resid_pre)
    v = shown(tap, f"{block}attn.hook_v", to_heads(x, W_V, n_heads), "(h b) k d -> b k h d", h=n_heads)
    return attended(scores.repeat_interleave(len(x), dim=0), v, n_heads, tap=tap, layer=layer)


def attention_by_token_and_position(
    W_Q: Float[Tensor, "head d_model d_model"],
    W_V: Float[Tensor, "head d_model d_written"],
    resid_pre: Float[Tensor, "batch position d_model"],
    mask: Float[Tensor, "position position"],
    *,
    attn_scale: float,
    queries: slice,
    tap: Tap,
    layer: int = 0,
) -> Float[Tensor, "batch query d_written"]:
    """The same for heads whose keys are tokens and positions themselves, and whose queries are read from both."""
    if tap is silent:
        return _attended_together(W_Q / attn_scale, W_V, resid_pre, mask, queries)
    weights = HeadWeights(W_Q, W_V=W_V)
    return attention(weights, resid_pre, mask, attn_scale=attn_scale, queries=queries, tap=tap, layer=layer)


# Where nobody listens, heads mix what they attend to and then write, so that they need no copies of it.


def _attended_alike(
    pattern: Float[Tensor, "head query key"],
    W_V: Float[Tensor, "head vocab vocab"],
    x: Float[Tensor, "batch key vocab"],
) -> Float[Tensor, "batch query vocab"]:
    """Where all sequences have one pattern, a head mixes the tokens of the whole batch in one product."""
    n_heads, n_queries, _ = pattern.shape
    batch, _, d_vocab = x.shape
    tokens = x.transpose(0, 1).flatten(1).expand(n_heads, -1, -1)  # head key (batch vocab)
    mixed = torch.bmm(pattern, tokens).view(n_heads, -1, d_vocab)  # head (query batch) vocab
    return torch.bmm(mixed, W_V).sum(0).view(n_queries, batch, d_vocab).transpose(0, 1)


def _attended_together(
    W_Q: Float[Tensor, "head d_model d_model"],
    W_V: Float[Tensor, "head d_model d_written"],
    x: Float[Tensor, "batch key d_model"],
    mask: Float[Tensor, "key key"],
    queries: slice,
) -> Float[Tensor, "batch query d_written"]:
    """Where all heads have the same keys, their queries meet them in one product."""
    n_heads, d_model, _ = W_Q.shape
    q = torch.matmul(x[:, queries], W_Q.transpose(0, 1).flatten(1))  # batch query (head d_model)
    q = q.view(len(x), -1, d_model)  # batch (query head) d_model
    scores = torch.baddbmm(mask[queries].repeat_interleave(n_heads, dim=0), q, x.mT)
    mixed = torch.bmm(scores.softmax(-1), x).view(-1, n_heads, d_model)  # (batch query) head d_model
    return torch.bmm(mixed.transpose(0, 1), W_V).sum(0).view(len(x), -1, W_V.shape[2])


class MinimalAttention(PaperModel):
    """`Minimal` as a hooked module: use `run_with_cache` and `run_with_hooks` as on any TransformerLens model.

    Heads that attend by position have no `hook_q` and `hook_k`: their scores are the weights themselves. While anybody
    listens at a hook, products are taken in another order, which can change the last bits of the logits.
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
        mask, tap = self.mask[:length, :length], self.tap
        attend = attention_by_position if self.by_position else attention_by_token_and_position
        last = len(self._heads) - 1
        resid = self._embedded(tokens, tap)
        for layer, heads in enumerate(self._heads):
            W_V = heads.W_V
            if layer == last and tap is silent:
                W_V = W_V[..., : self.cfg.d_vocab]  # what else the last layer writes is no logit
            resid = attend(
                heads.W_Q,
                W_V,
                resid,
                mask,
                attn_scale=self.cfg.attn_scale,
                queries=queries if layer == last else EVERY_QUERY,
                tap=tap,
                layer=layer,
            )
        return resid[..., : self.cfg.d_vocab]

    def _embedded(self, tokens: Int[Tensor, "batch position"], tap: Tap) -> Float[Tensor, "batch position d_model"]:
        """Heads that attend by position read positions before sequences in memory."""
        if self.by_position:
            return tap("hook_embed", functional.embedding(tokens.T, self.W_E).transpose(0, 1))
        embed = tap("hook_embed", functional.embedding(tokens, self.W_E))
        positions = self.one_hot[self.cfg.d_vocab : self.cfg.d_vocab + tokens.shape[1]]
        return embed + tap("hook_pos_embed", positions.repeat(len(tokens), 1, 1))

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
