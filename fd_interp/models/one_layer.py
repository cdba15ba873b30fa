"""The one-layer model without residual stream of arXiv 2605.01199, with TransformerLens' hook and weight names."""

from collections.abc import Callable, Mapping
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
    embed = tap("hook_embed", _embed(tokens, weights.W_E))
    resid_pre = tap("blocks.0.hook_resid_pre", embed)
    x = resid_pre.unsqueeze(2)  # b p 1 m
    q = tap(ATTENTION + "hook_q", _to_heads(x[:, queries], weights.W_Q))
    k = tap(ATTENTION + "hook_k", _to_heads(x, weights.W_K))
    v = tap(ATTENTION + "hook_v", x.expand(-1, -1, n_heads, -1) if weights.W_V is None else _to_heads(x, weights.W_V))

    scores = _scores(_merged(q), _merged(k), mask[queries], attn_scale)
    scores = tap(ATTENTION + "hook_attn_scores", scores.view(tokens.shape[0], n_heads, *scores.shape[1:]))
    pattern = tap(ATTENTION + "hook_pattern", scores.softmax(dim=-1))
    z = tap(ATTENTION + "hook_z", _split(torch.bmm(pattern.flatten(0, 1), _merged(v)), n_heads))
    attn_out = tap("blocks.0.hook_attn_out", _from_heads(z, weights.W_O))
    resid_post = tap("blocks.0.hook_resid_post", attn_out)
    return torch.matmul(resid_post, weights.W_U)


def _embed(
    tokens: Int[Tensor, "batch position"], W_E: Float[Tensor, "vocab d_model"]
) -> Float[Tensor, "batch position d_model"]:
    """On a CPU by `index_select`, whose gradient takes a third of the time; on CUDA that sums in no fixed order."""
    if W_E.is_cuda:
        return functional.embedding(tokens, W_E)
    return W_E.index_select(0, tokens.flatten()).view(*tokens.shape, W_E.shape[1])


# In a model this small a view takes as long as a product, so these spare one head the views of several.


def _to_heads(
    x: Float[Tensor, "batch position 1 d_model"], weight: Float[Tensor, "head d_model d_head"]
) -> Float[Tensor, "batch position head d_head"]:
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
        self._identity = {name for name in ("W_V", "W_O") if config.fixed.get(name) == "identity"}
        to_head = (config.n_heads, config.d_model, config.d_head)
        from_head = (config.n_heads, config.d_head, config.d_model)
        self.embed = _parameters(dtype, W_E=(d_vocab, config.d_model))
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList([_block(_parameters(dtype, W_Q=to_head, W_K=to_head, W_V=to_head, W_O=from_head))])
        self.unembed = _parameters(dtype, W_U=(config.d_model, d_vocab))
        future = torch.full((n_ctx, n_ctx), float("-inf"), dtype=dtype).triu(1)
        self.register_buffer("mask", future, persistent=False)
        self._parts = (self.embed, self.blocks[0].attn, self.unembed)  # nn.Module looks names up slowly
        self.setup()

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
            tap=self._tap,
        )

    def _tap(self, name: str, value: Tensor) -> Tensor:
        """What a hook returns may broadcast to what it replaces, as in TransformerLens."""
        point = self.hook_dict[name]
        if not (point._forward_hooks or point._forward_pre_hooks or point._backward_hooks or point._backward_pre_hooks):
            return value  # calling ten points that nobody listens at takes a thirtieth of a training step
        edited = point(value)
        return edited if edited is value else edited.expand_as(value)

    def matrices(self) -> OneLayerWeights:
        embed, attn, unembed = self._parts
        W_V = None if "W_V" in self._identity else attn.W_V
        W_O = None if "W_O" in self._identity else attn.W_O
        return OneLayerWeights(embed.W_E, attn.W_Q, attn.W_K, unembed.W_U, W_V, W_O)

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

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Refuses, before anything is written, a W_V or W_O that is not the identity it is held at."""
        for name in self._identity:
            weight = state_dict.get(ATTENTION + name)
            if weight is not None and not torch.equal(weight, torch.eye(self.cfg.d_model).to(weight).expand_as(weight)):
                raise InputError(f"{ATTENTION}{name} is not the identity that this model holds it at")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


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
