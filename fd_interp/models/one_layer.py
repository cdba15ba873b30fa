"""The one-layer model without residual stream of arXiv 2605.01199, with TransformerLens' hook and weight names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.models.config import OneLayer
from fd_interp.models.lens import HookedRootModule, HookPoint

ATTENTION = "blocks.0.attn."
EVERY_QUERY = slice(None)
LAST_QUERY = slice(-1, None)


class OneLayerWeights(NamedTuple):
    """The matrices of the model; a missing W_V or W_O is the identity."""

    W_E: Float[Tensor, "vocab d_model"]
    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    W_U: Float[Tensor, "d_model vocab"]
    W_V: Float[Tensor, "head d_model d_head"] | None = None
    W_O: Float[Tensor, "head d_head d_model"] | None = None


Tap = Callable[[str, Tensor], Tensor]
"""Sees each named activation on its way, and may replace it."""


def one_layer_logits(
    weights: OneLayerWeights,
    tokens: Int[Tensor, "batch position"],
    mask: Float[Tensor, "position position"],
    *,
    attn_scale: float,
    queries: slice,
    tap: Tap,
) -> Float[Tensor, "batch query vocab"]:
    """Logits at the positions `queries`, from the weights alone.

    Args:
        mask: added to the scores; minus infinity where a query may not look.
        attn_scale: scores are divided by it.
        tap: called with every hook's name and activation.
    """
    n_heads = weights.W_Q.shape[0]
    embed = tap("hook_embed", functional.embedding(tokens, weights.W_E))
    resid_pre = tap("blocks.0.hook_resid_pre", embed)
    q = tap(ATTENTION + "hook_q", _to_heads(resid_pre[:, queries], weights.W_Q))
    k = tap(ATTENTION + "hook_k", _to_heads(resid_pre, weights.W_K))
    v = resid_pre[:, :, None].expand(-1, -1, n_heads, -1) if weights.W_V is None else _to_heads(resid_pre, weights.W_V)
    v = tap(ATTENTION + "hook_v", v)

    scores = torch.matmul(q.transpose(1, 2) / attn_scale, k.permute(0, 2, 3, 1))  # b h q d, b h d k -> b h q k
    scores = tap(ATTENTION + "hook_attn_scores", scores + mask[queries])
    pattern = tap(ATTENTION + "hook_pattern", scores.softmax(dim=-1))
    z = tap(ATTENTION + "hook_z", torch.matmul(pattern, v.transpose(1, 2)).transpose(1, 2))
    attn_out = z.sum(2) if weights.W_O is None else torch.matmul(z.flatten(2), weights.W_O.flatten(0, 1))
    resid_post = tap("blocks.0.hook_resid_post", tap("blocks.0.hook_attn_out", attn_out))
    return torch.matmul(resid_post, weights.W_U)


def _to_heads(
    x: Float[Tensor, "batch position d_model"], weight: Float[Tensor, "head d_model d_head"]
) -> Float[Tensor, "batch position head d_head"]:
    n_heads, _, d_head = weight.shape
    joined = weight[0] if n_heads == 1 else weight.transpose(0, 1).flatten(1)
    return torch.matmul(x, joined).unflatten(-1, (n_heads, d_head))


@dataclass(frozen=True)
class OneLayerShape:
    """TransformerLens' names for the sizes, as its tools look them up in `model.cfg`."""

    d_model: int
    d_head: int
    n_heads: int
    d_vocab: int
    n_ctx: int
    attn_scale: float
    n_layers: int = 1
    attn_only: bool = True
    normalization_type: None = None
    attention_dir: str = "causal"

    @property
    def d_vocab_out(self) -> int:
        return self.d_vocab


class OneLayerAttention(HookedRootModule):
    """`OneLayer` as a hooked module: use `run_with_cache` and `run_with_hooks` as on any TransformerLens model."""

    mask: Tensor
    embed: Any
    blocks: Any
    unembed: Any

    def __init__(self, config: OneLayer, d_vocab: int, n_ctx: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.cfg = OneLayerShape(
            d_model=config.d_model,
            d_head=config.d_head,
            n_heads=config.n_heads,
            d_vocab=d_vocab,
            n_ctx=n_ctx,
            attn_scale=config.attn_scale,
        )
        self._identity = {name for name, hold in config.fixed.items() if hold == "identity"}
        to_head = (config.n_heads, config.d_model, config.d_head)
        from_head = (config.n_heads, config.d_head, config.d_model)
        self.embed = _parameters(dtype, W_E=(d_vocab, config.d_model))
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList([_block(_parameters(dtype, W_Q=to_head, W_K=to_head, W_V=to_head, W_O=from_head))])
        self.unembed = _parameters(dtype, W_U=(config.d_model, d_vocab))
        future = torch.full((n_ctx, n_ctx), float("-inf"), dtype=dtype).triu(1)
        self.register_buffer("mask", future, persistent=False)
        self.setup()
        self.register_load_state_dict_post_hook(lambda model, _: model._check_identities())

    def forward(
        self, tokens: Int[Tensor, "batch position"], queries: slice = EVERY_QUERY
    ) -> Float[Tensor, "batch query vocab"]:
        """Logits at the positions `queries`, by default all of them; the last alone costs much less."""
        length = tokens.shape[1]
        return one_layer_logits(
            self.matrices(),
            tokens,
            self.mask[:length, :length],
            attn_scale=self.cfg.attn_scale,
            queries=queries,
            tap=lambda name, value: self.hook_dict[name](value),
        )

    def matrices(self) -> OneLayerWeights:
        attn = self.blocks[0].attn
        held = {name: None if name in self._identity else getattr(attn, name) for name in ("W_V", "W_O")}
        return OneLayerWeights(W_E=self.embed.W_E, W_Q=attn.W_Q, W_K=attn.W_K, W_U=self.unembed.W_U, **held)

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        return self.embed.W_E

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        return self.unembed.W_U

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self.blocks[0].attn.W_Q[None]

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self.blocks[0].attn.W_K[None]

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self.blocks[0].attn.W_V[None]

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        return self.blocks[0].attn.W_O[None]

    def _check_identities(self) -> None:
        for name in self._identity:
            weight = getattr(self.blocks[0].attn, name)
            if not torch.equal(weight, torch.eye(self.cfg.d_model).to(weight).expand_as(weight)):
                raise InputError(f"{ATTENTION}{name} is not the identity that this model holds it at")


def _parameters(dtype: torch.dtype, **shapes: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return module


def _block(attn: nn.Module) -> nn.Module:
    for name in ("hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern", "hook_z"):
        attn.add_module(name, HookPoint())
    block = nn.Module()
    block.add_module("attn", attn)
    for name in ("hook_resid_pre", "hook_attn_out", "hook_resid_post"):
        block.add_module(name, HookPoint())
    return block
