"""The one-layer model without residual stream of arXiv 2605.01199, with TransformerLens' hook and weight names."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.models.attention import HeadWeights, attention
from fd_interp.models.config import OneLayer
from fd_interp.models.lens import HookPoint
from fd_interp.models.paper_model import EVERY_QUERY, PaperModel, Shape, Tap, attention_block, causal_mask, parameters

ATTENTION = "blocks.0.attn."


class OneLayerWeights(NamedTuple):
    """The matrices of the model; a missing W_V or W_O is the identity."""

    W_E: Float[Tensor, "vocab d_model"]
    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    W_U: Float[Tensor, "d_model vocab"]
    W_V: Float[Tensor, "head d_model d_head"] | None = None
    W_O: Float[Tensor, "head d_head d_model"] | None = None


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
    embed = tap("hook_embed", _embed(tokens, weights.W_E))
    heads = HeadWeights(weights.W_Q, weights.W_K, weights.W_V, weights.W_O)
    attn_out = attention(heads, embed, mask, attn_scale=attn_scale, queries=queries, tap=tap)
    return torch.matmul(attn_out, weights.W_U)


def _embed(
    tokens: Int[Tensor, "batch position"], W_E: Float[Tensor, "vocab d_model"]
) -> Float[Tensor, "batch position d_model"]:
    """On a CPU by `index_select`, whose gradient takes a third of the time; on CUDA that sums in no fixed order."""
    if W_E.is_cuda:
        return functional.embedding(tokens, W_E)
    return W_E.index_select(0, tokens.flatten()).view(*tokens.shape, W_E.shape[1])


class OneLayerAttention(PaperModel):
    """`OneLayer` as a hooked module: use `run_with_cache` and `run_with_hooks` as on any TransformerLens model."""

    mask: Tensor
    embed: Any
    blocks: Any
    unembed: Any

    def __init__(self, config: OneLayer, d_vocab: int, n_ctx: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.cfg = Shape(
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
        self.embed = parameters(dtype, W_E=(d_vocab, config.d_model))
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList(
            [attention_block(parameters(dtype, W_Q=to_head, W_K=to_head, W_V=to_head, W_O=from_head))]
        )
        self.unembed = parameters(dtype, W_U=(config.d_model, d_vocab))
        self.register_buffer("mask", causal_mask(n_ctx, dtype), persistent=False)
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
            tap=self.tap,
        )

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
